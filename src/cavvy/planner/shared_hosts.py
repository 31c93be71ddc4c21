"""Selects which offer of a shared host a task may use, divides an offer of one GPU if the task asks
for a part of it, and checks whether the task fits on the host.
"""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import groupby

from cavvy.catalog.accelerators import VGPU, Vendor, find_accelerator, split_instance
from cavvy.catalog.fit import accelerator_fit
from cavvy.domain.allocations import Host
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import AcceleratorNeed, TaskSpec
from cavvy.domain.values import replace
from cavvy.scheduler.packing import (
    AllocationOwner,
    HostIndex,
    allocate_across,
    explain_topology,
    host_of,
)


def smallest_shares(task: TaskSpec, offers: Iterable[Offer], hosts: Sequence[Host]) -> list[Offer]:
    """For each shared host, keep only the offer with the fewest devices. Offers of machines that
    are not shared hosts are all kept.

    A shared host has one offer for each number of devices. If all offers were kept, a task that
    needs two devices could receive eight devices. The offers of a group of `hosts` are left out for
    a task with one node, because each host of the group has its own offers; for a task with several
    nodes, those are left out if the group has such an offer. If the task asks for a part of a GPU,
    the offer is divided: it has the part's memory and price. An offer whose machine is
    paid once for all nodes has the price of one of the task's nodes.
    """
    kept: list[Offer] = []
    shared: list[Offer] = []
    index = HostIndex(hosts if task.nodes == 1 else ())
    for offer in offers:
        if offer.shared and task.nodes == 1 and _is_group(offer, index.find(offer)):
            continue
        (shared if offer.shared else kept).append(offer)

    if task.nodes > 1:
        groups = {
            (each.provider, each.region, each.instance_type) for each in shared if not each.zone
        }
        shared = [
            each
            for each in shared
            if not each.zone or (each.provider, each.region, each.instance_type) not in groups
        ]

    def place(offer: Offer) -> tuple[str, ...]:
        kind = (offer.instance_type,) if task.resources.accelerators else ()
        return (offer.provider, offer.region, offer.zone or "", *kind)

    for _, group in groupby(
        sorted(shared, key=lambda offer: (*place(offer), offer.accelerator_count)), key=place
    ):
        kept.append(divide(task, _price_node(task, next(group))))
    return kept


def _price_node(task: TaskSpec, offer: Offer) -> Offer:
    """Return the offer with the part of its price that each of the task's nodes pays if the machine
    is paid once for all of them. Each part is rounded to a micro-dollar per hour."""
    if offer.payers:
        return offer
    return replace(offer, payers=task.nodes, rate=offer.rate.divide(Fraction(1, task.nodes)))


def divide(task: TaskSpec, offer: Offer) -> Offer:
    """Return the part of a shared host's offer that the task asks for. Only NVIDIA's GPUs are
    divided, and no virtual ones, whose drivers may have neither MPS nor the memory of processes; a
    task that asks for a part of another GPU gets the whole GPU.
    """
    if not (offer.shared and offer.accelerator_count == 1 and offer.accelerator_part == 1):
        return offer
    if VGPU in offer.instance_type:
        return offer
    known = find_accelerator(offer.accelerator or "")
    if known is None or known.accelerator.vendor is not Vendor.NVIDIA:
        return offer
    part = next((_part(need, offer) for need in _needs(task) if _fits(need, offer)), Fraction(1))
    if part >= 1:
        return offer
    return replace(
        offer,
        accelerator_part=float(part),
        accelerator_memory_mib=int(offer.accelerator_memory_mib * part),
        rate=offer.rate.divide(part),
    )


def object_to_share(task: TaskSpec, offer: Offer) -> str:
    """Return why the offer, a GPU of the user's own machines or a part of one, cannot be isolated
    as the task requires, or "" if it need not be isolated."""
    if not (offer.owned or offer.shared) or not any(need.isolated for need in _needs(task)):
        return ""
    _, virtual, profile = offer.instance_type.partition(VGPU)
    if virtual and "-" not in profile:
        return (
            f"{offer.key}: the task requires isolation, but other machines share the GPU of this "
            "virtual GPU by time slices; request a virtual GPU that a MIG instance backs, a whole "
            "GPU or a MIG instance such as A100:1g.10gb, or set `isolation: none`"
        )
    if offer.accelerator_part == 1:
        return ""
    return (
        f"{offer.key}: the task requires isolation, but jobs share this GPU by MPS or time slices, "
        "which do not separate their errors and bandwidth; request a whole GPU or a MIG instance "
        "such as A100:1g.10gb, or set `isolation: none`"
    )


def _needs(task: TaskSpec) -> Sequence[AcceleratorNeed]:
    return task.resources.stated().accelerators  # a shared host is the user's own machine


def note_share(task: TaskSpec, offer: Offer) -> str:
    """Return a note for an offer of a whole GPU to a task that asks for a part of one, or ""."""
    if offer.accelerator_part < 1 or not offer.accelerator_count:
        return ""
    needs = _needs(task) if offer.shared else task.resources.accelerators
    if split_instance(offer.accelerator or ""):
        return ""
    if not any(need.part < 1 for need in needs) or any(need.part == 1 for need in needs):
        return ""
    if VGPU in offer.instance_type:
        return "the job gets the whole virtual GPU: only physical GPUs are divided"
    if offer.shared:
        return "the job gets the whole GPU: only NVIDIA's GPUs are divided"
    return "the job gets the whole GPU and pays for the whole node"


def _fits(need: AcceleratorNeed, offer: Offer) -> bool:
    count, memory_mib = offer.accelerator_count, offer.accelerator_memory_mib
    return accelerator_fit(offer.accelerator, count, memory_mib, (need,), True)[0] is None


def _part(need: AcceleratorNeed, offer: Offer) -> Fraction:
    """Return the part of the offer's GPU that the task asks for."""
    if need.share_mib is not None:
        return Fraction(need.share_mib, offer.accelerator_memory_mib)
    return Fraction(need.part).limit_denominator(10_000)


def _is_group(offer: Offer, found: Sequence[Host]) -> bool:
    return bool(found) and host_of(offer, found) is None


def object_to_topology(
    task: TaskSpec, offer: Offer, mine: Sequence[Host], hosts: Sequence[Host]
) -> str:
    """Return why the offer's hosts, which are some of the hosts, could not be as close to each
    other as the task requires, even if all of them were idle, or ""."""
    need = task.topology
    if need is None or not offer.shared:
        return ""
    here = _list_labels(mine)
    for label, among in ((need.same, mine), (need.prefer, hosts)):
        if label is None or label in here:
            continue
        known = _list_labels(among)
        if label not in known and (known or label == need.same):
            named = f"the labels are {', '.join(known)}" if known else "the hosts have no labels"
            return f"{offer.key}: topology: no node has the label {label}; {named}"
    owner = AllocationOwner(gang="", project=task.project)
    lack = explain_topology(task, offer, mine, (), owner)
    return f"{offer.key}: topology: {lack}, even if all nodes were idle" if lack else ""


def _list_labels(hosts: Iterable[Host]) -> Sequence[str]:
    return sorted({label for labels in {host.labels for host in hosts} for label, _ in labels})


def fits_empty(task: TaskSpec, offer: Offer, hosts: Sequence[Host]) -> bool:
    """Return whether all nodes of the task would fit on the offer's hosts at the same time if the
    hosts were idle.
    """
    return (
        allocate_across(task, offer, hosts, (), AllocationOwner(gang="", project=task.project))
        is not None
    )
