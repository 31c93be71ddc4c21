"""The steps in which ended jobs are removed, on virtual time."""

import json
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest
from tests.contract.store_suite import NOW, after, begin, make_attempt, make_charge, submit

from cavvy.control.clock import VirtualClock, run_virtual
from cavvy.control.decide.restored import RestoreComparison
from cavvy.control.deferred import Deferred
from cavvy.control.job_service import JobIds, JobService
from cavvy.control.restored import mark_restored
from cavvy.control.retention import _STEP, ROUNDS, WAIT, Retention, read_begin
from cavvy.domain.accounts import Project
from cavvy.domain.audit import CUT, AuditEntry, check_chain
from cavvy.domain.checkpoints import RemovedCheckpoints
from cavvy.domain.figures import FigureBlock, FigureColumns
from cavvy.domain.jobs import AttemptPhase, JobPhase, JobRecord
from cavvy.domain.policies import ProjectPolicy
from cavvy.domain.retention import RetentionDays
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite, LedgerFilter
from cavvy.store.open import MemoryStore

DAY = 86_400


class Crash(Exception):
    pass


class Rig:
    """A store with jobs of two projects that ended, one each day, and the retention."""

    def __init__(self, days: int) -> None:
        self.store = MemoryStore()
        self.clock = VirtualClock(NOW + timedelta(days=100))
        self.freed: list[str] = []
        self.crashes = 0
        self.days = RetentionDays(jobs=days, audit=365)
        self.retention = self.restart()

    def restart(self) -> Retention:
        clock = self.clock
        jobs = JobService(
            Deferred(self.store),
            clock,
            JobIds(clock),
            hint=lambda key: None,
            arrived=lambda: None,
            notify=lambda job_id, what: None,
            remove_files=self.remove_files,
        )
        return Retention(self.store, clock, jobs, self.days)

    async def remove_files(self, job: JobRecord) -> RemovedCheckpoints:
        if self.crashes:
            self.crashes -= 1
            raise Crash
        self.freed.append(job.id)
        return RemovedCheckpoints()

    async def end(self, number: int, project: str, *, phase: JobPhase = JobPhase.DONE) -> None:
        job = await submit(self.store, f"j{number:03}", project=project, name=f"train-{number}")
        attempt = await begin(self.store, job)
        charge = make_charge(attempt, 1000 + number)
        ended = replace(attempt, phase=AttemptPhase.ENDED, version=1)
        await self.store.commit(AtomicWrite(attempts=[ended], charges=[charge]))
        job = replace(await self.store.job(job.id), phase=phase)
        at = after(number * DAY) if phase is not JobPhase.RUNNING else None
        await self.store.commit(AtomicWrite(jobs=[replace(job, ended_at=at)]))

    async def run(self) -> int:
        """Make steps until the next round is an hour away; return the number of steps."""
        for count in range(1, 1000):
            if await self.retention.reconcile() >= timedelta(hours=1):
                return count
        raise AssertionError("the retention never ends")

    async def have_run(self, since: timedelta = WAIT, last: timedelta = timedelta(0)) -> None:
        """Let rounds have been made from `since` to `last` before now."""
        now = self.clock.now()
        await self.store.put_fact(ROUNDS, f"{(now - since).isoformat()} {(now - last).isoformat()}")

    async def left(self) -> list[str]:
        page = await self.store.list_jobs(None, limit=500)
        return sorted(each.id for each in page.jobs)


def play(scenario: Callable[[Rig], Awaitable[None]], days: int = 90) -> None:
    async def run() -> None:
        rig = Rig(days)
        await rig.have_run()
        await scenario(rig)

    run_virtual(run())


def test_old_jobs_are_removed_in_steps_and_sums_stay() -> None:
    async def scenario(rig: Rig) -> None:
        for number in range(1, 41):
            await rig.end(number, "p")
        await rig.end(99, "q", phase=JobPhase.RUNNING)
        before = await rig.store.sum_ledger(LedgerFilter(), ("project", "job"))
        assert await rig.run() == 4  # p twice, q once, and the end of the round
        assert await rig.left() == [f"j{number:03}" for number in (*range(10, 41), 99)]
        assert rig.freed == [f"j{number:03}" for number in range(1, 10)]
        assert await rig.store.sum_ledger(LedgerFilter(), ("project", "job")) == before
        told = await rig.store.retention.find_removed("p", "train-3")
        assert told is not None
        assert (told.days, told.rule) == (90, "retention.jobs_days")
        assert told.removed_at == rig.clock.now()

    play(scenario)


def test_old_figures_of_running_jobs_are_removed() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.end(99, "p", phase=JobPhase.RUNNING)
        [attempt] = await rig.store.attempts("j099")
        known = FigureColumns(low=[1.0], mean=[1.0], high=[1.0])
        now = int(rig.clock.now().timestamp()) // 60
        blocks = [
            FigureBlock(
                attempt_id=attempt.id, rank=0, minutes=[now - days * 1440], columns={"a": known}
            )
            for days in (1, 30, 32, 90)
        ]
        await rig.store.commit(AtomicWrite(figures=blocks))
        await rig.run()
        since, until = rig.clock.now() - timedelta(days=99), rig.clock.now()
        left = await rig.store.figures.list(attempt.id, 0, since=since, until=until)
        assert [now - each.minutes[0] for each in left] == [30 * 1440, 1440]

    play(scenario)


def test_a_step_is_small_and_the_next_one_waits() -> None:
    async def scenario(rig: Rig) -> None:
        for number in range(_STEP + 5):
            await rig.end(number, "p")
        assert await rig.retention.reconcile() > timedelta(0)
        assert len(rig.freed) == _STEP
        await rig.run()
        assert len(rig.freed) == _STEP + 5
        assert await rig.left() == []

    play(scenario, days=60)


