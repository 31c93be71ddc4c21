"""Work that goes on is polled as often as ever, but its rows are read only if something follows."""

from dataclasses import dataclass
from datetime import timedelta

import pytest
from tests.control.sim.test_control_services import HOST, ControlHarness, in_harness

from cavvy.control.running_costs import list_open
from cavvy.costs.metering import total
from cavvy.costs.running import charge_to_now
from cavvy.domain.budgets import SpendingBudget
from cavvy.domain.gangs import GangSeen
from cavvy.domain.jobs import AttemptPhase, JobPhase, JobRecord
from cavvy.domain.messages import MessageKind
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import JobLimits
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.providers.fake.cloud import FakeCloud
from cavvy.providers.fake.script import DEFAULT, FaultScript
from cavvy.store.base import JobReading
from cavvy.store.sql import Store

OWN: tuple[Offer, ...] = (replace(DEFAULT.offers[2], rate=HourlyRate(0)),)
NO_BOOT = (FaultScript(boots=False),)


@dataclass
class Work:
    """Work on one node, whose agent reports each 10 s."""

    harness: ControlHarness
    job: JobRecord
    gang: str
    seq: int = 1

    async def go_on(self, seconds: int) -> None:
        for _ in range(seconds // 10):
            self.seq += 1
            values = {"cpu_percent": 90.0}
            message = self.harness.message(self.seq, MessageKind.TELEMETRY, values=values)
            await self.harness.report(self.gang, message)
            await self.harness.wait(10)

    async def phases(self) -> tuple[JobPhase, AttemptPhase]:
        attempts = await self.harness.store.attempts(self.job.id)
        return (await self.harness.store.job(self.job.id)).phase, attempts[0].phase


async def start(harness: ControlHarness, **changes: object) -> Work:
    job = await harness.submit(**changes)
    await harness.wait()
    work = Work(harness, job, await harness.gang(job))
    await harness.control_plane.agents.claim(work.gang, 0, "n", "a", HOST)
    await harness.report(work.gang, harness.message(1, MessageKind.RUNNING))
    await work.go_on(60)
    return work


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs whose rows were read for a pass, each time."""
    found: list[str] = []
    real = Store.read_job

    async def read(self: Store, job_id: str) -> JobReading:
        found.append(job_id)
        return await real(self, job_id)

    monkeypatch.setattr(Store, "read_job", read)
    return found


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The gangs that the cloud was asked for, each time."""
    found: list[str | None] = []
    real = FakeCloud.gangs

    async def gangs(self: FakeCloud, name: str | None = None) -> list[GangSeen]:
        found.append(name)
        return [*await real(self, name)]

    monkeypatch.setattr(FakeCloud, "gangs", gangs)
    return found


@pytest.mark.parametrize(("offers", "most"), [(OWN, 6), (DEFAULT.offers, 12)])
def test_each_half_minute_has_a_poll_and_few_have_a_decision(
    passes: list[str], polls: list[str | None], offers: tuple[Offer, ...], most: int
) -> None:
    """Charges of paid nodes are written each minute, and then the job is decided."""

    async def scenario(harness: ControlHarness) -> None:
        work = await start(harness)
        passes.clear()
        polls.clear()
        await work.go_on(600)
        assert 19 <= polls.count(work.gang) <= 21
        assert 4 <= passes.count(work.job.id) <= most

    in_harness(scenario, NO_BOOT * 9, offers=offers)


def report_many(harness: ControlHarness) -> None:
    """Let the server have the reports of as many nodes as a large company's."""
    harness.control_plane.agents.gathered.agents += 1000


def test_of_many_nodes_few_have_a_decision_and_their_bills_are_as_before(
    passes: list[str], polls: list[str | None]
) -> None:
    async def scenario(harness: ControlHarness) -> int:
        work = await start(harness)
        report_many(harness)
        passes.clear()
        polls.clear()
        await work.go_on(600)
        assert 19 <= polls.count(work.gang) <= 21
        assert 2 <= passes.count(work.job.id) <= 3
        now, attempts = harness.clock.now(), await harness.store.attempts(work.job.id)
        (cost,) = await list_open(harness.store, attempts, now)
        written = await harness.store.charges(work.job.id)
        assert total(written) + cost.over(None, None) == total(
            charge_to_now(attempts, written, now)
        )
        await harness.control_plane.jobs.stop("default", work.job.id, "enough")
        exited = {"outcome": "stopped", "exit_code": 0}
        await harness.report(work.gang, harness.message(work.seq + 1, MessageKind.EXITED, **exited))
        await harness.wait(60)
        (found,) = await harness.store.attempts(work.job.id)
        assert found.phase is AttemptPhase.ENDED
        (node,) = (await harness.cloud.gangs(work.gang))[0].nodes
        assert node.started_at is not None
        assert node.ended_at is not None
        bill = await harness.store.charges(work.job.id)
        assert total(bill) == found.offer.rate.over(node.ended_at - node.started_at)
        return total(bill).micros

    assert in_harness(scenario, NO_BOOT * 9) > 0


def test_a_new_budget_that_may_stop_the_work_is_noticed_by_the_next_poll() -> None:
    async def scenario(harness: ControlHarness) -> None:
        work = await start(harness)
        report_many(harness)
        await work.go_on(300)
        assert (await harness.store.job(work.job.id)).stop_reason is None
        budget = SpendingBudget(name="b", limit=Money(1000), hard_percent=100, since=work.job.since)
        await harness.store.budgets.put(budget)
        harness.control_plane.budgets.expire()
        await work.go_on(40)
        assert "the budget b" in str((await harness.store.job(work.job.id)).stop_reason)

    in_harness(scenario, NO_BOOT * 9)


def test_a_lost_node_is_noticed_by_the_next_poll(polls: list[str | None]) -> None:
    async def scenario(harness: ControlHarness) -> None:
        work = await start(harness)
        assert await work.phases() == (JobPhase.RUNNING, AttemptPhase.RUNNING)
        await work.go_on(400 - 60)
        assert await work.phases() == (JobPhase.RUNNING, AttemptPhase.RUNNING)
        await work.go_on(60)  # its node ends
        assert (await work.phases())[1] in (AttemptPhase.ENDING, AttemptPhase.ENDED)

    lost = FaultScript(boots=False, preempted_after_s=425, notice_s=0)
    in_harness(scenario, (lost, *NO_BOOT * 9), offers=OWN)


def test_a_limit_a_stop_and_silence_take_effect_as_soon_as_ever() -> None:
    async def limited(harness: ControlHarness) -> None:
        work = await start(harness, limits=JobLimits(duration=timedelta(seconds=200)))
        await work.go_on(130)
        assert (await work.phases())[0] is JobPhase.RUNNING
        await work.go_on(20)
        assert (await harness.store.job(work.job.id)).stop_reason is not None

    async def stopped(harness: ControlHarness) -> None:
        work = await start(harness)
        await work.go_on(100)
        await harness.control_plane.jobs.stop("default", work.job.id, "enough")
        await harness.wait(1)
        node = await harness.node(work.job)
        assert node.order is not None

    async def silent(harness: ControlHarness) -> None:
        work = await start(harness, limits=JobLimits(unattended=timedelta(seconds=150)))
        await work.go_on(100)
        lease = timedelta(seconds=150) + work.job.task.grace
        await harness.wait(lease.total_seconds() + 90)
        assert (await work.phases())[1] is not AttemptPhase.RUNNING

    for scenario in (limited, stopped, silent):
        in_harness(scenario, NO_BOOT * 9, offers=OWN)
