"""Finds and removes resources that run or are billed at a provider but are not wanted. Except in
`cavvy down`, a gang is removed only after two observations.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from cavvy.control.agents.uploads import LeftUpload, UnfinishedUploads
from cavvy.control.clock import ControlClock
from cavvy.control.decide.orphans import OrphanGang, describe_gang, is_orphan
from cavvy.control.provider_pool import ProviderPool
from cavvy.domain.allocations import SilentPlace
from cavvy.domain.jobs import Attempt, AttemptPhase
from cavvy.providers.base import GangSeen, GangState, ProviderError, Refused, TryAgain
from cavvy.store.base import RowNotFound, Store

SWEEP = "sweep"  # the worklist key
EVERY = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanReport:
    """The result of a collection: gangs, uploads, and the providers that did not answer."""

    orphans: Sequence[OrphanGang] = ()
    problems: Sequence[SilentPlace] = ()
    uploads: Sequence[LeftUpload] = ()


class GarbageCollector:
    """Reconciles the key SWEEP, by which gangs alone are removed, so that a storage that does not
    answer delays no removal of a gang. Also does the work of `cavvy gc` and the last part of `cavvy
    down`.
    """

    def __init__(
        self, store: Store, pool: ProviderPool, clock: ControlClock, uploads: UnfinishedUploads
    ) -> None:
        self._store = store
        self._pool = pool
        self._clock = clock
        self._uploads = uploads
        self._sighted: dict[str, datetime] = {}  # gang -> when it was first seen unwanted

    async def reconcile(self, key: str) -> timedelta | None:
        await self._sweep_gangs(remove=True, at_once=False)
        return EVERY

    async def sweep(self, *, remove: bool, at_once: bool = False) -> OrphanReport:
        """List unwanted gangs, and unfinished uploads of attempts that are over. If `remove` is
        set, abort these uploads, and remove the gangs that two observations show to be unwanted, or
        all unwanted gangs if `at_once` is set.
        """
        found = await self._sweep_gangs(remove=remove, at_once=at_once)
        return replace(found, uploads=await self._uploads.sweep(remove=remove))

    async def _sweep_gangs(self, *, remove: bool, at_once: bool) -> OrphanReport:
        """The part of `sweep` for gangs.

        The first observation: the database does not contain the gang, or its attempt has ended. The
        second: the provider already showed the gang some time ago, or its nodes are old enough.
        """
        found, problems = await self._look()
        orphans: list[OrphanGang] = []
        for provider, seen in found:
            attempt, now = await self._attempt(seen.name), self._clock.now()
            if attempt is None or attempt.phase is AttemptPhase.ENDED:
                first = self._sighted.setdefault(seen.name, now)
                delay = self._pool.visibility_delay(provider)
                sure = is_orphan(seen, attempt, now, first=first, visibility_delay=delay)
                orphans.append(describe_gang(provider, seen, attempt, sure=sure))
        self._forget_all_but({orphan.gang for orphan in orphans})
        if remove:
            orphans = [
                await self._remove(orphan) if orphan.sure or at_once else orphan
                for orphan in orphans
            ]
        return OrphanReport(orphans=orphans, problems=problems)

    async def living(self) -> OrphanReport:
        """All gangs of this installation that have not ended, wanted or not."""
        found, problems = await self._look()
        orphans: list[OrphanGang] = []
        for provider, seen in found:
            attempt = await self._attempt(seen.name)
            why = "wanted" if attempt and attempt.phase is not AttemptPhase.ENDED else "not wanted"
            orphans.append(replace(describe_gang(provider, seen, attempt), why=why))
        return OrphanReport(orphans=orphans, problems=problems)

    async def _look(self) -> tuple[list[tuple[str, GangSeen]], list[SilentPlace]]:
        """Every gang that has not ended, with its provider, and the providers that did not
        answer."""
        found: list[tuple[str, GangSeen]] = []
        problems: list[SilentPlace] = []
        for provider in self._pool.providers:
            try:
                gangs = await self._pool.gangs(provider)
            except ProviderError as error:
                problems.append(SilentPlace(provider, str(error)))
                continue
            found += [(provider, seen) for seen in gangs if seen.state is not GangState.ENDED]
        return found, problems

    async def _remove(self, orphan: OrphanGang) -> OrphanGang:
        try:
            await self._pool.remove(orphan.provider, orphan.gang)
        except (TryAgain, Refused) as error:
            return replace(orphan, problem=str(error))
        return replace(orphan, removed=True)

    async def _attempt(self, gang: str) -> Attempt | None:
        try:
            return await self._store.attempt_of_gang(gang)
        except RowNotFound:
            return None

    def _forget_all_but(self, gangs: Collection[str]) -> None:
        self._sighted = {gang: at for gang, at in self._sighted.items() if gang in gangs}
