"""Decides whether a job may start on a shared host for which an earlier job waits (backfill). The
module does no I/O, and does not need to know when running jobs will end.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from math import floor, gcd
from operator import or_

from cavvy.domain.allocations import Allocation, Host
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TaskSpec
from cavvy.scheduler.packing import AllocationOwner, allocate_on, allocate_one, host_of

# These numbers limit the work of one pass over the queue. A job for which a limit is exceeded
# waits, as it would without backfill.
JOBS = 16  # maximum jobs that are checked
OFFERS = 8  # maximum offers of one job that are checked
_MOST_WAITS = 8  # maximum earlier jobs that wait for one host
# maximum gangs on one host, and maximum requests of the jobs that wait for the host
_MOST_AMOUNTS = 48
# maximum units of one resource; the unit is the greatest one that divides all amounts
_MOST_UNITS = 1 << 17

_MILLI = 1000  # CPUs are counted in thousandths
_SLACK = 1e-3  # in thousandths of a CPU; as in `packing`
# The amount for a part of a device. It occupies at most one device, but how parts are packed cannot
# be told from sums: an amount that is not whole is not checked further.
_SHARED = 1 - 1e-6
_ENDLESS = 1 << 50  # GiB of a disk whose size is unknown
_ANY = AllocationOwner(gang="", project="")

Amounts = Mapping[str, float]  # amount of each resource of a host
# Returns the pairs of task and offer, of which a waiting job needs one, that use the host with this
# name.
FindChoices = Callable[[str], Iterable[tuple[TaskSpec, Offer]]]


class HostWaits:
    """Records which earlier jobs wait for a part of a shared host, and how much each of them
    requests. What they request of a host is computed when a job may be placed on it.
    """

    def __init__(self, hosts: Mapping[str, Host]) -> None:
        self._hosts = hosts
        self._jobs: list[FindChoices] = []
        self._wishes: dict[str, tuple[int, list[Sequence[Amounts]]]] = {}

    def add(self, choices: FindChoices) -> None:
        """Add a waiting job."""
        self._jobs.append(choices)

    def _list_wishes(self, name: str) -> Sequence[Sequence[Amounts]]:
        seen, wishes = self._wishes.get(name, (0, []))
        for choices in self._jobs[seen:]:
            if len(wishes) > _MOST_WAITS:
                break
            wanted: list[Amounts] = []
            for task, offer in choices(name):
                wish = _wish(task, offer, self._hosts[name])
                if wish is not None and wish not in wanted:
                    wanted.append(wish)
            if wanted:
                wishes.append(wanted)
        self._wishes[name] = len(self._jobs), wishes
        return wishes

    def may_delay(self, mine: Sequence[Allocation], allocations: Sequence[Allocation]) -> bool:
        """Return whether a job with the allocations `mine` could delay one of the waiting jobs.

        The check is made for each host of the job. Any of the running gangs and waiting jobs may
        occupy the host later. In each such case, every further waiting job that fits on the host
        without `mine` must also fit with `mine`. If this condition is true, the job with the
        allocations `mine` changes neither the start time nor the host of a waiting job.
        """
        return any(
            _may_delay_on(
                self._hosts[name],
                _amounts_of(self._hosts[name], mine),
                wishes,
                _amounts_by_gang(self._hosts[name], allocations),
            )
            for name in {each.host for each in mine}
            if (wishes := self._list_wishes(name))
        )


def _wish(task: TaskSpec, offer: Offer, host: Host) -> Amounts | None:
    """Return the amounts that a task requests on a host of the offer. Returns None if the task does
    not fit even on the empty host.
    """
    if host_of(offer, (host,)) is not None:
        alone = task.nodes == 1 or not host.group
        allocations = allocate_on(task, offer, host, (), _ANY) if alone else None
    else:
        one = allocate_one(task, offer, host, (), _ANY, 0) if task.nodes > 1 else None
        allocations = None if one is None else (one,)
    return None if allocations is None else _amounts_of(host, allocations)


def _amounts_of(host: Host, allocations: Iterable[Allocation]) -> Amounts:
    """Return the sums of the allocations on the host: CPUs, memory, disk, and devices of each kind.
    Each part of a device counts as `_SHARED`.
    """
    kinds = dict(zip(host.devices, host.kinds or [""] * len(host.devices), strict=True))
    sums: defaultdict[str, float] = defaultdict(float)
    cpus = 0.0
    for each in allocations:
        if each.host == host.name:
            cpus += each.cpus
            sums["memory"] += each.memory_mib
            sums["disk"] += each.disk_gib
            size = 1 if each.part == 1 else _SHARED
            for device in each.devices:
                if device in kinds:
                    sums[f"devices {kinds[device]}"] += size
    return {**sums, "cpus": round(cpus * _MILLI, 3)}


def _amounts_by_gang(host: Host, allocations: Iterable[Allocation]) -> list[Amounts]:
    gangs: defaultdict[str, list[Allocation]] = defaultdict(list)
    for each in allocations:
        if each.host == host.name:
            gangs[each.gang].append(each)
    return [_amounts_of(host, each) for each in gangs.values()]


def _size_of(host: Host) -> dict[str, int]:
    devices = Counter(f"devices {kind}" for kind in host.kinds or [""] * len(host.devices))
    return {
        **devices,
        "cpus": floor(host.cpus * _MILLI + _SLACK),
        "memory": host.memory_mib,
        "disk": _ENDLESS if host.disk_gib is None else host.disk_gib,
    }


def _may_delay_on(
    host: Host, mine: Amounts, waits: Sequence[Sequence[Amounts]], gangs: Sequence[Amounts]
) -> bool:
    """Return whether a job that takes the amounts `mine` from the host could delay a waiting job.
    Each item of `waits` belongs to one waiting job: it lists the amounts that the job needs, one
    entry for each alternative in its task.

    Each resource is checked separately, so True may be returned for a job that would delay no other
    job.
    """
    there = [*([each] for each in gangs), *waits]
    if len(waits) > _MOST_WAITS or sum(map(len, there)) > _MOST_AMOUNTS:
        return True
    size = _size_of(host)
    for what in (what for what, amount in mine.items() if amount):
        amounts = [[each.get(what, 0) for each in some] for some in [*there, [mine]]]
        if sum(map(max, amounts)) <= size[what]:
            continue  # the host has enough of the resource for all of them at the same time
        unit = _find_unit([amount for some in amounts for amount in some])
        if not unit or size[what] // unit > _MOST_UNITS:
            return True
        for number, wait in enumerate(waits, start=len(gangs)):
            others = [*there[:number], *there[number + 1 :]]
            if any(_keeps_out(mine, each, others, size, what, unit) for each in wait):
                return True
    return False


def _keeps_out(
    mine: Amounts,
    wish: Amounts,
    others: Iterable[Iterable[Amounts]],
    size: Mapping[str, int],
    what: str,
    unit: int,
) -> bool:
    """Return whether `mine` can prevent `wish` from fitting on the host. This is so if a
    combination of `others` leaves an amount of the resource `what` that is enough for `wish`, but
    too small for the sum of `wish` and `mine`.

    A job in `others` that cannot run at the same time as `wish` is omitted: `wish` has to wait for
    its end, with or without `mine`.
    """
    beside = [
        [
            int(each.get(what, 0)) // unit
            for each in some
            if all(wish.get(one, 0) + each.get(one, 0) <= most for one, most in size.items())
        ]
        for some in others
    ]
    most = int(size[what] - wish.get(what, 0)) // unit
    enough = int(size[what] - wish.get(what, 0) - mine[what]) // unit
    return _can_sum_to(enough, most, beside)


def _find_unit(amounts: Sequence[float]) -> int:
    """Return the greatest unit that divides all amounts, or 0 if an amount is not a whole
    number."""
    return gcd(*map(int, amounts)) if all(float(each).is_integer() for each in amounts) else 0


def _can_sum_to(above: int, most: int, amounts: Iterable[Iterable[int]]) -> bool:
    """Take at most one amount from each list. Return whether the sum of these amounts can be more
    than `above` and at most `most`.
    """
    if most < 0:
        return False
    mask = (1 << (most + 1)) - 1
    sums = 1  # bit n is 1 if some of the amounts add up to n
    for some in amounts:
        sums |= reduce(or_, (sums << each for each in some if each <= most), 0) & mask
    return bool(sums >> max(0, above + 1))
