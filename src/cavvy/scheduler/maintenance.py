"""Decides what maintenance of hosts means for their work: which hosts take no new work, and when
the work of a host that is drained must leave. Decides which jobs the reservations of hosts keep
out, and which GPUs a reservation gets. The module does no I/O.

As in Kubernetes (https://kubernetes.io/docs/tasks/administer-cluster/safely-drain-node/), a host is
cordoned before its work leaves; as in Slurm (`scontrol update state=drain`), work that would be
lost may end first. As with Slurm's reservations (https://slurm.schedmd.com/reservations.html), a
job without a right to a reserved part never starts on it if it may still run when the reservation
begins. Only a time limit states how long a job runs at most, so a job without one does not start
there.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.domain.allocations import Allocation, Host
from cavvy.domain.authorization import list_line
from cavvy.domain.maintenance import NodeState, Reservation, ReservedPart
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import ResourceSpec, TaskSpec, TopologyNeed
from cavvy.domain.values import Struct, replace
from cavvy.scheduler.packing import (
    AllocationOwner,
    HostIndex,
    allocate_across,
    choose_slices,
    name_of,
)


class NodeWork(Struct, frozen=True, kw_only=True):
    """A gang on a host that is drained. The gang gets `notice` to end. `saves` means that its work
    runs and saves checkpoints, and `idle` that the gang is kept without work. A gang that is
    `leaving` has got its notice."""

    gang: str
    notice: timedelta
    saves: bool = False
    idle: bool = False
    leaving: bool = False


class DrainStep(Struct, frozen=True, kw_only=True):
    """The gangs that must leave now, each with the time at which its nodes are taken, the idle
    gangs to release, and when to decide again (None if nothing is left to decide)."""

    leave: Mapping[str, datetime]
    release: Sequence[str]
    again_at: datetime | None


def decide_drain(work: Sequence[NodeWork], by: datetime, now: datetime) -> DrainStep:
    """Decide which gangs leave a host that is to be free at the time `by`.

    Work that saves checkpoints leaves at once, because it loses nothing. Other work may end by
    itself until its notice must begin. Each gang gets its whole notice, so the host may be free
    later than `by`.
    """
    staying = [each for each in work if not each.leaving and not each.idle]
    latest = {each.gang: now if each.saves else by - each.notice for each in staying}
    return DrainStep(
        leave={each.gang: now + each.notice for each in staying if latest[each.gang] <= now},
        release=[each.gang for each in work if each.idle and not each.leaving],
        again_at=min((at for at in latest.values() if at > now), default=None),
    )


def find_sick(host: Host, state: NodeState | None) -> Mapping[str, str]:
    """Return the devices of the host on which no work is placed, with the reasons."""
    found = {**dict(host.sick), **(state.sick if state else {})}
    return {device: why for device, why in found.items() if device in host.devices}


def close_hosts(hosts: Sequence[Host], states: Mapping[str, NodeState]) -> Sequence[Host]:
    """Return the hosts as new work may use them: cordoned hosts are not ready, and the sick devices
    of the others are missing."""
    return [
        _close(host, states.get(host.name)) if host.sick or host.name in states else host
        for host in hosts
    ]


def _close(host: Host, state: NodeState | None) -> Host:
    if state is not None and (problem := state.describe()):
        return replace(host, ready=False, cordoned=True, problem=problem)
    sick = find_sick(host, state)
    if not sick:
        return host
    kept = [at for at, device in enumerate(host.devices) if device not in sick]
    return replace(
        host,
        devices=tuple(host.devices[at] for at in kept),
        kinds=tuple(host.kinds[at] for at in kept) if host.kinds else (),
        notes=(*host.notes, *(f"{device}: {why}" for device, why in sick.items())),
    )


def close_offers(
    offers: Sequence[Offer], hosts: Sequence[Host], changed: Collection[str]
) -> Sequence[Offer]:
    """Return the offers with the capacity that the hosts leave. `changed` are the hosts that accept
    less work than their provider states."""
    index = HostIndex(hosts)
    touched = {index.by_name[name].group for name in changed} - {""}
    found = []
    for offer in offers:
        name, group = name_of(offer), f"{offer.provider}/{offer.region}"
        if offer.shared and name in changed and not _fits(offer, index.by_name[name]):
            offer = replace(offer, capacity=0)
        elif offer.shared and name not in index.by_name and group in touched and offer.capacity:
            fitting = sum(_fits(offer, host) for host in index.find(offer))
            offer = replace(offer, capacity=min(offer.capacity, fitting))
        found.append(offer)
    return found


def _fits(offer: Offer, host: Host) -> bool:
    """Return whether the host is ready, and has enough devices of the offer's kind."""
    kinds = host.kinds or (offer.instance_type,) * len(host.devices)
    having = kinds.count(offer.instance_type) >= offer.accelerator_count
    return host.ready and (having or bool(choose_slices(offer.instance_type, host, ())))


_Offers = tuple[Offer, ...]
_Need = tuple[int, ResourceSpec, TopologyNeed | None, str]  # what decides whether a task fits
Parents = Mapping[str, str | None]  # the project above each project
# A job may need this time to start and to end, in addition to its time limit and its grace period.
MARGIN = timedelta(minutes=2)


class ReservedFor(Struct, frozen=True, kw_only=True):
    """What a job is compared with the reservations by. `runs` is how long it runs at most."""

    project: str
    user: str
    runs: timedelta | None


