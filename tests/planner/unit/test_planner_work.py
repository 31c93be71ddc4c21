"""Running time from operations and peak rates, or from a measured rate; unknown stays unknown."""

from datetime import timedelta

import pytest

from cavvy.catalog.accelerators import Precision, find_accelerator
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import AcceleratorNeed, ResourceSpec, TaskSpec, Workload
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.planner.work import (
    CPU_PEAK_FP32,
    MACHINE_START,
    SHARED_HOST_START,
    estimate,
    margin_of,
    shape_of,
    start_time,
)


def make_offer(
    accelerator: str | None = None, count: int = 1, vcpus: float = 8, memory_mib: int = 0
) -> Offer:
    return Offer(
        provider="p",
        region="r",
        instance_type="t",
        accelerator=accelerator,
        accelerator_count=count if accelerator else 0,
        accelerator_memory_mib=memory_mib,
        vcpus=vcpus,
        rate=HourlyRate(1),
    )


def make_task(work: Workload | None, nodes: int = 1, accelerated: bool = True) -> TaskSpec:
    needs = (AcceleratorNeed(),) if accelerated else ()
    return TaskSpec(
        name="t", run="true", work=work, nodes=nodes, resources=ResourceSpec(accelerators=needs)
    )


def peak(name: str, precision: Precision) -> float:
    known = find_accelerator(name)
    assert known is not None
    return known.accelerator.peak[precision]


def seconds(task: TaskSpec, offer: Offer) -> float:
    length = estimate(task, offer).run_time
    assert length is not None
    return length.total_seconds()


def test_no_work_no_estimate() -> None:
    assert estimate(make_task(None), make_offer("H100")).run_time is None
    assert estimate(make_task(Workload()), make_offer("H100")).run_time is None


def test_flops_over_nodes_count_peak_and_efficiency() -> None:
    work = Workload(flops=1e21, precision="bf16", efficiency=0.5)
    expected = 1e21 / (2 * 8 * peak("H100", Precision.BF16) * 0.5)
    assert seconds(make_task(work, nodes=2), make_offer("H100", 8)) == pytest.approx(expected)
    assert estimate(make_task(work, nodes=2), make_offer("H100", 8)).notes == ()


def test_a_missing_precision_falls_back_and_says_so() -> None:
    work = Workload(flops=1e18, precision="bf16")
    found = estimate(make_task(work), make_offer("V100"))
    assert seconds(make_task(work), make_offer("V100")) == pytest.approx(
        1e18 / (peak("V100", Precision.FP16) * 0.4)
    )
    assert found.notes == ("V100 has no bf16 rate, so the rate for fp16 is used",)


@pytest.mark.parametrize(
    ("precision", "accelerator", "note"),
    [
        ("fp64", "L4", "no fp64 rate is known for L4"),
        ("bf16", "NoSuchThing", "no peak rate is known for NoSuchThing"),
        ("bf17", "H100", "no peak rate is known for precision 'bf17'"),
    ],
)
def test_what_is_unknown_is_not_guessed(precision: str, accelerator: str, note: str) -> None:
    found = estimate(make_task(Workload(flops=1e18, precision=precision)), make_offer(accelerator))
    assert found.run_time is None
    assert found.notes == (note,)


def test_cpus_count_by_the_documented_constant() -> None:
    task = make_task(Workload(flops=1e15, precision="bf16", efficiency=0.5), accelerated=False)
    assert seconds(task, make_offer(vcpus=4)) == pytest.approx(1e15 / (4 * CPU_PEAK_FP32 * 0.5))
    assert "the time is a rough estimate" in estimate(task, make_offer(vcpus=4)).notes[0]
    assert (
        estimate(
            make_task(Workload(flops=1e15, precision="int8"), accelerated=False), make_offer()
        ).run_time
        is None
    )


