"""A provider that reports only some of its gangs, because a part of it does not answer: its other
gangs are still removed if they are orphans, and no missing gang counts as forgotten.
"""

from collections.abc import Sequence
from typing import cast

from tests.contract.store_suite import NOW, begin, submit

from cavvy.control.agents.uploads import UnfinishedUploads
from cavvy.control.clock import VirtualClock
from cavvy.control.garbage_collector import GarbageCollector
from cavvy.control.provider_bills import BillAudit
from cavvy.control.provider_pool import ProviderPool
from cavvy.domain.allocations import SilentPlace
from cavvy.domain.jobs import AttemptPhase
from cavvy.providers.base import GangSeen, GangState, PartlyUnknown, Provider
from cavvy.store.open import MemoryStore


class Half:
    """A provider of which the region `east` does not answer."""

    def __init__(self, *seen: GangSeen) -> None:
        self.seen = seen

    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        assert name is None
        raise PartlyUnknown("east is down", self.seen)


def make_pool(*seen: GangSeen) -> ProviderPool:
    return ProviderPool({"fake": cast(Provider, Half(*seen))}, VirtualClock(NOW))


async def test_gangs_of_parts_that_answer_are_found() -> None:
    store, pool = MemoryStore(), make_pool(GangSeen(name="rm-x", state=GangState.RUNNING))
    await store.open()
    uploads = cast(UnfinishedUploads, None)
    found = await GarbageCollector(store, pool, VirtualClock(NOW), uploads).living()
    assert [each.gang for each in found.orphans] == ["rm-x"]
    assert found.problems == [SilentPlace("fake", "east is down")]


async def test_a_gang_of_a_silent_part_is_not_forgotten_and_others_are_audited() -> None:
    store = MemoryStore()
    await store.open()
    job = await submit(store, "job")
    ended = [await begin(store, job, number, phase=AttemptPhase.ENDED) for number in (1, 2)]
    pool = make_pool(GangSeen(name=ended[1].gang, state=GangState.ENDED))
    bills, silent = await BillAudit(store, pool).audit([job.id])
    assert [each.attempt.number for each in bills] == [2]
    assert silent == [SilentPlace("fake", "east is down")]
