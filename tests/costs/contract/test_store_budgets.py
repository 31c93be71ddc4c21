"""What stores know of budgets, and how the keeper of budgets uses it."""

from datetime import UTC, datetime, timedelta

from tests.contract.store_suite import NOW, after, begin, make_charge, make_job, submit

from cavvy.control.budgets import BudgetKeeper
from cavvy.control.clock import VirtualClock, run_virtual
from cavvy.domain.budgets import ChargedRate, SpendingBudget
from cavvy.domain.events import ChargeKind
from cavvy.domain.jobs import AttemptPhase, JobRecord
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite
from cavvy.store.open import MemoryStore
from cavvy.store.sql import Store

_RATE = HourlyRate(3_600_000)  # 1000 micro-dollars a second
_BUDGET = SpendingBudget(name="b", limit=Money(1_000_000), project="p", hard_percent=100, since=NOW)


async def run_job(store: Store, job_id: str, **fields: object) -> JobRecord:
    """Write a job with a running attempt, which has cost 1000 micro-dollars a second for 60 s."""
    await submit(store, job_id, name=job_id, **fields)
    attempt = await begin(store, await store.job(job_id), phase=AttemptPhase.RUNNING)
    job = replace(await store.job(job_id), attempt=1)
    await store.commit(AtomicWrite(jobs=[job], charges=[make_charge(attempt, 60_000)]))
    return await store.job(job_id)


async def test_rates_are_those_of_the_newest_charges_of_open_attempts(store: Store) -> None:
    assert await store.budgets.charged_rates() == {}
    await run_job(store, "j1")
    (attempt,) = await store.attempts("j1")
    charges = [
        make_charge(attempt, 60_000),
        make_charge(attempt, 60_000, since=60, until=120, rate=_RATE.times(2)),
        make_charge(attempt, 5, until=120, kind=ChargeKind.DISK, rate=HourlyRate(7)),
        make_charge(attempt, 5, until=120, kind=ChargeKind.MINIMUM, rate=HourlyRate(9)),
        make_charge(attempt, 5, until=130, kind=ChargeKind.TRAFFIC, rate=HourlyRate()),
        make_charge(attempt, 60_000, rank=1),  # a node that has ended
    ]
    await store.commit(AtomicWrite(charges=charges))
    rate = HourlyRate(_RATE.times(2).micros_per_hour + 7)
    charged = ChargedRate(job_id="j1", until=after(120), rate=rate)
    assert await store.budgets.charged_rates() == {"j1": charged}
    await store.commit(AtomicWrite(attempts=[replace(attempt, phase=AttemptPhase.ENDED)]))
    assert await store.budgets.charged_rates() == {}


async def test_a_budget_is_replaced_only_if_it_is_the_one_that_was_read(store: Store) -> None:
    more = replace(_BUDGET, limit=Money(2))
    assert not await store.budgets.swap(_BUDGET, more)
    await store.budgets.put(_BUDGET)
    assert await store.budgets.swap(_BUDGET, more)
    assert not await store.budgets.swap(_BUDGET, replace(_BUDGET, limit=Money(3)))
    assert await store.budgets.list() == [more]


def test_jobs_of_other_servers_count_by_their_newest_charges() -> None:
    async def play() -> None:
        store = MemoryStore()
        await store.budgets.put(_BUDGET)
        await run_job(store, "theirs")
        job = await run_job(store, "ours")
        keeper = BudgetKeeper(store, VirtualClock(after(160)))
        allowance = await keeper.find_allowance(job, Money(160_000), _RATE)
        assert allowance is not None
        assert allowance.most == Money(160_000 + (1_000_000 - 2 * 160_000) // 2)

    run_virtual(play())


def test_what_no_pass_renews_is_not_extrapolated() -> None:
    async def play() -> None:
        store, clock = MemoryStore(), VirtualClock(after(60))
        await store.budgets.put(_BUDGET)
        job = await run_job(store, "j1")
        keeper = BudgetKeeper(store, clock)
        await keeper.find_allowance(job, Money(60_000), _RATE)
        # Now another server reconciles the job, whose gang is soon lost.
        (attempt,) = await store.attempts("j1")
        await store.commit(AtomicWrite(attempts=[replace(attempt, phase=AttemptPhase.ENDED)]))
        await clock.sleep_until(after(11 * 3600))
        assert await keeper.find_block(job) == ""

    run_virtual(play())


def test_spending_before_the_month_does_not_count_although_it_is_posted_later() -> None:
    async def play() -> None:
        month_end = datetime(2026, 4, 1, tzinfo=UTC)
        store = MemoryStore()
        await store.budgets.put(_BUDGET)
        job = await run_job(store, "j1")
        (attempt,) = await store.attempts("j1")
        until = (month_end - NOW).total_seconds() - 3600
        charge = make_charge(attempt, 1000 * int(until), until=until)
        await store.commit(AtomicWrite(charges=[charge]))
        keeper = BudgetKeeper(store, VirtualClock(month_end + timedelta(seconds=100)))
        # the provider has been silent for 3700 s, of which 100 s are in this month
        spent = charge.amount.micros + 3_700_000
        allowance = await keeper.find_allowance(job, Money(spent), _RATE)
        assert allowance is not None
        assert allowance.most == Money(spent + 1_000_000 - 100_000)

    run_virtual(play())


def test_spending_of_one_project_warns_the_jobs_of_another_before_it_stops_them() -> None:
    """A budget of a tag counts the jobs of all projects."""

    async def play() -> None:
        store, clock = MemoryStore(), VirtualClock(after(60))
        budget = replace(_BUDGET, project="", tag="study=x", limit=Money(125_000), alerts=(80,))
        await store.budgets.put(budget)
        jobs = {}
        for project in ("p", "q"):
            task = replace(make_job(project).task, project=project, tags={"study": "x"})
            jobs[project] = await run_job(store, project, project=project, task=task)
        await clock.sleep_until(after(61))
        keeper = BudgetKeeper(store, clock)
        await keeper.reconcile()
        for project, job in jobs.items():
            told = [each for each in await store.events(job.id) if each.kind == "budget"]
            assert [each.text.partition(" is spent")[0] for each in told] == ["80% of the budget b"]
            assert told[0].text.endswith(f"of it in project {project}")

    run_virtual(play())
