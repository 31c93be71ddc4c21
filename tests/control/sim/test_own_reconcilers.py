"""A reconciler of a capability that fails in whatever it is asked stops nothing else."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.control.sim.test_control_services import ControlHarness, in_harness

from cavvy.control.clock import VirtualClock, run_virtual
from cavvy.control.own_reconcilers import OwnReconcilers
from cavvy.control.parts import StandingReconciler
from cavvy.domain.jobs import AttemptPhase
from cavvy.frame.capability import Capability
from cavvy.frame.faults import forget_faults, list_faults
from cavvy.sim.harness import START
from cavvy.store.base import (
    LeaseLost,
    NameConflict,
    ProjectFilter,
    RowNotFound,
    StaleVersion,
    StoreError,
    StoreFull,
    StoreUnusable,
)
from cavvy.telemetry import Figures


def fail() -> Exception:
    return ZeroDivisionError("its own mistake")


class Broken(StandingReconciler):
    """Fails in everything."""

    def __init__(
        self, clock: VirtualClock, make_error: Callable[[], Exception] = fail, lasts_s: float = 0
    ) -> None:
        self.clock, self.make_error, self.lasts_s = clock, make_error, lasts_s
        self.begun: list[datetime] = []

    def owns(self, key: str) -> bool:
        raise self.make_error()

    async def unfinished(self) -> Sequence[str]:
        raise self.make_error()

    async def run(self) -> None:
        self.begun.append(self.clock.now())
        await self.clock.sleep_until(self.clock.now() + timedelta(seconds=self.lasts_s))
        raise ExceptionGroup("of a group of tasks", [self.make_error()])

    def follows(self, key: str) -> bool:
        raise self.make_error()

    async def note_job(self, job_id: str) -> None:
        raise self.make_error()

    async def sweep(self) -> None:
        raise self.make_error()

    async def is_needed(self) -> bool:
        raise self.make_error()

    async def end_all(self, project: str | None) -> None:
        raise self.make_error()

    async def add_figures(self, figures: Figures, projects: ProjectFilter) -> None:
        raise self.make_error()

    def find_problem(self) -> str:
        raise self.make_error()


class Works(Broken):
    """Does what it is asked, and says so."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.done: list[str] = []

    def owns(self, key: str) -> bool:
        return key.startswith("works:")

    async def unfinished(self) -> Sequence[str]:
        return ["works:1"]

    async def reconcile(self, key: str) -> timedelta | None:
        self.done.append(key)
        return None

    async def run(self) -> None:
        self.done.append("run")

    def follows(self, key: str) -> bool:
        return self.owns(key)

    async def note_job(self, job_id: str) -> None:
        self.done.append("note")

    async def sweep(self) -> None:
        self.done.append("sweep")

    async def is_needed(self) -> bool:
        return False

    async def end_all(self, project: str | None) -> None:
        self.done.append("end")

    async def add_figures(self, figures: Figures, projects: ProjectFilter) -> None:
        self.done.append("figures")

    def find_problem(self) -> str:
        return "one problem"


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    forget_faults()
    yield
    forget_faults()


