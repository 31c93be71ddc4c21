"""Computes the lowest possible cost of a job if the future is known. The module uses exact dynamic
programming for one or several markets.

A cut is a time at which a quote changes. A stay is a period on spot or on demand in one market.
Prices are constant between two cuts. Therefore, for each stay that starts between two cuts, there
is a stay that starts at a cut and has the same work and the same cost. So the program considers
only stays that start at a cut. A stay may end at any time. The state at a cut consists of the stay
that is running then, and the amount of work done. At a launch, the model subtracts the overhead
from the work done, and while the gang loads, the model adds the same amount again. A stay that ends
while its gang still loads does no work and only adds cost. As a result, no state costs less in the
model than in reality.

All lengths are multiples of their greatest common divisor, which is the unit of time. The result is
exact if all lengths are whole seconds.
"""

from collections.abc import Iterator
from math import gcd, inf

import numpy as np
from numpy.typing import NDArray

from cavvy.capabilities.simulation.traces.readers import TraceWorld
from cavvy.planner.spot.view import NOWHERE, JobTerms, SpotQuote

_Costs = NDArray[np.float64]
_Span = tuple[float, tuple[SpotQuote, ...]]


def find_optimum(world: TraceWorld, start_s: float, terms: JobTerms) -> float:
    """Return the cost in dollars of the cheapest schedule that meets the deadline. Raises
    ValueError if no schedule meets the deadline.
    """
    spans = list(_spans(world, start_s, terms.deadline_s))
    lengths = [round(length) for length, _ in spans]
    unit = gcd(*lengths, round(terms.work_s), round(terms.overhead_s)) or 1
    search = _OptimumSearch(terms, unit)
    for length, (_, quotes) in zip(lengths, spans, strict=True):
        search.launch(quotes)
        search.run(length // unit, quotes)
    best = search.best()
    if best == inf:
        raise ValueError(f"{terms.work_s:.0f} s of work do not fit into {terms.deadline_s:.0f} s")
    return best


def _spans(world: TraceWorld, start_s: float, length_s: float) -> Iterator[_Span]:
    """Yield the length and the quotes of each period between two changes. A change of the spot
    price is ignored if spot is unavailable before and after the change.
    """
    end_s = start_s + length_s
    since, holding = start_s, world.quotes[world.at(start_s)]
    for index in range(world.at(start_s) + 1, len(world.times_s)):
        time, quotes = world.times_s[index], world.quotes[index]
        if time >= end_s:
            break
        if all(
            one == other or not (one.up or other.up)
            for one, other in zip(holding, quotes, strict=True)
        ):
            continue
        if time > since:
            yield time - since, holding
        since, holding = time, quotes
    if end_s > since:
        yield end_s - since, holding


class _OptimumSearch:
    """The lowest cost of each state: `idle[m][p]` if the job idles with its checkpoint in market m,
    and `runs[m, spot][p]` if a gang runs in market m. Index p stands for p minus `overhead` units
    of finished work, a negative amount while the first gang is still loading.
    """

    def __init__(self, terms: JobTerms, unit: int) -> None:
        self._terms = terms
        self._low = round(terms.overhead_s / unit)
        self._top = round(terms.work_s / unit) + self._low
        self._hour = unit / 3600
        self._steps = np.arange(self._top + 1, dtype=np.float64)
        self._idle: dict[int, _Costs] = {NOWHERE: self._nothing()}
        self._idle[NOWHERE][self._low] = 0.0
        self._runs: dict[tuple[int, bool], _Costs] = {}

    def launch(self, quotes: tuple[SpotQuote, ...]) -> None:
        """Update the costs at the start of a period between two quote changes. At this time, a gang
        may start in any market, on demand or on available spot.
        """
        for market, quote in enumerate(quotes):
            best = self._nothing()
            for source, idle in self._idle.items():
                np.minimum(best, idle + self._terms.move(source, market), out=best)
            start = self._nothing()
            start[: self._top + 1 - self._low] = best[self._low :]
            for spot in (False, True) if quote.up else (False,):
                run = self._runs.get((market, spot))
                self._runs[market, spot] = start.copy() if run is None else np.minimum(run, start)

    def run(self, length: int, quotes: tuple[SpotQuote, ...]) -> None:
        """Update the costs for the period between two cuts. In this period, each gang can continue
        to work, and can end at any time.
        """
        for (market, spot), run in list(self._runs.items()):
            if spot and not quotes[market].up:
                del self._runs[market, spot]
                continue
            rate = quotes[market].usd_hr if spot else self._terms.markets[market].on_demand_usd_hr
            rate *= self._hour
            ended = _end_anywhere(run - rate * self._steps, length) + rate * self._steps
            idle = self._idle.get(market)
            self._idle[market] = ended if idle is None else np.minimum(idle, ended)
            on = self._nothing()
            if length <= self._top:
                on[length:] = run[: self._top + 1 - length] + rate * length
            self._runs[market, spot] = on

    def best(self) -> float:
        """Return the lowest cost of a state in which all work is done."""
        return min(float(idle[self._top]) for idle in self._idle.values())

    def _nothing(self) -> _Costs:
        return np.full(self._top + 1, inf)


def _end_anywhere(level: _Costs, length: int) -> _Costs:
    """Return an array of minima: element i is the lowest of the elements i - `length` to i of
    `level`. The function needs few steps, because each step doubles the number of indices over
    which the minimum is taken.
    """
    width = 1
    while width < length + 1:
        step = min(width, length + 1 - width)
        if step >= len(level):
            break
        moved = level.copy()
        np.minimum(level[step:], level[:-step], out=moved[step:])
        level = moved
        width += step
    return level
