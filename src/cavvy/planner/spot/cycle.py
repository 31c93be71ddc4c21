"""The value of one market's spot at a given price per hour of slack, and the price at which the
slack lasts.

The unit of money is the price of an hour on demand, the unit of time is an hour. Running on demand
is the zero: it does an hour's work for an hour's money and keeps the slack. Against it, an hour of
spot gains 1 - s (s: spot price over on-demand), an idle hour costs `price` (of the slack it uses
up), and a launch, which takes d hours, costs d (1 + price). Given the price, nothing couples one
spell of spot with the next, so the best thresholds follow from the spells alone:

* spot has gone: idle for at most `patience` hours, then go on demand (a ski rental with known
  odds);
* spot is back while on demand: change to it once it has stayed for `trust` hours.

The price is then the one at which the slack that these thresholds use, over the time that is left,
is the slack there is: dual ascent on the one constraint, solved again whenever something happens.
"""

from math import inf, sqrt
from typing import NamedTuple

from cavvy.planner.spot.spells import SpellLengths

_SCARCE = 64.0  # the highest price of slack: above it, idling never pays
_CHEAP = 1e-3
_CLOSE = 1.15  # prices within this factor are close enough


class IdleThresholds(NamedTuple):
    """How long to idle while spot is unavailable."""

    cost: float
    patience: float
    idle: float  # mean hours idled
    gives_up: float  # chance of going on demand


class SpotCycle(NamedTuple):
    """The best thresholds at a price of slack, and their result per cycle of spot being available
    and unavailable.
    """

    price: float
    wait: IdleThresholds
    trust: float
    relief: float  # value of being on demand instead of idle when spot returns
    slack: float  # hours of slack used
    gain: float  # gain over running on demand
    hours: float


def plan_wait(away: SpellLengths, price: float, launch: float, relief: float) -> IdleThresholds:
    """The cheapest patience: idling costs `price` an hour, giving up costs `launch`."""
    best, at = inf, 0
    for index, (waited, longer) in enumerate(zip(away.waited, away.longer, strict=True)):
        cost = price * waited + (launch - relief) * longer
        if cost < best - 1e-12:
            best, at = cost, index
    patience = away.thresholds[at] if away.longer[at] else inf
    return IdleThresholds(best + relief, patience, away.waited[at], away.longer[at])


def plan_trust(
    stays: SpellLengths, saving: float, entry: float
) -> tuple[float, float, float, float]:
    """How long spot must have been available before leaving on-demand for it, at `saving` an hour
    and `entry` a change.

    Returns the threshold (infinite: never), its gain, the chance that it is reached and the mean
    hours on spot.
    """
    best, at = 0.0, -1
    for index, (rest, longer) in enumerate(zip(stays.rest, stays.longer, strict=True)):
        gain = saving * rest - entry * longer
        if gain > best + 1e-12:
            best, at = gain, index
    if at < 0:
        return inf, 0.0, 0.0, 0.0
    return stays.thresholds[at], best, stays.longer[at], stays.rest[at]


def plan_cycle(
    stays: SpellLengths, away: SpellLengths, saving: float, overhead: float, price: float
) -> SpotCycle:
    """The best thresholds for a market, at a price of slack."""
    launch = overhead * (1 + price)
    relief = 0.0
    for _ in range(
        2
    ):  # being on demand when spot returns saves a launch if entering at once does not pay
        wait = plan_wait(away, price, launch, relief)
        trust, worth, enters, on_spot = plan_trust(stays, saving, launch + wait.cost)
        at_once = saving * stays.mean - launch - wait.cost
        relief = max(0.0, min(worth - at_once, launch))
    returns = 1 - wait.gives_up  # the chance that spot is back before patience ends
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
    """The cycle at the price at which `slack` lasts for the `left` hours to the deadline.

    `within` are the hours until spot is expected back, if it is unavailable now: that wait comes
    first, once.
    """

    def need(cycle: SpotCycle) -> float:
        if within is None:
            return cycle.slack * left / cycle.hours
        first = plan_wait(within, cycle.price, overhead * (1 + cycle.price), cycle.relief)
        later = max(0.0, left - within.mean) / cycle.hours
        return first.idle + first.gives_up * overhead + cycle.slack * later

    free = plan_cycle(stays, away, saving, overhead, 0.0)
    if need(free) <= slack:
        return free
    low, high = _CHEAP, _SCARCE
    best = plan_cycle(stays, away, saving, overhead, high)
    while high > low * _CLOSE:
        middle = sqrt(low * high)
        cycle = plan_cycle(stays, away, saving, overhead, middle)
        if need(cycle) > slack:
            low = middle
        else:
            high, best = middle, cycle
    return best