def test_a_task_that_asks_for_no_accelerator_runs_on_the_cpus_of_a_node_that_has_some() -> None:
    task = make_task(Workload(samples=100.0, rates={"cpu": 1.0, "H100": 100.0}), accelerated=False)
    assert seconds(task, make_offer("H100")) == 100


@pytest.mark.parametrize(
    ("rates", "offer", "expected"),
    [
        ({"H100": 10.0}, make_offer("H100", 1), 10.0),
        ({"H100": 10.0}, make_offer("H100", 8), 80.0),
        ({"H100": 10.0, "H100:8": 60.0}, make_offer("H100", 8), 60.0),
        ({"H100": 10.0, "H100:8": 60.0}, make_offer("H100", 4), 40.0),  # 1 is nearer than 8
        ({"H100:1": 10.0}, make_offer("H100", 2), 20.0),
        ({"h100:8": 60.0}, make_offer("H100", 6), 45.0),
        ({"H100": 10.0, "H100-PCIe": 7.0}, make_offer("H100-PCIe", 2), 14.0),
        ({"H100": 10.0}, make_offer("H100-PCIe", 1), 10.0),
        ({"A100-80GB": 5.0}, make_offer("A100", 1, memory_mib=81920), 5.0),
        ({"cpu": 3.0}, make_offer(vcpus=64), 3.0),
        ({"cpu:8": 8.0}, make_offer(vcpus=4), 4.0),
        ({"cpu:8": 8.0, "cpu:16": 12.0}, make_offer(vcpus=32), 12.0),
        ({"cpu:8": 8.0, "cpu:16": 12.0}, make_offer(vcpus=12), 8.0),
    ],
)
def test_measured_rates(rates: dict[str, float], offer: Offer, expected: float) -> None:
    task = make_task(
        Workload(samples=1000.0, rates=rates), accelerated=offer.accelerator is not None
    )
    assert seconds(task, offer) == pytest.approx(1000 / expected)


def test_a_bare_name_is_a_node_as_the_task_asks_for() -> None:
    needs = (
        AcceleratorNeed(name="H100", count_min=8),
        AcceleratorNeed(name="A100", count_min=2, count_max=4),
    )
    work = Workload(samples=1000.0, rates={"H100": 80.0, "A100": 10.0})
    task = TaskSpec(name="t", run="true", work=work, resources=ResourceSpec(accelerators=needs))
    assert seconds(task, make_offer("H100", 8)) == pytest.approx(1000 / 80)
    assert seconds(task, make_offer("A100", 4)) == pytest.approx(1000 / 20)


@pytest.mark.parametrize(
    ("rates", "offer"),
    [
        ({"H100": 1.0}, make_offer("A100")),
        ({"cpu": 1.0}, make_offer("A100")),
        ({"H100": 1.0}, make_offer()),
        ({"A100-80GB": 5.0}, make_offer("A100", memory_mib=40960)),
        ({"H100": 0.0}, make_offer("H100")),
        ({}, make_offer("H100")),
    ],
)
def test_no_rate_for_this_device_is_unknown(rates: dict[str, float], offer: Offer) -> None:
    task = make_task(
        Workload(samples=1000.0, rates=rates), accelerated=offer.accelerator is not None
    )
    assert estimate(task, offer).run_time is None


def test_a_scaled_rate_says_so() -> None:
    found = estimate(
        make_task(Workload(samples=1000.0, rates={"H100": 1.0}), nodes=2),
        make_offer("H100-PCIe", 8),
    )
    assert found.notes == (
        "no rate was measured on H100-PCIe itself; the rate of a group is used",
        "rate measured on 1, scaled to 8 accelerators",
        "assumes that 2 nodes are 2 times as fast as one",
    )


HOURS = timedelta(hours=10)


