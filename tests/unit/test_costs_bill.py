"""The bill adds up to its charges, and other places are priced on a stated assumption."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from remuda.costs.bill import make_bill, price_elsewhere
from remuda.costs.metering import bill, total
from remuda.domain.events import ChargeKind
from remuda.domain.jobs import Attempt, Outcome
from remuda.domain.offers import Offer, Purchase
from remuda.domain.units import HourlyRate, Money

START = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


def make_offer(name: str, usd: float, zone: str | None = None) -> Offer:
    rate = HourlyRate(round(usd * 1e6))
    return Offer(provider="p", region="r", zone=zone, instance_type=name, rate=rate)


def make_attempt(number: int, nodes: int = 2, usd: float = 1.0) -> Attempt:
    return Attempt(
        id=f"j-{number}",
        job_id="j",
        project="p",
        number=number,
        gang="g",
        offer=make_offer("t", usd),
        nodes=nodes,
        outcome=Outcome.PREEMPTED,
        created_at=START,
        since=START,
    )


def test_lines_sum_nodes_by_attempt_kind_and_price() -> None:
    first, second = make_attempt(1), make_attempt(2)
    change = [(START, HourlyRate(1_000_000)), (START + HOUR, HourlyRate(2_000_000))]
    charges = [
        *bill(attempt=second, rank=0, started=START + 5 * HOUR, until=START + 6 * HOUR, minimum=3 * HOUR, final=True),
        *bill(attempt=first, rank=0, started=START, until=START + 2 * HOUR, rates=change, final=True),
        *bill(attempt=first, rank=1, started=START, until=START + 2 * HOUR, rates=change, final=True),
    ]
    made = make_bill([first, second], charges)
    assert [(line.attempt, line.kind, line.nodes, line.node_time, line.amount.micros) for line in made.lines] == [
        (1, ChargeKind.NODE, 2, 2 * HOUR, 2_000_000),
        (1, ChargeKind.NODE, 2, 2 * HOUR, 4_000_000),
        (2, ChargeKind.NODE, 1, HOUR, 1_000_000),
        (2, ChargeKind.MINIMUM, 1, 2 * HOUR, 2_000_000),
    ]
    assert made.lines[0].place == first.offer.key
    assert made.lines[0].outcome is Outcome.PREEMPTED
    assert made.total == Money(9_000_000)


def test_a_charge_without_its_attempt_is_still_billed() -> None:
    charges = bill(attempt=make_attempt(7), rank=0, started=START, until=START + HOUR, final=True)
    (line,) = make_bill([], charges).lines
    assert (line.attempt, line.amount) == (7, Money(1_000_000))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2), st.integers(1, 10**10)), max_size=10))
def test_the_total_is_the_sum_of_lines_and_of_charges(lives: list[tuple[int, int, int]]) -> None:
    charges = [
        charge
        for number, rank, life_us in lives
        for charge in bill(
            attempt=make_attempt(number, usd=number),
            rank=rank,
            started=START,
            until=START + timedelta(microseconds=life_us),
            final=True,
        )
    ]
    made = make_bill([make_attempt(number) for number in range(1, 4)], charges)
    assert made.total == total(charges) == Money(sum(line.amount.micros for line in made.lines))


def test_elsewhere_is_the_cheapest_of_each_kind_of_machine() -> None:
    offers = [make_offer("b", 3, "z1"), make_offer("b", 2, "z2"), make_offer("a", 4), make_offer("c", 5)]
    spot = replace(make_offer("b", 1), purchase=Purchase.SPOT)
    found = price_elsewhere([*offers, spot], nodes=2, ran=HOUR)
    assert [(there.offer.key, there.cost.micros) for there in found] == [
        ("p/r/b:0/spot", 2_000_000),
        ("p/r/z2/b:0/on-demand", 4_000_000),
        ("p/r/a:0/on-demand", 8_000_000),
    ]
    assert {there.basis for there in found} == {"same running time assumed"}


def test_own_machines_and_free_offers_are_not_elsewhere() -> None:
    own = replace(make_offer("own", 1), shared=True)
    assert price_elsewhere([own, make_offer("free", 0)], nodes=1, ran=HOUR) == []


def test_scaled_times_and_starts_are_priced_and_said() -> None:
    slow, fast = make_offer("slow", 1), make_offer("fast", 2)
    found = price_elsewhere([slow, fast], nodes=1, ran=HOUR, start=HOUR / 4, lengths={fast.key: HOUR / 4})
    assert [(there.offer, there.cost.micros, there.basis) for there in found] == [
        (fast, 1_000_000, "running time scaled by the stated work, 15m00s to start"),
        (slow, 1_250_000, "same running time assumed, 15m00s to start"),
    ]


def test_the_minimum_charge_is_priced_and_said() -> None:
    offer = replace(make_offer("a", 1), minimum_charge=3 * HOUR)
    (there,) = price_elsewhere([offer], nodes=1, ran=HOUR)
    assert (there.cost, there.basis) == (Money(3_000_000), "same running time assumed, minimum charge of 3h00m")
