"""Volumes between jobs: what the ledger says equals a recount of what truly happened, whatever the
order in which servers learn of it.
"""

import itertools
import random
from calendar import monthrange
from collections.abc import Sequence
from datetime import datetime, timedelta
from fractions import Fraction
from typing import cast

import pytest
from tests.contract.store_suite import NOW, after, begin, make_charge, submit

from cavvy.control.budgets import post_discounts
from cavvy.control.clock import ControlClock
from cavvy.control.provider_bills import StorageMeter
from cavvy.control.provider_pool import ProviderPool
from cavvy.costs.discounts import parse_discounts
from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.jobs import Attempt, AttemptPhase
from cavvy.domain.ledger import EntryKind
from cavvy.domain.offers import ExtraPrice
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.domain.volumes import KeptVolume
from cavvy.providers.abilities import BILLS_VOLUMES
from cavvy.providers.base import Manifest, Provider, TryAgain
from cavvy.store.base import AtomicWrite, LedgerFilter
from cavvy.store.sql import Store

ALL = LedgerFilter()
US = timedelta(microseconds=1)


class VolumeFarm:
    """A provider with volumes, which may not answer."""

    manifest = Manifest(name="fake", title="Fake", docs="", abilities=(BILLS_VOLUMES,))

    def __init__(self) -> None:
        self.listed: list[KeptVolume] = []
        self.silent = False

    async def kept_volumes(self) -> Sequence[KeptVolume]:
        if self.silent:
            raise TryAgain("silent")
        return list(self.listed)


class Watch:
    def __init__(self) -> None:
        self.at = NOW

    def now(self) -> datetime:
        return self.at


def price(micros: int) -> ExtraPrice:
    return ExtraPrice(kind=ChargeKind.DISK, name="gp3", price=Money(micros), source="list")


def make_volume(**fields: object) -> KeptVolume:
    given = {
        "id": "vol-1",
        "name": "data",
        "region": "here",
        "type": "gp3",
        "size_gib": 100,
        "created_at": NOW,
        "made_for": "rm-j1-1",
        "price": price(80_000),
        **fields,
    }
    return KeptVolume(**given)


class Rig:
    def __init__(self, store: Store) -> None:
        self.store, self.farm, self.watch = store, VolumeFarm(), Watch()

    def meter(self) -> StorageMeter:
        """That of a server that has just started."""
        clock = cast(ControlClock, self.watch)
        pool = ProviderPool({"fake": cast(Provider, self.farm)}, clock)
        return StorageMeter(self.store, pool, clock)

    async def run(self, at: float) -> None:
        self.watch.at = after(at)
        await self.meter().run()

    async def amounts(self) -> list[tuple[str, int]]:
        lines = await self.store.ledger_lines(LedgerFilter(projects="p"))
        return [
            (str(each.entry.kind), each.entry.amount.micros)
            for each in lines
            if each.subject.volume
        ]


async def end(store: Store, attempt: Attempt) -> None:
    done = replace(attempt, phase=AttemptPhase.ENDED, ended_at=after(10**6))
    await store.commit(AtomicWrite(attempts=[done]))


def disk(attempt: Attempt, since: float, until: float) -> Charge:
    return make_charge(attempt, 5, since=since, until=until, kind=ChargeKind.DISK)


async def test_a_volume_is_charged_while_no_job_pays_for_it(store: Store) -> None:
    rig = Rig(store)
    attempt = await begin(store, await submit(store, "j1", user="ada"))
    await rig.run(0)
    rig.farm.listed = [make_volume(used_by=("rm-j1-1",))]
    await rig.run(600)  # the attempt starts, so nothing is known yet
    assert await rig.amounts() == []
    await store.commit(AtomicWrite(charges=[disk(attempt, 3600, 7200)]))
    await rig.run(7200)
    rate = round(100 * 80_000 / 744)
    assert await rig.amounts() == [("storage", rate)]
    await store.commit(AtomicWrite(charges=[disk(attempt, 3600, 10800)]))
    await end(store, attempt)
    await rig.run(14400)
    await rig.run(14400)
    assert await rig.amounts() == [("storage", rate), ("storage", rate)]
    # the provider tells later that the node ended earlier
    await store.commit(AtomicWrite(charges=[disk(attempt, 3600, 7200)]))
    await rig.run(14400)
    assert sum(each for _, each in await rig.amounts()) == 3 * rate
    sums = await store.sum_ledger(ALL, ("project", "user", "volume", "kind"))
    found = {tuple(each.groups.values()): each.amount.micros for each in sums}
    assert found["p", "ada", "data", "storage"] == 4 * rate  # of which one hour is taken back
    assert found["p", "ada", "data", "correction"] == -rate