def may_use(reservation: Reservation, project: str, user: str, parents: Parents) -> bool:
    """Return whether jobs of this user and project may use what is reserved."""
    line = list_line(project, parents)
    return reservation.project in line and reservation.user in ("", user)


class ReservedHosts:
    """The reservations as they keep out the jobs of one pass over the queue."""

    def __init__(
        self, reservations: Sequence[Reservation], hosts: Sequence[Host], parents: Parents
    ) -> None:
        self._reservations, self._parents = reservations, parents
        self._hosts = HostIndex(hosts if reservations else ())
        # the open offers of the lines that were checked, by the identity of the line
        self._open: dict[tuple[int, _Need], tuple[Sequence[Offer], _Offers]] = {}

    def find_closed(self, job: ReservedFor, now: datetime) -> Sequence[Reservation]:
        """Return the reservations whose parts the job may not use now."""
        return [
            each
            for each in self._reservations
            if each.ends_at > now
            and not may_use(each, job.project, job.user, self._parents)
            and (job.runs is None or now + job.runs + MARGIN > each.begins_at)
        ]

    def occupy(self, closed: Iterable[Reservation]) -> tuple[Allocation, ...]:
        """Return the reserved parts as allocations. Reserved devices take their share of the host's
        CPUs and memory along."""
        hosts = self._hosts.by_name
        parts = ((each, part) for each in closed for part in each.parts if part.host in hosts)
        return tuple(_occupy(each, part.devices, hosts[part.host]) for each, part in parts)

    def list_open(
        self, task: TaskSpec, project: str, offers: _Offers, occupied: Sequence[Allocation]
    ) -> _Offers:
        """Return the offers on which the task could ever run beside the occupied parts."""
        names = ",".join(each.gang for each in occupied)
        need = task.nodes, task.resources, task.topology, f"{project} {names}"
        key = id(offers), need
        if key not in self._open:
            touched = {each.host for each in occupied}
            groups = {self._hosts.by_name[name].group for name in touched}
            owner = AllocationOwner(gang="", project=project)
            found = []
            for offer in offers:
                if offer.shared and (
                    name_of(offer) in touched or f"{offer.provider}/{offer.region}" in groups
                ):
                    hosts = self._hosts.find(offer)
                    names_of = {host.name for host in hosts}
                    held = [each for each in occupied if each.host in names_of]
                    if held and allocate_across(task, offer, hosts, held, owner) is None:
                        continue
                found.append(offer)
            self._open[key] = offers, tuple(found)
        return self._open[key][1]


def _occupy(reservation: Reservation, devices: Sequence[str], host: Host) -> Allocation:
    mine = [each for each in devices if each in host.devices]
    share = len(mine) / len(host.devices) if mine else float(not devices)
    return Allocation(
        host=host.name,
        gang=f"reservation {reservation.name}",
        rank=0,
        project=reservation.project,
        cpus=host.cpus * share,
        memory_mib=int(host.memory_mib * share),
        devices=tuple(mine) if devices else host.devices,
    )


def subtract_held(
    occupied: Iterable[Allocation], held: Sequence[Allocation]
) -> Sequence[Allocation]:
    """Return the occupied parts of the hosts on which work is `held`, without the CPUs and memory
    of the work on the reserved devices, which count already."""
    hosts = {each.host for each in held}
    found = []
    for part in occupied:
        inside = [
            each for each in held if each.host == part.host and {*each.devices} & {*part.devices}
        ]
        cpus = max(0.0, part.cpus - sum(each.cpus for each in inside))
        memory = max(0, part.memory_mib - sum(each.memory_mib for each in inside))
        found.append(replace(part, cpus=cpus, memory_mib=memory) if part.host in hosts else part)
    return found


def find_overlap(one: Reservation, other: Reservation) -> str:
    """Return the first host of which both reservations get the same part at the same time, or
    ""."""
    if one.begins_at >= other.ends_at or other.begins_at >= one.ends_at:
        return ""
    for mine in one.parts:
        for theirs in other.parts:
            shared = not mine.devices or not theirs.devices
            if mine.host == theirs.host and (shared or {*mine.devices} & {*theirs.devices}):
                return mine.host
    return ""


def choose_parts(
    hosts: Sequence[Host],
    count: int,
    taken: Sequence[ReservedPart],
    busy: Collection[tuple[str, str]],
) -> Sequence[ReservedPart]:
    """Choose `count` devices of the hosts for a reservation, or nothing if there are too few.
    `taken` parts belong to other reservations; `busy` are the pairs of host and device that may
    still be held at the begin.

    Devices that are free at the begin come before others, and hosts with more of them first, so
    that few hosts are divided.
    """
    closed = {part.host for part in taken if not part.devices}
    gone = {(part.host, device) for part in taken for device in part.devices}
    free: dict[str, list[str]] = {}
    for host in hosts:
        left = [each for each in host.devices if (host.name, each) not in gone]
        if left and host.name not in closed:
            free[host.name] = sorted(left, key=lambda each: (host.name, each) in busy)

    def count_idle(name: str) -> int:
        return sum((name, each) not in busy for each in free[name])

    chosen: defaultdict[str, list[str]] = defaultdict(list)
    left_over = count
    for idle in (True, False):
        for name in sorted(free, key=lambda name: (-count_idle(name), name)):
            for device in free[name]:
                if left_over and ((name, device) not in busy) is idle:
                    chosen[name].append(device)
                    left_over -= 1
    return [] if left_over else [ReservedPart(name, tuple(got)) for name, got in chosen.items()]
