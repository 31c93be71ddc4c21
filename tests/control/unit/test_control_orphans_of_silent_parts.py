"""Orphans at a provider of which a part answers only now and then are removed nevertheless, and
accounts that cannot be asked count as silent.
"""

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import cast

from tests.contract.store_suite import NOW, begin, submit

from cavvy.control.agents.uploads import UnfinishedUploads
from cavvy.control.clock import VirtualClock, run_virtual
from cavvy.control.decide.restored import QUIET
from cavvy.control.garbage_collector import EVERY, SWEEP, GarbageCollector
from cavvy.control.provider_pool import ProviderPool
from cavvy.control.restored import RESTORED, read_restored_at
from cavvy.domain.allocations import SilentPlace
from cavvy.domain.jobs import AttemptPhase
from cavvy.providers.base import GangSeen, GangState, PartlyUnknown, Provider
from cavvy.store.open import MemoryStore


class Flaky:
    """A provider whose only part answers every other list of gangs."""

    manifest = SimpleNamespace(abilities=frozenset(), visibility_delay=timedelta(minutes=1))

    def __init__(self, gang: str) -> None:
        self.gang, self.lists, self.removed = gang, 0, list[str]()

    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        assert name is None
        self.lists += 1
        if self.lists % 2 == 0:
            raise PartlyUnknown("east is down", ())
        return [GangSeen(name=self.gang, state=GangState.RUNNING)]

    async def remove(self, name: str) -> None:
        self.removed.append(name)


async def _sweep_three_times() -> None:
    store, clock = MemoryStore(), VirtualClock(NOW)
    await store.open()
    attempt = await begin(store, await submit(store, "job"), 1, phase=AttemptPhase.ENDED)
    provider = Flaky(attempt.gang)
    pool = ProviderPool({"fake": cast(Provider, provider)}, clock)
    collector = GarbageCollector(store, pool, clock, cast(UnfinishedUploads, None))
    for expected in ([], [], [attempt.gang]):
        assert await collector.reconcile(SWEEP) == EVERY
        assert provider.removed == expected
        await clock.sleep_until(clock.now() + EVERY)


def test_a_part_that_answers_now_and_then_does_not_save_its_orphans() -> None:
    run_virtual(_sweep_three_times())


class Crowd:
    """A provider without gangs. While it is asked, a project sets a credential."""

    manifest = SimpleNamespace(abilities=frozenset())

    def __init__(self, pool: ProviderPool) -> None:
        self.pool = pool

    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        name = f"fake@project-{len(self.pool.providers)}"
        self.pool.providers[name] = cast(Provider, self)
        return []


async def _sweep_after_a_restore() -> None:
    store, clock = MemoryStore(), VirtualClock(NOW)
    await store.open()
    await store.put_fact(RESTORED, NOW.isoformat())
    pool = ProviderPool({}, clock)
    pool.providers["fake"] = cast(Provider, Crowd(pool))
    collector = GarbageCollector(store, pool, clock, cast(UnfinishedUploads, None))
    await clock.sleep_until(NOW + 2 * QUIET)
    pool.unusable["fake@p"] = "its key is lost"
    await collector.reconcile(SWEEP)
    assert await read_restored_at(store) == NOW
    assert (await collector.living()).problems == [SilentPlace("fake@p", "its key is lost")]
    del pool.unusable["fake@p"]
    await collector.reconcile(SWEEP)
    assert await read_restored_at(store) is None


def test_a_restore_is_remembered_while_an_account_cannot_be_asked() -> None:
    run_virtual(_sweep_after_a_restore())
