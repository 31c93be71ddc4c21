"""Finds avoidable costs from measurements and charges, with one function for each kind of waste.

A run is the resource use and the cost of one attempt in a period. Each function returns the amount
that the run could have saved, or None if the run has no waste of that kind. A run whose GPUs are
idle gets no other advice about its GPUs.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from enum import StrEnum

from cavvy.catalog.accelerators import Precision, find_accelerator
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import SpotPolicy
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import Struct, replace
from cavvy.planner.counterfactual import SYSTEM_MIB
from cavvy.planner.risk import (
    FAILURES_PER_NODE_HOUR,
    SPOT_PREEMPTIONS_PER_HOUR,
    checkpoint_interval,
    disturb,
)
from cavvy.planner.work import MACHINE_START

_MONTH = timedelta(days=30)
# Shorter runs are ignored, because loading and compiling leave GPUs idle for minutes.
_SHORTEST_HOURS = 1.0
# Waste below a dollar a month is not reported.
_LEAST = Money(1_000_000)
IDLE_PERCENT = 5.0  # the default of `limits.idle.gpu`
_IDLE_HOURS = 0.5  # the default of `limits.idle.for`
# The use of a GPU that never waits for data; the rest is the host's time between steps.
_FED = 0.95
_STARVED_PERCENT = 60.0
_CPUS_FULL = 0.8  # use of the node's CPUs in percent from which they limit the rate of the data
_LARGE_PERCENT = 50.0
_ROOM = 1.25  # the memory of a smaller machine, relative to the peak that was used
_PAUSED = 0.05  # the share of the time from which pauses for checkpoints are reported
_KEPT_SHARE = (
    0.2  # the share of the machine's cost; short waits between successive jobs stay below it
)
_KEEP_HOURS = 1 / 6  # 10 minutes: a person at work usually submits the next job within this time
_VOLUME_USED = 0.2  # jobs that use a volume more often need it
# Minimum savings on another offer, as a share, because the work's speed there was not measured.
_CHEAPER = 0.1
_SPOT_CHEAPER = 0.25


class WasteKind(StrEnum):
    """The cause of an avoidable cost."""

    IDLE_GPU = "idle gpu"
    UNUSED_MEMORY = "unused memory"
    STARVED = "starved by data"
    LARGE_GPU = "gpu too large"
    SPOT = "spot possible"
    CHECKPOINTS = "checkpoints too frequent"
    KEPT = "idle kept nodes"
    VOLUME = "unattached volume"


class ObservedRun(Struct, frozen=True, kw_only=True):
    """The resource use and the cost of an attempt in the period, summed over the attempt's nodes.
    Percentages are means; None means that a value was not measured. `cpu_percent` is relative to
    one CPU.
    """

    project: str
    job: str
    attempt: int
    nodes: int
    offer: Offer
    charged: Money = Money()  # cost of machines while the job used them
    hours: float = 0.0  # the sum over all nodes
    unfinished: bool = False
    session: bool = False
    cpu_percent: float | None = None
    gpu_percent: float | None = None
    idle_ranks: tuple[int, ...] = ()  # the nodes whose own mean is below 5 %
    memory_peak_mib: float | None = None
    gpu_memory_peak_mib: float | None = None  # memory of all GPUs of a node
    measured: timedelta = timedelta(0)
    checkpoints: int = 0
    pause: timedelta = timedelta(0)  # the sum over all checkpoints
    spot: SpotPolicy = SpotPolicy.NEVER
    kept: Money = Money()
    kept_hours: float = 0.0
    unattached: Money = Money()  # cost of disks while no machine used them

    @property
    def node_hours(self) -> float:
        """The hours of one node of the attempt."""
        return self.hours / self.nodes


class ObservedVolume(Struct, frozen=True, kw_only=True):
    """A volume and its unattached time in the period. `unattached` is the cost of the time in which
    no job paid for the volume. `known_hours` are the hours since the first moment at which no job
    paid for the volume. `unattached_hours` are the hours in which no job paid for the volume.
    """

    project: str
    name: str
    provider: str
    region: str
    id: str  # the volume's id at the provider
    unattached: Money
    unattached_hours: float
    known_hours: float
    free: bool  # whether no job uses the volume now


class ObservedMachine(Struct, frozen=True, kw_only=True):
    """The cost of a named machine in the period, separately for the time with a job and the time
    without a job. `kept_hours` are the idle hours summed over nodes, and `times` is the number of
    idle periods.
    """

    project: str
    name: str
    charged: Money
    kept: Money
    kept_hours: float
    times: int
    idle_now: bool


class Waste(Struct, frozen=True, kw_only=True):
    """An avoidable cost of one run. If the advice is to use a cheaper offer, `offer` is that offer.
    `every` is the recommended checkpoint interval, and `percent` the mean use of the GPU.
    """

    kind: WasteKind
    project: str
    job: str
    amount: Money  # the avoidable cost in the period
    monthly: Money
    unfinished: bool = False
    session: bool = False
    offer: Offer | None = None
    every: timedelta | None = None
    percent: float | None = None
    ranks: tuple[int, ...] = ()  # the idle nodes, if the others of the job are not
    volume: ObservedVolume | None = None
    machine: ObservedMachine | None = None


class _Saving(Struct, frozen=True, kw_only=True):
    micros: float
    offer: Offer | None = None
    every: timedelta | None = None


def advise(runs: Iterable[ObservedRun], offers: Sequence[Offer], period: timedelta) -> list[Waste]:
    """Find wasted money in the runs of a period. Returns the findings, the most expensive first.
    `offers` are the offers of the runs' providers.
    """
    found: dict[tuple[WasteKind, str, str], Waste] = {}
    for run in runs:
        for kind, rule in _RULES.items():
            saving = rule(run, offers)
            if saving is None:
                continue
            amount = Money(round(saving.micros))
            key = kind, run.project, run.job
            if key in found:
                amount += found[key].amount
            found[key] = Waste(
                kind=kind,
                project=run.project,
                job=run.job,
                amount=amount,
                monthly=Money(round(amount.micros * (_MONTH / period))),
                unfinished=run.unfinished,
                session=run.session,
                offer=saving.offer,
                every=saving.every,
                percent=run.gpu_percent,
                ranks=_merge_ranks(found.get(key), run, kind),
            )
    return sort_waste(waste for waste in found.values() if waste.monthly >= _LEAST)


def _merge_ranks(before: Waste | None, run: ObservedRun, kind: WasteKind) -> tuple[int, ...]:
    """Return the idle nodes of a job's runs. Return () if all nodes of a run are idle, or if the
    kind of waste is not IDLE_GPU.
    """
    if kind is not WasteKind.IDLE_GPU or _is_idle(run):
        return ()
    if before is None:
        return run.idle_ranks
    return tuple(sorted({*before.ranks, *run.idle_ranks})) if before.ranks else ()


def sort_waste(found: Iterable[Waste]) -> list[Waste]:
    """Return the items in the order of their cost, the most expensive first."""
    return sorted(found, key=lambda waste: (-waste.monthly.micros, waste.job, waste.kind))


def advise_volumes(volumes: Iterable[ObservedVolume], period: timedelta) -> list[Waste]:
    """Return the unattached volumes that jobs used for less than a fifth of the known hours."""
    found = []
    for each in volumes:
        used = 1 - each.unattached_hours / each.known_hours if each.known_hours else 1.0
        waste = _waste_of(WasteKind.VOLUME, each, each.unattached, period)
        if each.free and used < _VOLUME_USED and waste.monthly >= _LEAST:
            found.append(replace(waste, volume=each))
    return found


def advise_machines(machines: Iterable[ObservedMachine], period: timedelta) -> list[Waste]:
    """Return the machines that were idle for an hour or more and whose idle time makes up at least
    a fifth of their cost. The first ten minutes of each idle period do not count.
    """
    found = []
    for each in machines:
        if each.kept_hours < _SHORTEST_HOURS:
            continue
        if each.kept.micros < _KEPT_SHARE * (each.kept.micros + each.charged.micros):
            continue
        part = max(0.0, 1 - _KEEP_HOURS * each.times / each.kept_hours)
        amount = Money(round(each.kept.micros * part))
        waste = _waste_of(WasteKind.KEPT, each, amount, period)
        if waste.monthly >= _LEAST:
            found.append(replace(waste, machine=each))
    return found


def _waste_of(
    kind: WasteKind, each: ObservedVolume | ObservedMachine, amount: Money, period: timedelta
) -> Waste:
    monthly = Money(round(amount.micros * (_MONTH / period)))
    return Waste(kind=kind, project=each.project, job=each.name, amount=amount, monthly=monthly)


def _is_long(run: ObservedRun) -> bool:
    return run.node_hours >= _SHORTEST_HOURS and run.measured >= timedelta(hours=_SHORTEST_HOURS)


def _is_idle(run: ObservedRun) -> bool:
    return run.gpu_percent is not None and run.gpu_percent < IDLE_PERCENT


def _is_starved(run: ObservedRun) -> bool:
    """Return whether the CPUs are fully used while the GPU waits. Waiting for a disk or network
    cannot be distinguished from other waiting, so the function does not detect waits for a disk or
    network.
    """
    if run.cpu_percent is None or run.gpu_percent is None or not run.offer.vcpus:
        return False
    full = run.cpu_percent >= _CPUS_FULL * 100 * run.offer.vcpus
    return full and IDLE_PERCENT <= run.gpu_percent < _STARVED_PERCENT


def find_idle_gpu(run: ObservedRun, offers: Sequence[Offer]) -> _Saving | None:
    """Return the cost that `limits.idle` would have saved: the cost after the run's first half
    hour, when this limit would have stopped the run. If only some nodes are idle, return only the
    cost of the idle nodes.
    """
    if not run.offer.accelerator_count or not _is_long(run):
        return None
    part = 1.0 if _is_idle(run) else len(run.idle_ranks) / run.nodes
    saved = run.charged.micros * part * (1 - _IDLE_HOURS / run.node_hours)
    return _Saving(micros=saved) if part else None


def find_unused_memory(run: ObservedRun, offers: Sequence[Offer]) -> _Saving | None:
    """Compare two offers of the same provider with the same accelerators: the cheapest offer with
    the node's memory, and the cheapest offer with a quarter more memory than the run used. Return
    the difference between the costs of the two offers. Returns None if the node has less than twice
    the memory that the run needs. Savings from cheaper regions are not counted.
    """
    if run.memory_peak_mib is None or run.cpu_percent is None or not _is_long(run):
        return None
    memory = run.memory_peak_mib * _ROOM + SYSTEM_MIB
    cpus = run.cpu_percent / 100 * _ROOM
    if 2 * memory > run.offer.memory_mib:
        return None
    alike = [
        offer
        for offer in offers
        if _is_like(offer, run.offer) and offer.accelerator == run.offer.accelerator
    ]
    here = _cheapest(each for each in alike if each.memory_mib >= run.offer.memory_mib)
    less = _cheapest(each for each in alike if each.memory_mib >= memory and each.vcpus >= cpus)
    if here is None or less is None:
        return None
    saved = 1 - less.rate.micros_per_hour / here.rate.micros_per_hour
    if saved < _CHEAPER:
        return None
    return _Saving(micros=run.charged.micros * saved, offer=less)


def find_starved(run: ObservedRun, offers: Sequence[Offer]) -> _Saving | None:
    """Return the savings that would result if the data arrived in time. The GPU computed for the
    share g of the time. With data in time, it would compute for 95 % of the time, and the run would
    take only g / 0.95 of the measured time.
    """
    if not _is_long(run) or not _is_starved(run) or run.gpu_percent is None:
        return None
    return _Saving(micros=run.charged.micros * (1 - run.gpu_percent / 100 / _FED))


def find_large_gpu(run: ObservedRun, offers: Sequence[Offer]) -> _Saving | None:
    """Return the cheapest accelerator of the same vendor whose memory is sufficient for the run's
    peak memory use. On a different accelerator, the run's time is multiplied by 1 - g + g/r. Here g
    is the share of the time in which the GPU computes, and r is the accelerator's peak rate divided
    by the present peak rate.
    """
    known = run.gpu_percent is not None and run.gpu_memory_peak_mib is not None
    if not known or not _is_long(run) or _is_idle(run) or _is_starved(run):
        return None
    if (run.gpu_percent or 0) >= _LARGE_PERCENT:
        return None
    busy = (run.gpu_percent or 0) / 100
    each_mib = (run.gpu_memory_peak_mib or 0) / max(1, run.offer.accelerator_count)
    best: _Saving | None = None
    for offer in offers:
        ratio = _speed(offer, run.offer)
        if ratio is None or not _is_like(offer, run.offer):
            continue
        if ratio >= 1 or offer.accelerator_memory_mib < each_mib * _ROOM:
            continue
        cost = offer.rate.micros_per_hour * run.hours * (1 - busy + busy / ratio)
        saved = run.charged.micros - cost
        if saved >= 2 * _CHEAPER * run.charged.micros and (best is None or saved > best.micros):
            best = _Saving(micros=saved, offer=offer)
    return best


def find_spot(run: ObservedRun, offers: Sequence[Offer]) -> _Saving | None:
    """Return what the run would have saved on spot, with the same machine type in the same region.
    The expected time on spot includes starts and repeated work (`risk.disturb`, with the interval
    of the run's checkpoints).
    """
    wanted = run.offer.purchase is Purchase.ON_DEMAND and run.spot is SpotPolicy.NEVER
    if not wanted or run.session or not run.checkpoints or not _is_long(run) or _is_idle(run):
        return None
    here = run.offer
    spot = _cheapest(
        offer
        for offer in offers
        if offer.purchase is Purchase.SPOT
        and (offer.provider, offer.region) == (here.provider, here.region)
        and offer.instance_type == here.instance_type
    )
    if spot is None:
        return None
    length = timedelta(hours=run.node_hours)
    per_hour = SPOT_PREEMPTIONS_PER_HOUR * run.nodes
    every = run.measured / run.checkpoints
    expected = disturb(length, start=MACHINE_START, per_hour=per_hour, every=every)
    if expected is None:
        return None
    cost = spot.rate.times(run.nodes).over(expected.wall_time)
    saved = run.charged.micros - cost.micros
    return None if saved < _SPOT_CHEAPER * run.charged.micros else _Saving(micros=saved, offer=spot)


def find_frequent_checkpoints(run: ObservedRun, offers: Sequence[Offer]) -> _Saving | None:
    """Return the savings if the run had used Daly's checkpoint interval, and this interval is
    longer than the run's own. A longer interval means fewer pauses, which reduces the cost. Each
    time that a node is lost, more work must be repeated: on average, half of the difference between
    the two intervals. The cost of this work is subtracted. The result is None if the pauses take
    less than 5 % of the time.
    """
    if not run.checkpoints or not _is_long(run) or not run.pause:
        return None
    paused = run.pause / run.measured
    if paused < _PAUSED:
        return None
    is_spot = run.offer.purchase is Purchase.SPOT
    per_hour = (SPOT_PREEMPTIONS_PER_HOUR if is_spot else FAILURES_PER_NODE_HOUR) * run.nodes
    cost, every = run.pause / run.checkpoints, run.measured / run.checkpoints
    best = checkpoint_interval(cost, timedelta(hours=1 / per_hour))
    if best <= every:
        return None
    paused_then = cost / (best + cost)
    repeated = per_hour * (best - every) / 2 / timedelta(hours=1)
    saved = 1 - (1 - paused) / (1 - paused_then) - repeated
    return None if saved <= 0 else _Saving(micros=run.charged.micros * saved, every=best)


def find_kept(run: ObservedRun, offers: Sequence[Offer]) -> _Saving | None:
    """Return the cost of the time for which nodes were kept warm, except the first ten minutes of
    each node.
    """
    hours = run.kept_hours / run.nodes
    if hours < _SHORTEST_HOURS:
        return None
    if run.kept.micros < _KEPT_SHARE * (run.kept.micros + run.charged.micros):
        return None
    return _Saving(micros=run.kept.micros * (1 - _KEEP_HOURS / hours))


def find_unattached_volume(run: ObservedRun, offers: Sequence[Offer]) -> _Saving | None:
    """Return the cost of disks while no machine used them."""
    return _Saving(micros=run.unattached.micros) if run.unattached.micros > 0 else None


_RULES: dict[WasteKind, Callable[[ObservedRun, Sequence[Offer]], _Saving | None]] = {
    WasteKind.IDLE_GPU: find_idle_gpu,
    WasteKind.UNUSED_MEMORY: find_unused_memory,
    WasteKind.STARVED: find_starved,
    WasteKind.LARGE_GPU: find_large_gpu,
    WasteKind.SPOT: find_spot,
    WasteKind.CHECKPOINTS: find_frequent_checkpoints,
    WasteKind.KEPT: find_kept,
    WasteKind.VOLUME: find_unattached_volume,
}


def _is_like(offer: Offer, here: Offer) -> bool:
    """Return whether the offer can replace the node, ignoring the offer's memory and kind of
    accelerator.
    """
    same = (offer.provider, offer.purchase, offer.accelerator_count, offer.architecture) == (
        here.provider,
        here.purchase,
        here.accelerator_count,
        here.architecture,
    )
    rentable = not offer.shared and not offer.term_months and offer.rate > HourlyRate()
    return same and rentable and offer.accelerator_part == here.accelerator_part


def _cheapest(offers: Iterable[Offer]) -> Offer | None:
    return min(offers, key=lambda each: (each.rate, each.key), default=None)


def _speed(offer: Offer, here: Offer) -> float | None:
    """Return the ratio of the peak rates, in the first precision for which both rates are known, or
    None if the vendors differ.
    """
    if not offer.accelerator or not here.accelerator or offer.accelerator == here.accelerator:
        return None
    one, other = find_accelerator(offer.accelerator), find_accelerator(here.accelerator)
    if one is None or other is None or one.accelerator.vendor != other.accelerator.vendor:
        return None
    for precision in (Precision.BF16, Precision.FP16, Precision.FP32):
        there, now = (each.accelerator.peak.get(precision) for each in (one, other))
        if there and now:
            return there / now
    return None
