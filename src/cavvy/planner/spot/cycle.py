"""Computes how much spot in one market is worth, if an hour of slack has a given price. Also finds
the price at which the job uses up its slack just before the deadline.

The unit of money is the price of an hour on demand, and the unit of time is an hour. A gang that
runs on demand has the value 0: it does an hour of work for the price of an hour on demand, and uses
up no slack. Compared with running on demand:

* an hour of spot gains 1 - s, where s is the spot price divided by the on-demand price;
* an idle hour costs `price`, because it uses up slack;
* a launch that takes d hours costs d (1 + price).

A spell is a period with spot or a period without spot. If the price of slack is fixed, each spell
can be decided by itself, and the best thresholds depend only on the lengths of the spells:

* When spot becomes unavailable, idle for at most `patience` hours and then run on demand. The best
  `patience` solves the ski-rental problem (rent again, or buy) with known probabilities of the
  spells' lengths.
* When spot becomes available again while the job runs on demand, change to spot after spot has been
  available for `trust` hours.

With a higher price of slack, the best thresholds `patience` and `trust` use less slack. The module
searches for the price at which they use exactly the available slack in the remaining time (dual
ascent on this single constraint). Each decision first computes the price of an hour of slack again.
"""

from collections.abc import Callable
from functools import lru_cache
from math import inf, sqrt
from typing import NamedTuple

from cavvy.planner.spot.spells import SpellLengths

SCARCE = 64.0  # the highest price of slack that is tried; above it, idling never pays
_CHEAP = 1e-3  # the lowest price above 0 that is tried
_CLOSE = 1.15  # the search ends when the upper bound is within this factor of the lower bound
_NO_GAIN = 1e-12  # a smaller gain is treated as a rounding error


class IdleThresholds(NamedTuple):
    """The times to idle while spot is unavailable, and the expected outcome."""

    cost: float
    patience: float
    idle: float  # mean hours of idling
    # probability that spot does not return in time, so that the job changes to on-demand
    gives_up: float


class SpotCycle(NamedTuple):
    """The thresholds that are best if slack has the price `price`, and their expected outcome in
    one cycle. A cycle is a period with spot followed by a period without spot.
    """

    price: float
    wait: IdleThresholds
    trust: float
    relief: float  # gain of already running on demand, compared with idling, when spot returns
    slack: float  # mean hours of slack that one cycle uses
    gain: float  # mean gain compared with running on demand
    hours: float  # mean length of one cycle in hours


def plan_wait(away: SpellLengths, price: float, launch: float, relief: float) -> IdleThresholds:
    """Find the patience with the lowest expected cost. Idling costs `price` an hour. When the job
    has waited for the time of its patience, it is launched on demand, which costs `launch`.
    """
    loss = launch - relief
    patience, waited, longer = best_wait(away, price, loss)
    cost = price * waited + loss * longer + relief
    return IdleThresholds(cost, patience if longer else inf, waited, longer)


def best_wait(away: SpellLengths, price: float, loss: float) -> tuple[float, float, float]:
    """Return the patience for `plan_wait`, the mean hours of idling, and the probability that spot
    stays unavailable for longer than the patience. `loss` is the difference between the cost of a
    launch on demand and the cost of a return to spot.
    """
    return away.best(loss / price if price > 0 else inf if loss > 0 else 0.0)


def plan_trust(
    stays: SpellLengths, saving: float, entry: float
) -> tuple[float, float, float, float]:
    """Compute how long spot must have been available before a job moves from on-demand to spot.
    Spot saves `saving` dollars an hour, and the change to spot costs `entry` dollars.

    Returns the threshold (infinite if a change never pays), its gain, the probability that the
    threshold is reached, and the mean hours on spot.
    """
    if saving > 0:
        threshold, waited, longer = stays.best(entry / saving)
        rest = stays.mean - waited
        gain = saving * rest - entry * longer
        if longer and gain > _NO_GAIN:
            return threshold, gain, longer, rest
    return inf, 0.0, 0.0, 0.0


def _list_brackets(low: float, high: float) -> dict[float, float]:
    """Return all pairs of bounds that can result from a search between `low` and `high`. The result
    maps each upper bound to its lower bound.
    """
    if high <= low * _CLOSE:
        return {high: low}
    middle = sqrt(low * high)
    return _list_brackets(low, middle) | _list_brackets(middle, high)


_BRACKETS = _list_brackets(_CHEAP, SCARCE)


