"""The outbox of notices, on each kind of store: an event and its notices are one write."""

from typing import Any

import pytest
from tests.contract.store_suite import NOW, make_event, submit

from cavvy.domain.budgets import SpendingBudget
from cavvy.domain.ledger import month_of
from cavvy.domain.notices import Notice, NoticeChannel, NoticeEvent, NoticeTarget
from cavvy.domain.units import Money
from cavvy.store.base import AtomicWrite, RowNotFound, StaleVersion
from cavvy.store.sql import Store


async def put(store: Store, name: str, *events: str, **fields: Any) -> NoticeTarget:
    target = NoticeTarget(
        **{
            "project": "p",
            "name": name,
            "channel": NoticeChannel.SLACK,
            "sealed": b"sealed",
            "events": events,
            "updated_at": NOW,
            **fields,
        }
    )
    await store.notices.put(target)
    return target


async def waiting(store: Store, target: NoticeTarget) -> list[tuple[str, str]]:
    return [(each.event, each.job) for each in await store.notices.waiting(target, 99)]


async def test_notices_go_to_the_targets_of_their_project_user_and_event(store: Store) -> None:
    every = await put(store, "every", *NoticeEvent)
    failed = await put(store, "failed", "failed")
    adas = await put(store, "adas", "failed", "done", user="ada")
    foreign = await put(store, "foreign", *NoticeEvent, project="q")
    adas_job = await submit(store, "j1", name="one", user="ada")
    bobs_job = await submit(store, "j2", name="two", user="bob")
    kinds = ("queued", "running", "done", "failed", "preempted", "stuck", "stopped")
    events = [make_event(adas_job, kind=kind) for kind in kinds]
    events += [make_event(bobs_job, kind="failed")]
    events += [make_event(bobs_job, kind="limit", fact=fact) for fact in ("budget", "duration")]
    await store.commit(AtomicWrite(events=events))
    assert sorted(await waiting(store, every)) == [
        ("budget", "two"),
        ("done", "one"),
        ("failed", "one"),
        ("failed", "two"),
        ("preempted", "one"),
        ("stuck", "one"),
    ]
    assert sorted(await waiting(store, failed)) == [("failed", "one"), ("failed", "two")]
    assert sorted(await waiting(store, adas)) == [("done", "one"), ("failed", "one")]
    assert await waiting(store, foreign) == []
    assert sorted(await store.notices.due_targets(NOW)) == [
        ("p", "adas"),
        ("p", "every"),
        ("p", "failed"),
    ]


async def test_an_event_that_is_not_written_causes_no_notice(store: Store) -> None:
    target = await put(store, "t", "failed")
    job = await submit(store, "j1", name="one")
    stale = AtomicWrite(jobs=[job, job], events=[make_event(job, kind="failed")])
    with pytest.raises(StaleVersion):
        await store.commit(stale)
    assert await waiting(store, target) == []


async def test_a_budget_notifies_its_project_or_its_user_once_for_each_share(store: Store) -> None:
    team = await put(store, "team", "budget")
    adas = await put(store, "adas", "budget", user="ada")
    other = await put(store, "other", "budget", project="q")
    none = await put(store, "none", "failed")
    month, limit = month_of(NOW), Money(1)

    async def claim(percent: int, **fields: str) -> None:
        name = f"b-{'-'.join(fields)}" if fields else "b"
        budget = SpendingBudget(name=name, limit=limit, since=NOW, **fields)
        await store.budgets.put(budget)
        for _ in range(2):
            await store.budgets.claim_alert(budget, month, percent, "half is spent", NOW)

    await claim(50, project="p")
    await claim(50, user="ada")
    await claim(50)  # of the whole installation: members of a project must not see its spending
    assert await waiting(store, team) == [("budget", "")]
    assert await waiting(store, adas) == [("budget", "")]
    assert await waiting(store, other) == await waiting(store, none) == []


async def test_notices_are_postponed_removed_and_deleted_with_their_target(store: Store) -> None:
    target = await put(store, "t", "failed")
    for number in range(3):
        job = await submit(store, f"j{number}", name=f"n{number}")
        await store.commit(AtomicWrite(events=[make_event(job, "x" * 5000, kind="failed")]))
    first, *rest = await store.notices.waiting(target, 99)
    assert [isinstance(each, Notice) and len(each.text) for each in rest] == [1000, 1000]
    later = NOW.replace(year=2027)
    await store.notices.postpone(target, [first, *rest], later, "no answer")
    assert [each.tries for each in await store.notices.waiting(target, 99)] == [1, 1, 1]
    assert await store.notices.due_targets(NOW) == []
    await store.notices.remove(target, [first], "")
    assert await waiting(store, target) == [("failed", "n1"), ("failed", "n2")]
    assert await store.notices.reseal(target, b"new")
    assert not await store.notices.reseal(target, b"newer")
    assert (await store.notices.target("p", "t")).sealed == b"new"
    assert await store.notices.any_target()
    await store.notices.delete("p", "t")
    assert not await store.notices.any_target()
    assert await waiting(store, target) == []
    with pytest.raises(RowNotFound):
        await store.notices.delete("p", "t")
