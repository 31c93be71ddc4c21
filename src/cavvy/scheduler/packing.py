"""Chooses the part of a shared host that a node of a gang would get. The module does no I/O. The
store checks each allocation again before it writes the allocation.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from itertools import chain
from statistics import fmean

from cavvy.domain.allocations import Allocation, Host, SlicedGpu
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import DEFAULT_CPUS, TaskSpec, TopologyNeed
from cavvy.domain.values import Struct, replace
from cavvy.scheduler.fragmentation import (
    WHOLE,
    FreeNode,
    NodeDemand,
    PlacementRater,
    find_largest,
    find_typical,
)
from cavvy.scheduler.topology import HostLabels, choose_hosts, choose_joined, explain_lack

_SLACK = 1e-6  # sums of tenths of a CPU are not exact in floating point


class AllocationOwner(Struct, frozen=True, kw_only=True):
    """The gang that holds an allocation, and its project."""

    gang: str
    project: str


def host_of(offer: Offer, hosts: Iterable[Host]) -> Host | None:
    """Return the shared host of an offer. The host's name is provider/zone, or provider/region if
    the provider has no zones.
    """
    name = name_of(offer)
    return next((host for host in hosts if host.name == name), None)


def name_of(offer: Offer) -> str:
    """Return the name that the host of an offer has, if the offer is of one shared host."""
    return f"{offer.provider}/{offer.zone or offer.region}"


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
    rater: "HostRater | None" = None,
) -> tuple[Allocation, ...] | None:
    """Return the allocations of all ranks of the gang on the offer's hosts, sorted by rank. Returns
    None if not all ranks fit.

    In a group of hosts, each rank gets its own host. Of the hosts that have room, `topology`
    chooses; where it leaves a choice, the gang gets those that `rater` rates best, or else the
    first.
    """
    found = hosts_of(offer, hosts)
    one = host_of(offer, found)
    if one is not None:
        if task.nodes > 1 and (one.group or not _has_label(one, task.topology)):
            return None
        return allocate_on(task, offer, one, allocations, owner)
    if task.nodes == 1:
        return None
    return _FittingHosts(task, offer, found, owner, _by_host(allocations)).allocate(
        task, owner, rater
    )


def explain_topology(
    task: TaskSpec,
    offer: Offer,
    hosts: Sequence[Host],
    allocations: Sequence[Allocation],
    owner: AllocationOwner,
) -> str:
    """Return what the required racks, or other domains, of the offer's hosts lack, or "" if the
    task fits or lacks something else."""
    if task.topology is None or task.nodes == 1:
        return ""
    found = hosts_of(offer, hosts)
    return _FittingHosts(task, offer, found, owner, _by_host(allocations)).explain(task)


def _has_label(host: Host, need: TopologyNeed | None) -> bool:
    """Return whether the host, alone, is a domain of the required label."""
    return need is None or need.same is None or need.same in dict(host.labels)


class _FittingHosts:
    """The hosts of a group that have room for one rank of a task. Hosts are named by their
    positions, and idle hosts of the same size are looked at once, because large groups have many of
    them. `taken` are the allocations on each host."""

    def __init__(
        self,
        task: TaskSpec,
        offer: Offer,
        hosts: Sequence[Host],
        owner: AllocationOwner,
        taken: Mapping[str, Sequence[Allocation]],
    ) -> None:
        self._task, self._offer, self._hosts = task, offer, hosts
        self._labels = HostLabels([host.labels for host in hosts])
        self._position = {host.name: at for at, host in enumerate(hosts)}
        self._taken = taken
        self._fits: dict[Hashable, bool] = {}
        self._free = {at: None for at in range(len(hosts)) if self._has_room(at, owner)}

    def renew(
        self,
        changed: Iterable[str],
        owner: AllocationOwner,
        taken: Mapping[str, Sequence[Allocation]],
    ) -> None:
        """Look again at these hosts."""
        self._taken = taken
        for at in {self._position[name] for name in changed if name in self._position}:
            self._fits.pop(at, None)
            if self._has_room(at, owner):
                self._free[at] = None
            else:
                self._free.pop(at, None)

    def allocate(
        self, task: TaskSpec, owner: AllocationOwner, rater: "HostRater | None"
    ) -> tuple[Allocation, ...] | None:
        """Return the allocations of a task with the same resources, or None."""
        rates: dict[Hashable, float] = {}

        def rate(at: int) -> float:
            assert rater is not None
            host = self._hosts[at]
            # where as much is free, as much is left; slices also differ by their places
            like = at if host.sliced else rater.list_free(host)
            if like not in rates:
                rates[like] = rater.rate((self._take(at, owner),))
            return rates[like]

        chosen = self.choose(task, None if rater is None else rate)
        if chosen is None:
            return None
        return tuple(replace(self._take(at, owner), rank=rank) for rank, at in enumerate(chosen))

    def choose(
        self, task: TaskSpec, rate: Callable[[int], float] | None = None
    ) -> Sequence[int] | None:
        return choose_hosts(self._labels, sorted(self._free), task.nodes, task.topology, rate)

    def explain(self, task: TaskSpec) -> str:
        return explain_lack(self._labels, sorted(self._free), task.nodes, task.topology)

    def _has_room(self, at: int, owner: AllocationOwner) -> bool:
        like = self._like(at)
        if like not in self._fits:
            self._fits[like] = self._try(at, owner) is not None
        return self._fits[like]

    def _like(self, at: int) -> Hashable:
        """Return a key that is equal for idle hosts of the same size."""
        host = self._hosts[at]
        if self._taken.get(host.name) or host.sliced:
            return at
        return host.cpus, host.memory_mib, host.disk_gib, host.kinds, len(host.devices)

    def _take(self, at: int, owner: AllocationOwner) -> Allocation:
        found = self._try(at, owner)
        assert found is not None
        return found

    def _try(self, at: int, owner: AllocationOwner) -> Allocation | None:
        host = self._hosts[at]
        return allocate_one(self._task, self._offer, host, self._taken.get(host.name, ()), owner, 0)


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

    A task that requests no size gets one CPU and no memory. Whole devices are allocated in the
    order in which the host lists them, unless NVLink joins only some of them. If the offer is a
    part of a device, `choose_shared` chooses the device.
    """
    need = task.resources.stated()  # a shared host is the user's own machine
    cpus = need.cpus_min if need.cpus_min is not None else min(DEFAULT_CPUS, host.cpus)
    memory_mib = need.least_memory_mib(cpus)
    if not may_share(host, allocations, owner.project):
        return None
    free = _free_devices(offer, host, allocations)
    if offer.accelerator_part < 1:
        devices = choose_shared(offer.accelerator_part, free)
    else:
        whole = [each for each, left in free.items() if left == 1]
        devices = list(choose_joined(whole, offer.accelerator_count, host.islands))
        if not devices and host.sliced:
            devices = choose_slices(offer.instance_type, host, allocations)
    if len(devices) < offer.accelerator_count:
        return None
    if cpus > host.cpus - sum(allocation.cpus for allocation in allocations) + _SLACK:
        return None
    if memory_mib > host.memory_mib - sum(allocation.memory_mib for allocation in allocations):
        return None
    disk_gib = need.disk_gib or 0
    # what running jobs have written is already missing, and their requests are counted as well
    held_gib = sum(allocation.disk_gib for allocation in allocations)
    if disk_gib and host.disk_gib is not None and disk_gib > host.disk_gib - held_gib:
        return None
    return Allocation(
        host=host.name,
        gang=owner.gang,
        rank=rank,
        project=owner.project,
        cpus=cpus,
        memory_mib=memory_mib,
        devices=tuple(devices),
        part=offer.accelerator_part,
        disk_gib=disk_gib,
    )


