"""The outbox of notices, on each kind of store: an event and its notices are one write."""

from typing import Any

import pytest
from tests.contract.store_suite import NOW, make_event, submit

from cavvy.capabilities.notices.notice import Notice, NoticeChannel, NoticeEvent, NoticeTarget
from cavvy.capabilities.notices.rows import SqlNotices
from cavvy.control.clock import run_virtual
from cavvy.domain.budgets import SpendingBudget
from cavvy.domain.events import Announcement
from cavvy.domain.ledger import month_of
from cavvy.domain.units import Money
from cavvy.store.base import AtomicWrite, RowNotFound, StaleVersion
from cavvy.store.open import MemoryStore
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
    await SqlNotices(*store.database).put(target)
    return target


async def waiting(store: Store, target: NoticeTarget) -> list[tuple[str, str]]:
    return [
        (each.event, each.job) for each in await SqlNotices(*store.database).waiting(target, 99)
    ]


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
    assert sorted(await SqlNotices(*store.database).due_targets(NOW)) == [
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
    first, *rest = await SqlNotices(*store.database).waiting(target, 99)
    assert [isinstance(each, Notice) and len(each.text) for each in rest] == [1000, 1000]
    later = NOW.replace(year=2027)
    await SqlNotices(*store.database).postpone(target, [first, *rest], later, "no answer")
    assert [each.tries for each in await SqlNotices(*store.database).waiting(target, 99)] == [
        1,
        1,
        1,
    ]
    assert await SqlNotices(*store.database).due_targets(NOW) == []
    await SqlNotices(*store.database).remove(target, [first], "")
    assert await waiting(store, target) == [("failed", "n1"), ("failed", "n2")]
    assert await SqlNotices(*store.database).reseal(target, b"new")
    assert not await SqlNotices(*store.database).reseal(target, b"newer")
    assert (await SqlNotices(*store.database).target("p", "t")).sealed == b"new"
    assert await SqlNotices(*store.database).any_target()
    await SqlNotices(*store.database).delete("p", "t")
    assert not await SqlNotices(*store.database).any_target()
    assert await waiting(store, target) == []
    with pytest.raises(RowNotFound):
        await SqlNotices(*store.database).delete("p", "t")


def test_an_alert_of_all_projects_reaches_the_targets_of_each() -> None:
    async def play() -> None:
        store = MemoryStore()
        budget = SpendingBudget(
            name="b", limit=Money(1), project="", tag="study=x", hard_percent=100, since=NOW
        )
        texts = {project: f"80% of b, of it in project {project}" for project in ("p", "q")}
        targets = {each: await put(store, "t", NoticeEvent.BUDGET, project=each) for each in texts}
        await store.budgets.put(budget)
        assert await store.budgets.claim_alert(budget, month_of(NOW), 80, "all", NOW, texts)
        assert not await store.budgets.claim_alert(budget, month_of(NOW), 80, "all", NOW, texts)
        for project, text in texts.items():
            (notice,) = await SqlNotices(*store.database).waiting(targets[project], 9)
            assert (notice.event, notice.text) == ("budget", text)

    run_virtual(play())


async def test_an_announcement_of_a_capability_reaches_who_asked_for_it(store: Store) -> None:
    target = await put(store, "t", "reminder")
    await put(store, "other", *NoticeEvent)
    for project in ("p", "q"):
        await store.announce(Announcement(event="reminder", project=project, text="x", at=NOW))
    assert await waiting(store, target) == [("reminder", "")]
    assert await SqlNotices(*store.database).due_targets(NOW) == [("p", "t")]
