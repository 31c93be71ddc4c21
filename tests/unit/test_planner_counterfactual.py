"""A finished run priced on other offers, its measured time scaled where the work allows."""

from datetime import timedelta

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Task, Workload
from cavvy.domain.units import HourlyRate
from cavvy.planner.counterfactual import compare_counterfactuals
from cavvy.planner.work import MACHINE_START

HOUR = timedelta(hours=1)


def make_offer(name: str, vcpus: float) -> Offer:
    return Offer(
        provider="p", region="r", instance_type=name, vcpus=vcpus, rate=HourlyRate(1_000_000)
    )


def test_the_measured_time_is_scaled_by_the_ratio_of_the_estimates() -> None:
    """The stated efficiency is off by far, and cancels out: what counts is what was measured."""
    task = Task(name="t", run="x", work=Workload(flops=1e18, precision="fp32", efficiency=0.001))
    (fast,) = compare_counterfactuals(task, HOUR, make_offer("here", 2), [make_offer("fast", 8)])
    assert fast.node_time == HOUR / 4 + MACHINE_START
    assert fast.basis.startswith("running time estimated from the stated work")


def test_without_stated_work_the_same_time_is_assumed() -> None:
    task = Task(name="t", run="x")
    (there,) = compare_counterfactuals(task, HOUR, make_offer("here", 2), [make_offer("fast", 8)])
    assert there.node_time == HOUR + MACHINE_START
    assert there.basis.startswith("same running time assumed")


def test_a_place_whose_time_is_unknown_is_taken_to_need_the_same() -> None:
    task = Task(name="t", run="x", work=Workload(flops=1e18, precision="fp32"))
    (there,) = compare_counterfactuals(
        task, HOUR, make_offer("here", 2), [make_offer("unknown", 0)]
    )
    assert there.node_time == HOUR + MACHINE_START
    assert there.basis.startswith("same running time assumed")
