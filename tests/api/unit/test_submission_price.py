"""The price that a user agrees to includes all that the machines are expected to cost."""

from datetime import timedelta

from cavvy.api.routes.submission import describe_price
from cavvy.domain.elastic import NodeRange
from cavvy.domain.events import ChargeKind
from cavvy.domain.offers import ExtraPrice, Offer
from cavvy.domain.tasks import IndexRange, JobLimits, TaskSpec
from cavvy.domain.units import HourlyRate, Money

ADDRESS = ExtraPrice(kind=ChargeKind.ADDRESS, price=Money(250_000), usual=1)
RATE = HourlyRate(1_000_000)


def describe(minutes: int, **offer: object) -> str:
    limits = JobLimits(duration=timedelta(minutes=minutes))
    task = TaskSpec(name="t", run="true", nodes=2, limits=limits)
    made = Offer(provider="c", region="r", instance_type="i", rate=RATE, **offer)  # type: ignore[arg-type] # fields of an offer
    return describe_price(task, made)


def test_disks_and_addresses_are_part_of_the_price() -> None:
    text = describe(120, extras=(ADDRESS,))
    extra = "of which $0.50/h is for disks and public addresses"
    assert text.startswith(f"t costs $2.50/h for 2 nodes, {extra}, at c/r/i")
    assert "about $5.00 at most (limits.duration: 2h00m)" in text
    assert describe(120).startswith("t costs $2.00/h for 2 nodes at c/r/i")


def test_a_minimum_charge_is_part_of_the_most() -> None:
    assert "about $2.00 at most" in describe(1, minimum_charge=timedelta(hours=1))


def test_the_price_of_an_array_is_that_of_each_job() -> None:
    task = TaskSpec(name="t", run="true", array=(IndexRange(0, 999),))
    made = Offer(provider="c", region="r", instance_type="i", rate=RATE)
    assert describe_price(task, made).startswith("each of the 1,000 jobs of t costs $1.00/h at")


def test_the_price_of_an_elastic_job_is_that_of_the_most_nodes_that_it_may_get() -> None:
    task = TaskSpec(name="t", run="true", nodes=2, elastic=NodeRange(least=2, most=16))
    made = Offer(provider="c", region="r", instance_type="i", rate=RATE)
    text = "t costs $16.00/h on the 16 nodes that it may get at most at c/r/i"
    assert describe_price(task, made).startswith(text)
