"""Keeps the order of the queue, and decides which jobs may start now, also on a shared host for
which an earlier job waits (backfill). The module does no I/O and need not know when running jobs
will end: decisions are returned as values."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from fractions import Fraction
from functools import reduce
from itertools import chain
from math import floor, gcd
from operator import or_

from cavvy.domain.allocations import Allocation, Host
from cavvy.domain.jobs import JobRecord
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import ResourceSpec, TaskSpec, TopologyNeed
from cavvy.domain.values import Struct, field
from cavvy.scheduler.maintenance import subtract_held
from cavvy.scheduler.offer_lines import OfferLine, count_left, place_of, take
from cavvy.scheduler.packing import (
    AllocationOwner,
    HostIndex,
    HostRater,
    allocate_across,
    allocate_on,
    allocate_one,
    explain_topology,
    host_of,
    may_share,
)

_COMPARED = 64  # hosts for which no job waits that are compared for one job; bounds its cost
_MOST_CHANGES = 100_000  # of hosts, which a scheduler remembers
_TOLD = 2  # how many hosts that cannot be used the reason of a wait names


class WaitingJob(Struct, frozen=True, kw_only=True):
    """A job in the queue, the offers that it may use (best first), and the name that its gang would
    get.
    """

    job: JobRecord
    gang: str
    offers: tuple[Offer, ...]
    avoid: frozenset[str] = frozenset()  # names of shared hosts on which this job failed recently
    reserved: tuple[Allocation, ...] = ()  # parts of hosts that are reserved for other jobs


class QueueCapacity(Struct, frozen=True, kw_only=True):
    """The free capacity. `used` is the share of each pool that was assigned to jobs after the
    provider last reported the pool's capacity. `resting` contains the keys of offers on which a job
    failed recently, and `awaited` the hosts for which jobs waited in the last pass.
    """

    hosts: Sequence[Host] = ()
    allocations: Sequence[Allocation] = ()
    used: Mapping[str, Fraction] = field(default_factory=dict)
    resting: Collection[str] = ()
    awaited: Collection[str] = ()


class JobPlacement(Struct, frozen=True, kw_only=True):
    """The job starts on `offer`, with `allocations` on its shared hosts."""

    job: JobRecord
    offer: Offer
    allocations: tuple[Allocation, ...] = ()


class JobWait(Struct, frozen=True, kw_only=True):
    """The decision that a job stays in the queue. `behind` contains the hosts or offers that the
    job waits for. `unusable` is true if a person must act, because no host or account that fits the
    job can be used.
    """

    job: JobRecord
    reason: str
    behind: tuple[str, ...] = ()
    unusable: bool = False


class _Checks(Struct, kw_only=True):
    """The number of offers of one job that may still be checked for backfill."""

    left: int
    used: bool = False


# the offers that a job may have, its nodes, their resources, how close they are, and its project
_Unplaced = tuple[OfferLine, int, ResourceSpec, TopologyNeed | None, str]


class JobScheduler:
    """Decides for each waiting job, in the queue's order, whether and where it starts.

    While a job waits for an offer, no later job gets that offer. While a job waits for a shared
    host, a later job gets a part of that host only if the later job cannot delay the earlier job
    (see `HostWaits`). Therefore a large job does not wait forever while small jobs start. A later
    job that can use another host does not wait for the earlier job.

    Of several hosts with equal offers, a job gets the one on which it leaves the fewest fragments
    (see `fragmentation`). If a job waits for one of the hosts, it gets the first one instead: else
    the jobs that were placed while it waited would change its host, and with that the starts of
    other jobs that wait.
    """

    def __init__(self, capacity: QueueCapacity) -> None:
        self._all_hosts = capacity.hosts
        self._allocations: Sequence[Allocation] | None = capacity.allocations  # that are counted
        self._silent = HostIndex(host for host in capacity.hosts if not host.ready)
        self._rater = HostRater(
            (host for host in capacity.hosts if host.ready), capacity.allocations
        )
        # the lines of offers in this pass and in the pass before, by the offers' identity
        self._lines: dict[int, OfferLine] = {}
        self._old_lines: dict[int, OfferLine] = {}
        self._begin(capacity)

    def _begin(self, capacity: QueueCapacity) -> None:
        self._resting = frozenset(capacity.resting)
        awaited = capacity.awaited
        self._awaited = awaited if isinstance(awaited, Set) else frozenset(awaited)
        self._used = dict(capacity.used)
        self.blocked: set[str] = set()  # hosts and offers for which earlier jobs wait
        self._blocking: set[OfferLine] = set()  # lines all of whose offers are in `blocked`
        self._waits = HostWaits(self._rater.index.by_name)  # earlier jobs that wait for hosts
        self._jobs_left = JOBS  # how many jobs may still be checked for backfill
        # what has no room: in one pass, room only shrinks, unless placements are given back
        self._unplaced: set[_Unplaced] = set()

    def renew(self, capacity: QueueCapacity) -> "JobScheduler":
        """Return a scheduler for the next pass. It decides like a new one with this capacity, and
        looks only at the hosts that have changed."""
        worn = len(self._rater.changes) > _MOST_CHANGES
        if worn or capacity.hosts != self._all_hosts:
            return JobScheduler(capacity)
        if capacity.allocations is not self._allocations:
            self._rater.renew(capacity.allocations)
            self._allocations = capacity.allocations
        same = frozenset(capacity.resting) == self._resting
        self._old_lines, self._lines = (self._lines if same else {}), {}
        self._begin(capacity)
        return self

    def decide(self, waiting_job: WaitingJob, *others: WaitingJob) -> JobPlacement | JobWait:
        """Decide whether and where the next job in the queue starts. If the job is placed, less
        capacity is left for later jobs. `others` are alternatives of the same job, which are tried
        in order.
        """
        choices = (waiting_job, *others)
        placed = self._find(choices)
        if placed is None:
            return self._wait(choices)
        self._take(placed)
        return placed

    def decide_all(self, jobs: Sequence[Sequence[WaitingJob]]) -> Sequence[JobPlacement | JobWait]:
        """Decide whether and where jobs start that start together or not at all. Each of `jobs` has
        its alternatives, as in `decide`. If one of the jobs cannot start, all of them wait.
        """
        found: list[JobPlacement] = []
        for choices in jobs:
            placed = self._find(choices)
            if placed is None:
                self.give_back(found)
                return [self._wait(each) for each in jobs]
            self._take(placed)
            found.append(placed)
        return found

    def give_back(self, placed: Sequence[JobPlacement]) -> None:
        """Count jobs as not placed, because they do not start after all."""
        self._unplaced.clear()
        for each in reversed(placed):
            self._rater.remove(each.allocations)
            take(self._used, each.offer, -each.job.task.nodes)

    def _find(self, choices: Sequence[WaitingJob]) -> JobPlacement | None:
        checks = self._grant_checks()
        placed = next(filter(None, (self._place_new(each, checks) for each in choices)), None)
        self._jobs_left -= checks.used
        return placed

    def _place_new(self, waiting_job: WaitingJob, checks: _Checks) -> JobPlacement | None:
        """Place the job, unless one that needs the same has found no room in this pass, such as
        another job of its array."""
        if waiting_job.avoid or waiting_job.reserved:
            return self._place(waiting_job, checks)
        task, line = waiting_job.job.task, self._line_of(waiting_job.offers)
        need = line, task.nodes, task.resources, task.topology, waiting_job.job.project
        if need in self._unplaced:
            return None
        placed = self._place(waiting_job, checks)
        if placed is None:
            self._unplaced.add(need)
        return placed

    def _take(self, placed: JobPlacement) -> None:
        self._rater.add(placed.allocations)
        self._allocations = None
        take(self._used, placed.offer, placed.job.task.nodes)

    def _explain_topology(self, choices: Iterable[WaitingJob]) -> str:
        """Return what the racks, or other domains, of the first group of hosts lack for the job."""
        for each in choices:
            for offer in each.offers if each.job.task.topology is not None else ():
                hosts = [one for one in self._rater.index.find(offer) if one.name not in each.avoid]
                held = self._rater.list_held(hosts)
                owner = AllocationOwner(gang=each.gang, project=each.job.project)
                if missing := explain_topology(each.job.task, offer, hosts, held, owner):
                    return missing
        return ""

    def _wait(self, choices: Sequence[WaitingJob]) -> JobWait:
        job = choices[0].job
        lines = [(each, self._line_of(each.offers)) for each in choices]
        behind = _join([line.behind for _, line in lines])
        known = all(line in self._blocking for _, line in lines)
        earlier = known or self.blocked.issuperset(behind)
        for each, line in lines:
            if line not in self._blocking:
                self.blocked.update(self._list_blocks(each, line))
            if not each.avoid:
                self._blocking.add(line)
        self._waits.add(
            lambda host: [
                (each.job.task, offer) for each, line in lines for offer in line.find_on(host)
            ]
        )
        silent = [
            (offer, hosts)
            for each in (choices if self._silent.by_name else ())
            for offer in each.offers
            if (hosts := self._list_silent(offer, each.job.task.nodes))
        ]
        if silent and len(silent) == sum(len(each.offers) for each in choices):
            reason = _say_silent(silent)
            return JobWait(job=job, reason=reason, behind=behind, unusable=True)
        limits = _join([line.limits for _, line in lines])
        missing = self._explain_topology(choices)
        usable = _subtract(choices, [offer for offer, _ in silent])
        if apart := self._list_apart(usable, job.project):
            reason = self._say_apart(apart)
        elif silent:
            left = OfferLine(tuple(usable), self._rater, self._resting)
            reason = _reason(left.behind, left.limits, earlier, missing)
        else:
            reason = _reason(behind, limits, earlier, missing)
        return JobWait(job=job, reason=reason, behind=behind)

    def _line_of(self, offers: tuple[Offer, ...]) -> OfferLine:
        """Return the line of these offers. Jobs that need the same have the same offers."""
        line = self._lines.get(id(offers)) or self._old_lines.get(id(offers))
        if line is None:
            line = OfferLine(offers, self._rater, self._resting)
        self._lines[id(offers)] = line
        return line

    def _list_blocks(self, waiting_job: WaitingJob, line: OfferLine) -> Iterable[str]:
        avoid = waiting_job.avoid
        if not avoid:
            return line.blocks
        return {lane for offer in line.offers for lane in self._lanes(offer, avoid)}

    def _list_apart(self, offers: Iterable[Offer], project: str) -> list[str]:
        """Return the offers' shared hosts that this project may not use now because of other
        projects' allocations. The list is empty if the project may use another offer or host as
        soon as that offer or host is free.
        """
        apart: dict[str, None] = {}
        for offer in offers:
            hosts = self._rater.index.find(offer) if offer.shared else (None,)
            for host in hosts:
                if host is None or may_share(host, self._rater.list_held((host,)), project):
                    return []
                apart[host.name] = None
        return list(apart)

    def _list_silent(self, offer: Offer, nodes: int) -> Sequence[Host]:
        """Return the hosts of the offer that are not ready, if too few of its hosts are ready. The
        nodes of a gang in a group of hosts run on as many hosts.
        """
        silent = self._silent.find(offer) if offer.shared else ()
        if not silent:
            return ()
        ready = self._rater.index.find(offer)
        needed = 1 if host_of(offer, (*ready, *silent)) else nodes
        return silent if len(ready) < needed else ()

    def can_start(self, waiting_job: WaitingJob) -> bool:
        """Return whether `decide` would place the job now. This method changes nothing."""
        return self._place(waiting_job, self._grant_checks()) is not None

    def _grant_checks(self) -> _Checks:
        """Return how many offers may still be checked for the backfill of the next job."""
        return _Checks(left=OFFERS if self._jobs_left else 0)

    def _place(self, waiting_job: WaitingJob, checks: _Checks) -> JobPlacement | None:
        task, project = waiting_job.job.task, waiting_job.job.project
        owner = AllocationOwner(gang=waiting_job.gang, project=project)
        avoid = waiting_job.avoid
        for equal in self._line_of(waiting_job.offers).list_runs(task, project):
            found: list[JobPlacement] = []
            compared = 0
            for offer in equal:
                if not offer.shared:
                    left = count_left(offer, self._used)
                    if (left is None or left >= task.nodes) and not self._is_held(offer, avoid):
                        return JobPlacement(job=waiting_job.job, offer=offer)
                    continue
                mine = self._allocate(waiting_job, offer, owner)
                if mine is None:
                    continue
                found.append(JobPlacement(job=waiting_job.job, offer=offer, allocations=mine))
                compared += not self._is_held(offer, avoid)
                if compared == _COMPARED:
                    break
            for place in self._sort(found):
                blocked = self._is_held(place.offer, avoid)
                if not (blocked and self._may_delay(place.allocations, checks)):
                    return place
        return None

    def _allocate(
        self, waiting_job: WaitingJob, offer: Offer, owner: AllocationOwner
    ) -> tuple[Allocation, ...] | None:
        task, avoid, reserved = waiting_job.job.task, waiting_job.avoid, waiting_job.reserved
        hosts = [host for host in self._rater.index.find(offer) if host.name not in avoid]
        rater = self._rater if self._is_rated(hosts) else None
        if task.nodes > 1 and not avoid and not reserved:
            group = self._rater.find_fitting(task, offer, owner)
            if group is not None:
                return group.allocate(task, owner, rater)
        held = self._rater.list_held(hosts)
        if reserved:
            names = {host.name for host in hosts}
            parts = [each for each in reserved if each.host in names]
            held = [*held, *subtract_held(parts, held)]
        return allocate_across(task, offer, hosts, held, owner, rater)

    def _sort(self, found: list[JobPlacement]) -> list[JobPlacement]:
        """Sort placements on shared hosts: those that leave the fewest fragments come first."""
        hosts = (host for place in found for host in self._rater.index.find(place.offer))
        if len(found) < 2 or not self._is_rated(hosts):
            return found
        return sorted(found, key=lambda each: self._rater.rate(each.allocations))

    def _is_rated(self, hosts: Iterable[Host]) -> bool:
        """Return whether no job waited for any of these hosts in the last pass."""
        return not self._awaited or all(host.name not in self._awaited for host in hosts)

    def _is_held(self, offer: Offer, avoid: frozenset[str]) -> bool:
        """Return whether an earlier job waits for the offer or for one of its hosts."""
        return not self.blocked.isdisjoint(self._lanes(offer, avoid))

    def _may_delay(self, mine: Sequence[Allocation], checks: _Checks) -> bool:
        """Return whether a job with these allocations may delay an earlier job. The result is
        always True on a host that serves one project at a time.
        """
        taken = [self._rater.index.by_name[name] for name in {each.host for each in mine}]
        if not all(host.separates for host in taken):
            return True
        if not checks.left:
            return True
        checks.left -= 1
        checks.used = True
        return self._waits.may_delay(mine, self._rater.list_held(taken))

    def _say_apart(self, names: Sequence[str]) -> str:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        why = self._rater.index.by_name[names[0]].obstacle
        return (
            f"waits for {names[0]}{more}, where jobs of another project run: a host without "
            f"isolation between projects{why and f' ({why})'} runs the jobs of only one project at "
            "a time (docs/guides/isolation.md)"
        )

    def _lanes(self, offer: Offer, avoid: frozenset[str]) -> set[str]:
        """Return what a job waits for if it needs this offer: the names of the offer or, if the
        offer is a part of a shared host, of the host. For a group of hosts, the result also
        contains every host that the job does not avoid.
        """
        hosts = self._rater.index.find(offer) if offer.shared else ()
        return {place_of(offer), *(host.name for host in hosts if host.name not in avoid)}


def _join(names: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names of all alternatives of a job, each once."""
    return names[0] if len(names) == 1 else tuple(dict.fromkeys(chain.from_iterable(names)))


