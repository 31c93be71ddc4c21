"""The core of the deadline policy `auto`. The policy learns how long spot stays available in each
market, computes a price of slack, and compares staying with moving.

The slack is the time until the deadline minus the time that the remaining work needs. With one
market, the policy follows the thresholds of `cycle`. With several markets, the policy follows the
thresholds in the job's current market. The policy moves the job to another market if the expected
cost in the other market, including the copy of the checkpoint, is lower. The policy never takes a
step after which on-demand could no longer meet the deadline.
"""

from collections.abc import Sequence
from math import inf

from cavvy.planner.spot.cycle import CycleProblem, SpotCycle, plan_trust, plan_wait
from cavvy.planner.spot.roam import RoamingView, plan_course
from cavvy.planner.spot.spells import MarketMemory, SpellLengths, TimeLeft
from cavvy.planner.spot.view import (
    ABOUT,
    GRAIN_S,
    NOWHERE,
    JobTerms,
    MarketPolicy,
    PolicyDecision,
    PolicyView,
    RunMode,
    SpotQuote,
)

_HOUR_S = 3600.0
# after this time, the policy must be asked again, because the price of slack changes even without
# events
_LOOK_AGAIN_HR = 0.5
# The shortest time until a job on demand asks again. Spot that is only assumed to be available ages
# more slowly than time passes, so it would otherwise approach the required age in many steps.
_SOONEST_S = 30.0
# With several markets, the policy plans with this share of the slack in its current market, because
# the other markets offer chances that are worth more than the average one here.
_SHARE_HERE = 0.8
# the share of the price of a launch that spot must be expected to save
_PAID_BACK = 0.8
_LASTS = "spot is still available"
_BRIEF = "spot may not stay available for long"
# a move must save at least this share of the remaining cost, because estimates are noisy
_WORTH_MOVING = 0.02


