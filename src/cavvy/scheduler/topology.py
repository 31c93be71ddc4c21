"""Chooses which hosts a gang gets, and in which order of ranks, by the labels of the hosts. The
module does no I/O; `packing` and the simulation of fleets call it.

The hosts with one value of a label, such as `rack: r1`, are a domain. The rules are those of Kueue
(https://kueue.sigs.k8s.io/docs/concepts/topology_aware_scheduling/): a gang never leaves the domain
that it requires; of the domains that hold the gang, it gets the one with the fewest free hosts; and
a gang that only prefers a domain is spread over as few domains as possible. Slices are spread
evenly over as few domains as possible, like Kueue's balanced placement.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from heapq import nsmallest
from math import ceil
from typing import TypeVar

from cavvy.domain.tasks import TopologyNeed
from cavvy.domain.units import format_count

_T = TypeVar("_T")
_ANYWHERE = TopologyNeed()
Labels = Sequence[tuple[str, str]]  # of one host, such as (("block", "b1"), ("rack", "r1"))


class HostLabels:
    """The labels of the hosts that a gang may get. Hosts are named by their positions."""

    def __init__(self, labels: Sequence[Labels]) -> None:
        self._labels = labels
        self._domains: dict[str, Sequence[str | None]] = {}  # of each label, by host

    def group(self, at: Iterable[int], label: str) -> Mapping[str, Sequence[int]]:
        """Return the hosts of each domain. Hosts without the label are in no domain."""
        if label not in self._domains:
            self._domains[label] = [dict(mine).get(label) for mine in self._labels]
        domains = self._domains[label]
        found: dict[str, list[int]] = {}
        for each in at:
            domain = domains[each]
            if domain is not None:
                found.setdefault(domain, []).append(each)
        return found

    def order(self, parts: Iterable[Sequence[int]], main: str | None) -> Sequence[int]:
        """Return the hosts of all parts. Hosts of one domain of the label `main` are neighbours,
        and within and around it those of one domain of other labels."""
        at = sorted(each for part in parts for each in part)
        labels = {each: dict(self._labels[each]) for each in at}
        known: dict[str, dict[str | None, int]] = {}  # the values of each label, numbered
        for mine in labels.values():
            for label, value in mine.items():
                values = known.setdefault(label, {None: -1})
                values.setdefault(value, len(values))

        def contains_main(label: str) -> bool:
            pairs = {(each.get(main or ""), each.get(label)) for each in labels.values()}
            return len({inner for inner, _ in pairs}) == len(pairs)

        # labels with few values come first: a block contains racks, and a rack NVLink domains
        names = sorted(
            known,
            key=lambda each: (
                not (main in known and contains_main(each)),
                each != main,
                len(known[each]),
                each,
            ),
        )
        if main in names:  # what contains it comes before it, although it also contains itself
            names.remove(main)
            names.insert(sum(contains_main(each) for each in names), main)
        return sorted(
            at, key=lambda each: [known[label][labels[each].get(label)] for label in names]
        )


def choose_hosts(
    labels: HostLabels,
    free: Sequence[int],
    nodes: int,
    need: TopologyNeed | None,
    rate: Callable[[int], float] | None = None,
) -> Sequence[int] | None:
    """Return one of the `free` hosts for each node, in the order of ranks, or None if the gang must
    wait. Where the labels leave a choice, the hosts with the lowest rate are taken.
    """
    chooser = _Chooser(labels, nodes, need or _ANYWHERE, rate)
    parts = chooser.choose(free)
    if parts is None:
        return None
    return labels.order(parts, None if need is None else need.same or need.prefer)


def explain_lack(
    labels: HostLabels, free: Sequence[int], nodes: int, need: TopologyNeed | None
) -> str:
    """Return what the required domains of the `free` hosts lack, or "" if they hold the gang or the
    gang requires none."""
    if need is None or need.same is None or choose_hosts(labels, free, nodes, need) is not None:
        return ""
    label, size = need.same, need.slice or nodes
    domains = labels.group(free, label)
    if size == nodes:
        best = max(domains, key=lambda name: len(domains[name]), default="")
        there = f"the best {label} ({best}) has {len(domains[best])}" if best else "none has any"
        return f"needs {nodes} nodes of one {label}; {there} free"
    room = sum(len(each) // size for each in domains.values())
    return (
        f"needs {nodes // size} slices of {format_count(size, 'node')}, each in one {label}; there "
        f"is room for {format_count(room, 'slice')}"
    )


Parts = list[list[int]]  # the chosen hosts of each domain


class _Chooser:
    def __init__(
        self,
        labels: HostLabels,
        nodes: int,
        need: TopologyNeed,
        rate: Callable[[int], float] | None,
    ) -> None:
        self._labels, self._nodes, self._need, self._rate = labels, nodes, need, rate

    def choose(self, free: Sequence[int]) -> Parts | None:
        """Keep the gang in one preferred domain, if one has room for it in required domains."""
        need = self._need
        if len(free) < self._nodes:
            return None
        if need.prefer is not None and (need.same is not None or need.slice is None):
            for domain in sorted(self._labels.group(free, need.prefer).values(), key=len):
                if (found := self._choose_required(domain)) is not None:
                    return found
        found = self._choose_required(free)
        if found is None and need.same is None:
            return [self._gather(free, self._nodes)]
        return found

    def _choose_required(self, free: Sequence[int]) -> Parts | None:
        """Choose the hosts of each required domain."""
        need = self._need
        label = need.same if need.same is not None or need.slice is None else need.prefer
        if label is None:
            return [self._gather(free, self._nodes)] if len(free) >= self._nodes else None
        size = need.slice or self._nodes
        domains = list(self._labels.group(free, label).values())
        shares = spread_slices([len(each) for each in domains], size, self._nodes // size)
        if shares is None:
            return None
        return [
            self._gather(domain, share * size)
            for domain, share in zip(domains, shares, strict=True)
            if share
        ]

    def _gather(self, free: Sequence[int], count: int) -> list[int]:
        """Take `count` hosts from as few preferred domains as possible: whole domains, largest
        first, and the rest from the smallest domain that holds it."""
        label, chosen = self._need.prefer, list[int]()
        domains = [] if label is None else list(self._labels.group(free, label).values())
        for domain, part in take_domains(domains, count):
            chosen += self._pick(domain, part)
        others = set(free) - set(chosen)  # without the label, if it has not been enough
        return chosen + self._pick([at for at in free if at in others], count - len(chosen))

    def _pick(self, free: Sequence[int], count: int) -> list[int]:
        if self._rate is None or count == len(free):
            return list(free[:count])
        return nsmallest(count, free, key=self._rate)


def take_domains(domains: Iterable[Sequence[_T]], count: int) -> Iterator[tuple[Sequence[_T], int]]:
    """Yield as few domains as possible that together have `count` members, each with the number to
    take: whole domains, largest first, and the rest from the smallest domain that holds it. If all
    have fewer members, everything is taken."""
    left = [domain for domain in domains if domain]
    while left and count:
        holding = [each for each in left if len(each) >= count]
        domain = min(holding, key=len) if holding else max(left, key=len)
        left.remove(domain)
        part = min(count, len(domain))
        count -= part
        yield domain, part


def choose_joined(
    free: Sequence[str], count: int, islands: Sequence[Collection[str]]
) -> Sequence[str]:
    """Return `count` of the free devices, in their order, from as few islands as possible; [] if
    there are fewer. A device in no island is an island of its own, so that a job that needs one
    device leaves joined devices together."""
    if not islands or len(free) <= count:
        return free[:count]
    joined = [[each for each in free if each in island] for island in islands]
    alone = [[each] for each in free if not any(each in island for island in islands)]
    parts = take_domains([*alone, *joined], count)
    taken = {each for domain, part in parts for each in domain[:part]}
    return [each for each in free if each in taken]


def spread_slices(free: Sequence[int], size: int, slices: int) -> Sequence[int] | None:
    """Return how many slices of `size` hosts each domain gets, or None if they do not fit. `free`
    has the number of free hosts of each domain. As few domains as possible get slices, each of them
    nearly the same number; of those that can hold their part, the ones with the fewest free hosts
    are taken."""
    room = [each // size for each in free]
    fullest = sorted(range(len(room)), key=lambda at: -room[at])
    count, held = 0, 0
    while held < slices:
        if count == len(room) or not room[fullest[count]]:
            return None
        held += room[fullest[count]]
        count += 1
    even = ceil(slices / count)
    holding = sorted((at for at in range(len(room)) if room[at] >= even), key=lambda at: free[at])
    chosen = holding[:count] if len(holding) >= count else fullest[:count]
    shares, left = [0] * len(room), slices
    for done, at in enumerate(sorted(chosen, key=lambda at: room[at])):
        shares[at] = min(room[at], ceil(left / (count - done)))
        left -= shares[at]
    return shares
