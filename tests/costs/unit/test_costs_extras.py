"""Disks and public addresses are charged for exactly the time of their node."""

from datetime import UTC, datetime, timedelta, timezone

from tests.records import make_attempt_record, make_offer

from cavvy.costs.extras import bill_extras, expect_extras, rate_extras
from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.gangs import NodeExtra, NodeSeen, list_extras
from cavvy.domain.jobs import Attempt
from cavvy.domain.offers import ExtraPrice
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace

START = datetime(2026, 4, 1, tzinfo=UTC)  # April has 720 hours
HOUR = timedelta(hours=1)
GP3 = ExtraPrice(kind=ChargeKind.DISK, name="gp3", price=Money(72_000), usual=100)
SC1 = ExtraPrice(kind=ChargeKind.DISK, name="sc1", price=Money(14_400))
ADDRESS = ExtraPrice(kind=ChargeKind.ADDRESS, price=Money(5000), usual=1)
OFFER = make_offer("p/r/t", 1_000_000, extras=(GP3, SC1, ADDRESS))
ATTEMPT = make_attempt_record(START, OFFER)
NODE = NodeSeen(
    rank=0,
    engine_id="e",
    started_at=START,
    extras=(
        NodeExtra(kind=ChargeKind.DISK, name="gp3", units=100),
        NodeExtra(kind=ChargeKind.DISK, name="sc1", units=500),
        NodeExtra(kind=ChargeKind.ADDRESS),
    ),
)


def bill(
    node: NodeSeen = NODE,
    until: datetime = START + HOUR,
    *,
    attempt: Attempt = ATTEMPT,
    earlier: tuple[Charge, ...] = (),
    final: bool = False,
) -> list[Charge]:
    since = node.started_at or START
    return bill_extras(attempt, node, since=since, until=until, earlier=earlier, final=final)


def amounts(charges: list[Charge]) -> list[tuple[ChargeKind, int]]:
    return [(charge.kind, charge.amount.micros) for charge in charges]


def test_disks_are_one_row_and_addresses_another() -> None:
    """100 GiB at 7.2 cents a month are 10,000 micro-dollars an hour in April, as are 500 GiB at
    1.44 cents.
    """
    assert amounts(bill()) == [(ChargeKind.DISK, 20_000), (ChargeKind.ADDRESS, 5000)]


def test_a_month_s_price_is_for_the_hours_of_that_month() -> None:
    end = datetime(2026, 5, 1, tzinfo=UTC)
    node = replace(NODE, started_at=end - HOUR, extras=NODE.extras[:1])
    april, may = bill(node, end + HOUR)
    assert (april.until, may.since) == (end, end)
    assert (april.amount.micros, may.amount.micros) == (10_000, 9677)  # 720 and 744 hours


def test_a_month_begins_in_utc_and_not_in_the_provider_s_time_zone() -> None:
    end = datetime(2026, 5, 1, tzinfo=UTC)
    pacific = timezone(timedelta(hours=-7))
    node = replace(NODE, started_at=(end - HOUR).astimezone(pacific), extras=NODE.extras[:1])
    assert [each.since for each in bill(node, end + HOUR)] == [end - HOUR, end]


def test_a_minimum_that_crosses_the_end_of_a_month_has_both_prices() -> None:
    price = replace(GP3, minimum=2 * HOUR)
    attempt = replace(ATTEMPT, offer=replace(OFFER, extras=(price,)))
    end = datetime(2026, 5, 1, tzinfo=UTC)
    node = replace(NODE, started_at=end - HOUR, extras=NODE.extras[:1])
    charges = bill(node, end, attempt=attempt, final=True)
    assert [each.amount.micros for each in charges] == [10_000, 9677]


def test_a_whole_month_costs_the_month_s_price() -> None:
    node = replace(NODE, extras=NODE.extras[:1])
    (charge,) = bill(node, datetime(2026, 5, 1, tzinfo=UTC))
    assert charge.amount == Money(100 * GP3.price.micros)


def test_an_extra_without_a_price_is_not_charged() -> None:
    node = replace(NODE, extras=(NodeExtra(kind=ChargeKind.DISK, name="io2", units=8),))
    assert bill(node) == []


def test_the_minimum_is_charged_once_the_node_has_ended() -> None:
    price = replace(ADDRESS, minimum=timedelta(minutes=1))
    attempt = replace(ATTEMPT, offer=replace(OFFER, extras=(price,)))
    end = START + timedelta(seconds=6)
    (running,) = bill(until=end, attempt=attempt)
    (ended,) = bill(until=end, attempt=attempt, final=True)
    assert (running.until, ended.until) == (end, START + timedelta(minutes=1))


def test_the_longest_minimum_of_several_disks_is_charged() -> None:
    short, long = (replace(GP3, minimum=timedelta(minutes=1)), replace(SC1, minimum=HOUR))
    end = START + timedelta(seconds=6)
    for extras in ((short, long), (long, short)):
        attempt = replace(ATTEMPT, offer=replace(OFFER, extras=extras))
        (ended,) = bill(until=end, attempt=attempt, final=True)
        assert ended.until == START + HOUR


def test_earlier_rates_hold_if_the_provider_no_longer_reports_the_extras() -> None:
    earlier = tuple(bill(until=START + HOUR))
    forgotten = replace(NODE, extras=())
    found = amounts(bill(forgotten, START + 2 * HOUR, earlier=earlier))
    assert found == [(ChargeKind.DISK, 40_000), (ChargeKind.ADDRESS, 10_000)]
    assert bill(replace(forgotten, rank=1), earlier=earlier) == []


def test_the_rate_of_a_running_node_s_extras() -> None:
    assert rate_extras(OFFER, NODE.extras, START) == HourlyRate(25_000)


def test_a_disk_of_a_fixed_size_costs_the_next_larger_one() -> None:
    sizes = tuple(
        replace(GP3, price=Money(720_000 * gib), up_to_gib=gib, usual=128, least=128)
        for gib in (256, 128)
    )
    offer = replace(OFFER, extras=sizes)
    attempt = replace(ATTEMPT, offer=offer)
    for gib, hourly in ((128, 128_000), (129, 256_000), (256, 256_000)):
        disk = NodeExtra(kind=ChargeKind.DISK, name="gp3", units=gib)
        (charge,) = bill(replace(NODE, extras=(disk,)), attempt=attempt)
        assert charge.amount == Money(hourly)
    larger = NodeExtra(kind=ChargeKind.DISK, name="gp3", units=257)
    assert bill(replace(NODE, extras=(larger,)), attempt=attempt) == []
    assert [each.units for each in list_extras(offer, 64)] == [128]
    assert [each.units for each in list_extras(offer, 200)] == [200]


def test_planning_expects_the_task_s_disk_or_else_the_usual_one() -> None:
    usual = round(100 * 72_000 / 730) + 5000
    assert expect_extras(OFFER) == HourlyRate(usual)
    assert expect_extras(OFFER, 200) == HourlyRate(round(200 * 72_000 / 730) + 5000)
    assert expect_extras(OFFER, 500, "sc1") == HourlyRate(round(500 * 14_400 / 730) + 5000)
    assert expect_extras(OFFER, 500, "io2") == HourlyRate(5000)
    assert expect_extras(replace(OFFER, extras=())) == HourlyRate(0)