async def test_prices_sizes_and_silence(store: Store) -> None:
    rig = Rig(store)
    await end(store, await begin(store, await submit(store, "j1")))
    await rig.run(0)
    rig.farm.listed = [make_volume(price=None)]
    await rig.run(3600)
    assert await rig.amounts() == []
    rig.farm.listed = [make_volume()]  # the first price also counts for before
    await rig.run(7200)
    rig.farm.listed = [make_volume(size_gib=200)]
    await rig.run(10800)
    rig.farm.silent = True
    await rig.run(14400)
    rig.farm.silent = False
    await rig.run(18000)
    rate, double = round(100 * 80_000 / 744), round(200 * 80_000 / 744)
    assert sum(each for _, each in await rig.amounts()) == 3 * rate + 2 * double
    rig.farm.listed = []  # it was deleted at some time after it was listed last
    await rig.run(36000)
    assert sum(each for _, each in await rig.amounts()) == 3 * rate + 2 * double
    await post_discounts(store, parse_discounts("fake:10%"), rig.watch.at)
    (total,) = await store.sum_ledger(ALL, ("volume",))
    assert total.discount.micros == -((3 * rate + 2 * double) // 10)
    assert total.jobs == 0


async def test_two_servers_post_once(store: Store) -> None:
    rig = Rig(store)
    await end(store, await begin(store, await submit(store, "j1")))
    await rig.run(0)
    rig.farm.listed = [make_volume()]
    await rig.run(3600)
    stale = await store.meters.volumes()
    await rig.run(7200)

    class Late:
        """A server that has read the bills before another one changed them."""

        def __getattr__(self, name: str) -> object:
            return getattr(store.meters, name)

        async def volumes(self) -> object:
            return stale

    class LateStore:
        meters = Late()

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

    late = Rig(cast(Store, LateStore()))
    late.farm, late.watch = rig.farm, rig.watch
    before = await rig.amounts()
    await late.run(7300)
    assert await rig.amounts() == before


def recount(volume: "Truth") -> int:
    """The cost of the time in which no node had the volume: each stretch between two edges (uses,
    price changes, months) is rounded once.
    """
    edges = {0, volume.until, *(at for at, _ in volume.prices), *sum(volume.uses, ())}
    first = NOW.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    while first < after(volume.until):
        first = (first + timedelta(days=32)).replace(day=1)
        edges.add((first - NOW) / timedelta(seconds=1))
    inside = sorted(each for each in edges if 0 <= each <= volume.until)
    total = 0
    for since, until in itertools.pairwise(inside):
        if any(a <= since and until <= b for a, b in volume.uses):
            continue
        micros = [rate for at, rate in volume.prices if at <= since][-1] * 100
        hours = monthrange(after(since).year, after(since).month)[1] * 24
        rate = int(Fraction(micros, hours) + Fraction(1, 2))
        length = (after(until) - after(since)) // US
        total += int(Fraction(rate * length, 3_600_000_000) + Fraction(1, 2))
    return total


class Truth:
    """What truly happens to a volume; times are seconds."""

    def __init__(self, dice: random.Random) -> None:
        self.until = float(dice.randrange(40, 90) * 86400)
        at, self.uses = float(dice.randrange(10**5)), []
        while at < self.until - 10**5 and len(self.uses) < 6:
            length = float(dice.randrange(60, 9 * 10**5))
            self.uses.append((at, min(self.until - 1, at + length)))
            at += length + dice.randrange(0, 4 * 10**5)
        self.prices = [(0.0, 80_000)]
        for _ in range(dice.randrange(3)):
            self.prices.append(
                (self.prices[-1][0] + dice.randrange(1, 10**6), dice.randrange(10**6))
            )


@pytest.mark.parametrize("seed", range(4))
async def test_random_histories_equal_a_recount(store: Store, seed: int) -> None:
    dice = random.Random(seed)
    truth, rig = Truth(dice), Rig(store)
    await end(store, await begin(store, await submit(store, "j1")))
    await rig.run(0)
    jobs = []
    for number, use in enumerate(truth.uses):
        job = await submit(store, f"use{number}", name=f"use{number}")
        jobs.append((use, None, job))
    looks = {float(dice.randrange(int(truth.until))) for _ in range(12)}
    looks |= {at for at, _ in truth.prices} | {truth.until}
    begun: dict[int, Attempt] = {}
    ended: set[int] = set()
    for now in sorted(looks):
        for number, ((since, until), _, job) in enumerate(jobs):
            if since <= now and number not in begun:
                begun[number] = await begin(store, job, created_at=after(since - 1))
            if number not in begun or number in ended:
                continue
            wrong = dice.choice([0, 0, 30]) if now < truth.until else 0
            told = disk(begun[number], since, max(since + 1, min(now, until) - wrong))
            await store.commit(AtomicWrite(charges=[told]))
            if until <= now and (dice.random() < 0.7 or now == truth.until):
                await store.commit(AtomicWrite(charges=[disk(begun[number], since, until)]))
                await end(store, begun[number])
                ended.add(number)
        micros = [rate for at, rate in truth.prices if at <= now][-1]
        names = tuple(each.gang for each in begun.values())
        rig.farm.listed = [make_volume(price=price(micros), used_by=names)]
        await rig.run(now)
        if dice.random() < 0.3:
            await rig.run(now)  # a restart right after
    assert sum(each for _, each in await rig.amounts()) == recount(truth)
    lines = await store.ledger_lines(ALL, limit=10_000)
    assert {each.entry.kind for each in lines if each.subject.volume} <= {
        EntryKind.STORAGE,
        EntryKind.CORRECTION,
    }
    assert HourlyRate() not in {each.entry.rate for each in lines if each.subject.volume}
