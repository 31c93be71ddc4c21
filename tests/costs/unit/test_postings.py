"""A newer bill is posted as the difference to the one before it."""

import itertools
from datetime import UTC, datetime, timedelta, timezone

from hypothesis import given, settings
from hypothesis import strategies as st

from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.ledger import EntryKind, LedgerPosting, QuantityUnit, month_of, post, share_of
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace

BEGAN = datetime(2026, 10, 31, 22, tzinfo=UTC)
NOVEMBER = datetime(2026, 11, 1, tzinfo=UTC)


def charge(
    since_h: float, until_h: float, rate: int = 3_600_000, kind: ChargeKind = ChargeKind.NODE
) -> Charge:
    price = HourlyRate(rate)
    since, until = (BEGAN + timedelta(hours=each) for each in (since_h, until_h))
    return Charge(
        project="p",
        job_id="j",
        attempt_id="j-1",
        rank=0,
        kind=kind,
        since=since,
        until=until,
        rate=price,
        amount=price.over(until - since),
    )


def shown(postings: list[LedgerPosting]) -> list[tuple[str, float, float, int]]:
    def hours(at: datetime) -> float:
        return (at - BEGAN).total_seconds() / 3600

    return [(str(p.kind), hours(p.since), hours(p.until), p.amount.micros) for p in postings]


def test_a_line_that_grows_gets_an_entry_for_the_new_part() -> None:
    assert shown(post([charge(0, 1)], [charge(0, 1.5)])) == [("node", 1, 1.5, 1_800_000)]
    assert post([charge(0, 1)], [charge(0, 1)]) == []


def test_an_entry_ends_with_its_month() -> None:
    entries = post([], [charge(1, 3)])
    assert shown(entries) == [("node", 1, 2, 3_600_000), ("node", 2, 3, 3_600_000)]
    assert entries[1].since == NOVEMBER
    assert [each.quantity for each in entries] == [3_600_000_000] * 2


def test_a_shorter_period_and_another_start_are_corrections() -> None:
    assert shown(post([charge(0, 1)], [charge(0, 0.5)])) == [("correction", 0.5, 1, -1_800_000)]
    assert shown(post([charge(0, 1)], [charge(0.5, 1)])) == [
        ("correction", 0, 1, -3_600_000),
        ("node", 0.5, 1, 1_800_000),
    ]


def test_another_price_is_a_correction_of_the_whole_line() -> None:
    assert shown(post([charge(0, 1)], [charge(0, 1, 7_200_000)])) == [
        ("correction", 0, 1, 3_600_000)
    ]


def test_time_in_which_no_job_ran_is_idle() -> None:
    unused = (ChargeKind.KEPT, ChargeKind.MINIMUM, ChargeKind.ROLLED_BACK)
    for kind in unused:
        assert post([], [charge(0, 1, kind=kind)])[0].kind is EntryKind.IDLE


def test_traffic_is_counted_in_bytes() -> None:
    sent = replace(charge(0, 1, 0, ChargeKind.TRAFFIC), amount=Money(90), bytes=10**9)
    more = replace(sent, amount=Money(120), bytes=2 * 10**9)
    (entry,) = post([sent], [more])
    assert (entry.kind, entry.amount, entry.quantity) == (EntryKind.TRAFFIC, Money(30), 10**9)
    assert entry.unit is QuantityUnit.BYTES


lines = st.dictionaries(
    st.tuples(st.sampled_from([*ChargeKind]), st.integers(0, 3)),
    st.tuples(st.integers(0, 800), st.sampled_from([0, 1_000_001, 7_777_777])),
    max_size=4,
)


def make_bill(drawn: "dict[tuple[ChargeKind, int], tuple[int, int]]") -> list[Charge]:
    return [
        charge(since / 7, (since + length) / 7, rate, kind)
        for (kind, since), (length, rate) in drawn.items()
    ]


@settings(max_examples=200, deadline=None)
@given(st.lists(lines, max_size=5))
def test_entries_of_a_line_add_up_to_its_charge(history: list[object]) -> None:
    posted: dict[tuple[str, datetime], int] = {}
    bill: list[Charge] = []
    for drawn in history:
        newer = make_bill(drawn)  # type: ignore[arg-type]
        for each in post(bill, newer):
            key = each.line, each.line_since
            posted[key] = posted.get(key, 0) + each.amount.micros
            month = each.since.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
            assert each.until <= (month + timedelta(days=32)).replace(day=1)
        bill = newer
        assert {key: total for key, total in posted.items() if total} == {
            (str(each.kind), each.since): each.amount.micros for each in bill if each.amount.micros
        }


@given(
    st.integers(-(10**12), 10**12),
    st.integers(0, 10**6),
    st.lists(st.integers(-10, 10**6), max_size=5),
)
def test_windows_that_meet_have_parts_that_add_up(
    whole: int, length_s: int, edges: list[int]
) -> None:
    until = BEGAN + timedelta(seconds=length_s)
    times = [None, *(BEGAN + timedelta(seconds=each) for each in sorted(edges)), None]
    parts = [
        share_of(whole, BEGAN, until, first, last) for first, last in itertools.pairwise(times)
    ]
    assert sum(parts) == whole


def test_months_are_in_utc_whatever_zone_a_provider_reports() -> None:
    pacific = timezone(timedelta(hours=-7))
    line = charge(1, 3)
    there = replace(
        line, since=line.since.astimezone(pacific), until=line.until.astimezone(pacific)
    )
    assert post([], [there]) == post([], [line])
    assert month_of(NOVEMBER.astimezone(pacific)) == NOVEMBER