def find_price(need: Callable[[float], float], slack: float, guess: float = 0.0) -> float:
    """Return the lowest price of an hour of slack at which the job uses at most `slack` hours of
    slack, or SCARCE if the search finds no price. `need` returns the hours of slack that are needed
    at a price. The higher the price of slack, the fewer hours of slack are needed.

    `guess` is the result of an earlier search. `guess` only saves time: if the lowest price still
    lies between the last two bounds of the earlier search, no new search is needed.
    """
    if need(0.0) <= slack:
        return 0.0
    low, high = _BRACKETS.get(guess, 0.0), guess
    if low and (high == SCARCE or need(high) <= slack) and (low == _CHEAP or need(low) > slack):
        return high
    low, high = _CHEAP, SCARCE
    while high > low * _CLOSE:
        middle = sqrt(low * high)
        if need(middle) > slack:
            low = middle
        else:
            high = middle
    return high


def plan_cycle(
    stays: SpellLengths, away: SpellLengths, saving: float, overhead: float, price: float
) -> SpotCycle:
    """Find the thresholds with the lowest expected cost in one market, if an hour of slack costs
    `price`.
    """
    launch = overhead * (1 + price)
    relief = 0.0
    # `relief` and the thresholds depend on each other; two rounds are enough. If the job is on
    # demand when spot returns, and an immediate change to spot does not pay, a launch is saved.
    for _ in range(2):
        wait = plan_wait(away, price, launch, relief)
        trust, worth, enters, on_spot = plan_trust(stays, saving, launch + wait.cost)
        at_once = saving * stays.mean - launch - wait.cost
        relief = max(0.0, min(worth - at_once, launch))
    returns = 1 - wait.gives_up  # the probability that spot returns before the patience ends
    from_idle = enters * returns / max(1e-9, 1 - returns * (1 - enters))
    entries = from_idle + (1 - from_idle) * enters
    launches = entries * (1 + wait.gives_up)
    hours_on_spot = from_idle * stays.mean + (1 - from_idle) * on_spot
    slack = launches * overhead + entries * wait.idle
    return SpotCycle(
        price,
        wait,
        trust,
        relief,
        slack,
        saving * hours_on_spot - launches * overhead - price * slack,
        stays.mean + away.mean,
    )


class _CyclesByPrice(dict[float, SpotCycle]):
    """Caches the cycles of one market by the price of an hour of slack. All searches try the same
    prices, so each cycle is computed only once.
    """

    def __init__(
        self, stays: SpellLengths, away: SpellLengths, saving: float, overhead: float
    ) -> None:
        self._market = stays, away, saving, overhead

    def __missing__(self, price: float) -> SpotCycle:
        self[price] = cycle = plan_cycle(*self._market, price)
        return cycle


_find_cycles = lru_cache(maxsize=512)(_CyclesByPrice)


class CycleProblem(NamedTuple):
    """Finds the lowest price of an hour of slack at which the job uses at most `slack` hours of
    slack, and computes the cycle at this price. `left` is the number of hours until the deadline.

    If spot is unavailable now, `within` is the distribution of the hours until spot returns. The
    job waits once for spot to return, before the first cycle.
    """

    stays: SpellLengths
    away: SpellLengths
    saving: float
    overhead: float
    slack: float
    left: float
    within: SpellLengths | None

    def is_free(self) -> bool:
        """Return whether the job has more slack than it can use. With a price of 0 for slack, the
        job would use as much slack as it ever uses; this amount is compared with the available
        slack.
        """
        return self._need(self._cycles())(0.0) <= self.slack

    def solve(self, guess: float = 0.0) -> SpotCycle:
        """Find the cycle. `guess` is the price of an earlier solution and speeds up the search."""
        cycles = self._cycles()
        return cycles[find_price(self._need(cycles), self.slack, guess)]

    def _cycles(self) -> _CyclesByPrice:
        return _find_cycles(self.stays, self.away, self.saving, self.overhead)

    def _need(self, cycles: _CyclesByPrice) -> Callable[[float], float]:
        """Return a function of the price of an hour of slack. The function returns how many hours
        of slack the job uses at this price.
        """
        within, overhead, left = self.within, self.overhead, self.left
        if within is None:

            def need(price: float) -> float:
                cycle = cycles[price]
                return cycle.slack * left / cycle.hours
        else:
            later_hours = max(0.0, left - within.mean)

            def need(price: float) -> float:
                cycle = cycles[price]
                loss = overhead * (1 + price) - cycle.relief
                _, idle, gives_up = best_wait(within, price, loss)
                return idle + gives_up * overhead + cycle.slack * (later_hours / cycle.hours)

        return need