def may_share(host: Host, allocations: Iterable[Allocation], project: str) -> bool:
    """Return whether jobs of the project may run on the host together with the jobs that already
    have allocations on the host.
    """
    return host.separates or all(
        allocation.project == project for allocation in allocations if allocation.host == host.name
    )


def choose_shared(part: float, free: Mapping[str, float]) -> list[str]:
    """Return the device on which `part` leaves the least free, or [] if it fits on no device.
    `free` has the free part of each device. Because used devices are filled first (best fit), whole
    devices stay free.
    """
    fitting = [each for each, left in free.items() if part <= left + _SLACK]
    return [min(fitting, key=free.__getitem__)] if fitting else []


def choose_slices(kind: str, host: Host, allocations: Iterable[Allocation]) -> list[str]:
    """Return the slices on which an agent makes a MIG instance of this kind, or [] if none are
    free. Of all places, the one is chosen that costs the least of what the GPU's free slices could
    still hold, with large instances counting most."""
    used, present = _sum_parts(allocations), set(host.devices)
    places: list[tuple[int, list[str]]] = []
    for gpu in host.sliced:
        last = max(start + size for _, size, starts in gpu.profiles for start in starts)
        names = [f"{gpu.gpu}/{at}" for at in range(last)]
        free = {at for at, name in enumerate(names) if name in present and not used[name]}
        room = _count_room(gpu, free)
        for name, size, starts in gpu.profiles:
            for start in starts if name == kind else ():
                mine = range(start, start + size)
                if free >= {*mine}:
                    loss = room - _count_room(gpu, free - {*mine})
                    places.append((loss, [names[at] for at in mine]))
    return min(places, key=lambda place: place[0])[1] if places else []


