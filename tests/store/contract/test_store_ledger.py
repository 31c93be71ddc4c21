"""The ledger is the bill's history: append-only, equal to the charges, and added up exactly."""

import itertools
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from scripts.drills.ledger import play
from tests.contract.store_suite import (
    NOW,
    after,
    begin,
    make_attempt,
    make_charge,
    make_event,
    make_job,
    store_url,
    submit,
)

from cavvy.control.budgets import BudgetKeeper, post_discounts
from cavvy.costs.discounts import parse_discounts
from cavvy.domain.budgets import SpendingBudget
from cavvy.domain.ledger import EntryKind, month_of
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import Money
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite, LedgerFilter
from cavvy.store.drivers import make_driver
from cavvy.store.sql import Store

ALL = LedgerFilter()


async def test_a_revised_bill_is_posted_as_corrections(store: Store) -> None:
    attempt = await begin(store, await submit(store, "j1"))
    await store.commit(AtomicWrite(charges=[make_charge(attempt, 100)]))
    await store.commit(AtomicWrite(charges=[make_charge(attempt, 100)]))  # a repeated poll
    await store.commit(AtomicWrite(charges=[make_charge(attempt, 250, until=150)]))
    await store.commit(AtomicWrite(charges=[make_charge(attempt, 70, until=40)]))
    lines = await store.ledger_lines(ALL)
    assert [(each.entry.kind, each.entry.amount.micros) for each in lines] == [
        (EntryKind.NODE, 100),
        (EntryKind.NODE, 150),
        (EntryKind.CORRECTION, -180),
    ]
    assert [each.entry.id for each in lines] == ["j1-1/0/1", "j1-1/0/2", "j1-1/0/3"]
    assert [each.entry.corrects for each in lines] == [None, None, 2]
    subject = lines[0].subject
    assert (subject.provider, subject.job, subject.attempt) == ("fake", "train", 1)
    assert await store.spent("p") == Money(70)
    number = lines[0].entry.number
    assert await store.ledger_lines(ALL, after=number, limit=1) == [lines[1]]


async def test_sums_by_any_dimension_add_up_to_the_ledger(store: Store) -> None:
    job = make_job("j1", user="ada", task=TaskSpec(name="a", run="true", tags={"team": "x"}))
    other = make_job("j2", name="b", project="q", user="bob")
    for each in (job, other):
        attempt = await begin(store, await store.submit(each, make_event(each)))
        charges = [make_charge(attempt, 100), make_charge(attempt, 11, kind="kept", since=60)]
        await store.commit(AtomicWrite(charges=charges))

    async def sums(*by: str, which: LedgerFilter = ALL) -> dict[tuple[str, ...], int]:
        found = await store.sum_ledger(which, by)
        return {tuple(each.groups.values()): each.amount.micros for each in found}

    assert await sums("project", "user") == {("p", "ada"): 111, ("q", "bob"): 111}
    assert await sums("kind") == {("node",): 200, ("idle",): 22}
    assert await sums("tag:team") == {("x",): 111, ("",): 111}
    assert await sums("month") == {(f"{NOW:%Y-%m}",): 222}
    assert await sums("job", which=LedgerFilter(projects="p")) == {("train",): 111}
    assert await sums("job", which=LedgerFilter(user="bob")) == {("b",): 111}
    assert await sums(which=LedgerFilter(tag=("team", "x"))) == {(): 111}
    assert (await store.sum_ledger(ALL, ()))[0].jobs == 2


async def test_the_ledger_tells_which_account_paid(store: Store) -> None:
    job = await submit(store, "j1")
    offer = replace(make_attempt(job).offer, credential="p")
    own = await begin(store, job, offer=offer)
    others = await begin(store, await submit(store, "j2", name="b"))
    charges = [make_charge(own, 1000), make_charge(others, 500)]
    await store.commit(AtomicWrite(charges=charges))
    await post_discounts(store, parse_discounts("fake:10%"), NOW)
    sums = await store.sum_ledger(ALL, ("provider", "account"))
    assert [(each.groups["account"], each.amount.micros) for each in sums] == [
        ("fake@p", 1000),
        ("fake", 450),
    ]


async def test_parts_of_entries_add_up(store: Store) -> None:
    attempt = await begin(store, await submit(store, "j1"))
    await store.commit(AtomicWrite(charges=[make_charge(attempt, 101, until=60)]))
    edges = [None, after(7), after(20), after(59.9), None]
    parts = []
    for since, until in itertools.pairwise(edges):
        sums = await store.sum_ledger(LedgerFilter(since=since, until=until), ("job",))
        parts.append(sums[0].amount.micros)
    assert parts[0] == 11  # 101 * 7 / 60, rounded down
    assert sum(parts) == 101


async def test_sums_by_month_add_up(store: Store) -> None:
    attempt = await begin(store, await submit(store, "j1"))
    begun = datetime(2026, 1, 31, 23, tzinfo=UTC)
    charge = make_charge(attempt, 1001, since=(begun - NOW).total_seconds(), until=0)
    await store.commit(AtomicWrite(charges=[charge]))
    lines = await store.ledger_lines(ALL)
    assert [each.entry.since.month for each in lines] == [1, 2, 3]
    sums = await store.sum_ledger(ALL, ("month",))
    assert sorted(each.groups["month"] for each in sums) == ["2026-01", "2026-02", "2026-03"]
    assert sum(each.amount.micros for each in sums) == 1001
    february = LedgerFilter(
        since=datetime(2026, 2, 1, tzinfo=UTC), until=datetime(2026, 3, 1, tzinfo=UTC)
    )
    assert [each.entry.since.month for each in await store.ledger_lines(february)] == [2]
    assert begun + timedelta(hours=1) == lines[1].entry.since


