"""Compute what one market's spot is worth at a given price per hour of slack, and find the price at
which the slack lasts until the deadline.

The unit of money is the price of an hour on demand, and the unit of time is an hour. Running on
demand is the reference with value 0: it does an hour's work for an hour's money and uses no slack.
Compared with on-demand, an hour of spot gains 1 - s, where s is the spot price divided by the
on-demand price; an idle hour costs `price`, because it uses up slack; and a launch, which takes d
hours, costs d (1 + price). At a given price, one spell of spot does not depend on the next, so the
best thresholds follow from the spell lengths alone:

* When spot becomes unavailable, idle for at most `patience` hours and then run on demand. This is a
  ski-rental problem with known odds.
* When spot becomes available again while the job runs on demand, change to spot after it has stayed
  for `trust` hours.

The price is then chosen so that these thresholds use exactly the available slack in the time that
is left (dual ascent on this one constraint). It is computed again for each decision.
"""

from collections.abc import Callable
from functools import lru_cache
from math import inf, sqrt
from typing import NamedTuple

from cavvy.planner.spot.spells import SpellLengths

SCARCE = 64.0  # the highest price of slack that is tried: above it, idling never pays
_CHEAP = 1e-3  # the lowest price above 0 that is tried
_CLOSE = 1.15  # the search ends when its bounds are within this factor
_NO_GAIN = 1e-12  # a smaller gain is a rounding error


class IdleThresholds(NamedTuple):
    """How long to idle while spot is unavailable, and the expected result of this."""

    cost: float
    patience: float
    idle: float  # mean hours of idling
    gives_up: float  # chance that spot stays away for longer and the job leaves for on-demand


class SpotCycle(NamedTuple):
    """The best thresholds at a price of slack, and their expected result in one cycle: a spell with
    spot and a spell without.
    """

    price: float
    wait: IdleThresholds
    trust: float
    relief: float  # how much more it is worth to be on demand than idle when spot returns
    slack: float  # mean hours of slack that a cycle uses
    gain: float  # gain compared with running on demand
    hours: float  # mean length of a cycle


def plan_wait(away: SpellLengths, price: float, launch: float, relief: float) -> IdleThresholds:
    """Find the patience with the least expected cost. Idling costs `price` an hour, and a launch on
    demand when the patience ends costs `launch`.
    """
    loss = launch - relief
    patience, waited, longer = away.best(loss / price if price > 0 else inf if loss > 0 else 0.0)
    cost = price * waited + loss * longer + relief
    return IdleThresholds(cost, patience if longer else inf, waited, longer)


def plan_trust(
    stays: SpellLengths, saving: float, entry: float
) -> tuple[float, float, float, float]:
    """Find how long spot must have been available before a job leaves on-demand for it, if spot
    saves `saving` an hour and the change costs `entry`.

    Returns the threshold (infinite if a change never pays off), its gain, the chance that it is
    reached and the mean hours on spot.
    """
    if saving > 0:
        threshold, waited, longer = stays.best(entry / saving)
        rest = stays.mean - waited
        gain = saving * rest - entry * longer
        if longer and gain > _NO_GAIN:
            return threshold, gain, longer, rest
    return inf, 0.0, 0.0, 0.0


def find_price(need: Callable[[float], float], slack: float) -> float:
    """The lowest price of slack at which at most `slack` hours are needed; SCARCE if the search
    finds none. `need` returns the hours that are needed at a price.
    """
    if need(0.0) <= slack:
        return 0.0
    low, high = _CHEAP, SCARCE
    while high > low * _CLOSE:
        middle = sqrt(low * high)
        if need(middle) > slack:
            low = middle
        else:
            high = middle
    return high


@lru_cache(maxsize=2048)  # the search for a price tries the same prices in each decision
def plan_cycle(
    stays: SpellLengths, away: SpellLengths, saving: float, overhead: float, price: float
) -> SpotCycle:
    """Find the best thresholds for a market at a price of slack."""
    launch = overhead * (1 + price)
    relief = 0.0
    # `relief` and the thresholds depend on each other; two rounds are enough. Being on demand when
    # spot returns saves a launch if it does not pay to change to spot at once.
    for _ in range(2):
        wait = plan_wait(away, price, launch, relief)
        trust, worth, enters, on_spot = plan_trust(stays, saving, launch + wait.cost)
        at_once = saving * stays.mean - launch - wait.cost
        relief = max(0.0, min(worth - at_once, launch))
    returns = 1 - wait.gives_up  # the chance that spot returns before the patience ends
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


def solve_cycle(
    stays: SpellLengths,
    away: SpellLengths,
    saving: float,
    overhead: float,
    *,
    slack: float,
    left: float,
    within: SpellLengths | None,
) -> SpotCycle:
    """The cycle at the lowest price at which `slack` lasts for the `left` hours to the deadline.

    If spot is unavailable now, `within` are the possible hours until it returns: the job waits for
    this once, before the first cycle.
    """

    def plan(price: float) -> SpotCycle:
        return plan_cycle(stays, away, saving, overhead, price)

    def need(price: float) -> float:
        cycle = plan(price)
        if within is None:
            return cycle.slack * left / cycle.hours
        first = plan_wait(within, price, overhead * (1 + price), cycle.relief)
        later = max(0.0, left - within.mean) / cycle.hours
        return first.idle + first.gives_up * overhead + cycle.slack * later

    return plan(find_price(need, slack))
