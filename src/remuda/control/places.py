"""Every provider behind one door: calls have time limits, answers about offers are kept for a few seconds."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TypeVar

from remuda.control.attempts import Look, Seen
from remuda.control.clock import Clock
from remuda.domain.tasks import Task
from remuda.planner.prospects import Market
from remuda.providers.base import (
    GangSeen,
    GangSpec,
    NotFound,
    Provider,
    ProviderError,
    Refused,
    SharesHosts,
    TryAgain,
)
from remuda.providers.objections import list_objections

T = TypeVar("T")
CALL_TIMEOUT = timedelta(seconds=120)  # a launch of many nodes may take a cloud this long to accept
OFFERS_TIMEOUT = timedelta(seconds=20)
OFFERS_AGE = timedelta(seconds=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What every place offered a moment ago, and how many nodes were placed since, by offer key."""

    market: Market
    as_of: datetime
    used: Counter[str] = field(default_factory=Counter)


class Places:
    """The configured providers by name."""

    def __init__(self, providers: Mapping[str, Provider], clock: Clock) -> None:
        self.providers = providers
        self._clock = clock
        self._snapshot: Snapshot | None = None
        self._asking = asyncio.Lock()

    async def market(self, age: timedelta = OFFERS_AGE) -> Snapshot:
        """What can be had, at most `age` old."""
        async with self._asking:
            now = self._clock.now()
            if self._snapshot is None or now - self._snapshot.as_of >= age:
                self._snapshot = Snapshot(market=await self._ask_all(), as_of=now)
            return self._snapshot

    def notice(self, name: str) -> timedelta | None:
        """How long before its end a node is told, at the least; None where it is not, or the place is not known."""
        provider = self.providers.get(name)
        return provider.manifest.notice if provider is not None else None

    def expire(self) -> None:
        """Capacity or prices are known to have changed: ask again at the next need."""
        self._snapshot = None

    async def launch(self, spec: GangSpec) -> None:
        """As Provider.launch."""
        await self._call(spec.offer.provider, self._provider(spec.offer.provider).launch(spec))

    async def look(self, provider: str, gang: str) -> Seen:
        """The gang as its place sees it now; UNKNOWN where the place cannot say."""
        try:
            found = await self._call(provider, self._provider(provider).gangs(gang))
        except (TryAgain, Refused):
            return Look.UNKNOWN
        return next((seen for seen in found if seen.name == gang), Look.ABSENT)

    async def gangs(self, provider: str) -> Sequence[GangSeen]:
        """Everything of this installation at one place. Raises TryAgain, Refused."""
        return await self._call(provider, self._provider(provider).gangs(None))

    async def remove(self, provider: str, gang: str) -> None:
        """As Provider.remove."""
        try:
            await self._call(provider, self._provider(provider).remove(gang))
        except NotFound:
            return

    def settle(self, provider: str) -> timedelta:
        """How long the place may not show a gang that it has."""
        known = self.providers.get(provider)
        return known.manifest.settle if known else timedelta(minutes=2)

    def objections(self, task: Task, provider: str) -> Sequence[str]:
        """Why this place cannot run the task, whatever it has free."""
        return list_objections(task, self._provider(provider))

    async def _ask_all(self) -> Market:
        """All places at once: a slow one holds up the others no longer than its time limit."""
        answers = await asyncio.gather(*(self._ask(name, place) for name, place in self.providers.items()))
        return Market(
            offers=tuple(offer for answer in answers for offer in answer.offers),
            hosts=tuple(host for answer in answers for host in answer.hosts),
            problems=tuple(problem for answer in answers for problem in answer.problems),
        )

    async def _ask(self, name: str, place: Provider) -> Market:
        try:
            offers = await self._call(name, place.offers(), OFFERS_TIMEOUT)
            hosts = await self._call(name, place.hosts(), OFFERS_TIMEOUT) if isinstance(place, SharesHosts) else ()
        except ProviderError as error:
            return Market(offers=(), problems=(f"{name}: {error}",))
        return Market(offers=offers, hosts=hosts)

    def _provider(self, name: str) -> Provider:
        if name not in self.providers:
            raise Refused(f"the provider {name!r} is not configured here any more; enable it again in the settings")
        return self.providers[name]

    async def _call(self, name: str, call: Awaitable[T], limit: timedelta = CALL_TIMEOUT) -> T:
        try:
            async with asyncio.timeout(limit.total_seconds()):
                return await call
        except TimeoutError:
            raise TryAgain(f"{name} did not answer within {limit.total_seconds():.0f} s") from None
