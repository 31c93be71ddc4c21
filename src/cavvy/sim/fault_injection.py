"""Injects faults: the server can crash during a call to the store or the provider, and writes to
the store can fail.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import TypeVar, cast

from cavvy.domain.offers import Offer
from cavvy.domain.values import replace
from cavvy.providers.abilities import CLOSEABLE
from cavvy.providers.base import GangSeen, GangSpec, Manifest
from cavvy.providers.fake.agents import pause
from cavvy.providers.fake.cloud import FakeCloud
from cavvy.sim.scenario import CrashMoment, ServerCrash
from cavvy.store.base import AtomicWrite, StaleVersion, StoreFull
from cavvy.store.open import MemoryStore
from cavvy.store.sql import Store

T = TypeVar("T")


class CrashPoint:
    """Counts external calls, and crashes the server at the calls that the scenario names, so that
    the caller never receives a response.
    """

    def __init__(self, crashes: Sequence[ServerCrash]) -> None:
        self.calls = 0
        self.blown: asyncio.Queue[ServerCrash] = asyncio.Queue()
        self._crashes = {crash.call: crash for crash in crashes}

    async def through(self, call: Callable[[], Awaitable[T]]) -> T:
        self.calls += 1
        crash = self._crashes.pop(self.calls, None)
        if crash is not None and crash.when is CrashMoment.BEFORE:
            await self._blow(crash)
        answer = await call()
        if crash is not None:
            await self._blow(crash)
        return answer

    async def _blow(self, crash: ServerCrash) -> None:
        self.blown.put_nowait(crash)
        await asyncio.Event().wait()  # This blocks until the harness has stopped the whole server.


class FaultyStore:
    """An in-memory store with delays. As with a real store, other tasks can read and write during
    the delays. The server can crash while it writes to the store.
    """

    def __init__(
        self,
        store: MemoryStore,
        crash_point: CrashPoint,
        stale: frozenset[int],
        latency_s: float,
        broken: frozenset[int] = frozenset(),
    ) -> None:
        self._store = store
        self._broken = broken
        self._crash_point = crash_point
        self._stale = stale
        self._latency_s = latency_s
        self._random = Random(0)
        self._commits = 0

    def __getattr__(self, name: str) -> object:
        return self._delay(getattr(self._store, name))

    def _delay(self, found: object) -> object:
        """Return what the store has under a name, so that each call of it takes time: a method, the
        functions of a tuple, or a part such as its budgets.
        """
        if callable(found):
            return self._slow(found)
        if isinstance(found, tuple):
            return tuple(self._delay(each) for each in found)
        return _SlowPart(found, self._delay)

    def _slow(self, method: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
        async def slowly(*args: object, **named: object) -> object:
            await self._pass_time()
            answer = await method(*args, **named)
            await self._pass_time()
            return answer

        return slowly

    async def commit(self, changes: AtomicWrite) -> None:
        self._commits += 1
        if self._commits in self._stale:
            raise StaleVersion("the scenario simulates a concurrent write")
        if self._commits in self._broken:
            raise StoreFull("the scenario simulates a full disk")
        await self._pass_time()
        await self._crash_point.through(lambda: self._store.commit(changes))

    async def _pass_time(self) -> None:
        await pause(self._random.random() * self._latency_s)

    def as_store(self) -> Store:
        return cast(Store, self)  # `__getattr__` provides all methods except `commit`


class _SlowPart:
    """A part of a store, such as its budgets. `delay` makes each call of what it has take time."""

    def __init__(self, part: object, delay: Callable[[object], object]) -> None:
        self._part = part
        self._delay = delay

    def __getattr__(self, name: str) -> object:
        return self._delay(getattr(self._part, name))


class FaultyProvider:
    """The fake cloud as a provider. The server can crash during calls to the provider."""

    def __init__(self, cloud: FakeCloud, crash_point: CrashPoint) -> None:
        abilities = [each for each in cloud.manifest.abilities if each is not CLOSEABLE]
        self.manifest: Manifest = replace(cloud.manifest, abilities=abilities)
        self.changed = cloud.changed
        self.hosts = cloud.hosts
        self.connect = cloud.connect
        self._cloud = cloud
        self._crash_point = crash_point

    async def offers(self) -> Sequence[Offer]:
        return await self._cloud.offers()

    async def launch(self, gang: GangSpec) -> None:
        await self._crash_point.through(lambda: self._cloud.launch(gang))

    async def replace(self, gang: GangSpec, ranks: Sequence[int]) -> None:
        await self._crash_point.through(lambda: self._cloud.replace(gang, ranks))

    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        return await self._crash_point.through(lambda: self._cloud.gangs(name))

    async def remove(self, name: str) -> None:
        await self._crash_point.through(lambda: self._cloud.remove(name))
