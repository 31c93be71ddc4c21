"""Remembers between passes over the queue what follows from the offers of a job: what it waits for,
and which of its offers have room. The module does no I/O.

With thousands of hosts, jobs that need the same have the same thousands of offers, and a job that
starts or ends changes the room on its hosts only. So a pass looks only at the hosts that have
changed since the pass before.

Offers that share nodes form a pool: a node used for one offer of the pool reduces the capacity of
all its offers. An offer's capacity is the number of nodes that jobs can get of this offer while
they use no other offer of the pool. A node of an offer with the capacity c uses the share 1/c of
the pool. The capacity of each other offer in the pool shrinks by this share. The result is exact if
each node size is a multiple of all smaller node sizes; otherwise, the result is slightly too low
until the provider next reports its capacity.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from fractions import Fraction
from heapq import merge
from itertools import groupby

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import ResourceSpec, TaskSpec, TopologyNeed
from cavvy.domain.values import Struct
from cavvy.scheduler.packing import AllocationOwner, HostRater, allocate_across, name_of

# What decides whether a task fits on hosts: its nodes, their resources, how close they are to each
# other and, because a host may serve one project at a time, its project.
_Need = tuple[int, ResourceSpec, TopologyNeed | None, str]


def place_of(offer: Offer) -> str:
    """Return the name of the resource that jobs for this offer wait for: the shared host, or the
    offer itself if it uses no shared host."""
    return name_of(offer) if offer.shared else offer.key


class _Room(Struct):
    """The numbers of the offers that have room, in order, after the first `seen` changes."""

    numbers: list[int]
    seen: int = 0


class OfferLine:
    """The offers of a job, best first. `behind` is what a job waits for that needs one of them, and
    `blocks` what later jobs then do not get: the same, and all hosts of groups of hosts."""

    def __init__(self, offers: Sequence[Offer], rater: HostRater, resting: Collection[str]) -> None:
        self.offers = offers
        self._rater = rater
        self._runs: list[int] = []  # offers with the same tie that follow each other have one run
        self._of_host: defaultdict[str, list[int]] = defaultdict(list)  # the offers of each host
        self._unshared: list[int] = []
        self._rooms: dict[_Need, _Room] = {}
        for run, (_, equal) in enumerate(groupby(offers, lambda each: _tie_of(each, resting))):
            self._runs += [run for _ in equal]
        for number, offer in enumerate(offers):
            if not offer.shared:
                self._unshared.append(number)
            for host in rater.index.find(offer) if offer.shared else ():
                self._of_host[host.name].append(number)
        self.behind = tuple(dict.fromkeys(map(place_of, offers)))
        self.blocks = frozenset((*self.behind, *self._of_host))
        self.limits = tuple(dict.fromkeys(offer.limited_by for offer in offers))

    def find_on(self, host: str) -> Sequence[Offer]:
        """Return the offers of a shared host."""
        return [self.offers[number] for number in self._of_host.get(host, ())]

    def list_runs(self, task: TaskSpec, project: str) -> Iterator[Iterator[Offer]]:
        """Yield the offers, without those of shared hosts on which the task has no room now. Each
        run has offers of which the job may get any."""
        with_room = self._find_room(task, project).numbers
        numbers = merge(self._unshared, with_room) if self._unshared else iter(with_room)
        for _, run in groupby(numbers, self._runs.__getitem__):
            yield map(self.offers.__getitem__, run)

    def _find_room(self, task: TaskSpec, project: str) -> _Room:
        owner = "" if self._rater.separates else project
        need = task.nodes, task.resources, task.topology, owner
        room = self._rooms.get(need)
        changes = self._rater.changes
        if room is None:
            numbers = (number for number, offer in enumerate(self.offers) if offer.shared)
            fitting = [each for each in numbers if self._has_room(each, task, project)]
            room = self._rooms[need] = _Room(fitting, len(changes))
        changed = dict.fromkeys(changes[room.seen :])
        room.seen = len(changes)
        for number in {each for name in changed for each in self._of_host.get(name, ())}:
            _keep(room.numbers, number, self._has_room(number, task, project))
        return room

    def _has_room(self, number: int, task: TaskSpec, project: str) -> bool:
        offer = self.offers[number]
        hosts = self._rater.index.find(offer)
        if all(self._rater.is_full(host, offer) for host in hosts):
            return False
        owner = AllocationOwner(gang="", project=project)
        group = self._rater.find_fitting(task, offer, owner) if task.nodes > 1 else None
        if group is not None:
            return group.choose(task) is not None
        held = self._rater.list_held(hosts)
        return allocate_across(task, offer, hosts, held, owner) is not None


def _keep(numbers: list[int], number: int, wanted: bool) -> None:
    """Let the sorted list contain the number if it is wanted, and otherwise not."""
    at = bisect_left(numbers, number)
    found = at < len(numbers) and numbers[at] == number
    if wanted and not found:
        numbers.insert(at, number)
    elif found and not wanted:
        del numbers[at]


def _tie_of(offer: Offer, resting: Collection[str]) -> tuple[object, ...]:
    """Return a key that is equal for offers of shared hosts of which a job may get any."""
    if not offer.shared:
        return (False,)
    return (
        True,
        offer.provider,
        offer.instance_type,
        offer.accelerator_count,
        offer.accelerator_part,
        offer.rate,
        bool(resting) and offer.key in resting,
    )


def pool_of(offer: Offer) -> str:
    """Return the name of the offer's pool. An offer that shares no nodes has its own pool."""
    return f"{offer.account}/{offer.region}/{offer.pool}" if offer.pool else offer.key


def units_of(offer: Offer) -> int:
    """Return the units that a node of the offer counts as. Nodes of several sizes may share a
    pool."""
    return max(1, offer.accelerator_count)


def count_left(offer: Offer, used: Mapping[str, Fraction]) -> int | None:
    """Return how many nodes of the offer are still available. Returns None if the provider does not
    report the capacity.
    """
    if not offer.capacity:
        return offer.capacity
    return max(0, int(offer.capacity * (1 - used.get(pool_of(offer), Fraction(0)))))


def take(used: MutableMapping[str, Fraction], offer: Offer, nodes: int) -> None:
    """Count nodes of the offer as used. `used` maps each pool to the used share of its nodes."""
    if offer.capacity:
        pool = pool_of(offer)
        used[pool] = used.get(pool, Fraction(0)) + Fraction(nodes, offer.capacity)
