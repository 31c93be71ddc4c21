"""Estimates how long a task's work takes on an offer: from the work's FLOPs and the peak rates of
the devices, from a measured rate, or from a duration that was measured on other devices.
"""

from datetime import timedelta

from cavvy.catalog.accelerators import (
    KnownAccelerator,
    Precision,
    find_accelerator,
    is_match,
    names_matching,
)
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import DEFAULT_CPUS, TaskSpec, Workload
from cavvy.domain.values import Struct, replace
from cavvy.planner.device_rates import MeasuredRate, carry, device_of, spread_of

# Peak FLOP/s of one virtual CPU in fp32: half a core (one of two hardware threads) at 2.5 GHz with
# two 256-bit fused multiply-add units, 32 operations per cycle and core
# (https://en.wikipedia.org/wiki/FLOPS, table of operations per cycle, Intel Haswell to Raptor Lake,
# AMD Zen 2 and 3). On some clouds a virtual CPU is a whole core or has wider units, so an estimate
# for CPUs is accurate only to about a factor of two; its note states this.
CPU_PEAK_FP32 = 40e9

# The time from the launch to the start of the work, for a new machine and for a running host. Mao
# and Humphrey, "A performance study on the VM startup time in the cloud" (IEEE CLOUD 2012),
# measured 44 s to 7 min, depending on the provider; "An empirical analysis of VM startup times in
# public IaaS clouds" (arXiv 2107.03467, 2021) found shorter times. 2 min includes the first steps
# of setup; it is an assumption, not a measurement. On a running host only a process starts, which
# takes no time (0).
MACHINE_START = timedelta(minutes=2)
SHARED_HOST_START = timedelta(0)

# The precisions that a program uses instead if the device lacks the requested one, best first. If
# the device has none of these precisions, the time is unknown.
_FALLBACKS: dict[Precision, tuple[Precision, ...]] = {
    Precision.BF16: (Precision.FP16, Precision.FP32),
    Precision.FP16: (Precision.BF16, Precision.FP32),
    Precision.TF32: (Precision.FP32,),
    Precision.FP8: (Precision.BF16, Precision.FP16, Precision.FP32),
    Precision.FP4: (Precision.FP8, Precision.BF16, Precision.FP16, Precision.FP32),
}
_CPU_SHARES = {Precision.FP64: 0.5, Precision.FP32: 1.0}
_CPU_FALLBACK = (Precision.BF16, Precision.FP16, Precision.TF32)


class TimeEstimate(Struct, frozen=True, kw_only=True):
    """The running time without interruptions, or None if it is unknown. `notes` explain how the
    time was estimated.

    If the time was measured on another device, 80 % of true times are between `run_time` / `spread`
    and `run_time` * `spread`. `spread` is 1 if the uncertainty is unknown, or if the time was not
    scaled by data sheets.
    """

    run_time: timedelta | None
    spread: float = 1.0
    notes: tuple[str, ...] = ()


def start_time(offer: Offer) -> timedelta:
    """Return the time from the launch to the start of the work."""
    if offer.boot is not None:
        return offer.boot
    return SHARED_HOST_START if offer.shared else MACHINE_START


def shape_of(offer: Offer, task: TaskSpec) -> tuple[object, ...]:
    """Return the properties of an offer that determine the estimate. Offers of the same shape
    differ only in location and price. If no rate was measured on the offer's machine type, offers
    of different providers may have the same shape.
    """
    return (
        _machine_rate(task.work, offer, task) if task.work is not None else None,
        offer.accelerator,
        offer.accelerator_count,
        offer.accelerator_memory_mib,
        offer.accelerator_part,
        offer.vcpus,
        offer.purchase,
        offer.shared,
        offer.boot,
    )


