"""Finds and removes unneeded resources that still run, or are still billed, at providers. A gang is
removed after two observations have found the gang unwanted; for `cavvy nodes down`, one observation
is enough.
"""

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

from cavvy.control.agents.uploads import LeftUpload, UnfinishedUploads
from cavvy.control.clock import ControlClock
from cavvy.control.decide.restored import OrphanGang, describe_gang, is_orphan, is_settled
from cavvy.control.provider_pool import ProviderPool
from cavvy.control.restored import forget_restored, read_restored_at
from cavvy.domain.allocations import SilentPlace
from cavvy.domain.jobs import Attempt, AttemptPhase
from cavvy.domain.values import Struct, replace
from cavvy.providers.base import (
    GangSeen,
    GangState,
    PartlyUnknown,
    ProviderError,
    Refused,
    TryAgain,
)
from cavvy.store.base import RowNotFound
from cavvy.store.sql import Store

SWEEP = "sweep"  # the garbage collector's key on the worklist
EVERY = timedelta(minutes=10)


class OrphanReport(Struct, frozen=True, kw_only=True):
    """The result of a garbage collection: unwanted gangs, unfinished uploads, and the providers
    that did not respond."""

    orphans: Sequence[OrphanGang] = ()
    problems: Sequence[SilentPlace] = ()
    uploads: Sequence[LeftUpload] = ()


class GarbageCollector:
    """Reconciles the key SWEEP, which removes unwanted gangs but not uploads, so that an
    unresponsive storage does not delay the removal of gangs. The class also performs `cavvy nodes
    gc` and the last step of `cavvy nodes down`.
    """

    def __init__(
        self, store: Store, pool: ProviderPool, clock: ControlClock, uploads: UnfinishedUploads
    ) -> None:
        self._store = store
        self._pool = pool
        self._clock = clock
        self._uploads = uploads
        # (provider, gang) -> when it was first seen although not wanted
        self._sighted: dict[tuple[str, str], datetime] = {}

    async def reconcile(self, key: str) -> timedelta | None:
        restored_at = await read_restored_at(self._store)
        found = await self._sweep_gangs(remove=True, at_once=False, restored=restored_at)
        unknown = sum(each.job_id is None for each in found.orphans)
        if restored_at and is_settled(restored_at, self._clock.now(), unknown, len(found.problems)):
            await forget_restored(self._store)
        return EVERY

    async def sweep(self, *, remove: bool, at_once: bool = False) -> OrphanReport:
        """List the unwanted gangs, and the unfinished uploads of attempts that have ended. If
        `remove` is set, also abort the listed uploads, and remove the gangs that two observations
        show to be unwanted. If `remove` and `at_once` are both set, one observation is enough to
        remove a gang.
        """
        restored_at = await read_restored_at(self._store)
        found = await self._sweep_gangs(
            remove=remove, at_once=at_once, restored=None if remove else restored_at
        )
        return replace(found, uploads=await self._uploads.sweep(remove=remove))

    async def _sweep_gangs(
        self, *, remove: bool, at_once: bool, restored: datetime | None = None
    ) -> OrphanReport:
        """Find unwanted gangs, and remove them if `remove` is set. If the database was restored
        from a backup, gangs that are not in the database are kept until a person decides about
        them.

        A gang is unwanted if it is not in the database, or if its attempt has ended. Two
        observations, sufficiently far apart in time, are needed before a gang is removed. The first
        observation is an earlier sweep that found the gang unwanted. For a gang that is not in the
        database, the start of its oldest node also counts as the first observation.
        """
        found, problems = await self._look()
        orphans: list[OrphanGang] = []
        for provider, seen in found:
            attempt, now = await self._attempt(seen.name), self._clock.now()
            if attempt is None or attempt.phase is AttemptPhase.ENDED:
                first = self._sighted.setdefault((provider, seen.name), now)
                delay = self._pool.visibility_delay(provider)
                sure = is_orphan(seen, attempt, now, first=first, visibility_delay=delay)
                spared = restored if attempt is None else None
                orphans.append(
                    describe_gang(provider, seen, attempt, sure=sure, restored_at=spared)
                )
        self._forget_all_but(orphans, {each.provider for each in problems})
        if remove:
            orphans = [
                await self._remove(orphan)
                if (orphan.sure or at_once) and not orphan.spared
                else orphan
                for orphan in orphans
            ]
        return OrphanReport(orphans=orphans, problems=problems)

    async def living(self) -> OrphanReport:
        """Return all gangs of this installation that have not ended, whether they are wanted or
        not."""
        found, problems = await self._look()
        orphans: list[OrphanGang] = []
        for provider, seen in found:
            attempt = await self._attempt(seen.name)
            why = "wanted" if attempt and attempt.phase is not AttemptPhase.ENDED else "not wanted"
            orphans.append(replace(describe_gang(provider, seen, attempt), why=why))
        return OrphanReport(orphans=orphans, problems=problems)

    async def _look(self) -> tuple[list[tuple[str, GangSeen]], list[SilentPlace]]:
        """Return every known gang that has not ended, with its provider, and the providers whose
        answers are missing or incomplete. Accounts with an unusable credential count as providers
        whose answers are missing.
        """
        found: list[tuple[str, GangSeen]] = []
        problems: list[SilentPlace] = []
        # a project may set a credential while this function waits
        for provider in list(self._pool.providers):
            try:
                gangs = await self._pool.gangs(provider)
            except ProviderError as error:
                problems.append(SilentPlace(provider, str(error)))
                gangs = error.seen if isinstance(error, PartlyUnknown) else ()
            found += [(provider, seen) for seen in gangs if seen.state is not GangState.ENDED]
        problems += [SilentPlace(*each) for each in self._pool.unusable.items()]
        return found, problems

    async def _remove(self, orphan: OrphanGang) -> OrphanGang:
        try:
            await self._pool.remove(orphan.provider, orphan.gang, release=True)
        except (TryAgain, Refused) as error:
            return replace(orphan, problem=str(error))
        return replace(orphan, removed=True)

    async def _attempt(self, gang: str) -> Attempt | None:
        try:
            return await self._store.attempt_of_gang(gang)
        except RowNotFound:
            return None

    def _forget_all_but(self, orphans: Sequence[OrphanGang], silent: Collection[str]) -> None:
        """Forget the first observations of all gangs that are not in the list. Keep the
        observations at providers that did not report all their gangs; otherwise, orphans at a
        partly unresponsive provider would never be removed.
        """
        kept = {(orphan.provider, orphan.gang) for orphan in orphans}
        self._sighted = {
            key: at for key, at in self._sighted.items() if key in kept or key[0] in silent
        }
