"""Decide how long to wait for spot in one market before moving to another, for a job with several
markets and enough slack to finish on spot alone.

The reference is work on spot in the current market. Compared with this, an idle hour costs the
price of slack; a launch costs its loading time; and a move to another market costs the copy of the
checkpoint, a launch and the difference in price. As in `cycle`, the patience solves a ski-rental
problem over the spells without spot. The price of slack is the lowest price at which the remaining
cycles of the job are expected to use no more slack than it has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from cavvy.planner.spot.cycle import SCARCE, find_price, plan_wait
from cavvy.planner.spot.market_memory import MarketMemory, TimeLeft

# The policy plans with this many times the slack: a wait that is too long causes a move later, not
# a missed deadline.
_BOLDNESS = 1.25
# Leaving available spot must save this share of the remaining cost: estimates are noisy.
_WORTH_MOVING = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class RoamingView:
    """The markets of a job. `open` are the other markets in which it may start now. `moves` are the
    prices of copying the checkpoint from where it is to each market; the unit of money is the price
    of an hour on demand.
    """

    watches: Sequence[MarketMemory]
    open: Sequence[int]
    moves: Sequence[float]
    home: int
    overhead: float


class RoamingTarget(NamedTuple):
    """The decision to run in the market `target`, which has spot now, or to wait for at most
    `patience` hours if `target` is None.
    """

    target: int | None
    patience: float
    reason: str


def plan_course(field: RoamingView, moment: TimeLeft, running: bool) -> RoamingTarget | None:
    """Decide where to run or how long to wait; None if the slack is not enough for spot alone, so
    that on-demand has to be considered.
    """
    price = _price_of_slack(field, moment)
    if price is None:
        return None
    home = field.watches[field.home]
    costs = {index: _cost_there(field, moment, index, price) for index in (field.home, *field.open)}
    best = min(field.open, key=costs.__getitem__, default=None)
    if home.up:
        stay = costs[field.home] - (field.overhead * (home.ratio + price) if running else 0.0)
        if best is not None and costs[best] < stay - (_WORTH_MOVING * stay if running else 0.0):
            return RoamingTarget(best, 0.0, "another market is cheaper, even with the move")
        reason = "spot is used while it lasts" if running else "spot is available"
        return RoamingTarget(field.home, inf, reason)
    if best is None:
        return RoamingTarget(None, inf, "no market has spot, and there is enough slack to wait")
    back = field.overhead * (home.ratio + price)
    leave = max(costs[best] - (costs[field.home] - back), back)
    patience = plan_wait(home.away.beyond(home.age), price, leave, back).patience
    if patience <= 0:
        return RoamingTarget(
            best, 0.0, "spot is unavailable for too long in this market: the job moves to another"
        )
    return RoamingTarget(None, patience, "spot is expected back before a move would pay off")


def _price_of_slack(field: RoamingView, moment: TimeLeft) -> float | None:
    """The lowest price of slack at which the slack is enough for spot alone; None if it is not
    enough at any price.
    """
    home = field.watches[field.home]
    working = home.stays.mean - field.overhead
    if working <= 0:
        return None
    cycles = moment.work / working
    nowhere, gap = _nothing_else(field)
    leave = _leave(field, field.home, moment)
    away = home.away.beyond(home.age)

    def need(price: float) -> float:
        """The hours of slack that the rest of the work is expected to need."""
        launch = leave + field.overhead * price
        wait = plan_wait(home.away, price, launch, field.overhead * (home.ratio + price))
        first = 0.0
        if not home.up:
            first = plan_wait(away, price, launch, 0.0).idle if field.open else gap
        return first + cycles * (field.overhead + wait.idle + wait.gives_up * nowhere * gap)

    slack = _BOLDNESS * (moment.slack - field.overhead)
    return find_price(need, slack) if min(need(0.0), need(SCARCE)) <= slack else None


def _nothing_else(field: RoamingView) -> tuple[float, float]:
    """Return the chance that no other market has spot, and the mean hours until one has it in that
    case.
    """
    chance, gap = 1.0, inf
    for index, watch in enumerate(field.watches):
        if index != field.home:
            chance *= watch.away.mean / (watch.away.mean + watch.stays.mean)
            gap = min(gap, watch.away.mean)
    return chance, gap


def _leave(field: RoamingView, index: int, moment: TimeLeft) -> float:
    """The cost of moving from a market to the best other market, without the slack that it uses."""
    here = field.watches[index]
    return min(
        field.moves[other if index == field.home else index]
        + field.overhead * watch.ratio
        + max(0.0, watch.ratio - here.ratio) * min(watch.stays.mean, moment.work)
        for other, watch in enumerate(field.watches)
        if other != index
    )


def _cost_there(field: RoamingView, moment: TimeLeft, index: int, price: float) -> float:
    """The cost of the rest of the job if it is launched in this market now and stays in it."""
    watch = field.watches[index]
    launch = field.overhead * (watch.ratio + price)
    leave = _leave(field, index, moment) + field.overhead * price
    wait = plan_wait(watch.away, price, leave, launch)
    first = (watch.stays.beyond(watch.age) if watch.up else watch.stays).mean
    restarts = max(0.0, moment.work - first) / max(watch.stays.mean, field.overhead)
    return field.moves[index] + launch + moment.work * watch.ratio + restarts * (wait.cost + launch)
