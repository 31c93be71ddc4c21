"""The row of a volume stays small, and its entries add up to what they would without that."""

import random
from datetime import UTC, datetime, timedelta

import pytest

from cavvy.costs.storage import (
    SETTLED_AFTER,
    begin_bill,
    bill_volume,
    observe_volume,
    post_storage,
    settle_bill,
)
from cavvy.domain.events import ChargeKind
from cavvy.domain.ledger import LedgerSubject
from cavvy.domain.offers import ExtraPrice
from cavvy.domain.units import Money
from cavvy.domain.values import replace
from cavvy.domain.volumes import KeptVolume, VolumeBill, VolumeUse

BORN = datetime(2024, 1, 10, tzinfo=UTC)
DAY = timedelta(days=1)
SUBJECT = LedgerSubject(
    id="volume:aws:vol-1", project="p", user="ada", provider="aws", account="aws"
)


def volume(micros: int, gangs: list[str]) -> KeptVolume:
    price = ExtraPrice(kind=ChargeKind.DISK, name="gp3", price=Money(micros))
    made = KeptVolume(id="vol-1", name="data", region="x", size_gib=100, created_at=BORN)
    return replace(made, price=price, used_by=tuple(gangs))


class Life:
    """Uses of a volume in three years, at random, or one after the other without a pause."""

    def __init__(self, dice: random.Random, *, dense: bool) -> None:
        self.uses: dict[str, VolumeUse] = {}
        at = BORN
        while at < BORN + 1000 * DAY:
            since = at if dense else at + dice.random() * 20 * DAY
            at = since + dice.random() * 10 * DAY
            self.uses[f"gang{len(self.uses)}"] = VolumeUse(since=since, until=at)

    def known(self, gangs: tuple[str, ...], now: datetime) -> dict[str, list[VolumeUse]]:
        """The uses as jobs report them: until now, and open while they run."""
        return {
            gang: [use if use.until and use.until <= now else replace(use, until=None)]
            for gang in gangs
            if (use := self.uses[gang]).since <= now
        }


def look(
    bill: VolumeBill, life: Life, micros: int, now: datetime, *, settle: bool
) -> tuple[VolumeBill, int]:
    """A look at the volume, and what it posts."""
    near = [
        name for name, use in life.uses.items() if use.since <= now and now - DAY * 9 < _end(use)
    ]
    bill = observe_volume(bill, volume(micros, near), now)
    uses = life.known(bill.gangs, now)
    if settle:
        bill = settle_bill(bill, uses)
    lines = bill_volume(bill, [use for each in uses.values() for use in each])
    posted = post_storage(bill.lines, lines)
    return replace(bill, lines=lines), sum(each.amount.micros for each in posted)


def _end(use: VolumeUse) -> datetime:
    assert use.until is not None
    return use.until


@pytest.mark.parametrize("seed", range(6))
def test_a_settled_bill_posts_the_same_and_stays_small(seed: int) -> None:
    dice = random.Random(seed)
    life = Life(dice, dense=seed % 3 == 2)
    whole = small = begin_bill(volume(1, []), SUBJECT, BORN)
    totals, micros, now = [0, 0], 80_000, BORN
    while now < BORN + 1000 * DAY:
        now += dice.random() * 4 * DAY
        micros = dice.randrange(1, 10**6) if dice.random() < 0.1 else micros
        whole, posted = look(whole, life, micros, now, settle=False)
        totals[0] += posted
        small, posted = look(small, life, micros, now, settle=True)
        totals[1] += posted
        assert totals[0] == totals[1]
        kept = [use for use in life.uses.values() if now - _end(use) < SETTLED_AFTER + 62 * DAY]
        assert len(small.gangs) <= len(kept)
        assert now - small.since <= SETTLED_AFTER + 62 * DAY
    assert len(small.lines) < len(whole.lines) / 4 or not whole.lines
    assert len(small.gangs) < len(whole.gangs) / 4
    assert len(small.terms) < len(whole.terms) / 2
