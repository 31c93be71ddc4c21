"""Finds and removes what runs or bills at a place but is not wanted. Nothing is removed on one
witness alone.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from cavvy.control.clock import Clock
from cavvy.control.places import Places
from cavvy.domain.jobs import Attempt, AttemptPhase
from cavvy.domain.places import SilentPlace
from cavvy.providers.base import GangSeen, GangState, ProviderError, Refused, TryAgain
from cavvy.store.base import NotFound, Store

SWEEP = "sweep"  # the key on the worklist
EVERY = timedelta(minutes=10)
_LEAST_AGE = timedelta(seconds=30)  # between the two witnesses, or since the node's start


@dataclass(frozen=True, slots=True, kw_only=True)
class Stray:
    """One gang at a place and what we know of it. `sure`: two witnesses agree that nobody wants
    it.
    """

    provider: str
    gang: str
    state: GangState
    nodes: int
    why: str
    job_id: str | None = None
    sure: bool = False
    removed: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What a sweep found, and the places that could not be asked."""

    strays: Sequence[Stray] = ()
    problems: Sequence[SilentPlace] = ()


class Sweeper:
    """Reconciles the key SWEEP, and answers `cavvy gc` and the last part of `cavvy down`."""

    def __init__(self, store: Store, places: Places, clock: Clock) -> None:
        self._store = store
        self._places = places
        self._clock = clock
        self._sighted: dict[str, datetime] = {}  # gang -> when it was first seen unwanted

    async def reconcile(self, key: str) -> timedelta | None:
        await self.sweep(remove=True)
        return EVERY

    async def sweep(self, *, remove: bool, at_once: bool = False) -> Sweep:
        """List what nobody wants; remove what two witnesses agree on, or all of it `at_once`.

        The first witness is our database: it knows no such gang, or knows that its attempt is over.
        The second is the place: it showed the gang unwanted some time ago already, or its nodes are
        older than that.
        """
        found, problems = await self._look()
        judged = [await self._judge(provider, seen) for provider, seen in found]
        strays = [stray for stray in judged if stray is not None]
        self._forget_all_but({stray.gang for stray in strays})
        if remove:
            strays = [
                await self._remove(stray) if stray.sure or at_once else stray for stray in strays
            ]
        return Sweep(strays=strays, problems=problems)

    async def living(self) -> Sweep:
        """Everything of this installation that runs or bills anywhere, wanted or not."""
        found, problems = await self._look()
        strays: list[Stray] = []
        for provider, seen in found:
            attempt = await self._attempt(seen.name)
            why = "wanted" if attempt and attempt.phase is not AttemptPhase.ENDED else "not wanted"
            strays.append(_stray(provider, seen, why, attempt))
        return Sweep(strays=strays, problems=problems)

    async def _look(self) -> tuple[list[tuple[str, GangSeen]], list[SilentPlace]]:
        """Every gang that has not ended, with its place; and the places that could not be asked."""
        found: list[tuple[str, GangSeen]] = []
        problems: list[SilentPlace] = []
        for provider in self._places.providers:
            try:
                gangs = await self._places.gangs(provider)
            except ProviderError as error:
                problems.append(SilentPlace(provider, str(error)))
                continue
            found += [(provider, seen) for seen in gangs if seen.state is not GangState.ENDED]
        return found, problems

    async def _judge(self, provider: str, seen: GangSeen) -> Stray | None:
        attempt = await self._attempt(seen.name)
        if attempt is not None and attempt.phase is not AttemptPhase.ENDED:
            return None
        now = self._clock.now()
        first = self._sighted.setdefault(seen.name, now)
        started = [node.started_at for node in seen.nodes if node.started_at]
        oldest = min([first, *started]) if attempt is None else first
        sure = now - oldest >= max(_LEAST_AGE, self._places.settle(provider))
        why = (
            "our database does not know it"
            if attempt is None
            else f"attempt {attempt.number} is over"
        )
        return _stray(provider, seen, why, attempt, sure=sure)

    async def _remove(self, stray: Stray) -> Stray:
        try:
            await self._places.remove(stray.provider, stray.gang)
        except (TryAgain, Refused) as error:
            return replace(stray, problem=str(error))
        return replace(stray, removed=True)

    async def _attempt(self, gang: str) -> Attempt | None:
        try:
            return await self._store.attempt_of_gang(gang)
        except NotFound:
            return None

    def _forget_all_but(self, gangs: Collection[str]) -> None:
        self._sighted = {gang: at for gang, at in self._sighted.items() if gang in gangs}


def _stray(
    provider: str, seen: GangSeen, why: str, attempt: Attempt | None, *, sure: bool = False
) -> Stray:
    return Stray(
        provider=provider,
        gang=seen.name,
        state=seen.state,
        nodes=len(seen.nodes),
        why=why,
        job_id=attempt.job_id if attempt else None,
        sure=sure,
    )
