"""Every microsecond of a node's life is charged exactly once, at the price that held then."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from tests.records import make_attempt_record, make_offer

from cavvy.costs.metering import bill, total
from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.jobs import Attempt
from cavvy.domain.units import HourlyRate, Money

START = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


def make_attempt(usd_per_hour: float = 3.6, minimum: timedelta = timedelta(0)) -> Attempt:
    offer = make_offer("fake/r/t", round(usd_per_hour * 1e6), minimum_charge=minimum)
    return make_attempt_record(START, offer, id="job-1", job_id="job")


def test_one_price_is_one_stretch() -> None:
    (charge,) = bill(
        attempt=make_attempt(3.6), rank=2, started=START, until=START + HOUR, final=False
    )
    assert (charge.project, charge.job_id, charge.attempt_id, charge.rank) == (
        "p",
        "job",
        "job-1",
        2,
    )
    assert (charge.since, charge.until, charge.amount) == (START, START + HOUR, Money(3_600_000))
    assert charge.kind is ChargeKind.NODE


def test_a_price_change_splits_the_stretch() -> None:
    rates = [(START - HOUR, HourlyRate(1_000_000)), (START + HOUR, HourlyRate(5_000_000))]
    charges = bill(
        attempt=make_attempt(),
        rank=0,
        started=START,
        until=START + 3 * HOUR,
        rates=rates,
        final=True,
    )
    assert [charge.amount.micros for charge in charges] == [1_000_000, 10_000_000]


def test_the_same_price_said_again_is_no_change() -> None:
    rates = [(START + n * HOUR, HourlyRate(1_000_000)) for n in range(5)]
    assert (
        len(
            bill(
                attempt=make_attempt(),
                rank=0,
                started=START,
                until=START + 9 * HOUR,
                rates=rates,
                final=True,
            )
        )
        == 1
    )


def test_of_two_prices_at_one_time_the_later_entry_counts() -> None:
    rates = [(START, HourlyRate(1)), (START + HOUR, HourlyRate(2)), (START + HOUR, HourlyRate(9))]
    charges = bill(
        attempt=make_attempt(),
        rank=0,
        started=START,
        until=START + 2 * HOUR,
        rates=rates,
        final=True,
    )
    assert [charge.rate.micros_per_hour for charge in charges] == [1, 9]


def test_the_minimum_is_topped_up_once_and_only_at_the_end() -> None:
    attempt = make_attempt(3.6, minimum=HOUR)
    until = START + timedelta(minutes=15)
    assert len(bill(attempt=attempt, rank=0, started=START, until=until, final=False)) == 1
    life, rest = bill(attempt=attempt, rank=0, started=START, until=until, final=True)
    assert rest.kind is ChargeKind.MINIMUM
    assert (rest.since, rest.until) == (life.until, START + HOUR)
    assert total([life, rest]) == Money(3_600_000)


def test_the_minimum_is_topped_up_at_the_price_that_the_node_had() -> None:
    """A change at the very moment of its end never applied to it."""
    attempt, until = make_attempt(minimum=HOUR), START + HOUR / 2
    rates = [(START, HourlyRate(1_000_000)), (until, HourlyRate(9_000_000))]
    _, rest = bill(attempt=attempt, rank=0, started=START, until=until, rates=rates, final=True)
    assert (rest.rate, rest.amount) == (HourlyRate(1_000_000), Money(500_000))


def test_a_node_that_lived_longer_than_the_minimum_has_no_top_up() -> None:
    charges = bill(
        attempt=make_attempt(minimum=HOUR),
        rank=0,
        started=START,
        until=START + 2 * HOUR,
        final=True,
    )
    assert [charge.kind for charge in charges] == [ChargeKind.NODE]


def test_a_node_that_ended_as_it_began_pays_the_minimum_only() -> None:
    (charge,) = bill(
        attempt=make_attempt(3.6, minimum=HOUR), rank=0, started=START, until=START, final=True
    )
    assert (charge.kind, charge.amount) == (ChargeKind.MINIMUM, Money(3_600_000))


def test_a_clock_that_ran_backwards_charges_nothing() -> None:
    assert (
        bill(attempt=make_attempt(), rank=0, started=START, until=START - HOUR, final=False) == []
    )


moments = st.integers(0, 10**11).map(lambda micros: START + timedelta(microseconds=micros))
prices = st.lists(st.tuples(moments, st.integers(0, 10**8).map(HourlyRate)), max_size=8)


@given(prices, moments, st.integers(0, 10**11), st.integers(0, 10**10), st.booleans())
def test_stretches_cover_the_life_exactly_once(
    rates: list[tuple[datetime, HourlyRate]],
    started: datetime,
    life_us: int,
    minimum_us: int,
    final: bool,
) -> None:
    until = started + timedelta(microseconds=life_us)
    minimum = timedelta(microseconds=minimum_us)
    charges = bill(
        attempt=make_attempt(),
        rank=0,
        started=started,
        until=until,
        rates=rates,
        minimum=minimum,
        final=final,
    )
    end = max(until, started + minimum) if final else until
    edges = [started, *(charge.until for charge in charges)]
    assert [charge.since for charge in charges] == edges[:-1]
    assert edges[-1] == end
    assert all(charge.since < charge.until for charge in charges)
    assert [c.kind for c in charges if c.until > until] == [ChargeKind.MINIMUM] * (end > until)


@given(prices, moments, st.integers(0, 10**11))
def test_the_sum_is_the_direct_sum_within_rounding(
    rates: list[tuple[datetime, HourlyRate]], started: datetime, life_us: int
) -> None:
    """The direct sum walks over every price that was ever named, without merging or skipping
    any.
    """
    until = started + timedelta(microseconds=life_us)
    charges = bill(
        attempt=make_attempt(), rank=0, started=started, until=until, rates=rates, final=True
    )
    cuts = sorted({started, until, *(at for at, _ in rates if started < at < until)})
    ordered = sorted(rates, key=lambda entry: entry[0]) or [(started, make_attempt().offer.rate)]
    exact = 0
    for since, end in pairwise(cuts):
        price = [rate for at, rate in ordered if at <= since] or [ordered[0][1]]
        exact += price[-1].micros_per_hour * ((end - since) // timedelta(microseconds=1))
    assert abs(total(charges).micros * 3_600_000_000 - exact) <= len(charges) * 1_800_000_000


def keyed(charges: list[Charge]) -> dict[tuple[ChargeKind, datetime], Charge]:
    return {(charge.kind, charge.since): charge for charge in charges}


@given(prices, moments, st.lists(st.integers(0, 10**11), min_size=1, max_size=8))
def test_as_time_grows_only_the_last_stretch_is_replaced(
    rates: list[tuple[datetime, HourlyRate]], started: datetime, looks_us: list[int]
) -> None:
    """The rows that many looks leave in a store are those of one look at the end: prices are
    learned on the way.
    """
    stored: dict[tuple[ChargeKind, datetime], Charge] = {}
    first = min(rates, key=lambda entry: entry[0], default=None)
    until = started
    for look_us in sorted(looks_us):
        until = started + timedelta(microseconds=look_us)
        known = [entry for entry in rates if entry[0] <= until or entry == first]
        new = keyed(
            bill(
                attempt=make_attempt(),
                rank=0,
                started=started,
                until=until,
                rates=known,
                final=False,
            )
        )
        untouched = sorted(stored, key=lambda key: key[1])[:-1]
        assert all(new[key] == stored[key] for key in untouched)
        stored.update(new)
    last = bill(
        attempt=make_attempt(), rank=0, started=started, until=until, rates=rates, final=True
    )
    stored.update(keyed(last))
    assert stored == keyed(last)
