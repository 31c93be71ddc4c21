"""Keeps the order of the queue, and decides which jobs may start now. The module does no I/O:
decisions are returned as values.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import groupby

from cavvy.domain.allocations import Allocation, Host
from cavvy.domain.jobs import JobRecord
from cavvy.domain.offers import Offer
from cavvy.domain.values import Struct, field
from cavvy.scheduler.backfill import JOBS, OFFERS, HostWaits
from cavvy.scheduler.packing import (
    AllocationOwner,
    HostRater,
    allocate_across,
    explain_topology,
    host_of,
    hosts_of,
    may_share,
    name_of,
)
from cavvy.scheduler.pools import count_left, take

_COMPARED = 64  # hosts for which no job waits that are compared for one job; bounds its cost
_TOLD = 2  # how many hosts that cannot be used the reason of a wait names


class WaitingJob(Struct, frozen=True, kw_only=True):
    """A job in the queue, the offers that it may use (best first), and the name that its gang would
    get.
    """

    job: JobRecord
    gang: str
    offers: tuple[Offer, ...]
    avoid: frozenset[str] = frozenset()  # names of shared hosts on which this job failed recently


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
    behind: tuple[str, ...]
    unusable: bool = False


class _Checks(Struct, kw_only=True):
    """The number of offers of one job that may still be checked for backfill."""

    left: int
    used: bool = False


class JobScheduler:
    """Decides for each waiting job, in the queue's order, whether and where it starts.

    While a job waits for an offer, no later job gets that offer. While a job waits for a shared
    host, a later job gets a part of that host only if the later job cannot delay the earlier job
    (see `backfill`). Therefore a large job does not wait forever while small jobs start. A later
    job that can use another host does not wait for the earlier job.

    Of several hosts with equal offers, a job gets the one on which it leaves the fewest fragments
    (see `fragmentation`). If a job waits for one of the hosts, it gets the first one instead: else
    the jobs that were placed while it waited would change its host, and with that the starts of
    other jobs that wait.
    """

    def __init__(self, capacity: QueueCapacity) -> None:
        self._hosts = [host for host in capacity.hosts if host.ready]
        self._silent = [host for host in capacity.hosts if not host.ready]
        self._allocations = list(capacity.allocations)
        self._rater = HostRater(self._hosts, self._allocations)
        self._resting = frozenset(capacity.resting)
        self._awaited = frozenset(capacity.awaited)
        self._used = dict(capacity.used)
        self.blocked: set[str] = set()  # hosts and offers for which earlier jobs wait
        self._waits = HostWaits(self._hosts)  # earlier jobs that wait for shared hosts
        self._jobs_left = JOBS  # how many jobs may still be checked for backfill

    def decide(self, waiting_job: WaitingJob, *others: WaitingJob) -> JobPlacement | JobWait:
        """Decide whether and where the next job in the queue starts. If the job is placed, less
        capacity is left for later jobs. `others` are alternatives of the same job, which are tried
        in order.
        """
        choices = (waiting_job, *others)
        checks = self._grant_checks()
        placed = next(
            (found for each in choices if (found := self._place(each, checks)) is not None), None
        )
        self._jobs_left -= checks.used
        if placed is None:
            offers = [offer for each in choices for offer in each.offers]
            behind = tuple(dict.fromkeys(place_of(offer) for offer in offers))
            earlier = all(place in self.blocked for place in behind)
            self.blocked.update(
                *(self._lanes(offer, each.avoid) for each in choices for offer in each.offers)
            )
            self._waits.add(
                (each.job.task, offer, self._rater.find_hosts(offer))
                for each in choices
                for offer in each.offers
                if offer.shared
            )
            silent = [
                (offer, hosts)
                for each in choices
                for offer in each.offers
                if (hosts := self._list_silent(offer, each.job.task.nodes))
            ]
            if silent and len(silent) == len(offers):
                reason = _say_silent(silent)
                return JobWait(job=waiting_job.job, reason=reason, behind=behind, unusable=True)
            usable = [offer for offer in offers if offer not in [each for each, _ in silent]]
            apart = self._list_apart(usable, waiting_job.job.project)
            missing = self._explain_topology(choices)
            reason = self._say_apart(apart) if apart else _reason(usable, earlier, missing)
            return JobWait(job=waiting_job.job, reason=reason, behind=behind)
        self._allocations += placed.allocations
        self._rater.add(placed.allocations)
        take(self._used, placed.offer, waiting_job.job.task.nodes)
        return placed

    def _explain_topology(self, choices: Iterable[WaitingJob]) -> str:
        """Return what the racks, or other domains, of the first group of hosts lack for the job."""
        for each in choices:
            for offer in each.offers if each.job.task.topology is not None else ():
                hosts = [one for one in self._rater.find_hosts(offer) if one.name not in each.avoid]
                held = self._rater.list_held(hosts)
                owner = AllocationOwner(gang=each.gang, project=each.job.project)
                if missing := explain_topology(each.job.task, offer, hosts, held, owner):
                    return missing
        return ""

    def _list_apart(self, offers: Iterable[Offer], project: str) -> list[str]:
        """Return the offers' shared hosts that this project may not use now because of other
        projects' allocations. The list is empty if the project may use another offer or host as
        soon as that offer or host is free.
        """
        found = [
            host
            for offer in offers
            for host in (self._rater.find_hosts(offer) if offer.shared else (None,))
        ]
        apart = [
            host.name
            for host in found
            if host is not None and not may_share(host, self._allocations, project)
        ]
        return list(dict.fromkeys(apart)) if len(apart) == len(found) else []

    def _list_silent(self, offer: Offer, nodes: int) -> Sequence[Host]:
        """Return the hosts of the offer that are not ready, if too few of its hosts are ready. The
        nodes of a gang in a group of hosts run on as many hosts.
        """
        silent = hosts_of(offer, self._silent) if offer.shared and self._silent else ()
        if not silent:
            return ()
        ready = self._rater.find_hosts(offer)
        needed = 1 if host_of(offer, (*ready, *silent)) else nodes
        return silent if len(ready) < needed else ()

    def can_start(self, waiting_job: WaitingJob) -> bool:
        """Return whether `decide` would place the job now. This method changes nothing."""
        return self._place(waiting_job, self._grant_checks()) is not None

    def _grant_checks(self) -> _Checks:
        """Return how many offers may still be checked for the backfill of the next job."""
        return _Checks(left=OFFERS if self._jobs_left else 0)

    def _place(self, waiting_job: WaitingJob, checks: _Checks) -> JobPlacement | None:
        task = waiting_job.job.task
        owner = AllocationOwner(gang=waiting_job.gang, project=waiting_job.job.project)
        avoid = waiting_job.avoid
        for _, equal in groupby(waiting_job.offers, self._tie_of):
            found: list[JobPlacement] = []
            compared = 0
            for offer in equal:
                if not offer.shared:
                    left = count_left(offer, self._used)
                    if (left is None or left >= task.nodes) and not self._is_held(offer, avoid):
                        return JobPlacement(job=waiting_job.job, offer=offer)
                    continue
                hosts = [host for host in self._rater.find_hosts(offer) if host.name not in avoid]
                held = self._rater.list_held(hosts)
                rater = self._rater if self._is_rated(hosts) else None
                mine = allocate_across(task, offer, hosts, held, owner, rater)
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

    def _tie_of(self, offer: Offer) -> tuple[object, ...]:
        """Return a key that is equal for offers of shared hosts of which the job may get any."""
        if not offer.shared:
            return (False,)
        return (
            True,
            offer.provider,
            offer.instance_type,
            offer.accelerator_count,
            offer.accelerator_part,
            offer.rate,
            offer.key in self._resting,
        )

    def _sort(self, found: list[JobPlacement]) -> list[JobPlacement]:
        """Sort placements on shared hosts: those that leave the fewest fragments come first."""
        hosts = (host for place in found for host in self._rater.find_hosts(place.offer))
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
        taken = {each.host for each in mine}
        if any(host.name in taken and not host.separates for host in self._hosts):
            return True
        if not checks.left:
            return True
        checks.left -= 1
        checks.used = True
        return self._waits.may_delay(mine, self._allocations)

    def _say_apart(self, names: Sequence[str]) -> str:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        why = next((host.obstacle for host in self._hosts if host.name == names[0]), "")
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
        hosts = self._rater.find_hosts(offer) if offer.shared else ()
        return {place_of(offer), *(host.name for host in hosts if host.name not in avoid)}


def place_of(offer: Offer) -> str:
    """Return the name of the resource that jobs for this offer wait for: the shared host, or the
    offer itself if it uses no shared host."""
    return name_of(offer) if offer.shared else offer.key


def _say_silent(found: Sequence[tuple[Offer, Sequence[Host]]]) -> str:
    """Return one sentence about hosts that are not ready, with the command that shows more."""
    hosts = list(dict.fromkeys(host for _, hosts in found for host in hosts))
    names = sorted({offer.provider for offer, _ in found})
    told = [f"{host.name} cannot be used: {host.problem or 'no answer'}" for host in hosts[:_TOLD]]
    more = [f"{len(hosts) - _TOLD} more hosts cannot be used"] if len(hosts) > _TOLD else []
    checks = " and ".join(f"`cavvy check {name}`" for name in names)
    shows = "shows" if len(names) == 1 else "show"
    return f"waits because {'; '.join([*told, *more])}; {checks} {shows} more"


def _reason(offers: Sequence[Offer], earlier: bool, missing: str) -> str:
    behind = tuple(dict.fromkeys(place_of(offer) for offer in offers))
    limits = list(dict.fromkeys(offer.limited_by for offer in offers))
    limited = f", limited by {'; '.join(limits)}" if limits and all(limits) else ""
    names = behind[0] if len(behind) == 1 else f"{behind[0]} and {len(behind) - 1} more that fit"
    return (
        f"waits behind earlier jobs for {names}"
        if earlier
        else f"waits for free capacity at {names}{limited}"
    ) + (f": {missing}" if missing else "")