def _say_silent(found: Sequence[tuple[Offer, Sequence[Host]]]) -> str:
    """Return one sentence about hosts that are not ready, with the command that shows more."""
    hosts = list(dict.fromkeys(host for _, hosts in found for host in hosts))
    names = sorted({offer.provider for offer, _ in found})
    told = [f"{host.name} cannot be used: {host.problem or 'no answer'}" for host in hosts[:_TOLD]]
    more = [f"{len(hosts) - _TOLD} more hosts cannot be used"] if len(hosts) > _TOLD else []
    commands = [f"`cavvy check {name}`" for name in names]
    if any(host.cordoned for host in hosts):
        commands = ["`cavvy nodes hosts`"]
    checks, shows = " and ".join(commands), "shows" if len(commands) == 1 else "show"
    return f"waits because {'; '.join([*told, *more])}; {checks} {shows} more"


def _subtract(choices: Sequence[WaitingJob], silent: Collection[Offer]) -> Iterable[Offer]:
    """Return the offers of all alternatives, without these."""
    offers = (offer for each in choices for offer in each.offers)
    if not silent:
        return offers
    left_out = frozenset(silent)
    return [offer for offer in offers if offer not in left_out]


def _reason(behind: Sequence[str], limits: Sequence[str], earlier: bool, missing: str) -> str:
    limited = f", limited by {'; '.join(limits)}" if limits and all(limits) else ""
    names = behind[0] if len(behind) == 1 else f"{behind[0]} and {len(behind) - 1} more that fit"
    return (
        f"waits behind earlier jobs for {names}"
        if earlier
        else f"waits for free capacity at {names}{limited}"
    ) + (f": {missing}" if missing else "")


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
