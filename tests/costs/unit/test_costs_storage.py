"""The row of a volume stays small, and its entries add up to what they would without that."""

import random
from datetime import UTC, datetime, timedelta

import pytest

from cavvy.costs.extras import (
    SETTLED_AFTER,
    begin_bill,
    bill_volume,
    observe_volume,
    post_storage,
    settle_bill,
)
from cavvy.domain.events import ChargeKind
from cavvy.domain.ledger import STORAGE_LINE, EntryKind, LedgerSubject
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


APRIL = datetime(2026, 4, 1, tzinfo=UTC)  # April has 720 hours


def at(hours: float) -> datetime:
    return APRIL + timedelta(hours=hours)


def observe(
    bill: VolumeBill, hours: float, micros: int = 72_000, *, up_to_gib: int = 0, source: str = ""
) -> VolumeBill:
    seen = volume(micros, [])
    assert seen.price is not None
    price = replace(seen.price, up_to_gib=up_to_gib, source=source)
    return observe_volume(bill, replace(seen, price=price), at(hours))


def list_charges(bill: VolumeBill, *uses: VolumeUse) -> list[tuple[datetime, datetime, int]]:
    return [(each.since, each.until, each.amount.micros) for each in bill_volume(bill, uses)]


def test_a_volume_pays_for_the_time_between_jobs() -> None:
    """100 GiB at 7.2 cents a month are 10,000 micro-dollars an hour in April."""
    bill = observe(begin_bill(replace(volume(1, []), created_at=at(0)), SUBJECT, at(2)), 12)
    assert bill.since == at(2)
    uses = [
        VolumeUse(since=at(5), until=at(7)),
        VolumeUse(since=at(1), until=at(3)),
        VolumeUse(since=at(4), until=at(6)),
    ]
    before = list_charges(bill, *uses)
    assert before == [(at(3), at(4), 10_000), (at(7), at(12), 50_000)]
    running = VolumeUse(since=at(10), until=None)
    assert list_charges(bill, *uses, running) == [
        (at(3), at(4), 10_000),
        (at(7), at(10), 30_000),
    ]
    assert list_charges(bill, VolumeUse(since=at(2), until=at(12))) == []
    later = begin_bill(replace(volume(1, []), created_at=at(3)), SUBJECT, at(2))
    assert later.since == at(3)


def test_a_changed_price_of_a_volume_holds_from_its_report_on() -> None:
    bill = begin_bill(replace(volume(1, []), created_at=at(0)), SUBJECT, at(0))
    assert list_charges(observe_volume(bill, replace(volume(1, []), price=None), at(1))) == []
    bill = observe(observe(bill, 6), 8, micros=144_000)
    bill = observe(bill, 10, micros=144_000, source="another page")
    assert len(bill.terms) == 2
    assert list_charges(bill) == [(at(0), at(8), 80_000), (at(8), at(10), 40_000)]


def test_a_price_seen_after_the_clock_was_set_back_holds_from_the_last_report_on() -> None:
    bill = begin_bill(replace(volume(1, []), created_at=at(0)), SUBJECT, at(0))
    bill = observe(observe(bill, 2), 6, micros=144_000)
    bill = observe(bill, 4, micros=216_000)
    assert list_charges(observe(bill, 8, micros=216_000)) == [
        (at(0), at(6), 60_000),
        (at(6), at(8), 60_000),
    ]


def test_a_volume_of_a_fixed_size_has_one_price() -> None:
    bill = begin_bill(replace(volume(1, []), created_at=at(0)), SUBJECT, at(0))
    assert list_charges(observe(bill, 1, micros=7_200_000, up_to_gib=128)) == [
        (at(0), at(1), 10_000)
    ]


@pytest.mark.parametrize(
    ("month", "before", "after"),
    [
        (datetime(2026, 5, 1, tzinfo=UTC), 10_000, 9677),  # 720 and 744 hours
        (datetime(2027, 3, 1, tzinfo=UTC), 10_714, 9677),  # February has 672 hours
        (datetime(2028, 3, 1, tzinfo=UTC), 10_345, 9677),  # or 696 hours
        (datetime(2029, 1, 1, tzinfo=UTC), 9677, 9677),
    ],
)
def test_a_volumes_price_is_for_the_hours_of_each_month(
    month: datetime, before: int, after: int
) -> None:
    hour = timedelta(hours=1)
    bill = begin_bill(replace(volume(1, []), created_at=month - hour), SUBJECT, APRIL)
    bill = observe_volume(bill, volume(72_000, []), month)
    assert list_charges(bill) == [(month - hour, month, before)]
    bill = observe_volume(bill, volume(72_000, []), month + hour)
    whole = [(month - hour, month, before), (month, month + hour, after)]
    joined = [(month - hour, month + hour, before + after)]
    assert list_charges(bill) == (whole if before != after else joined)


def test_the_charges_of_a_volume_are_storage_and_their_changes_corrections() -> None:
    bill = observe(begin_bill(replace(volume(1, []), created_at=at(0)), SUBJECT, at(0)), 4)
    lines = bill_volume(bill, ())
    (posted,) = post_storage((), lines)
    assert (posted.kind, posted.line) == (EntryKind.STORAGE, STORAGE_LINE)
    assert posted.amount == Money(40_000)
    changes = post_storage(lines, bill_volume(bill, [VolumeUse(since=at(1), until=at(2))]))
    assert sum(each.amount.micros for each in changes) == -10_000
    assert {each.line for each in changes} == {STORAGE_LINE}
    assert EntryKind.CORRECTION in {each.kind for each in changes}
