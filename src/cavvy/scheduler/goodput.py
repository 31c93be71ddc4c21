"""Chooses the numbers of nodes and the types of accelerators of elastic jobs by goodput: how much
useful work each of them does per second on each size. No I/O.

Ideas, and where they come from:
* goodput as what a scheduler shares out, and a change of size that must earn the time of its
  restart: Pollux (Qiao et al., OSDI'21);
* one choice among all sizes and all types of accelerators, each job with a least size before any
  grows: Sia (Jayaram Subramanya et al., SOSP'23);
* more accelerators go to a job that would end sooner: heSRPT (Berg et al., Performance 2020),
  which is optimal for the mean time of jobs whose speedup is a power of their size. How much
  sooner counts is an exponent here: with 1 long jobs wait too long, and with 0 short ones do;
* a job of unknown length is expected to run for as long again as it has run, so that the one with
  the least attained service is first, as in Tiresias (Gu et al., NSDI'19).

Rigid jobs have their accelerators already: `choose_sizes` shares out only what they leave.
"""

import heapq
from collections.abc import Mapping, Sequence

from cavvy.domain.elastic import ElasticJob, ElasticSize
from cavvy.domain.values import Struct

# A job of unknown length is expected to run at least so long on its least size.
_LEAST_LEFT_S = 600.0
# A size is expected to last for as long as this many restarts at least: no job changes more often.
_LEAST_RESTARTS = 5
_TINY = 1e-12


class GrowthRules(Struct, frozen=True, kw_only=True):
    """How elastic jobs grow.

    `horizon_s`: a change of size must earn the seconds of its restart within this time, because
    later the sizes change again. `short_first`: the power of a job's remaining time by which it is
    worth less, from 0 (all gains count the same) to 1 (the shortest job first). `least_efficiency`:
    no job grows by accelerators that do less than this part of the work that one does on the job's
    most efficient size.
    """

    horizon_s: float = 300.0
    short_first: float = 0.5
    least_efficiency: float = 0.1


class Room(Struct, frozen=True, kw_only=True):
    """What there is for elastic jobs: accelerators by type (nodes, for jobs without accelerators),
    and how many more of them each owner may use by quota, where there is a quota."""

    free: Mapping[str | None, int]
    quotas: Mapping[str, int] = {}


class _Value(Struct, frozen=True):
    """What a size is worth to all, and what it costs in accelerators of average speed."""

    worth: float
    cost: float
    units: int
    size: ElasticSize


def choose_sizes(
    jobs: Sequence[ElasticJob], room: Room, rules: GrowthRules | None = None
) -> Mapping[str, ElasticSize]:
    """Return the size of each job by its ID; a job without a size waits. First each job gets its
    least size, the most urgent job first. Then the accelerators that are left go one step at a time
    to the job that makes the most of them. A job that runs keeps its size unless a change earns its
    restart; a running job is never larger than its quota allows."""
    return _Division(jobs, room, rules or GrowthRules()).decide()