def estimate(task: TaskSpec, offer: Offer) -> TimeEstimate:
    """Return the running time of `task.work` on `task.nodes` nodes of `offer`.

    For work stated in FLOPs, the time is FLOPs / (nodes x accelerators x peak at the precision x
    efficiency). For work stated in samples, the time is samples / (rate x nodes). The two formulas
    assume that spreading the work over nodes and accelerators costs no time beyond the stated
    efficiency. A stated duration is scaled to other devices by `estimate.transfer`; that of an
    elastic task holds for its least number of nodes, and N times as many take an Nth. A task that
    requests neither an accelerator nor an instance type runs on the CPUs, even on a node with
    accelerators.
    """
    work = task.work
    if work is None:
        return TimeEstimate(run_time=None)
    counted = _as_used(offer, task)
    is_measured = work.samples is not None and _machine_rate(work, counted, task) is not None
    if counted.accelerator is not None and counted.accelerator_part < 1 and not is_measured:
        return _on_a_part(task, offer)
    if work.samples is not None:
        return _by_rate(work, counted, task)
    if work.flops is not None:
        return _by_flops(work, counted, task.nodes)
    found = _by_duration(work, counted)
    sizes = task.elastic
    if sizes is None or task.nodes == sizes.least or found.run_time is None:
        return found
    assumed = f"assumes that {task.nodes} nodes are {task.nodes / sizes.least:g} times as fast as "
    notes = (*found.notes, f"{assumed}{sizes.least}, for which `work.duration` holds")
    run_time = found.run_time * sizes.least / task.nodes
    return TimeEstimate(run_time=run_time, notes=notes)


def _on_a_part(task: TaskSpec, offer: Offer) -> TimeEstimate:
    """Return the time on a fraction of an accelerator. The result is the time on a whole
    accelerator divided by the fraction.
    """
    whole = estimate(task, replace(offer, accelerator_part=1.0))
    if whole.run_time is None:
        return whole
    note = f"the node has {offer.accelerators_text} of an accelerator; the time is for this share"
    return replace(
        whole,
        run_time=_length(whole.run_time.total_seconds() / offer.accelerator_part),
        notes=(*whole.notes, note),
    )


def _by_duration(work: Workload, offer: Offer) -> TimeEstimate:
    """Return the stated duration, converted to the devices of the offer."""
    if work.duration is None or work.measured_on is None:
        return TimeEstimate(run_time=work.duration)
    name, count = _split(work.measured_on)
    if name == "cpu" and offer.accelerator is None:
        rate, notes = _cpu_rate(replace(work, rates={work.measured_on: 1.0}), offer)
        return TimeEstimate(run_time=work.duration / rate if rate else None, notes=notes)
    known = find_accelerator(name)
    same = _is_device(known, name, offer)
    if same and (count or 1) == offer.accelerator_count:
        return TimeEstimate(run_time=work.duration)
    source = device_of(name, offer.accelerator_memory_mib if same else None)
    target = device_of(offer.accelerator or "cpu", offer.accelerator_memory_mib or None)
    if source is None or target is None:
        return TimeEstimate(run_time=None, notes=(_not_scaled(work, offer),))
    measured = MeasuredRate(device=source, count=count or 1, rate=1.0)
    rate = carry([measured], target, offer.accelerator_count, work.precision)
    return TimeEstimate(
        run_time=_length(work.duration.total_seconds() / rate),
        spread=spread_of(measured, target, offer.accelerator_count),
        notes=(f"scaled from {work.measured_on} by the figures of data sheets",),
    )


def _is_device(known: KnownAccelerator | None, name: str, offer: Offer) -> bool:
    """Return whether the offer has the accelerator `name`, with the same memory size if the name
    states one.
    """
    size = known.memory_mib if known else None
    product = known.accelerator.name if known else name
    return product == offer.accelerator and size in (None, offer.accelerator_memory_mib)


def _not_scaled(work: Workload, offer: Offer) -> str:
    """Return why the duration cannot be scaled to the devices of the offer."""
    there = offer.accelerator or "CPUs"
    for name in (_split(work.measured_on or "")[0], offer.accelerator or "cpu"):
        if name != "cpu" and device_of(name) is None:
            return (
                f"the duration on {work.measured_on} cannot be scaled to {there}: no data sheet "
                f"of {name} is known"
            )
    return (
        f"the duration was measured on {work.measured_on}; the time on {there} cannot be estimated "
        "from this"
    )


def _as_used(offer: Offer, task: TaskSpec) -> Offer:
    """Return the part of the offer that the task uses. Accelerators are left out if the task does
    not compute on them. On a shared host, only the task's share of the CPUs is included.
    """
    if offer.accelerator is not None and not task.resources.uses_accelerators(offer.shared):
        offer = replace(offer, accelerator=None, accelerator_count=0)
    if offer.shared:
        offer = replace(
            offer, vcpus=min(offer.vcpus, task.resources.stated().cpus_min or DEFAULT_CPUS)
        )
    return offer