def _count_room(gpu: SlicedGpu, free: Set[int]) -> int:
    """Return the sum of the squared sizes of all instances that the free slices could hold."""
    return sum(
        size * size
        for _, size, starts in gpu.profiles
        for start in starts
        if free >= {*range(start, start + size)}
    )


def _free_devices(
    offer: Offer, host: Host, allocations: Sequence[Allocation]
) -> Mapping[str, float]:
    """Return the free part of each of the host's devices of the offer's kind. A whole free device
    has 1.
    """
    used = _sum_parts(allocations)
    kinds = host.kinds or (offer.instance_type,) * len(host.devices)
    return {
        device: max(0.0, 1 - used[device])
        for device, kind in zip(host.devices, kinds, strict=True)
        if kind == offer.instance_type
    }


def _sum_parts(allocations: Iterable[Allocation]) -> Mapping[str, float]:
    """Return how much of each device is held; a whole device is 1."""
    used: defaultdict[str, float] = defaultdict(float)
    for allocation in allocations:
        for device in allocation.devices:
            used[device] += allocation.part
    return used


class HostIndex:
    """Finds the shared hosts of offers without a look at each host."""

    def __init__(self, hosts: Iterable[Host]) -> None:
        self.by_name = {host.name: host for host in hosts}
        self._groups: defaultdict[str, list[Host]] = defaultdict(list)
        for host in self.by_name.values():
            if host.group:
                self._groups[host.group].append(host)

    def find(self, offer: Offer) -> Sequence[Host]:
        """Return the same as `hosts_of`."""
        one = self.by_name.get(name_of(offer))
        return self._groups.get(f"{offer.provider}/{offer.region}", ()) if one is None else (one,)