class _Division:
    def __init__(self, jobs: Sequence[ElasticJob], room: Room, rules: GrowthRules):
        self.jobs, self.rules = jobs, rules
        self.left = dict(room.free)
        self.quotas = dict(room.quotas)
        self.prices = _price_types(jobs, self.left)
        self.values = [self._value(job) for job in jobs]
        self.floors = [self._find_floor(values) for values in self.values]
        self.chosen: list[_Value | None] = [None] * len(jobs)

    def decide(self) -> Mapping[str, ElasticSize]:
        self._give_least()
        heap = [
            (-step[0], number)
            for number in range(len(self.jobs))
            if (step := self._find_step(number))
        ]
        heapq.heapify(heap)
        while heap:
            _, number = heapq.heappop(heap)
            step = self._find_step(number)
            if step is None:
                continue
            if heap and -step[0] > heap[0][0]:
                heapq.heappush(heap, (-step[0], number))  # others took what it counted on
                continue
            changed = [number, *self._list_gaining(number, step[1])]
            self._take(number, step[1])
            for each in changed:
                if after := self._find_step(each):
                    heapq.heappush(heap, (-after[0], each))
        return {
            job.id: chosen.size
            for job, chosen in zip(self.jobs, self.chosen, strict=True)
            if chosen is not None
        }

    def _value(self, job: ElasticJob) -> list[_Value]:
        """The worth of each size: the goodput, less what a restart costs, relative to that of the
        least size, and the less the longer the job still runs on the least one."""
        if not job.sizes:
            return []
        slowest = max(min(each.goodput for each in job.sizes), _TINY)
        left = job.done if job.remaining is None else job.remaining
        seconds = max(left / slowest, 1.0 if job.remaining is not None else _LEAST_LEFT_S)
        factor = job.weight * seconds**-self.rules.short_first / slowest
        values = []
        for size in job.sizes:
            rate, units = size.goodput, _count_units(size)
            if job.current is not None and size != job.current and rate > 0:
                horizon = max(self.rules.horizon_s, _LEAST_RESTARTS * job.resize_s)
                horizon = min(horizon, seconds * slowest / rate + job.resize_s)
                rate *= max(1 - job.resize_s / max(horizon, _TINY), 0.0)
            cost = units * self.prices.get(size.accelerator, 1.0)
            values.append(_Value(rate * factor, cost, units, size))
        return values

    def _find_floor(self, values: Sequence[_Value]) -> float:
        best = max(map(_find_yield, values), default=0.0)
        return self.rules.least_efficiency * best

    def _give_least(self) -> None:
        """Give each job a size of as few accelerators of a type as possible, of the type that does
        most for it by its price."""
        most = [max((each.worth for each in values), default=0.0) for values in self.values]
        for number in sorted(range(len(self.jobs)), key=lambda each: -most[each]):
            least: dict[str | None, _Value] = {}
            for each in self.values[number]:
                kind = each.size.accelerator
                known = least.get(kind)
                better = known is None or (each.units, -each.worth) < (known.units, -known.worth)
                if better and self._fits(number, each):
                    least[kind] = each
            if least:
                self._take(number, max(least.values(), key=_find_yield))

    def _fits(self, number: int, value: _Value) -> bool:
        held, kind, owner = self.chosen[number], value.size.accelerator, self.jobs[number].owner
        own = 0 if held is None else held.units
        same = own if held is not None and held.size.accelerator == kind else 0
        if value.units > self.left.get(kind, 0) + same:
            return False
        quota = self.quotas.get(owner)
        return quota is None or value.units <= quota + own

    def _take(self, number: int, value: _Value) -> None:
        held, owner = self.chosen[number], self.jobs[number].owner
        if held is not None:
            self.left[held.size.accelerator] += held.units
        self.left[value.size.accelerator] -= value.units
        if owner in self.quotas:
            self.quotas[owner] -= value.units - (0 if held is None else held.units)
        self.chosen[number] = value

    def _list_gaining(self, number: int, value: _Value) -> Sequence[int]:
        """Return the other jobs that may have a further step when this job takes the size, since it
        gives up accelerators, or a part of its owner's quota."""
        held = self.chosen[number]
        if held is None:
            return ()
        kind, owner = held.size.accelerator, self.jobs[number].owner
        fewer = value.units < held.units
        gives_up = fewer or value.size.accelerator != kind
        return [
            other
            for other, job in enumerate(self.jobs)
            if other != number
            and (
                (gives_up and any(each.size.accelerator == kind for each in self.values[other]))
                or (fewer and owner in self.quotas and job.owner == owner)
            )
        ]

    def _find_step(self, number: int) -> tuple[float, _Value] | None:
        """The size that makes the most of what it costs more than the one that the job has, with
        the worth per cost; None if no larger one fits or is efficient enough."""
        held = self.chosen[number]
        if held is None:
            worth, cost, floor = 0.0, 0.0, 0.0
        else:
            worth, cost, floor = held.worth, held.cost, self.floors[number]
        best = None
        for value in self.values[number]:
            gain = value.worth - worth
            if gain <= _TINY * value.worth:
                continue
            density = gain / max(value.cost - cost, 1e-6)
            if density < floor or (best is not None and density <= best[0]):
                continue
            if self._fits(number, value):
                best = density, value
        return best


def _find_yield(value: _Value) -> float:
    """The worth per cost."""
    return value.worth / max(value.cost, _TINY)


def _count_units(size: ElasticSize) -> int:
    return size.accelerators if size.accelerator is not None else size.nodes


def _price_types(
    jobs: Sequence[ElasticJob], types: Mapping[str | None, int]
) -> Mapping[str | None, float]:
    """What an accelerator of each type costs others that can't have it: how fast it is for the
    average job, relative to the job's mean over all types."""
    speeds: dict[str | None, list[float]] = {kind: [] for kind in types}
    for job in jobs:
        best: dict[str | None, float] = {}
        for size in job.sizes:
            if units := _count_units(size):
                each = size.goodput / units
                best[size.accelerator] = max(best.get(size.accelerator, 0.0), each)
        mean = sum(best.values()) / max(len(best), 1)
        for kind, each in best.items():
            if kind in speeds and mean > 0:
                speeds[kind].append(each / mean)
    return {kind: sum(each) / len(each) if each else 1.0 for kind, each in speeds.items()}