@pytest.fixture
def contribute(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes these the only reconcilers of capabilities of control planes to come."""

    def use(**makers: Callable[..., object]) -> None:
        found = [(Capability(name, name), make) for name, make in sorted(makers.items())]
        monkeypatch.setattr("cavvy.control.control_plane.load_all", lambda pick: iter(found))

    return use


def test_the_control_plane_works_beside_a_reconciler_that_fails(
    contribute: Callable[..., None],
) -> None:
    made: list[Broken] = []

    def keep(kind: type[Broken]) -> Callable[..., Broken]:
        def make(parts: object) -> Broken:
            made.append(kind(parts.clock))  # type: ignore[attr-defined]
            return made[-1]

        return make

    contribute(broken=keep(Broken), works=keep(Works))

    async def scenario(harness: ControlHarness) -> None:
        job = await harness.submit()
        await harness.wait(30)
        plane = harness.control_plane
        assert plane.running
        assert plane.failure is None
        assert (await harness.store.attempts(job.id))[-1].phase is not AttemptPhase.ENDED
        plane.hint("sweep")
        await harness.wait(30)

    in_harness(scenario)
    broken, works = made
    assert isinstance(works, Works)
    assert {"run", "works:1", "note", "sweep"} <= {*works.done}
    # 1, 2, 4, 8 and 16 seconds between its beginnings
    assert [round((at - START).total_seconds()) for at in broken.begun] == [0, 1, 3, 7, 15, 31]
    named = {fault.split(" (Broken): ")[0] for fault in list_faults()}
    assert named == {
        "broken: does not answer",
        "broken: does not say what it has to do",
        "broken: cannot learn of a job",
        "broken: does not tidy up",
        "broken: stopped, and begins anew",
    }
    [stopped] = [fault for fault in list_faults() if "begins anew" in fault]
    assert stopped.endswith("(Broken): ZeroDivisionError: its own mistake (6 times)")


def test_one_that_fails_leaves_the_answers_of_the_others() -> None:
    async def main() -> None:
        clock = VirtualClock(START)
        works = Works(clock)
        own = OwnReconcilers(clock, [("broken", Broken(clock)), ("works", works)])
        assert own.find_owner("works:1") is works
        assert own.find_follower("works:1") is works
        assert own.find_owner("job") is None
        assert await own.unfinished() == await own.unfinished(again=True) == ["works:1"]
        await own.note_job("j")
        await own.sweep()
        await own.add_figures(Figures(), None)
        assert own.find_problem() == "one problem"
        assert await own.any_needed(), "it fails to say whether the server may exit"
        with pytest.raises(ZeroDivisionError):
            await own.end_all(None)
        assert works.done == ["note", "sweep", "figures", "end"]

    run_virtual(main())


def list_hooks(own: OwnReconcilers) -> Sequence[Coroutine[Any, Any, object]]:
    figures = own.add_figures(Figures(), None)
    return [own.unfinished(), own.note_job("j"), own.sweep(), own.any_needed(), figures]


@pytest.mark.parametrize("error", [StoreUnusable("gone"), StoreFull("full"), LeaseLost("lost")])
def test_errors_that_no_capability_causes_are_left_to_the_core(error: StoreError) -> None:
    async def main() -> None:
        clock = VirtualClock(START)
        own = OwnReconcilers(clock, [("broken", Broken(clock, lambda: error))])
        for work in list_hooks(own):
            with pytest.raises(type(error)):
                await work

    run_virtual(main())
    assert not list_faults()


@pytest.mark.parametrize("error", [RowNotFound("no row"), StaleVersion("old"), NameConflict("two")])
def test_other_errors_of_the_store_stop_nothing_else(error: StoreError) -> None:
    async def main() -> None:
        clock = VirtualClock(START)
        works = Works(clock)
        made = [("broken", Broken(clock, lambda: error)), ("works", works)]
        for work in list_hooks(OwnReconcilers(clock, made)):
            await work
        assert works.done == ["note", "sweep", "figures"]

    run_virtual(main())
    assert len(list_faults()) == 5, list_faults()


class Hangs(Broken):
    """Answers nothing."""

    async def hang(self, *_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()

    unfinished = note_job = sweep = is_needed = end_all = add_figures = hang


def test_one_that_hangs_is_given_up() -> None:
    async def main() -> None:
        clock = VirtualClock(START)
        works = Works(clock)
        own = OwnReconcilers(clock, [("hangs", Hangs(clock)), ("works", works)])
        for work in list_hooks(own):
            await work
        with pytest.raises(TimeoutError, match="given up after 60 s"):
            await own.end_all(None)
        assert works.done == ["note", "sweep", "figures", "end"]

    run_virtual(main())
    assert all("TimeoutError: given up after" in each for each in list_faults())
    assert len(list_faults()) == 6, list_faults()


def test_one_that_has_worked_for_long_begins_anew_at_once() -> None:
    async def main() -> list[datetime]:
        clock = VirtualClock(START)
        broken = Broken(clock, lasts_s=1000)
        own = OwnReconcilers(clock, [("broken", broken)])
        stopped = False
        try:
            async with asyncio.timeout(3500), asyncio.TaskGroup() as group:
                own.start(group)
        except TimeoutError:
            stopped = True
        assert stopped
        return broken.begun

    begun = run_virtual(main())
    assert [round((at - START).total_seconds()) for at in begun] == [0, 1001, 2002, 3003]


def test_a_capability_that_cannot_end_its_work_keeps_nothing_else_running(
    contribute: Callable[..., None],
) -> None:
    contribute(broken=lambda parts: Broken(parts.clock))

    async def scenario(harness: ControlHarness) -> None:
        job = await harness.submit()
        await harness.wait(30)
        with pytest.raises(ZeroDivisionError):
            await harness.control_plane.down()
        assert (await harness.store.job(job.id)).stop_reason == "all jobs are being stopped"
        await harness.wait(60)
        assert (await harness.store.attempts(job.id))[-1].phase is AttemptPhase.ENDED

    in_harness(scenario)
