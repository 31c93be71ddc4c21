"""Decides which running elastic jobs change their number of nodes: which of them grow, because
nodes are free and the change earns its restart, and which give nodes back, because another job
waits for them. No I/O. `scheduler.goodput` shares free nodes out; the keeper of the capability
`elastic` and simulated clusters give it what they have measured.

* Growth takes only nodes for which no job waits: so a job beside an elastic one starts when it
  would start beside a rigid one of the least size, but for the seconds in which nodes are handed
  over.
* Elastic jobs share what they have above their least sizes: one that holds much gives some to one
  that gains more by it, by proportional fairness with the weights of their projects.
* What an elastic job has above its least is lent, except what is within its project's own quota.
  The first jobs of the queue get it back; their own order is that of fair shares.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from cavvy.domain.elastic import ElasticJob, ElasticSize
from cavvy.domain.values import Struct
from cavvy.scheduler.goodput import GrowthRules, Room, choose_sizes

# How a training speeds up on sizes of which nothing was measured: with the nodes to this power. It
# is the median of six programs in Pollux' profiles whose batch stays the same on twice as many
# nodes of four T4 (`benchmarks/elastic_policies.py scaling`: 0.28). It is low on purpose: what a
# larger size really gains is measured after the first change, and a promise is not paid back.
SCALING = 0.3
# Free nodes are expected to stay free for ten minutes at least: a change must earn its restart
# within this time, or within five restarts, if these take longer.
_HORIZON_S = 600.0
_PAID = GrowthRules(horizon_s=_HORIZON_S)
_FREE = GrowthRules(horizon_s=_HORIZON_S, least_efficiency=0.0)
_COMPARED = 8
# A smaller size that was this much faster when it was measured is gone back to.
_FASTER = 1.05
# Nodes move from a running job to another one if the sum of the logarithms of the jobs' speedups,
# by their weights, grows by this: as if one job were 5 % faster, and no other one slower.
_BETTER = 0.05


class ElasticRun(Struct, frozen=True, kw_only=True):
    """A running elastic job. Jobs in one `place` compete for the same nodes. `sizes` are the
    numbers of nodes that it may have, ascending, and `nodes` is the present one. `room` is the most
    that it could have now if no other job changes, and a node of it has `unit` accelerators.

    `rates` are what was measured by number of nodes, in any unit of work per second; `remaining`
    and `done` are in the same unit, None and 0 if the program tells nothing. `scaling` is the power
    of the nodes that its rate is expected to follow while it has measured one size only. A change
    of size costs `resize_s`, in which no work is done. `time_left_s` is the time until the job's
    deadline. `lends` states whether what it has above its least may go to other projects, and
    `paid` whether its nodes cost money. `rested` states whether it has run long enough since its
    last change to grow.
    """

    id: str
    project: str
    place: str
    sizes: tuple[int, ...]
    nodes: int
    room: int = 0
    unit: int = 1
    rates: Mapping[int, float] = {}
    remaining: float | None = None
    done: float = 0.0
    resize_s: float = 0.0
    time_left_s: float | None = None
    weight: float = 1.0
    scaling: float = SCALING
    lends: int | None = None
    paid: bool = False
    rested: bool = True

    @property
    def least(self) -> int:
        """The fewest nodes that the job keeps: its least size, or the least one with which it is in
        time if it is so now. Without a rate, no deadline can be compared."""
        most, left = self.time_left_s, self.remaining
        if most is None or left is None or not self.rates:
            return self.sizes[0]
        if left / self.guess_rate(self.nodes) > most:
            return self.sizes[0]
        in_time = (
            each
            for each in self.sizes
            if each <= self.nodes and left / self.guess_rate(each) + self.resize_s <= most
        )
        return min(in_time, default=self.nodes)

    def find_floor(self, project: str) -> int:
        """Return the fewest nodes that the job keeps if a job of the project asks for them."""
        if self.lends is None or project == self.project:
            return self.least
        return max(self.least, self.nodes - self.lends)

    def guess_rate(self, nodes: int) -> float:
        """Return the work per second on so many nodes: as measured or, in proportion to a power of
        the nodes, between and beyond the sizes that were measured."""
        return guess_rate(self.rates, nodes, self.scaling)


class SizeStep(Struct, frozen=True, kw_only=True):
    """A job gets another number of nodes. `gain_s` is how much sooner it ends, None if the job does
    not tell how much work it has left; `speedup` is the expected ratio of the rates."""

    id: str
    nodes: int
    gain_s: float | None = None
    speedup: float = 1.0


def guess_rate(measured: Mapping[int, float], nodes: int, scaling: float = SCALING) -> float:
    """Return the work per second on so many nodes; relative to that on one node if nothing was
    measured. Of a job that has measured one size only, the rate follows the power `scaling` of the
    nodes. Between two measured sizes, and beyond them, the rate follows a power of the nodes:
    beyond them at least 0 and at most 1, so that an outlier promises no more than the ideal."""
    known = sorted(each for each in measured if measured[each] > 0)
    if not known:
        return float(nodes**scaling)
    if nodes in known:
        return measured[nodes]
    below = [each for each in known if each < nodes]
    above = [each for each in known if each > nodes]
    if below and above:
        power = _find_power(measured, below[-1], above[0])
        return float(measured[below[-1]] * (nodes / below[-1]) ** power)
    near, *others = below[::-1] or above
    power = min(max(_find_power(measured, near, others[0]), 0.0), 1.0) if others else scaling
    return float(measured[near] * (nodes / near) ** power)


def find_scaling(rates: Sequence[Mapping[int, float]]) -> float:
    """Return the power of the nodes that the rates of jobs follow, the median of those jobs that
    have measured several sizes; SCALING if there is none."""
    powers = sorted(
        _find_power(each, min(each), max(each))
        for each in rates
        if len(each) > 1 and min(each.values()) > 0
    )
    return min(max(powers[len(powers) // 2], 0.0), 1.0) if powers else SCALING


def _find_power(measured: Mapping[int, float], one: int, other: int) -> float:
    return math.log(measured[other] / measured[one]) / math.log(other / one)


def choose_growth(runs: Sequence[ElasticRun]) -> Sequence[SizeStep]:
    """Return which jobs get more nodes, those first that gain most. Of the jobs in one place, all
    that are `rested` share what is free there. A step that would not end the job sooner, its
    restart included, is none. Nodes that cost nothing would be idle, so that they are used however
    little a job gains by them."""
    places: defaultdict[str, list[ElasticRun]] = defaultdict(list)
    for run in runs:
        if run.rested and run.room > run.nodes:
            places[run.place].append(run)
    steps = []
    for place, here in places.items():
        held = sum(run.nodes * run.unit for run in here)
        free = max((run.room - run.nodes) * run.unit for run in here)
        jobs = [_describe(run, run.nodes, run.room) for run in here]
        rules = _PAID if any(run.paid for run in here) else _FREE
        sizes = choose_sizes(jobs, Room(free={place: held + free}), rules)
        for run in here:
            chosen = sizes.get(run.id)
            if chosen is not None and chosen.nodes > run.nodes:
                step = _make_step(run, chosen.nodes)
                if step.speedup > 1 and (step.gain_s is None or step.gain_s > 0):
                    steps.append(step)
    return sorted(steps, key=lambda each: -(each.gain_s or 0.0))


def choose_moves(runs: Sequence[ElasticRun]) -> Sequence[SizeStep]:
    """Return which jobs keep fewer nodes, so that other running jobs in their place can grow: only
    if this is better for all of them together, what they lose by restarts included. The nodes that
    become free are those that `choose_growth` hands out next."""
    places: defaultdict[str, list[ElasticRun]] = defaultdict(list)
    for run in runs:
        if run.rested:
            places[run.place].append(run)
    found = [_find_move(here) for here in places.values()]
    return [_make_step(run, nodes) for run, nodes in found if run is not None]


def _find_move(here: Sequence[ElasticRun]) -> tuple[ElasticRun | None, int]:
    """Return the best gift of one job of a place to another one, and the nodes that the giver
    keeps; of many jobs, only those are compared that have most and least above their least."""
    free = max((run.room - run.nodes) * run.unit for run in here)
    ranked = sorted(here, key=lambda run: -(run.nodes / run.least) / max(run.weight, 1e-9))
    best: tuple[float, ElasticRun | None, int] = _BETTER, None, 0
    for giver in ranked[:_COMPARED]:
        for taker in ranked[::-1][:_COMPARED]:
            if taker is giver:
                continue
            floor = giver.find_floor(taker.project)
            for kept in (each for each in giver.sizes if floor <= each < giver.nodes):
                more = (free + (giver.nodes - kept) * giver.unit) // taker.unit
                fits = [each for each in taker.sizes if each <= taker.nodes + more]
                got = max(fits, key=taker.guess_rate, default=taker.nodes)
                won = _find_welfare(giver, kept) + _find_welfare(taker, got)
                if got > taker.nodes and won > best[0]:
                    best = won, giver, kept
    return best[1], best[2]


def _find_welfare(run: ElasticRun, nodes: int) -> float:
    """Return what a change to so many nodes is worth: the logarithm of how much faster the job is
    over the time in which a change must earn its restart, by the job's weight. The sum over jobs is
    largest at proportional fairness, where a node is worth less to a job that has many."""
    speedup = run.guess_rate(nodes) / run.guess_rate(run.nodes)
    kept = 1 - run.resize_s / max(_HORIZON_S, 5 * run.resize_s)
    return run.weight * math.log(speedup * kept)


def choose_returns(runs: Sequence[ElasticRun]) -> Sequence[SizeStep]:
    """Return which jobs go back to a smaller number of nodes, on which they were measurably faster
    than on the present one: their growth has not paid."""
    steps = []
    for run in runs:
        smaller = [each for each in run.rates if each < run.nodes and each in run.sizes]
        if not run.rested or run.nodes not in run.rates or not smaller:
            continue
        best = max(smaller, key=lambda each: (run.rates[each], -each))
        step = _make_step(run, best)
        if step.speedup > _FASTER and (step.gain_s is None or step.gain_s > 0):
            steps.append(step)
    return steps


def _describe(run: ElasticRun, least: int, most: int) -> ElasticJob:
    """Return the job as the shared policy sees it, with its present size and those from `least` to
    `most` nodes."""
    sizes = tuple(
        ElasticSize(
            nodes=each,
            accelerator=run.place,
            accelerators_per_node=run.unit,
            throughput=run.guess_rate(each),
            measured=each in run.rates,
        )
        for each in sorted({*run.sizes, run.nodes})
        if each == run.nodes or least <= each <= most
    )
    return ElasticJob(
        id=run.id,
        sizes=sizes,
        current=next(each for each in sizes if each.nodes == run.nodes),
        resize_s=run.resize_s,
        remaining=run.remaining if run.rates else None,
        done=run.done,
        weight=run.weight,
        owner=run.project,
    )


def _make_step(run: ElasticRun, nodes: int) -> SizeStep:
    now, then = run.guess_rate(run.nodes), run.guess_rate(nodes)
    gain = None
    if run.remaining is not None and run.rates:
        gain = run.remaining / now - run.remaining / then - run.resize_s
    return SizeStep(id=run.id, nodes=nodes, gain_s=gain, speedup=then / now)


def choose_donors(
    project: str, runs: Sequence[ElasticRun], suffices: Callable[[Mapping[str, int]], bool]
) -> Sequence[SizeStep]:
    """Return which jobs keep fewer nodes, so that a waiting job of the project can start; none if
    that does not suffice, or is not needed. `suffices` returns whether the job could start if the
    jobs with these IDs had these numbers of nodes.

    As few nodes as suffice are given, by those first that have most above their least for their
    weight. Jobs of the same project give, too: their owner has asked for both.
    """
    floors = {run.id: run.find_floor(project) for run in runs}
    donors = [run for run in runs if floors[run.id] < run.nodes]
    donors.sort(key=lambda run: (run.nodes - floors[run.id]) * run.unit / max(run.weight, 1e-9))
    sizes = {run.id: floors[run.id] for run in donors}
    if not donors or suffices({run.id: run.nodes for run in donors}) or not suffices(sizes):
        return ()
    for run in donors:  # those that have least above their least get theirs back first
        sizes[run.id] = _find_most(run, sizes, suffices)
    return [_make_step(run, sizes[run.id]) for run in reversed(donors) if sizes[run.id] < run.nodes]


def _find_most(
    run: ElasticRun, sizes: Mapping[str, int], suffices: Callable[[Mapping[str, int]], bool]
) -> int:
    """Return the largest size of the job that suffices, beside these sizes of other jobs; its own
    among them does."""
    least = sizes[run.id]
    tried = sorted({least, run.nodes, *run.sizes})
    tried = [each for each in tried if least <= each <= run.nodes]
    low, high = 0, len(tried) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if suffices({**sizes, run.id: tried[middle]}):
            low = middle
        else:
            high = middle - 1
    return tried[low]