@pytest.mark.parametrize(
    ("work", "hours"),
    [
        (Workload(flops=125e12 * 8 * 3600, precision="fp16", efficiency=0.5), 2),
        (Workload(samples=7200, rates={"V100": 1}), 2),
        (Workload(samples=7200, rates={"V100:4": 1}), 1),
        (Workload(duration=HOURS, measured_on="V100:8"), 10),
    ],
)
def test_a_named_instance_counts_with_its_accelerators(work: Workload, hours: float) -> None:
    task = TaskSpec(name="t", run="x", work=work, resources=ResourceSpec(instance="t"))
    found = estimate(task, make_offer("V100", 8)).run_time
    assert found == timedelta(hours=hours)


def test_an_instance_on_a_shared_host_holds_no_accelerators() -> None:
    task = TaskSpec(
        name="t",
        run="x",
        work=Workload(samples=60, rates={"V100": 60, "cpu": 1}),
        resources=ResourceSpec(instance="t"),
    )
    assert seconds(task, replace(make_offer("V100", 8), shared=True)) == 60


@pytest.mark.parametrize(
    ("measured_on", "offer", "expected"),
    [
        ("A100:8", make_offer("A100", 8), 10),
        ("A100:8", make_offer("A100", 8, memory_mib=40960), 10),
        ("A100-80GB:8", make_offer("A100", 8, memory_mib=81920), 10),
        (None, make_offer("L4", 2), 10),
        ("cpu", make_offer(vcpus=4), 10),
        ("cpu:16", make_offer(vcpus=64), 10),
        ("cpu:16", make_offer(vcpus=4), 40),
    ],
)
def test_a_duration_stands_where_it_was_measured(
    measured_on: str | None, offer: Offer, expected: float
) -> None:
    work = Workload(duration=HOURS, measured_on=measured_on)
    found = estimate(make_task(work, accelerated=offer.accelerator is not None), offer)
    assert found.run_time == timedelta(hours=expected)
    assert found.spread == 1


@pytest.mark.parametrize(
    ("offer", "low", "high", "spread"),
    [
        (make_offer("H100", 8, memory_mib=81920), 4, 6, 1.5),
        (make_offer("A100", 4, memory_mib=81920), 16, 20, 1.23),  # the same device, half of them
        (make_offer("A100", 8, memory_mib=40960), 10, 12, 1.5),  # less bandwidth
        (make_offer("L4", 2), 50, 300, 1.79),
    ],
)
def test_a_duration_is_scaled_by_data_sheets_with_a_range(
    offer: Offer, low: float, high: float, spread: float
) -> None:
    work = Workload(duration=HOURS, measured_on="A100-80GB:8")
    found = estimate(make_task(work), offer)
    assert found.run_time is not None
    assert low < found.run_time / timedelta(hours=1) < high
    assert found.spread == pytest.approx(spread, abs=0.01)
    assert found.notes == ("scaled from A100-80GB:8 by the figures of data sheets",)


def test_a_duration_counts_for_all_nodes_of_the_task() -> None:
    work = Workload(duration=HOURS, measured_on="A100:8")
    assert estimate(make_task(work, nodes=4), make_offer("A100", 8)).run_time == HOURS


@pytest.mark.parametrize(
    ("measured_on", "offer", "note"),
    [
        ("cpu:8", make_offer("A100"), "the time on A100 cannot be estimated"),
        ("A100:8", make_offer(), "the time on CPUs cannot be estimated"),
        ("A100:8", make_offer("Mystery"), "no data sheet of Mystery is known"),
    ],
)
def test_a_duration_that_cannot_be_scaled_says_why(
    measured_on: str, offer: Offer, note: str
) -> None:
    work = Workload(duration=HOURS, measured_on=measured_on)
    found = estimate(make_task(work, accelerated=offer.accelerator is not None), offer)
    assert found.run_time is None
    assert note in found.notes[0]


def test_absurd_lengths_are_unknown() -> None:
    assert estimate(make_task(Workload(flops=1e40)), make_offer("H100")).run_time is None


def test_a_shared_host_starts_at_once_and_a_machine_does_not() -> None:
    shared = Offer(provider="p", region="r", instance_type="t", rate=HourlyRate(0), shared=True)
    assert start_time(shared) == SHARED_HOST_START < MACHINE_START == start_time(make_offer())
    assert timedelta(seconds=1) > SHARED_HOST_START


