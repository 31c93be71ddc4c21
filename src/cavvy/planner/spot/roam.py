"""Decides how long to wait for spot in one market before moving to another market. `auto` uses this
module for a job that has several markets and enough slack to finish on spot only.

Costs are compared with the cost of working on spot in the current market. One more idle hour costs
the price of one hour of slack, and a launch costs its loading time. A move to another market costs
the copy of the checkpoint, a launch, and the difference in price. The patience says how long the
job waits in a period without spot. As in `cycle`, it is the solution of a ski-rental problem.

The price of slack is the higher of two values. The first is the lowest price at which the remaining
cycles of the job are expected to use at most the slack that the job has left. The second is the
value of an hour of slack as a reserve: no thrift can save the job from running out of slack if its
spells with spot are much shorter than expected.
"""

from collections.abc import Sequence
from math import erfc, inf, sqrt
from typing import NamedTuple

from cavvy.planner.spot.cycle import SCARCE, best_wait, find_price, plan_wait
from cavvy.planner.spot.spells import MarketMemory, TimeLeft

# The policy plans with this many times the slack, because a wait that is too long only causes a
# move later, not a missed deadline.
_BOLDNESS = 1.25
# Leaving a market that has spot must save at least this share of the remaining cost, because
# estimates are noisy.
_WORTH_MOVING = 0.02
_LASTS = "spot is still available"
_AVAILABLE = "spot is available"


class RoamingView(NamedTuple):
    """The markets of a job. `open` contains the markets other than `home` in which the job may
    start now. `moves` are the prices of copying the checkpoint to each market. `enters` is the
    smallest slack in hours with which the job may start on spot. The unit of money is the price of
    an hour on demand.
    """

    watches: Sequence[MarketMemory]
    open: Sequence[int]
    moves: Sequence[float]
    home: int
    overhead: float
    enters: float


class RoamingTarget(NamedTuple):
    """A decision: run in the market `target`, which has spot now. If `target` is None, wait for at
    most `patience` hours.
    """

    target: int | None
    patience: float
    reason: str
    price: float = 0.0  # the price at which the slack is expected to suffice, if it was computed


def plan_course(
    field: RoamingView, moment: TimeLeft, running: bool, guess: float = 0.0
) -> RoamingTarget | None:
    """Decide where to run or how long to wait. Returns None if the slack is not enough to finish on
    spot only, so that on-demand must be considered. `guess` is the price of slack from an earlier
    decision and only speeds up the search.
    """
    leaving = _Leaving(field, moment)
    slack = _SlackOfCourse(field, moment, leaving.cost(field.home))
    if not slack.suffices():
        return None
    home = field.watches[field.home]
    stays = RoamingTarget(field.home, inf, _LASTS if running else _AVAILABLE)
    if not field.open:
        if home.up:
            return stays
        return RoamingTarget(None, inf, "no market has spot, and there is enough slack to wait")
    found = slack.price(guess)
    price = max(found, slack.reserve())
    costs = _list_costs(field, moment, price, leaving)
    if home.up:
        best = min(field.open, key=costs.__getitem__)
        stay = costs[field.home] - (field.overhead * (home.ratio + price) if running else 0.0)
        if costs[best] < stay - (_WORTH_MOVING * stay if running else 0.0):
            return RoamingTarget(best, 0.0, "another market is cheaper, even with the move", found)
        return stays._replace(price=found)
    back = field.overhead * (home.ratio + price)
    # To leave means to stay in the other market until the end, or to return after one spell there.
    forever = {index: costs[index] - (costs[field.home] - back) for index in field.open}
    leaves = {i: min(forever[i], _spell_there(field, moment, i, price)) for i in field.open}
    best = min(leaves, key=leaves.__getitem__)
    leave = max(leaves[best], back)
    patience = plan_wait(home.away.beyond(home.age), price, leave, back).patience
    if patience <= 0:
        return RoamingTarget(
            best,
            0.0,
            "spot is unavailable for too long in this market: the job moves to another market",
            found,
        )
    return RoamingTarget(None, patience, "spot is expected back before a move would pay off", found)