def test_nothing_is_removed_without_a_number_of_days() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.end(1, "p")
        await rig.run()
        assert await rig.left() == ["j001"]

    play(scenario, days=0)


def test_more_days_than_the_calendar_has_keep_everything() -> None:
    async def scenario(rig: Rig) -> None:
        rig.days = RetentionDays(jobs=10**12, audit=10**12)
        rig.retention = rig.restart()
        at = rig.clock.now() - timedelta(days=400)
        await rig.store.record(AuditEntry(at=at, signed_in=True, action="PUT /v1/x"))
        await rig.run()
        assert rig.freed == []
        assert len(await rig.store.audit_records()) == 1

    play(scenario)


def test_the_nearest_policy_sets_the_days() -> None:
    async def scenario(rig: Rig) -> None:
        store = rig.store
        for project, parent in (("team", None), ("a", "team"), ("b", "team")):
            await store.add_project(Project(name=project, parent=parent), adopt=False)
        await store.put_policy("team", ProjectPolicy(keep_jobs_days=20))
        await store.put_policy("b", ProjectPolicy(keep_jobs_days=0))
        for number, project in enumerate(("a", "b", "p"), 50):
            await rig.end(number, project)
        await rig.run()
        assert await rig.left() == ["j051", "j052"]
        told = await store.retention.find_removed("a", "train-50")
        assert told is not None
        assert (told.days, told.rule) == (20, "policy of project team")

    play(scenario)


def test_only_a_policy_removes_jobs_of_archived_projects() -> None:
    async def scenario(rig: Rig) -> None:
        store = rig.store
        for number, project in enumerate(("a", "b", "p")):
            await store.add_project(Project(name=project), adopt=False)
            await rig.end(number, project)
        await store.archive.put(["a", "b"], rig.clock.now())
        await store.put_policy("b", ProjectPolicy(keep_jobs_days=50))
        await rig.run()
        assert await rig.left() == ["j000"]

    play(scenario)


def test_a_failed_removal_delays_no_other_and_is_repeated() -> None:
    async def scenario(rig: Rig) -> None:
        for number in (1, 2, 3):
            await rig.end(number, "p")
        rig.crashes = 1
        with pytest.raises(Crash):
            await rig.retention.reconcile()
        await rig.run()
        assert await rig.left() == ["j001"]
        rig.retention = rig.restart()
        await rig.run()
        assert await rig.left() == []
        assert rig.freed == ["j002", "j003", "j001"]

    play(scenario)


def test_what_users_removed_is_deleted_as_well() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.end(1, "p")
        await rig.store.remove_job(await rig.store.job("j001"))
        await rig.run()
        assert await rig.store.attempts("j001") == []
        assert rig.freed == []
        assert (await rig.store.spent("p")).micros == 1001

    play(scenario)


def test_unfinished_work_is_never_removed() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.end(1, "p")
        await rig.store.commit(AtomicWrite(attempts=[make_attempt(await rig.store.job("j001"), 2)]))
        await rig.run()
        assert await rig.left() == ["j001"]
        assert rig.freed == []

    play(scenario)


def test_audit_records_are_cut_once_a_month() -> None:
    async def scenario(rig: Rig) -> None:
        async def record(days: int) -> None:
            at = rig.clock.now() - timedelta(days=days)
            await rig.store.record(AuditEntry(at=at, signed_in=True, action="PUT /v1/x"))

        async def actions() -> list[str]:
            return [json.loads(each.text)["action"] for each in await rig.store.audit_records()]

        for days in (394, 366, 1):
            await record(days)
        await rig.run()
        assert await actions() == ["PUT /v1/x"] * 3
        await rig.clock.sleep_until(rig.clock.now() + timedelta(days=2))
        await rig.run()
        assert await actions() == ["PUT /v1/x", CUT]
        list(check_chain(await rig.store.audit_records()))
        await rig.run()
        assert await actions() == ["PUT /v1/x", CUT]

    play(scenario)


@pytest.mark.parametrize(
    "rounds",
    [None, (timedelta(days=400), timedelta(days=31)), (-timedelta(days=31), -timedelta(days=40))],
    ids=["updated", "not run for a month", "clock was ahead"],
)
def test_nothing_is_removed_in_the_first_month(
    rounds: tuple[timedelta, timedelta] | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Servers of earlier versions, which kept everything, stored no rounds."""

    async def scenario(rig: Rig) -> None:
        await rig.end(1, "p")
        if rounds is None:
            await rig.store.put_fact(ROUNDS, "")
        else:
            await rig.have_run(*rounds)
        began = rig.clock.now()
        for day in range(30):
            await rig.clock.sleep_until(began + timedelta(days=day))
            assert await rig.run() == 1
            assert await read_begin(rig.store, rig.clock.now()) == began + WAIT
        assert await rig.left() == ["j001"]
        assert caplog.text.count(f"be removed after {began + WAIT:%Y-%m-%d %H:%M} UTC") == 1
        await rig.clock.sleep_until(began + WAIT)
        assert await read_begin(rig.store, rig.clock.now()) is None
        await rig.run()
        assert await rig.left() == []

    play(scenario)


def test_a_restored_database_keeps_its_old_jobs_for_a_month() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.end(1, "p")
        unchanged = RestoreComparison(unknown=[], lost=[], found=0, used={})
        await mark_restored(rig.store, unchanged, rig.clock.now())
        await rig.run()
        assert await rig.left() == ["j001"]

    play(scenario)