class AutoPolicy(MarketPolicy):
    """The policy of one job. Between decisions, the policy stores only its observations of the
    markets.
    """

    def __init__(self, terms: JobTerms) -> None:
        self._terms = terms
        self._overhead = terms.overhead_s / _HOUR_S
        self._enters = terms.spot_needs_s / _HOUR_S
        self._unit = min(market.on_demand_usd_hr for market in terms.markets) or 1.0
        # The price of a move from each market (row) to each other market (column). NOWHERE is the
        # last row.
        self._moves = [
            [terms.move(source, target) / self._unit for target in range(len(terms.markets))]
            for source in (*range(len(terms.markets)), NOWHERE)
        ]
        self._learned = [MarketMemory(self._unit) for _ in terms.markets]
        self._seen: Sequence[SpotQuote | None] = [None] * len(terms.markets)
        self._watches = self._learned  # `decide` replaces these with copies that fit its view.
        self._home = NOWHERE
        # The last computed price of slack for each market, and for a job that runs on spot only.
        # The next search starts there, which saves time but does not change the result.
        self._prices = [0.0] * (len(terms.markets) + 1)

    def learn(self, at_s: float, quotes: Sequence[SpotQuote]) -> None:
        now = at_s / _HOUR_S
        for watch, quote, old in zip(self._learned, quotes, self._seen, strict=True):
            if quote != old:
                watch.see(now, quote)
        self._seen = tuple(quotes)

    def spells(self) -> list[tuple[SpellLengths, SpellLengths]]:
        """Return two learned distributions for each market: the lengths of periods with spot, and
        the lengths of periods without spot.
        """
        return [(watch.stays, watch.away) for watch in self._learned]

    def decide(self, view: PolicyView) -> PolicyDecision:
        now = view.now_s / _HOUR_S
        self._watches = [
            watch.shown(now, quote) for watch, quote in zip(self._learned, view.quotes, strict=True)
        ]
        self._home = view.market if view.market != NOWHERE else self._first_home()
        moment = TimeLeft(view, self._terms)
        single = len(self._watches) == 1
        if (forced := self._forced(view, moment, single)) is not None:
            return forced
        watch = self._watches[self._home]
        targets: Sequence[int] = ()
        if not single:
            targets = self._targets(view, moment)
            if (course := self._on_spot_alone(view, moment, targets)) is not None:
                return course
        problem = self._problem(watch, moment)
        if targets and (there := self._better_place(view, moment, problem, targets)) is not None:
            return there
        match view.mode:
            case RunMode.SPOT:
                return PolicyDecision(
                    RunMode.SPOT,
                    view.market,
                    view.now_s + _LOOK_AGAIN_HR * _HOUR_S,
                    _LASTS,
                )
            case RunMode.ON_DEMAND:
                return self._leave_on_demand(view, moment, problem, targets)
            case RunMode.IDLE:
                return self._leave_idle(view, moment, watch, problem)

    def _forced(self, view: PolicyView, moment: TimeLeft, single: bool) -> PolicyDecision | None:
        """Return the decision if the view allows only one decision, or None if costs must be
        compared."""
        if view.mode is RunMode.SPOT:
            dearer = (self._watches[self._home].ratio - 1) * moment.work
            if dearer > self._overhead and moment.slack >= self._overhead:
                return self._on_demand(view, "spot now costs more than on-demand")
            if single:
                return PolicyDecision(RunMode.SPOT, view.market, reason=_LASTS)
        elif moment.slack <= self._overhead + GRAIN_S / _HOUR_S:
            return self._on_demand(view, "on-demand meets the deadline only if it starts now")
        return None

    def _leave_on_demand(
        self, view: PolicyView, moment: TimeLeft, problem: CycleProblem, targets: Sequence[int]
    ) -> PolicyDecision:
        watch, spare = self._watches[self._home], moment.slack - self._enters
        if not watch.up and spare > 0 and problem.is_free() and self._pays(watch, 0.0, moment, 0.0):
            return self._idle(view, moment, inf, "there is enough slack to wait for spot")
        if spare < 0:
            return self._stay(view, inf, "there is too little slack to change to spot")
        if not watch.up and not targets:
            return self._stay(view, _LOOK_AGAIN_HR, "spot is unavailable")
        cycle = self._solve(problem, self._home)
        trust = self._trust(view, moment, cycle, self._home) if watch.up else _LOOK_AGAIN_HR
        if trust <= 0:
            return PolicyDecision(
                RunMode.SPOT,
                self._home,
                reason="spot has been available long enough to be worth the change",
            )
        soonest = min((self._trust(view, moment, cycle, index) for index in targets), default=inf)
        # Spot may be trusted although a move there is not worth its price.
        return self._stay(view, min(trust, soonest if soonest > 0 else _LOOK_AGAIN_HR), _BRIEF)

    def _trust(self, view: PolicyView, moment: TimeLeft, cycle: SpotCycle, index: int) -> float:
        """Return how many more hours spot must stay available in this market before a job on demand
        should change to spot. The result is 0 if the job should change now. The change must also
        pay off: the expected saving on the remaining work must cover the cost of the change and of
        the wait that may follow.
        """
        watch = self._watches[index]
        entry = self._overhead * (1 + cycle.price) + self._moves[view.market][index]
        rest = watch.stays.beyond(watch.age)
        trust, *_ = plan_trust(rest, watch.saving, entry + cycle.wait.cost)
        if trust > 0:
            return trust
        hours, lasts = watch.stays.trusting_seen().within(watch.age, moment.work)
        pays = watch.saving * hours >= entry + (1 - lasts) * cycle.wait.cost
        return 0.0 if pays else _LOOK_AGAIN_HR

    def _leave_idle(
        self, view: PolicyView, moment: TimeLeft, watch: MarketMemory, problem: CycleProblem
    ) -> PolicyDecision:
        if watch.up and moment.slack < self._enters:
            return self._on_demand(view, "there is too little slack left to start on spot")
        cycle = self._solve(problem, self._home)
        if watch.up:
            if self._pays(watch, watch.age, moment, cycle.price):
                return PolicyDecision(RunMode.SPOT, self._home, reason="spot is available")
            return self._on_demand(view, _BRIEF)
        launch = self._overhead * (1 + cycle.price)
        patience = inf
        if cycle.price > 0:
            away = problem.within or watch.away.beyond(watch.age)
            patience = plan_wait(away, cycle.price, launch, cycle.relief).patience
        if patience <= GRAIN_S / _HOUR_S:
            return self._on_demand(
                view,
                (
                    "the job runs on demand now, to keep its slack for a later time when "
                    "waiting saves more money"
                ),
            )
        return self._idle(
            view, moment, patience, "spot is expected to return before the slack runs out"
        )

    def _pays(self, watch: MarketMemory, age: float, moment: TimeLeft, price: float) -> bool:
        """Return whether a start on spot pays off if spot has been available for `age` hours. The
        expected savings must reach `_PAID_BACK` times the price of another launch, times the
        probability that spot becomes unavailable before the work ends.

        `_PAID_BACK` is less than 1 because a start on spot has a second benefit: the policy learns
        how long spot lasts in this market. The prior for the lengths of spells has a small weight,
        so a few short periods with spot outweigh the prior.
        """
        hours, lasts = watch.stays.trusting_seen().within(age, moment.work)
        launch = self._overhead * (1 + price)
        return watch.saving * hours >= _PAID_BACK * (1 - lasts) * launch

    def _on_spot_alone(
        self, view: PolicyView, moment: TimeLeft, targets: Sequence[int]
    ) -> PolicyDecision | None:
        """Return the decision among several markets if the slack is enough to finish on spot only;
        otherwise return None.
        """
        field = RoamingView(
            self._watches,
            targets,
            self._moves[view.market],
            self._home,
            self._overhead,
            self._enters,
        )
        course = plan_course(field, moment, view.mode is RunMode.SPOT, self._prices[NOWHERE])
        if course is None:
            return None
        self._prices[NOWHERE] = course.price or self._prices[NOWHERE]
        if course.target is None:
            return self._idle(view, moment, course.patience, course.reason)
        starts = view.mode is not RunMode.SPOT or course.target != view.market
        if starts and moment.slack < self._enters:
            return None
        return PolicyDecision(
            RunMode.SPOT, course.target, view.now_s + _LOOK_AGAIN_HR * _HOUR_S, course.reason
        )

    def _targets(self, view: PolicyView, moment: TimeLeft) -> list[int]:
        """Return the markets other than the home market in which the job may start now.

        A gang that runs on spot moves only to a market whose spot has been available for at least
        two overheads, and only if the slack is enough for two such moves. If spot in the other
        market is only assumed to be available, it must also be cheaper than spot in the home
        market.
        """
        others = [
            index for index, watch in enumerate(self._watches) if watch.up and index != self._home
        ]
        if view.mode is not RunMode.SPOT:
            return others
        if moment.slack < 2 * self._enters:
            return []
        most = self._watches[self._home].ratio / ABOUT
        return [
            index
            for index in others
            if self._watches[index].age >= 2 * self._overhead
            and (view.quotes[index].since_s is None or self._watches[index].ratio < most)
        ]

    def _better_place(
        self, view: PolicyView, moment: TimeLeft, problem: CycleProblem, targets: Sequence[int]
    ) -> PolicyDecision | None:
        """Return a move to another market if spot in that market is expected to cost less than
        staying; otherwise return None. A job on demand moves only to a market whose spot has been
        available for long enough.
        """
        if moment.slack < self._enters:
            return None
        cycle = self._solve(problem, self._home)
        here = self._prospect_here(view, moment, cycle)
        hurdle = here + (_WORTH_MOVING * moment.work if view.market != NOWHERE else 0.0)
        best, there = hurdle, None
        for index in targets:
            if view.mode is RunMode.ON_DEMAND and self._trust(view, moment, cycle, index) > 0:
                continue
            worth = self._prospect_there(view, moment, cycle, index)
            if worth > best:
                best, there = worth, index
        if there is None:
            return None
        return PolicyDecision(
            RunMode.SPOT,
            there,
            reason=("another market is expected to cost less, even with the cost of the move"),
        )

    def _prospect_here(self, view: PolicyView, moment: TimeLeft, cycle: SpotCycle) -> float:
        watch = self._watches[self._home]
        launch = self._overhead * (1 + cycle.price)
        pace = cycle.gain / cycle.hours
        if not watch.up:
            away = watch.away.beyond(watch.age)
            first = (
                0.0
                if view.mode is RunMode.ON_DEMAND
                else plan_wait(away, cycle.price, launch, cycle.relief).cost
            )
            return pace * max(0.0, moment.left - away.mean) - first
        stays = watch.stays.mean_beyond(watch.age)
        later = pace * max(0.0, moment.left - stays - watch.away.mean)
        enter = watch.saving * min(stays, moment.work) - cycle.wait.cost
        match view.mode:
            case RunMode.SPOT:
                return enter + later
            case RunMode.ON_DEMAND:
                return max(0.0, enter - launch) + later
            case RunMode.IDLE:
                return enter - launch + later

    def _prospect_there(
        self, view: PolicyView, moment: TimeLeft, cycle: SpotCycle, index: int
    ) -> float:
        watch = self._watches[index]
        move = self._moves[view.market][index]
        after = TimeLeft.later(moment, self._overhead)
        own = self._solve(self._problem(watch, after), index)
        launch = self._overhead * (1 + cycle.price)
        stays = watch.stays.mean_beyond(watch.age)
        later = own.gain / own.hours * max(0.0, moment.left - stays - watch.away.mean)
        return watch.saving * min(stays, moment.work) - own.wait.cost + later - launch - move

    def _solve(self, problem: CycleProblem, market: int) -> SpotCycle:
        cycle = problem.solve(self._prices[market])
        self._prices[market] = cycle.price
        return cycle

    def _problem(self, watch: MarketMemory, moment: TimeLeft) -> CycleProblem:
        slack = moment.slack - self._overhead
        return CycleProblem(
            watch.stays,
            watch.away,
            watch.saving,
            self._overhead,
            slack if len(self._watches) == 1 else _SHARE_HERE * slack,
            moment.left,
            None if watch.up else watch.away.beyond(watch.age),
        )

    def _first_home(self) -> int:
        """Return the market for the first start: the market with the cheapest available spot or, if
        no market has spot now, the market with the lowest spot price.
        """
        order = range(len(self._watches))
        return min(
            order, key=lambda index: (not self._watches[index].up, self._watches[index].ratio)
        )

    def _on_demand(self, view: PolicyView, reason: str) -> PolicyDecision:
        if view.mode is RunMode.ON_DEMAND:
            return PolicyDecision(RunMode.ON_DEMAND, view.market, reason=reason)
        hours = view.left_s / _HOUR_S + self._overhead

        def cost(index: int) -> float:
            return self._terms.markets[index].on_demand_usd_hr * hours + self._terms.move(
                view.market, index
            )

        order = sorted(range(len(self._watches)), key=lambda index: index != self._home)
        return PolicyDecision(
            RunMode.ON_DEMAND, min(order, key=cost), view.now_s + _LOOK_AGAIN_HR * _HOUR_S, reason
        )

    def _stay(self, view: PolicyView, hours: float, reason: str) -> PolicyDecision:
        again = view.now_s + max(_SOONEST_S, min(hours, 10 * _LOOK_AGAIN_HR) * _HOUR_S)
        return PolicyDecision(RunMode.ON_DEMAND, view.market, again, reason)

    def _idle(
        self, view: PolicyView, moment: TimeLeft, hours: float, reason: str
    ) -> PolicyDecision:
        wait = min(hours, moment.slack - self._overhead, _LOOK_AGAIN_HR)
        return PolicyDecision(
            RunMode.IDLE, view.market, view.now_s + max(GRAIN_S, wait * _HOUR_S), reason
        )