class HostRater:
    """Rates allocations on the hosts by the fragments that they leave (see `fragmentation`); lower
    is better. The typical jobs are those that hold allocations when the first one is rated.

    The devices of each kind on a host are rated as a node of their own, with the host's CPUs and
    memory. `changes` names the hosts whose allocations have changed, once for each change.
    """

    def __init__(self, hosts: Iterable[Host], allocations: Sequence[Allocation]) -> None:
        self.index = HostIndex(hosts)
        self.separates = all(host.separates for host in self.index.by_name.values())
        self.changes: list[str] = []
        self._given = {id(each): each for each in allocations}
        self._held = _by_host(allocations)
        self._added: set[str] = set()  # hosts with allocations that were not given
        self._free: dict[str, tuple[FreeNode, ...]] = {}
        self._idle: dict[str, int] = {}  # how many devices of a host no job holds
        self._rater: PlacementRater | None = None
        self._demands: dict[str, Sequence[NodeDemand]] = {}  # of the allocations on each host
        self._largest: FreeNode | None = None
        # the hosts of groups with room for a rank, and how many changes they take into account
        self._fitting: dict[Hashable, tuple[_FittingHosts, int]] = {}

    def find_fitting(
        self, task: TaskSpec, offer: Offer, owner: AllocationOwner
    ) -> _FittingHosts | None:
        """Return the hosts of the offer's group that have room for a rank of the task. Only those
        that have changed are looked at again. Returns None if the offer is of one host."""
        if name_of(offer) in self.index.by_name:
            return None
        project = "" if self.separates else owner.project
        what = (offer.instance_type, offer.accelerator_count, offer.accelerator_part)
        key = name_of(offer), what, task.resources, project
        known, seen = self._fitting.get(key, (None, 0))
        if known is None:
            known = _FittingHosts(task, offer, self.index.find(offer), owner, self._held)
        else:
            known.renew(self.changes[seen:], owner, self._held)
        self._fitting[key] = known, len(self.changes)
        return known

    def renew(self, allocations: Sequence[Allocation]) -> None:
        """Count these allocations as held, and no others. Those that are the same objects as before
        are not compared."""
        given, before = {id(each): each for each in allocations}, self._given
        changed = {before[lost].host for lost in before.keys() - given.keys()}
        added = _by_host(given[new] for new in given.keys() - before.keys())
        for name in sorted({*self._added, *changed, *added}):
            known = self._held.get(name, ())
            kept = [each for each in known if id(each) in given and id(each) in before]
            held = sorted([*kept, *added.get(name, ())], key=lambda each: (each.gang, each.rank))
            if name in self._added or held != self._held.get(name, []):
                self._change(name)
            self._held[name] = held
        self._given, self._added, self._rater = given, set(), None

    def list_held(self, hosts: Iterable[Host]) -> Sequence[Allocation]:
        """Return the allocations on these hosts."""
        return [each for host in hosts for each in self._held.get(host.name, ())]

    def is_full(self, host: Host, offer: Offer) -> bool:
        """Return whether fewer devices of the host are idle than the offer has. Offers of parts of
        devices, and of no devices, need another check."""
        if offer.accelerator_part < 1:
            return False
        idle = self._idle.get(host.name)
        if idle is None:
            taken = {device for each in self._held.get(host.name, ()) for device in each.devices}
            idle = self._idle[host.name] = len(set(host.devices) - taken)
        return idle < offer.accelerator_count

    def rate(self, allocations: Sequence[Allocation]) -> float:
        """Return the mean rate of these new allocations over their hosts."""
        more = _by_host(allocations)
        return fmean(self._rate_on(self.index.by_name[name], mine) for name, mine in more.items())

    def add(self, allocations: Iterable[Allocation]) -> None:
        """Count the allocations as held from now on."""
        for each in allocations:
            self._held.setdefault(each.host, []).append(each)
            self._added.add(each.host)
            self._change(each.host)

    def remove(self, allocations: Iterable[Allocation]) -> None:
        """Count the allocations as not held from now on."""
        for each in allocations:
            self._held[each.host].remove(each)
            self._change(each.host)

    def _change(self, name: str) -> None:
        self._free.pop(name, None)
        self._idle.pop(name, None)
        self._demands.pop(name, None)
        self.changes.append(name)

    def list_free(self, host: Host) -> tuple[FreeNode, ...]:
        """Return what is free on the host, for each kind of its devices."""
        free = self._free.get(host.name)
        if free is None:
            free = self._free[host.name] = _list_free(host, self._held.get(host.name, ()))
        return free

    def _rate_on(self, host: Host, more: Sequence[Allocation]) -> float:
        if self._rater is None:
            self._rater = self._make_rater()
        after = _list_free(host, [*self._held.get(host.name, ()), *more])
        return fmean(map(self._rater.rate, self.list_free(host), after))

    def _make_rater(self) -> PlacementRater:
        for name, host in self.index.by_name.items():
            if name not in self._demands:
                held = self._held.get(name, ())
                self._demands[name] = [_demand_of(host, each) for each in held]
        if self._largest is None:
            empty = (_list_free(host, ()) for host in self.index.by_name.values())
            self._largest = find_largest(chain.from_iterable(empty))
        demands = chain.from_iterable(map(self._demands.__getitem__, self.index.by_name))
        return PlacementRater(find_typical(demands), self._largest)


def _by_host(allocations: Iterable[Allocation]) -> dict[str, list[Allocation]]:
    found: defaultdict[str, list[Allocation]] = defaultdict(list)
    for each in allocations:
        found[each.host].append(each)
    return dict(found)


def _list_free(host: Host, allocations: Sequence[Allocation]) -> tuple[FreeNode, ...]:
    used = _sum_parts(allocations)
    free = {name: max(0, WHOLE - round(WHOLE * used[name])) for name in host.devices}
    cpus = round(host.cpus - sum(each.cpus for each in allocations), 3)
    memory_mib = host.memory_mib - sum(each.memory_mib for each in allocations)
    kinds = _kinds_of(host)
    if not kinds:
        return (FreeNode(cpus, memory_mib),)
    return tuple(
        FreeNode(
            cpus,
            memory_mib,
            tuple(sorted(free[name] for name in kinds if kinds[name] == kind)),
            kind,
        )
        for kind in dict.fromkeys(kinds.values())
    )


def _demand_of(host: Host, allocation: Allocation) -> NodeDemand:
    kinds = _kinds_of(host)
    wanted = {kinds[device] for device in allocation.devices if device in kinds}
    return NodeDemand(
        allocation.cpus,
        allocation.memory_mib,
        len(allocation.devices),
        round(WHOLE * allocation.part),
        kinds=tuple(sorted(wanted)),
    )


def _kinds_of(host: Host) -> Mapping[str, str]:
    """Return the kind of each device of the host."""
    return dict(zip(host.devices, host.kinds or ("",) * len(host.devices), strict=True))