def _by_flops(work: Workload, offer: Offer, nodes: int) -> TimeEstimate:
    assert work.flops is not None
    try:
        wanted = Precision(work.precision)
    except ValueError:
        return TimeEstimate(
            run_time=None, notes=(f"no peak rate is known for precision {work.precision!r}",)
        )
    peak, notes = (
        _accelerator_peak(offer, wanted) if offer.accelerator else _cpu_peak(offer, wanted)
    )
    if not peak or work.efficiency <= 0:
        return TimeEstimate(run_time=None, notes=notes)
    return TimeEstimate(
        run_time=_length(work.flops / (nodes * peak * work.efficiency)), notes=notes
    )


def _accelerator_peak(offer: Offer, wanted: Precision) -> tuple[float | None, tuple[str, ...]]:
    """Return the peak FLOP/s of all accelerators of a node together (None if unknown), and
    notes.
    """
    known = find_accelerator(offer.accelerator or "")
    if known is None:
        return None, (f"no peak rate is known for {offer.accelerator}",)
    for precision in (wanted, *_FALLBACKS.get(wanted, ())):
        if rate := known.accelerator.peak.get(precision):
            notes = (
                ()
                if precision is wanted
                else (
                    f"{offer.accelerator} has no {wanted} rate, so the rate for {precision} is "
                    "used",
                )
            )
            return rate * offer.accelerator_count, notes
    return None, (f"no {wanted} rate is known for {offer.accelerator}",)


def _cpu_peak(offer: Offer, wanted: Precision) -> tuple[float | None, tuple[str, ...]]:
    """Return the peak FLOP/s of all CPUs of a node together (None if unknown), and notes."""
    used = Precision.FP32 if wanted in _CPU_FALLBACK else wanted
    if used not in _CPU_SHARES or not offer.vcpus:
        return None, (f"no {wanted} rate is known for CPUs",)
    note = (
        f"the time is a rough estimate: {CPU_PEAK_FP32 * _CPU_SHARES[used] / 1e9:g} GFLOP/s in "
        f"{used} are assumed for each vCPU"
    )
    return CPU_PEAK_FP32 * _CPU_SHARES[used] * offer.vcpus, (note,)


def _by_rate(work: Workload, offer: Offer, task: TaskSpec) -> TimeEstimate:
    assert work.samples is not None
    rate, notes = _node_rate(work, offer, task)
    if rate is None or rate <= 0:
        return TimeEstimate(run_time=None, notes=notes)
    if task.nodes > 1:
        notes = (*notes, f"assumes that {task.nodes} nodes are {task.nodes} times as fast as one")
    return TimeEstimate(run_time=_length(work.samples / (rate * task.nodes)), notes=notes)


def margin_of(task: TaskSpec, offer: Offer) -> float:
    """Return the factor by which the work may take longer on the offer than estimated, for the
    comparison with limits.
    """
    work = task.work
    if work is None or work.samples is None or _machine_rate(work, _as_used(offer, task), task):
        return 1.0
    return work.margin


def _node_rate(
    work: Workload, offer: Offer, task: TaskSpec
) -> tuple[float | None, tuple[str, ...]]:
    """Return the rate of one node in samples per second (None if unknown), and notes that explain
    the rate.
    """
    measured = _machine_rate(work, offer, task)
    if measured is not None:
        return measured, ()
    return _accelerator_rate(work, offer, task) if offer.accelerator else _cpu_rate(work, offer)


def _machine_rate(work: Workload, offer: Offer, task: TaskSpec) -> float | None:
    """Return the rate that was measured on this machine type of this provider, or None if no rate
    was measured. Batch systems offer parts of a node as one instance type. A key may end with a
    count. For example, the value of "slurm/8xa100:2" is the rate of 2 accelerators or, if the task
    uses no accelerators, the rate of 2 vCPUs. On a shared host, a job gets only a part of the
    machine, so rates of whole machine types do not apply.
    """
    if offer.shared:
        return None
    machine = f"{offer.provider}/{offer.instance_type}"
    is_used = offer.accelerator is not None and task.resources.uses_accelerators(offer.shared)
    count = offer.accelerator_count if is_used else f"{offer.vcpus:g}"
    return work.rates.get(f"{machine}:{count}", work.rates.get(machine))


