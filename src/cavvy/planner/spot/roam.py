"""For several markets and enough slack for spot alone: decides how long to wait in one before
moving to another.

Compared with work on spot in the current market, an idle hour costs the price of slack, a launch
its loading time, and a move to another market the copy of the checkpoint, a launch there and the
difference in price. Patience is again a ski rental over the spells without spot. The price of slack
is the lowest at which the job, cycle after cycle, fits into the slack.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import NamedTuple

from cavvy.planner.spot.cycle import IdleThresholds, plan_wait
from cavvy.planner.spot.market_memory import MarketMemory, TimeLeft

_SCARCE, _CHEAP, _CLOSE = 64.0, 1e-3, 1.15  # as in `cycle`
# slack may be overcommitted by this factor: one wait too many costs a move later, not the deadline
_BOLDNESS = 1.25
# leaving available spot must save this share of the remaining cost: estimates are noisy
_WORTH_MOVING = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class RoamingView:
    """All markets as the job sees them. The unit is an hour on demand; moves start where the
    checkpoint is.
    """

    watches: Sequence[MarketMemory]
    moves: Sequence[float]
    home: int
    overhead: float


class RoamingTarget(NamedTuple):
    """The market to run in. `target` has spot capacity now; if it is None, wait for at most
    `patience` hours.
    """

    target: int | None
    patience: float
    reason: str


def plan_course(field: RoamingView, moment: TimeLeft, running: bool) -> RoamingTarget | None:
    """The decision while spot alone suffices; None if it does not, so that on-demand has to be
    considered.
    """
    price = _price_of_slack(field, moment)
    if price is None:
        return None
    home = field.watches[field.home]
    costs = [_cost_there(field, moment, index, price) for index in range(len(field.watches))]
    present = [
        index for index, watch in enumerate(field.watches) if watch.up and index != field.home
    ]
    best = min(present, key=lambda index: costs[index], default=None)
    if home.up:
        stay = costs[field.home] - (field.overhead * (home.ratio + price) if running else 0.0)
        if best is not None and costs[best] < stay - (_WORTH_MOVING * stay if running else 0.0):
            return RoamingTarget(best, 0.0, "another market is cheaper, including the move")
        reason = "spot while it lasts" if running else "spot is available"
        return RoamingTarget(field.home, inf, reason)
    if best is None:
        return RoamingTarget(None, inf, "no spot in any market, and enough slack to wait")
    back = field.overhead * (home.ratio + price)
    leave = max(costs[best] - (costs[field.home] - back), back)
    patience = plan_wait(home.away.beyond(home.age), price, leave, back).patience
    if patience <= 0:
        return RoamingTarget(
            best, 0.0, ("spot is unavailable for too long here: move to another market")
        )
    return RoamingTarget(None, patience, "spot is expected back before a move would pay off")


def _price_of_slack(field: RoamingView, moment: TimeLeft) -> float | None:
    """The lowest price at which spot alone fits into the slack; None if there is none."""
    slack = _BOLDNESS * (moment.slack - field.overhead)
    if _need(field, moment, 0.0) <= slack:
        return 0.0
    if _need(field, moment, _SCARCE) > slack:
        return None
    low, high = _CHEAP, _SCARCE
    while high > low * _CLOSE:
        middle = sqrt(low * high)
        if _need(field, moment, middle) > slack:
            low = middle
        else:
            high = middle
    return high


def _need(field: RoamingView, moment: TimeLeft, price: float) -> float:
    """The hours of slack that the rest of the work is expected to need."""
    home = field.watches[field.home]
    wait = _wait_at(field, field.home, price, moment)
    working = home.stays.mean - field.overhead
    if working <= 0:
        return inf
    cycles = moment.work / working
    nowhere, gap = _nothing_else(field)
    per_cycle = field.overhead + wait.idle + wait.gives_up * nowhere * gap
    first = 0.0
    if not home.up:
        present = any(watch.up for watch in field.watches)
        away = home.away.beyond(home.age)
        first = (
            plan_wait(away, price, _leave(field, field.home, price, moment), 0.0).idle
            if present
            else gap
        )
    return first + cycles * per_cycle


def _nothing_else(field: RoamingView) -> tuple[float, float]:
    """The chance that no other market has spot, and the mean wait for one in that case."""
    chance, gap = 1.0, inf
    for index, watch in enumerate(field.watches):
        if index != field.home:
            chance *= watch.away.mean / (watch.away.mean + watch.stays.mean)
            gap = min(gap, watch.away.mean)
    return chance, gap


def _wait_at(field: RoamingView, index: int, price: float, moment: TimeLeft) -> IdleThresholds:
    watch = field.watches[index]
    back = field.overhead * (watch.ratio + price)
    return plan_wait(watch.away, price, _leave(field, index, price, moment), back)


def _leave(field: RoamingView, index: int, price: float, moment: TimeLeft) -> float:
    """The cost of leaving a market for the best other one."""
    here = field.watches[index]
    return min(
        field.moves[other if index == field.home else index]
        + field.overhead * (watch.ratio + price)
        + max(0.0, watch.ratio - here.ratio) * min(watch.stays.mean, moment.work)
        for other, watch in enumerate(field.watches)
        if other != index
    )


def _cost_there(field: RoamingView, moment: TimeLeft, index: int, price: float) -> float:
    """The cost of the rest of the job if it is launched there now and stays."""
    watch = field.watches[index]
    wait = _wait_at(field, index, price, moment)
    launch = field.overhead * (watch.ratio + price)
    first = (watch.stays.beyond(watch.age) if watch.up else watch.stays).mean
    restarts = max(0.0, moment.work - first) / max(watch.stays.mean, field.overhead)
    return field.moves[index] + launch + moment.work * watch.ratio + restarts * (wait.cost + launch)
