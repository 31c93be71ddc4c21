"""A finished run priced on other offers, its measured time scaled where the work allows."""

from datetime import timedelta

import pytest

from cavvy.catalog.tables import find_architecture
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TaskSpec, Workload
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.planner.counterfactual import compare_counterfactuals
from cavvy.planner.work import MACHINE_START

HOUR = timedelta(hours=1)


def make_offer(name: str, vcpus: float) -> Offer:
    return Offer(
        provider="p", region="r", instance_type=name, vcpus=vcpus, rate=HourlyRate(1_000_000)
    )


def test_the_measured_time_is_scaled_by_the_ratio_of_the_estimates() -> None:
    """The stated efficiency is off by far, and cancels out: what counts is what was measured."""
    task = TaskSpec(
        name="t", run="x", work=Workload(flops=1e18, precision="fp32", efficiency=0.001)
    )
    (fast,) = compare_counterfactuals(task, HOUR, make_offer("here", 2), [make_offer("fast", 8)])
    assert fast.node_time == HOUR / 4 + MACHINE_START
    assert fast.basis.startswith("running time estimated from the stated work")


def test_without_stated_work_the_same_time_is_assumed() -> None:
    task = TaskSpec(name="t", run="x")
    (there,) = compare_counterfactuals(task, HOUR, make_offer("here", 2), [make_offer("fast", 8)])
    assert there.node_time == HOUR + MACHINE_START
    assert there.basis.startswith("same running time assumed")


def test_a_place_whose_time_is_unknown_is_taken_to_need_the_same() -> None:
    task = TaskSpec(name="t", run="x", work=Workload(flops=1e18, precision="fp32"))
    (there,) = compare_counterfactuals(
        task, HOUR, make_offer("here", 2), [make_offer("unknown", 0)]
    )
    assert there.node_time == HOUR + MACHINE_START
    assert there.basis.startswith("same running time assumed")


def test_offers_of_another_architecture_are_left_out() -> None:
    """The architecture is reported by the provider, or follows from the instance type."""
    arm = replace(make_offer("t4g.small", 2), provider="aws")
    intel = replace(make_offer("t3.small", 2), provider="aws")

    def found(here: Offer) -> list[str]:
        compared = compare_counterfactuals(TaskSpec(name="t", run="x"), HOUR, here, [arm, intel])
        return [each.offer.instance_type for each in compared]

    here = make_offer("here", 2)
    assert found(here) == ["t3.small"]
    assert found(replace(here, architecture="x86_64")) == ["t3.small"]
    assert found(replace(here, architecture="aarch64")) == ["t4g.small"]


@pytest.mark.parametrize(
    ("provider", "instance_type", "accelerator", "architecture"),
    [
        ("aws", "m7gd.large", None, "arm64"),
        ("aws", "g5g.xlarge", "T4G", "arm64"),
        ("aws", "im4gn.large", None, "arm64"),
        ("aws", "g4dn.xlarge", "T4", "x86_64"),
        ("aws", "p5.48xlarge", "H100", "x86_64"),
        ("aws", "hpc7g.4xlarge", None, "arm64"),
        ("aws", "dl2q.24xlarge", None, "x86_64"),
        ("azure", "Standard_D4pds_v5", None, "arm64"),
        ("azure", "Standard_D4ds_v5", None, "x86_64"),
        ("gcp", "c4a-standard-8", None, "arm64"),
        ("gcp", "a2-highgpu-1g", "A100", "x86_64"),
        ("lambda", "gpu_1x_gh200", "GH200", "arm64"),
    ],
)
def test_the_architecture_of_an_instance_type(
    provider: str, instance_type: str, accelerator: str | None, architecture: str
) -> None:
    offer = replace(make_offer(instance_type, 2), provider=provider, accelerator=accelerator)
    assert find_architecture(offer) == architecture
