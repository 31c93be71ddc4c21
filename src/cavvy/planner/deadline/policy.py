"""The deadline policy that production, forecasts and the simulator use.

The core of the policy (`spot/auto.py`) proposes a decision. The rules are applied one after another
and can replace the core's decision. Each rule decides from the same inputs as the core: the job's
terms and the current view. A rule can also change the view, and ask the core how it would decide
for the changed view.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from cavvy.domain.values import Struct, replace
from cavvy.planner.spot import view as spot
from cavvy.planner.spot.auto import AutoPolicy

AHEAD = (
    "the provider reports that this gang is at risk, and spot is available for about the same price"
)
NOT_AHEAD = (
    "the provider reports that this gang is at risk, but no other spot market has capacity at "
    "about the same price"
)
# a move between on-demand markets must save at least this share of the remaining cost
_WORTH_MOVING = 0.05
_HOUR_S = 3600.0


class PolicyQuestion(NamedTuple):
    """The input of a rule: the terms, the view, and the core. A rule can ask the core for its
    decision on a changed view.
    """

    terms: spot.JobTerms
    view: spot.PolicyView
    core: spot.MarketPolicy

    @property
    def slack_s(self) -> float:
        return self.terms.slack_s(self.view)

    def spot_cost(self, market: int) -> float:
        """Return the cost in dollars of finishing the work on this market's spot, including the
        launch and the copy of the checkpoint.
        """
        return self._cost(market, self.view.quotes[market].usd_hr)

    def fixed_cost(self, market: int) -> float:
        """Return the cost in dollars of finishing the work on demand in this market, including the
        launch and the copy of the checkpoint.
        """
        return self._cost(market, self.terms.markets[market].on_demand_usd_hr)

    def cheapest_fixed(self) -> int:
        markets = range(len(self.terms.markets))
        return 0 if len(markets) == 1 else min(markets, key=self.fixed_cost)

    def near(self, most_usd: float) -> list[int]:
        """Return the indices of the markets that have spot now and in which finishing the work on
        spot costs at most `most_usd`, cheapest first.
        """
        costs = {i: self.spot_cost(i) for i, quote in enumerate(self.view.quotes) if quote.up}
        return sorted((i for i in costs if costs[i] <= most_usd), key=costs.__getitem__)

    def _cost(self, market: int, usd_hr: float) -> float:
        terms, view = self.terms, self.view
        hours = (view.left_s + terms.overhead_s) / _HOUR_S
        return usd_hr * hours + terms.move(view.market, market)


Rule = Callable[[PolicyQuestion, spot.PolicyDecision], spot.PolicyDecision]


def only_long_waits(question: PolicyQuestion, decision: spot.PolicyDecision) -> spot.PolicyDecision:
    """Reject a change from on-demand to waiting for spot if the wait would be too short to pay for
    the additional launch. The wait must last at least one hour, and at least as long as ten
    launches: the core must not choose on-demand again at this time.
    """
    view = question.view
    if decision.mode is not spot.RunMode.IDLE or view.mode is not spot.RunMode.ON_DEMAND:
        return decision
    long_s = max(_HOUR_S, 10 * question.terms.overhead_s)
    later = view._replace(now_s=view.now_s + long_s, mode=spot.RunMode.IDLE, loading_s=0.0)
    if question.core.decide(later).mode is not spot.RunMode.ON_DEMAND:
        return decision
    return spot.PolicyDecision(
        spot.RunMode.ON_DEMAND,
        view.market,
        reason="spot is unavailable, and the slack is too short for a long wait",
    )


def last_moment(question: PolicyQuestion, decision: spot.PolicyDecision) -> spot.PolicyDecision:
    """Change to on-demand in time if a spot gang does not start, or does not save checkpoints.
    Without this rule, the spot gang would use up the time that on-demand needs to meet the
    deadline.
    """
    view, risk_s = question.view, 0.0
    if view.mode is not spot.RunMode.SPOT:
        return decision
    overhead_s = question.terms.overhead_s
    if view.loading_s <= 0:
        risk_s = view.unsaved_s
        # A start on spot requires enough slack to repeat `again_s` of work.
        if risk_s <= question.terms.again_s:
            return decision
    spare_s = question.slack_s - risk_s - overhead_s
    if spare_s > 0:
        return decision._replace(again_s=min(decision.again_s, view.now_s + spare_s))
    what = (
        "the spot gang has not started"
        if view.loading_s > 0
        else "the spot gang has not saved a checkpoint for too long"
    )
    return spot.PolicyDecision(
        spot.RunMode.ON_DEMAND,
        question.cheapest_fixed(),
        inf,
        f"{what}, and on-demand must start now to meet the deadline",
    )


def free_moves_now(question: PolicyQuestion, decision: spot.PolicyDecision) -> spot.PolicyDecision:
    """Start in another market instead of waiting for spot if the other market has spot at about the
    same price and copying the checkpoint is free.
    """
    terms, view = question.terms, question.view
    waits = decision.mode is view.mode is spot.RunMode.IDLE and view.market != spot.NOWHERE
    if not waits or question.slack_s < terms.spot_needs_s:
        return decision
    up = [index for index, quote in enumerate(view.quotes) if quote.up]
    free = [market for market in up if not terms.move(view.market, market)]
    if not free:
        return decision
    cheapest = min(free, key=question.spot_cost)
    if question.spot_cost(cheapest) > question.spot_cost(view.market) * spot.ABOUT:
        return decision
    return spot.PolicyDecision(
        spot.RunMode.SPOT,
        cheapest,
        inf,
        "spot is available in another market for about the same price",
    )


def not_dearer(question: PolicyQuestion, decision: spot.PolicyDecision) -> spot.PolicyDecision:
    """Run on demand if spot would cost at least as much as on-demand in every market."""
    view = question.view
    if view.mode is spot.RunMode.SPOT or decision.mode is spot.RunMode.ON_DEMAND:
        return decision
    fixed = view.market if view.mode is spot.RunMode.ON_DEMAND else question.cheapest_fixed()
    most = question.fixed_cost(fixed)
    if any(question.spot_cost(index) < most for index in range(len(view.quotes))):
        return decision
    return spot.PolicyDecision(
        spot.RunMode.ON_DEMAND, fixed, inf, "on-demand costs no more than spot"
    )


def ahead(question: PolicyQuestion, decision: spot.PolicyDecision) -> spot.PolicyDecision:
    """If the provider may soon preempt the running gang, move the gang to spot in another market
    with about the same price.

    The rule does not move the gang to on-demand. The policy already reserves enough time to move to
    on-demand after a preemption, and the preemption may never occur.
    """
    view = question.view
    stays = decision.mode is view.mode is spot.RunMode.SPOT and decision.market == view.market
    if not stays or not view.quotes[view.market].at_risk or view.loading_s > 0:
        return decision
    near = [
        i for i in question.near(question.spot_cost(view.market) * spot.ABOUT) if i != view.market
    ]
    if not near:
        return decision._replace(reason=NOT_AHEAD)
    return spot.PolicyDecision(spot.RunMode.SPOT, near[0], inf, AHEAD)


def cheaper(question: PolicyQuestion, decision: spot.PolicyDecision) -> spot.PolicyDecision:
    """Move a job that runs on demand to another market if finishing the work on demand in the other
    market costs less, including the copy of the checkpoint.
    """
    terms, view = question.terms, question.view
    goes_on = (
        decision.mode is view.mode is spot.RunMode.ON_DEMAND and decision.market == view.market
    )
    if not goes_on or view.loading_s > 0 or len(terms.markets) == 1:
        return decision
    if question.slack_s < terms.overhead_s:
        return decision
    best = question.cheapest_fixed()
    stay = terms.markets[view.market].on_demand_usd_hr * view.left_s / _HOUR_S
    if best == view.market or question.fixed_cost(best) > stay * (1 - _WORTH_MOVING):
        return decision
    return spot.PolicyDecision(
        spot.RunMode.ON_DEMAND,
        best,
        inf,
        "on-demand is cheaper in another market, even with the cost of the move",
    )


def within_budget(question: PolicyQuestion, decision: spot.PolicyDecision) -> spot.PolicyDecision:
    """Use spot instead of on-demand if the remaining budget can pay for the rest of the work on
    spot, but not on demand.
    """
    terms, view = question.terms, question.view
    if view.budget_usd == inf or decision.mode is not spot.RunMode.ON_DEMAND:
        return decision
    hours = (view.left_s + terms.overhead_s) / _HOUR_S
    stays = view.mode is spot.RunMode.ON_DEMAND and view.market == decision.market
    # If the gang stays, no other start must be paid.
    needed = (view.left_s + view.loading_s) / _HOUR_S if stays else hours
    if terms.markets[decision.market].on_demand_usd_hr * needed <= view.budget_usd:
        return decision
    up = [i for i, q in enumerate(view.quotes) if q.up and q.usd_hr * hours <= view.budget_usd]
    if not up:
        return decision
    return spot.PolicyDecision(
        spot.RunMode.SPOT,
        min(up, key=lambda index: view.quotes[index].usd_hr),
        inf,
        f"the budget is too small to finish the work on on-demand capacity ({decision.reason})",
    )


# The rules in their order; a later rule overrules earlier ones.
RULES: tuple[Rule, ...] = (
    only_long_waits,
    last_moment,
    free_moves_now,
    not_dearer,
    ahead,
    cheaper,
    within_budget,
)


class DeadlinePolicy(spot.MarketPolicy):
    """The policy `auto`: the core, followed by the rules."""

    def __init__(
        self,
        terms: spot.JobTerms,
        core: spot.PolicyMaker = AutoPolicy,
        rules: Sequence[Rule] = RULES,
    ) -> None:
        self._terms, self._core, self._rules = terms, core(terms), rules

    def learn(self, at_s: float, quotes: Sequence[spot.SpotQuote]) -> None:
        self._core.learn(at_s, quotes)

    def decide(self, view: spot.PolicyView) -> spot.PolicyDecision:
        question = PolicyQuestion(self._terms, view, self._core)
        decision = self._core.decide(view)
        for rule in self._rules:
            decision = rule(question, decision)
        return decision


class PolicyMargins(Struct, frozen=True, kw_only=True):
    """The safety margins that are added to a job's terms, because running times are only estimates
    and work since the last checkpoint may have to be repeated.
    """

    spare_s: float = 60.0  # time that is reserved before the deadline, for small delays
    spare_share: float = 0.01  # additional reserved time, as a share of the work that is left
    again_s: float = 0.0  # maximum time of work that a preemption may repeat

    def keep(self, terms: spot.JobTerms) -> spot.JobTerms:
        """Return a copy of the terms with these margins added."""
        return replace(
            terms,
            deadline_s=terms.deadline_s - self.spare_s,
            again_s=self.again_s,
            spare_share=self.spare_share,
        )