def _accelerator_rate(
    work: Workload, offer: Offer, task: TaskSpec
) -> tuple[float | None, tuple[str, ...]]:
    """Return the rate of one node in samples per second (None if unknown), and notes that explain
    the rate.

    A key "H100:8" in `work.rates` is the rate of a node with 8 accelerators; "H100" alone is the
    rate of the smallest node that fits the task. If the offer's count was not measured, the rate of
    the nearest measured count is scaled in proportion. A rate of the exact accelerator takes
    precedence over a rate of its group. This function ignores keys of machine types
    ("aws/p5.48xlarge:8").
    """
    assert offer.accelerator is not None
    fewest = _fewest(task, offer)
    own: dict[int, float] = {}
    group: dict[int, float] = {}
    for key, rate in work.rates.items():
        name, stated = _split(key)
        if name == "cpu" or "/" in name:
            continue
        count = stated or fewest
        known = find_accelerator(name)
        if (known.accelerator.name if known else name) == offer.accelerator:
            if known is None or known.memory_mib in (None, offer.accelerator_memory_mib):
                own[count] = rate
        elif offer.accelerator in names_matching(name):
            group[count] = rate
    measured = own or group
    if not measured:
        return None, (f"no measured rate for {offer.accelerator}",)
    nearest = min(measured, key=lambda count: (abs(count - offer.accelerator_count), count))
    notes = (
        ()
        if own
        else (f"no rate was measured on {offer.accelerator} itself; the rate of a group is used",)
    )
    if nearest != offer.accelerator_count:
        notes = (
            *notes,
            f"rate measured on {nearest}, scaled to {offer.accelerator_count} accelerators",
        )
    return measured[nearest] * offer.accelerator_count / nearest, notes


def _cpu_rate(work: Workload, offer: Offer) -> tuple[float | None, tuple[str, ...]]:
    """Return the rate of one node without accelerators in samples per second (None if unknown), and
    notes that explain the rate.

    A key "cpu" in `work.rates` is the rate of every node that fits the task, however many CPUs the
    node has. A key "cpu:8" is a rate measured on 8 CPUs. A node gets the rate of the largest
    measured count that does not exceed its CPUs; a node with fewer CPUs than every measured count
    is slower in proportion.
    """
    rates = {_split(key): rate for key, rate in work.rates.items()}
    if ("cpu", None) in rates:
        return rates["cpu", None], (
            "the estimate uses the rate that was measured on one CPU node, and does not adapt it "
            "to other nodes",
        )
    measured = {count: rate for (name, count), rate in rates.items() if name == "cpu" and count}
    if not measured or not offer.vcpus:
        return None, ("no measured rate for CPUs",)
    below = [count for count in measured if count <= offer.vcpus]
    if below:
        return measured[max(below)], ()
    smallest = min(measured)
    return measured[smallest] * offer.vcpus / smallest, (
        f"rate measured on {smallest} vCPUs, scaled down to this node",
    )


def _fewest(task: TaskSpec, offer: Offer) -> int:
    """Return the smallest number of the offer's accelerators that a node of the task requests. A
    task that requests an instance type requests all accelerators of the type.
    """
    needs = task.resources.accelerators
    counts = [need.count_min for need in needs if is_match(offer.accelerator or "", need.name)]
    return max(1, min(counts, default=1 if needs else offer.accelerator_count))


def _split(key: str) -> tuple[str, int | None]:
    """Split a key of `work.rates`: "H100:8" -> ("H100", 8); "CPU" -> ("cpu", None)."""
    name, _, count = key.partition(":")
    return (name.lower() if name.lower() == "cpu" else name), int(count) if count.isdigit() and int(
        count
    ) else None


def _length(seconds: float) -> timedelta | None:
    """Convert seconds to a timedelta. Returns None if the number is negative or exceeds a thousand
    years."""
    return timedelta(seconds=seconds) if 0 <= seconds < 3.2e10 else None