class _SlackOfCourse:
    """Compares two amounts of slack in hours: the slack that is left, and the slack that the job is
    expected to use up if it runs only on spot.
    """

    def __init__(self, field: RoamingView, moment: TimeLeft, leave: float) -> None:
        home = field.watches[field.home]
        self._field, self._home = field, home
        self._work, self._working = moment.work, home.stays.mean - field.overhead
        self._cycles = moment.work / self._working if self._working > 0 else inf
        self._nowhere, self._gap = _nothing_else(field)
        self._leave = leave
        self._away = None if home.up else home.away.beyond(home.age)
        # Waiting must not use up the last `enters` hours: with less slack, the job may not start on
        # spot again, and must do all its remaining work on demand.
        self._spare = moment.slack - field.enters
        self._slack = _BOLDNESS * self._spare

    def suffices(self) -> bool:
        """Return whether there is a price of slack at which the job does not need more slack than
        it has.
        """
        if self._cycles == inf:
            return False
        return self._need(0.0) <= self._slack or self._need(SCARCE) <= self._slack

    def price(self, guess: float) -> float:
        """Return the lowest price of an hour of slack at which the job needs no more slack than it
        has.
        """
        return find_price(self._need, self._slack, guess)

    def reserve(self) -> float:
        """Return the value of an hour of slack as a reserve: the probability that even the most
        thrifty course runs out of slack, times the saving on the work that an hour of slack makes
        possible on spot.

        The most thrifty course never waits. It uses slack only for launches: one on spot for each
        cycle, and one on demand for each time at which no market has spot. The number of cycles is
        uncertain, because the spells vary, and because their mean was learned from few spells.
        """
        once = self._field.overhead * (1 + self._nowhere)
        if once <= 0 or self._work <= 0:
            return 0.0
        need = self._cycles * once
        variation, known = self._home.stays.variation(self._work)
        deviation = need * sqrt(variation * (1 / self._cycles + 1 / known))
        runs_out = erfc((self._spare - need) / (deviation * sqrt(2))) / 2 if deviation else 0.0
        return runs_out * self._home.saving * self._working / once

    def _need(self, price: float) -> float:
        field, home, gap = self._field, self._home, self._gap
        launch = self._leave + field.overhead * price
        loss = launch - field.overhead * (home.ratio + price)
        _, idle, gives_up = best_wait(home.away, price, loss)
        first = 0.0
        if self._away is not None:
            first = best_wait(self._away, price, launch)[1] if field.open else gap
        return first + self._cycles * (field.overhead + idle + gives_up * self._nowhere * gap)


def _nothing_else(field: RoamingView) -> tuple[float, float]:
    """Return the probability that no other market has spot and, for that case, the mean number of
    hours until another market has spot.
    """
    chance, gap = 1.0, inf
    for index, watch in enumerate(field.watches):
        if index != field.home:
            chance *= watch.away.mean / (watch.away.mean + watch.stays.mean)
            gap = min(gap, watch.away.mean)
    return chance, gap


class _Leaving:
    """The costs of moves from one market to the best alternative market. The value of the slack
    that a move uses up is not part of these costs.
    """

    def __init__(self, field: RoamingView, moment: TimeLeft) -> None:
        self._field, self._work = field, moment.work
        self._cheapest, self._next = sorted(
            range(len(field.watches)), key=lambda index: field.watches[index].ratio
        )[:2]
        self._home = self._search(field.home)

    def cost(self, index: int) -> float:
        """Return the cost of a move from this market."""
        field = self._field
        if index == field.home:
            return self._home
        # The copy costs the same to every other market, so the cheapest one is the best. Only from
        # the market with the checkpoint does each move cost more than a launch.
        best = field.watches[self._next if index == self._cheapest else self._cheapest].ratio
        if best <= field.watches[index].ratio:
            return field.moves[index] + field.overhead * best
        return self._search(index)

    def _search(self, index: int) -> float:
        field, least = self._field, inf
        here = field.watches[index].ratio
        for other, watch in enumerate(field.watches):
            if other == index:
                continue
            move = field.moves[other if index == field.home else index]
            cost = move + field.overhead * watch.ratio
            if watch.ratio > here:
                cost += (watch.ratio - here) * min(watch.stays.mean, self._work)
            if cost < least:
                least = cost
        return least


def _list_costs(
    field: RoamingView, moment: TimeLeft, price: float, leaving: _Leaving
) -> dict[int, float]:
    """Return the cost of the rest of the job in the home market, and in each market in which the
    job may start.
    """
    return {
        index: _cost_there(field, moment, index, price, leaving.cost(index))
        for index in (field.home, *field.open)
    }


def _cost_there(
    field: RoamingView, moment: TimeLeft, index: int, price: float, leave: float
) -> float:
    """Return the cost of the rest of the job if it is launched in this market now and stays there.
    `leave` is the cost of a move from this market.
    """
    watch = field.watches[index]
    launch = field.overhead * (watch.ratio + price)
    leave += field.overhead * price
    wait = plan_wait(watch.away, price, leave, launch)
    first = watch.stays.mean_beyond(watch.age) if watch.up else watch.stays.mean
    restarts = max(0.0, moment.work - first) / max(watch.stays.mean, field.overhead)
    return field.moves[index] + launch + moment.work * watch.ratio + restarts * (wait.cost + launch)


def _spell_there(field: RoamingView, moment: TimeLeft, index: int, price: float) -> float:
    """Return the cost of a launch and one spell in another market, compared with working at home,
    including the copies of the checkpoint there and back.
    """
    watch = field.watches[index]
    hours = min(watch.stays.mean_beyond(watch.age), moment.work)
    dearer = max(0.0, watch.ratio - field.watches[field.home].ratio)
    return 2 * field.moves[index] + field.overhead * (watch.ratio + price) + dearer * hours