@pytest.mark.parametrize("kind", ["sqlite-wal", "postgres"])
@pytest.mark.parametrize("table", ["ledger", "ledger_subjects"])
async def test_the_database_refuses_to_change_entries(
    kind: str, table: str, tmp_path: Path
) -> None:
    url = store_url(kind, tmp_path)
    store = Store(url)
    await store.open()
    attempt = await begin(store, await submit(store, "j1"))
    await store.commit(AtomicWrite(charges=[make_charge(attempt, 100)]))
    await store.close()
    session = make_driver(url, journal="wal").connect()
    for statement in (f"UPDATE {table} SET project = 'q'", f"DELETE FROM {table}"):
        with pytest.raises(Exception, match="only added"):
            session.run(statement)
    session.close()


async def test_a_discount_is_posted_as_the_difference(store: Store) -> None:
    attempt = await begin(store, await submit(store, "j1"))
    await store.commit(AtomicWrite(charges=[make_charge(attempt, 1000)]))
    assert await post_discounts(store, parse_discounts("fake:10%"), NOW) == 1
    assert await post_discounts(store, parse_discounts("fake:10%"), NOW) == 0
    await store.commit(AtomicWrite(charges=[make_charge(attempt, 500, until=30)]))
    assert await post_discounts(store, parse_discounts("fake:10%, fake:$0.0001"), NOW) == 2
    (row,) = await store.sum_ledger(ALL, ("project",))
    assert (row.amount, row.discount) == (Money(500 - 50 - 100), Money(-150))
    lines = await store.ledger_lines(ALL)
    discounts = [each.entry.amount.micros for each in lines if each.entry.kind == "discount"]
    assert discounts == [-100, 50, -100]
    assert await store.charges("j1") == [make_charge(attempt, 500, until=30)]


async def test_a_discount_accrues_in_the_days_of_the_charges(store: Store) -> None:
    """A node runs for two days of the month, and the discount is posted three times."""
    attempt = await begin(store, await submit(store, "j1"))
    day = 86400
    for until in (day / 2, day, 2 * day):
        await store.commit(AtomicWrite(charges=[make_charge(attempt, int(until), until=until)]))
        await post_discounts(store, parse_discounts("fake:10%, fake:$0.01"), NOW)

    async def list_days() -> list[tuple[int, int]]:
        """The charges and the discounts of each day."""
        found = []
        for first in range(3):
            which = LedgerFilter(since=after(first * day), until=after((first + 1) * day))
            sums = await store.sum_ledger(which, ())
            off = sum(each.discount.micros for each in sums)
            found.append((sum(each.amount.micros for each in sums) - off, off))
        return found

    assert await list_days() == [(day, -8640 - 10_000), (day, -8640), (0, 0)]
    await post_discounts(store, (), NOW)
    assert await list_days() == [(day, 0), (day, 0), (0, 0)]


async def test_a_changed_or_removed_discount_takes_back_the_former_one(store: Store) -> None:
    attempt = await begin(store, await submit(store, "j1"))
    await store.commit(AtomicWrite(charges=[make_charge(attempt, 1000)]))

    async def posted(discounts: str) -> Money:
        await post_discounts(store, parse_discounts(discounts), NOW)
        (row,) = await store.sum_ledger(ALL, ("project",))
        return row.discount

    assert await posted("fake:12%") == Money(-120)
    assert await posted("fake:15%") == Money(-150)
    assert await posted("fake@p:95%") == Money(0)
    assert await posted("fake:95%") == Money(-950)
    assert await posted("") == Money(0)
    assert await posted("fake:12%") == Money(-120)


@pytest.mark.parametrize("kind", ["sqlite-wal", "postgres"])
async def test_random_histories_agree_with_an_independent_recount(
    kind: str, tmp_path: Path
) -> None:
    """`scripts/drills/ledger.py` plays a thousand."""
    assert await play(store_url(kind, tmp_path), 12, seed=3) == []


async def test_alerts_of_a_raised_or_removed_budget_are_sent_again(store: Store) -> None:
    attempt = await begin(store, await submit(store, "j1"))
    await store.commit(AtomicWrite(charges=[make_charge(attempt, 900_000)]))

    class Watch:
        def now(self) -> datetime:
            return after(60)

    keeper, month = BudgetKeeper(store, Watch()), month_of(NOW)  # type: ignore[arg-type]  # no waits

    async def set_and_check(limit: int) -> list[int]:
        """The shares of which no alert was sent before, after alerts for all reached shares."""
        await store.budgets.put(SpendingBudget(name="b", limit=Money(limit), since=NOW))
        await keeper.renew_alerts("b")
        await keeper.reconcile()
        claim, [budget] = store.budgets.claim_alert, await store.budgets.list()
        return [each for each in (50, 80, 100) if await claim(budget, month, each, "", NOW)]

    assert await set_and_check(1_000_000) == [100]
    assert await set_and_check(1_000_000) == [100]
    assert await set_and_check(1_500_000) == [80, 100]
    assert await set_and_check(9_000_000) == [50, 80, 100]
    await store.budgets.delete("b")
    assert await set_and_check(1_000_000) == [100]
