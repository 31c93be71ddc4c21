"""The reconcilers that capabilities contribute. What one of them does wrong stops neither the
others nor the core: the fault is kept for the server's status, and the work is done again later.
One that does not answer is given up after a time, since the core waits for it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import timedelta
from typing import TypeVar, cast

from cavvy.control.clock import ControlClock
from cavvy.control.parts import OwnReconciler, StandingReconciler
from cavvy.control.worklist import FIRST_PAUSE, LONGEST_PAUSE
from cavvy.frame.faults import note_fault
from cavvy.store.base import LeaseLost, ProjectFilter, StaleVersion, StoreFull, StoreUnusable
from cavvy.telemetry import Figures

_T = TypeVar("_T")
_FAILS = "fails in its work"
# Errors of the store that no capability causes: the core waits and tries again after these.
_OF_CORE = (StoreUnusable, StoreFull, LeaseLost)
_ANSWER_S = 60  # seconds that a reconciler has for what jobs or people wait for
_SWEEP_S = 600


class OwnReconcilers:
    """The reconcilers of capabilities, in the order of the capabilities' names. StoreUnusable,
    StoreFull and LeaseLost are raised, since the core waits and tries again after these; all other
    errors are kept as faults, also those of the store, such as RowNotFound.
    """

    def __init__(self, clock: ControlClock, made: Iterable[tuple[str, OwnReconciler]] = ()) -> None:
        self._clock = clock
        found = list(made)
        self.all = [each for _, each in found]
        self._found: dict[type, object | None] = {}
        self._standing = [each for each in self.all if isinstance(each, StandingReconciler)]
        # most learn of no jobs, and are not asked at each of their passes
        self._noting = [
            each
            for each in self._standing
            if type(each).note_job is not StandingReconciler.note_job
        ]
        self._names = {id(each): name for name, each in found}

    def find(self, kind: type[_T]) -> _T | None:
        """Return the first reconciler of this type, or None."""
        if kind not in self._found:  # it takes long to compare with a protocol
            self._found[kind] = next((each for each in self.all if isinstance(each, kind)), None)
        return cast(_T | None, self._found[kind])

    def find_owner(self, key: str) -> OwnReconciler | None:
        """Return the reconciler whose key this is, or None."""
        owns = (each for each in self.all if self._ask(each, lambda one: one.owns(key)))
        return next(owns, None)

    def find_follower(self, key: str) -> StandingReconciler | None:
        """Return the reconciler that looks at the key on each server, or None."""
        follows = (each for each in self._standing if self._ask(each, lambda one: one.follows(key)))
        return next(follows, None)

    def open(self, app_state: object) -> None:
        """Give the reconcilers what the routes use."""
        for each in self._standing:
            self._ask(each, lambda one: one.open(app_state))

    async def unfinished(self, *, again: bool = False) -> Sequence[str]:
        """Return the keys to reconcile when the server starts; with `again`, those to look at from
        time to time, since servers share the work. Raises the errors of the core.
        """
        keys: list[str] = []
        for each in self._standing if again else self.all:
            what = "does not say what it has to do"
            keys += await self._contain(each, what, each.unfinished()) or ()
        return keys

    async def reconcile(self, owner: OwnReconciler, key: str) -> timedelta | None:
        """Reconcile a key of a reconciler. Raises its error, with which the worklist tries the key
        again. It is no fault that another writer was first (StaleVersion).
        """
        try:
            return await owner.reconcile(key)
        except (*_OF_CORE, StaleVersion):
            raise
        except Exception as error:
            self._note(owner, _FAILS, error)
            raise

    def start(self, group: asyncio.TaskGroup) -> None:
        """Let the reconcilers work until the group is cancelled."""
        for each in self._standing:
            group.create_task(self._keep_running(each))

    async def note_job(self, job_id: str) -> None:
        """Tell the reconcilers that a job was reconciled. Raises the errors of the core."""
        for each in self._noting:
            await self._contain(each, "cannot learn of a job", each.note_job(job_id))

    async def sweep(self) -> None:
        """Remove and settle what is left over. Raises the errors of the core."""
        for each in self._standing:
            await self._contain(each, "does not tidy up", each.sweep(), _SWEEP_S)

    async def any_needed(self) -> bool:
        """Return whether the server must not exit, which a reconciler that fails to say does not
        allow. Raises the errors of the core.
        """
        what = "does not say whether it needs the server"
        for each in self._standing:
            if await self._contain(each, what, each.is_needed()) is not False:
                return True
        return False

    async def end_all(self, project: str | None) -> None:
        """End what the reconcilers keep running in a project, or in all. Raises the error of the
        first that could not, after the others have ended theirs: it may cost money.
        """
        failed = []
        for each in self._standing:
            try:
                await _bound(each.end_all(project), _ANSWER_S)
            except Exception as error:  # noqa: BLE001 - code of others raises anything
                self._note(each, "cannot end what it runs", error)
                failed.append(error)
        if failed:
            raise failed[0]

    async def add_figures(self, figures: Figures, projects: ProjectFilter) -> None:
        """Add figures to those that the server exports. Raises the errors of the core."""
        for each in self._standing:
            what = "gives no figures"
            await self._contain(each, what, each.add_figures(figures, projects))

    def find_problem(self) -> str:
        """Return what a reconciler cannot do now and why, or ""."""
        found = (self._ask(each, lambda one: one.find_problem()) for each in self._standing)
        return next(filter(None, found), "")

    async def _keep_running(self, each: StandingReconciler) -> None:
        """Run a reconciler until it ends by itself or is cancelled. After an error it begins anew,
        at first after a second, and later after a longer pause each time that it failed soon.
        """
        pause = FIRST_PAUSE
        while True:
            begun = self._clock.now()
            try:
                return await each.run()
            except Exception as error:  # noqa: BLE001 - code of others raises anything
                self._note(each, "stopped, and begins anew", error)
            if self._clock.now() - begun > LONGEST_PAUSE:
                pause = FIRST_PAUSE
            await self._clock.sleep_until(self._clock.now() + pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _contain(
        self, each: OwnReconciler, what: str, work: Awaitable[_T], most_s: float = _ANSWER_S
    ) -> _T | None:
        try:
            return await _bound(work, most_s)
        except _OF_CORE:
            raise
        except Exception as error:  # noqa: BLE001 - code of others raises anything
            self._note(each, what, error)
            return None

    def _ask(self, each: StandingReconciler | OwnReconciler, ask: Callable[..., _T]) -> _T | None:
        try:
            return ask(each)
        except Exception as error:  # noqa: BLE001 - code of others raises anything
            self._note(each, "does not answer", error)
            return None

    def _note(self, each: OwnReconciler, what: str, error: Exception) -> None:
        note_fault(self._names[id(each)], f"{what} ({type(each).__name__})", error)


async def take_all(*steps: Callable[[], Awaitable[object]]) -> None:
    """Take one step after the other, also those after one that fails. Raises the first error."""
    failed = []
    for step in steps:
        try:
            await step()
        except Exception as error:  # noqa: BLE001 - raised below
            failed.append(error)
    if failed:
        raise failed[0]


async def _bound(work: Awaitable[_T], most_s: float) -> _T:
    """Wait for the work. Raises its error, and TimeoutError, with a sentence, if it lasts longer
    than `most_s` seconds."""
    try:
        async with asyncio.timeout(most_s) as limit:
            return await work
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"given up after {most_s:g} s") from error