def test_a_machine_starts_as_late_as_its_provider_documents() -> None:
    slow = replace(make_offer(), boot=timedelta(minutes=10))
    assert start_time(slow) == timedelta(minutes=10)
    task = make_task(Workload(flops=1e15), accelerated=False)
    assert shape_of(slow, task) != shape_of(make_offer(), task)


def test_on_a_shared_host_only_the_share_that_is_held_counts() -> None:
    work = Workload(flops=1e15, precision="fp32", efficiency=1.0)
    shared = Offer(
        provider="p", region="r", instance_type="cpu", vcpus=64, rate=HourlyRate(0), shared=True
    )
    silent = TaskSpec(name="t", run="true", work=work)
    asking = TaskSpec(name="t", run="true", work=work, resources=ResourceSpec(cpus_min=4))
    assert seconds(silent, shared) == pytest.approx(1e15 / CPU_PEAK_FP32)
    assert seconds(asking, shared) == pytest.approx(1e15 / (4 * CPU_PEAK_FP32))


def test_a_part_of_an_accelerator_is_that_much_slower_and_says_so() -> None:
    whole = make_offer("A10", 1)
    sixth = replace(whole, accelerator_part=1 / 6)
    task = make_task(Workload(samples=1000.0, rates={"A10:1": 10.0}))
    assert seconds(task, whole) == 100
    assert seconds(task, sixth) == pytest.approx(600)
    assert "the node has 1/6 of an accelerator" in estimate(task, sixth).notes[-1]
    task = make_task(Workload(samples=1000.0, rates={"A10:1": 10.0, "p/t": 4.0}))
    assert seconds(task, sixth) == pytest.approx(250), "this rate was measured on the part"


def test_the_rate_of_a_machine_takes_precedence_over_that_of_its_accelerator() -> None:
    offer = make_offer("H100", 8)
    rates = {"H100:8": 10.0, f"{offer.provider}/{offer.instance_type}": 20.0}
    task = make_task(Workload(samples=1000.0, rates=rates))
    assert seconds(task, offer) == 50
    elsewhere = replace(offer, provider="elsewhere")
    assert seconds(task, elsewhere) == 100
    assert seconds(task, replace(offer, shared=True)) == 100
    assert shape_of(offer, task) != shape_of(elsewhere, task)
    plain = make_task(Workload(samples=1000.0, rates={"H100:8": 10.0}))
    assert shape_of(offer, plain) == shape_of(elsewhere, plain)


def test_a_rate_of_a_part_of_a_node_is_not_used_for_another_part() -> None:
    work = Workload(samples=36_000.0, rates={"p/t:1": 10.0, "H100:8": 80.0})
    task, one, all8 = make_task(work), make_offer("H100"), make_offer("H100", count=8)
    assert seconds(task, one) == pytest.approx(3600)
    assert seconds(task, all8) == pytest.approx(450)
    assert shape_of(one, task) != shape_of(all8, task)
    cpus = Workload(samples=36_000.0, rates={"p/t:8": 10.0, "cpu": 5.0})
    assert seconds(make_task(cpus, accelerated=False), make_offer(vcpus=8)) == pytest.approx(3600)
    assert seconds(make_task(cpus, accelerated=False), make_offer(vcpus=16)) == pytest.approx(7200)


def test_a_margin_applies_to_rates_that_were_not_measured_on_the_machine() -> None:
    work = Workload(samples=1e6, rates={"H100": 10.0}, margin=1.3)
    offer = make_offer("H100")
    assert margin_of(make_task(work), offer) == 1.3
    assert seconds(make_task(work), offer) == 1e5
    measured = replace(work, rates={"H100": 10.0, "p/t:1": 8.0})
    assert margin_of(make_task(measured), offer) == 1.0
    assert margin_of(make_task(Workload(flops=1e20, margin=1.3)), offer) == 1.0
