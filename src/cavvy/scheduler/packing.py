"""Chooses the part of a shared host that a node of a gang would get. The module does no I/O. The
store checks each allocation again before it writes the allocation.
"""

from collections.abc import Iterable, Sequence

from cavvy.domain.allocations import Allocation, Host
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import DEFAULT_CPUS, TaskSpec
from cavvy.domain.values import Struct

_SLACK = 1e-6  # sums of tenths of a CPU are not exact in floating point


class AllocationOwner(Struct, frozen=True, kw_only=True):
    """The gang that holds an allocation, and its project."""

    gang: str
    project: str


def host_of(offer: Offer, hosts: Iterable[Host]) -> Host | None:
    """Return the shared host of an offer. The host's name is provider/zone, or provider/region if
    the provider has no zones.
    """
    name = f"{offer.provider}/{offer.zone or offer.region}"
    return next((host for host in hosts if host.name == name), None)


def hosts_of(offer: Offer, hosts: Iterable[Host]) -> Sequence[Host]:
    """Return the shared hosts of an offer: its own host, or the hosts of its group
    (`Host.group`)."""
    hosts = tuple(hosts)
    one = host_of(offer, hosts)
    return (
        [host for host in hosts if host.group == f"{offer.provider}/{offer.region}"]
        if one is None
        else [one]
    )


def allocate_across(
    task: TaskSpec,
    offer: Offer,
    hosts: Sequence[Host],
    allocations: Sequence[Allocation],
    owner: AllocationOwner,
) -> tuple[Allocation, ...] | None:
    """Return the allocations of all ranks of the gang on the offer's hosts, sorted by rank. Returns
    None if not all ranks fit.

    In a group of hosts, each rank gets its own host, in the order of the hosts.
    """
    found = hosts_of(offer, hosts)
    one = host_of(offer, found)
    if one is not None:
        return (
            allocate_on(task, offer, one, allocations, owner)
            if task.nodes == 1 or not one.group
            else None
        )
    mine: list[Allocation] = []
    for host in found if task.nodes > 1 else ():
        taken = [allocation for allocation in allocations if allocation.host == host.name]
        allocation = allocate_one(task, offer, host, taken, owner, len(mine))
        mine += [allocation] if allocation is not None and len(mine) < task.nodes else []
    return tuple(mine) if len(mine) == task.nodes else None


def allocate_on(
    task: TaskSpec,
    offer: Offer,
    host: Host,
    allocations: Sequence[Allocation],
    owner: AllocationOwner,
) -> tuple[Allocation, ...] | None:
    """Return new allocations on `host` for all ranks of the gang, sorted by rank. `allocations` are
    the existing ones, whose resources are in use. Returns None if not all ranks fit.
    """
    taken = [allocation for allocation in allocations if allocation.host == host.name]
    mine: list[Allocation] = []
    for rank in range(task.nodes):
        allocation = allocate_one(task, offer, host, taken, owner, rank)
        if allocation is None:
            return None
        taken.append(allocation)
        mine.append(allocation)
    return tuple(mine)


def allocate_one(
    task: TaskSpec,
    offer: Offer,
    host: Host,
    allocations: Sequence[Allocation],
    owner: AllocationOwner,
    rank: int,
) -> Allocation | None:
    """Return the allocation of one rank on `host`. `allocations` are all existing allocations on
    this host. Returns None if the rank does not fit.

    A task that requests no size gets one CPU and no memory. Devices are never divided. Devices are
    allocated in the order in which the host lists them.
    """
    need = task.resources.stated()  # a shared host is the user's own machine
    cpus = need.cpus_min if need.cpus_min is not None else min(DEFAULT_CPUS, host.cpus)
    memory_mib = need.least_memory_mib(cpus)
    if not may_share(host, allocations, owner.project):
        return None
    devices = _free_devices(offer, host, allocations)[: offer.accelerator_count]
    if len(devices) < offer.accelerator_count:
        return None
    if cpus > host.cpus - sum(allocation.cpus for allocation in allocations) + _SLACK:
        return None
    if memory_mib > host.memory_mib - sum(allocation.memory_mib for allocation in allocations):
        return None
    return Allocation(
        host=host.name,
        gang=owner.gang,
        rank=rank,
        project=owner.project,
        cpus=cpus,
        memory_mib=memory_mib,
        devices=tuple(devices),
    )


def may_share(host: Host, allocations: Iterable[Allocation], project: str) -> bool:
    """Return whether jobs of the project may run on the host together with the jobs that already
    have allocations on the host.
    """
    return host.separates or all(
        allocation.project == project for allocation in allocations if allocation.host == host.name
    )


def _free_devices(offer: Offer, host: Host, allocations: Sequence[Allocation]) -> list[str]:
    """Return the host's free devices of the offer's kind."""
    taken = {device for allocation in allocations for device in allocation.devices}
    kinds = host.kinds or (offer.instance_type,) * len(host.devices)
    return [
        device
        for device, kind in zip(host.devices, kinds, strict=True)
        if kind == offer.instance_type and device not in taken
    ]
