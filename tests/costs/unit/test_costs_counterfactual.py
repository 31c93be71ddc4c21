"""Other places are priced on a stated assumption."""

from datetime import timedelta

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.planner.counterfactual import price_counterfactuals

HOUR = timedelta(hours=1)


def make_offer(name: str, usd: float, zone: str | None = None) -> Offer:
    rate = HourlyRate(round(usd * 1e6))
    return Offer(provider="p", region="r", zone=zone, instance_type=name, rate=rate)


def test_elsewhere_is_the_cheapest_of_each_kind_of_machine() -> None:
    offers = [
        make_offer("b", 3, "z1"),
        make_offer("b", 2, "z2"),
        make_offer("a", 4),
        make_offer("c", 5),
    ]
    spot = replace(make_offer("b", 1), purchase=Purchase.SPOT)
    found = price_counterfactuals([*offers, spot], nodes=2, ran=HOUR)
    assert [(there.offer.key, there.cost.micros) for there in found] == [
        ("p/r/b:0/spot", 2_000_000),
        ("p/r/z2/b:0/on-demand", 4_000_000),
        ("p/r/a:0/on-demand", 8_000_000),
    ]
    assert {there.basis for there in found} == {"same running time assumed"}


def test_own_machines_and_free_offers_are_not_elsewhere() -> None:
    own = replace(make_offer("own", 1), shared=True)
    assert price_counterfactuals([own, make_offer("free", 0)], nodes=1, ran=HOUR) == []


def test_scaled_times_and_starts_are_priced_and_said() -> None:
    slow, fast = make_offer("slow", 1), make_offer("fast", 2)
    found = price_counterfactuals(
        [slow, fast], nodes=1, ran=HOUR, start=HOUR / 4, lengths={fast.key: HOUR / 4}
    )
    assert [(there.offer, there.cost.micros, there.basis) for there in found] == [
        (fast, 1_000_000, "running time estimated from the stated work, 15m00s to start"),
        (slow, 1_250_000, "same running time assumed, 15m00s to start"),
    ]


def test_the_minimum_charge_is_priced_and_said() -> None:
    offer = replace(make_offer("a", 1), minimum_charge=3 * HOUR)
    (there,) = price_counterfactuals([offer], nodes=1, ran=HOUR)
    assert (there.cost, there.basis) == (
        Money(3_000_000),
        "same running time assumed, minimum charge of 3h00m",
    )


def test_a_documented_start_is_priced_instead_of_the_usual_one() -> None:
    offer = replace(make_offer("metal", 6), boot=HOUR / 6)
    (there,) = price_counterfactuals([offer], nodes=1, ran=HOUR, start=HOUR / 30)
    assert (there.cost, there.basis) == (
        Money(7_000_000),
        "same running time assumed, 10m00s to start",
    )
