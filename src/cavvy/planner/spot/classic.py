"""Simple policies, and policies from publications. Users can select each policy by name.
Simulations compare the policy `auto` with the policies in this module.

"Safe" means that on-demand can still meet the deadline. With slack = (time to the deadline) - (work
left), waiting is safe while slack > overhead. Starting on spot is safe while slack >= 2 overheads:
one for this start, and one for a start on demand if the spot node is preempted immediately.
"""

from collections.abc import Mapping
from math import inf

from cavvy.planner.deadline.policy import DeadlinePolicy
from cavvy.planner.spot.view import (
    GRAIN_S,
    NOWHERE,
    JobTerms,
    MarketPolicy,
    PolicyDecision,
    PolicyMaker,
    PolicyView,
    RunMode,
)


class OnDemandPolicy(MarketPolicy):
    """Runs on demand from start to end."""

    def __init__(self, terms: JobTerms) -> None:
        self._market = _cheapest(terms)

    def decide(self, view: PolicyView) -> PolicyDecision:
        return PolicyDecision(RunMode.ON_DEMAND, self._market, reason="always on demand")


class SpotOnlyPolicy(MarketPolicy):
    """Uses spot while spot is available, and waits otherwise. Ignores the deadline."""

    def __init__(self, terms: JobTerms) -> None:
        self._choice = _Choice(terms)

    def decide(self, view: PolicyView) -> PolicyDecision:
        if view.mode is RunMode.SPOT:
            return PolicyDecision(RunMode.SPOT, view.market, reason="spot is still available")
        if (spot := self._choice.spot(view)) is not None:
            return PolicyDecision(RunMode.SPOT, spot, reason="spot is available")
        return PolicyDecision(RunMode.IDLE, view.market, reason="no spot: wait")


class GreedyPolicy(MarketPolicy):
    """Uses spot while spot is available, and waits otherwise. At the last moment at which on-demand
    can still meet the deadline, the policy changes to on-demand and stays there until the end.
    """

    def __init__(self, terms: JobTerms) -> None:
        self._terms = terms
        self._choice = _Choice(terms)

    def decide(self, view: PolicyView) -> PolicyDecision:
        if view.mode is RunMode.ON_DEMAND:
            return PolicyDecision(
                RunMode.ON_DEMAND, view.market, reason="on-demand is used until the end"
            )
        if view.mode is RunMode.SPOT:
            return PolicyDecision(RunMode.SPOT, view.market, reason="spot is still available")
        overhead = self._terms.overhead_s
        slack = self._terms.deadline_s - view.now_s - view.left_s
        spot = self._choice.spot(view)
        if spot is not None and slack >= 2 * overhead:
            return PolicyDecision(RunMode.SPOT, spot, reason="spot is available")
        if slack <= overhead + GRAIN_S or spot is not None:
            return PolicyDecision(
                RunMode.ON_DEMAND,
                self._choice.on_demand(view),
                reason="on-demand meets the deadline only if it starts now",
            )
        return PolicyDecision(
            RunMode.IDLE, view.market, view.now_s + slack - overhead, "no spot: wait"
        )


class UniformProgress(MarketPolicy):
    """Uniform Progress of "Can't Be Late" (Wu et al., NSDI 2024, section 4), with eager failover
    between several markets.

    The expected pace is work / deadline. If the job is behind the expected pace and spot is
    unavailable, the job runs on demand until the work done exceeds the expected work by twice the
    overhead. The margin of two overheads prevents frequent changes. A job that is on pace uses
    spot, or idles if spot is unavailable. A job on spot stays on spot as long as possible. After a
    preemption, the policy prefers the cheapest spot market in a region other than the preempted
    gang's region.
    """

    def __init__(self, terms: JobTerms) -> None:
        self._terms = terms
        self._choice = _Choice(terms)
        self._pace = terms.work_s / terms.deadline_s

    def decide(self, view: PolicyView) -> PolicyDecision:
        if view.mode is RunMode.SPOT:
            return PolicyDecision(RunMode.SPOT, view.market, reason="spot is still available")
        overhead, pace = self._terms.overhead_s, self._pace
        slack = self._terms.deadline_s - view.now_s - view.left_s
        spot = self._choice.spot(view)
        done = self._terms.work_s - view.left_s
        if view.mode is RunMode.ON_DEMAND:
            behind = (view.now_s + 2 * overhead) * pace - done
            if slack < 2 * overhead or behind > GRAIN_S:
                wait = behind / (1 - pace) + view.loading_s if pace < 1 else inf
                return PolicyDecision(
                    RunMode.ON_DEMAND,
                    view.market,
                    view.now_s + max(wait, 1.0),
                    "on-demand is used to catch up",
                )
        if spot is not None and slack >= 2 * overhead:
            return PolicyDecision(RunMode.SPOT, spot, reason="spot is available")
        if spot is not None or slack <= 2 * overhead + GRAIN_S:
            return PolicyDecision(
                RunMode.ON_DEMAND,
                self._choice.on_demand(view),
                reason="there is too little slack to wait longer",
            )
        behind_at = done / pace
        if behind_at <= view.now_s + GRAIN_S:
            return PolicyDecision(
                RunMode.ON_DEMAND,
                self._choice.on_demand(view),
                reason="the work is behind the expected pace",
            )
        again = min(behind_at, view.now_s + slack - 2 * overhead)
        return PolicyDecision(
            RunMode.IDLE,
            view.market,
            again,
            "the work is ahead of the expected pace, so the job waits",
        )


class _Choice:
    """Chooses a market. For spot, the result is the cheapest market outside the previous market's
    region, or inside that region if no other region has spot. For on-demand, the result is the
    market that has the checkpoint.
    """

    def __init__(self, terms: JobTerms) -> None:
        self._markets = terms.markets
        self._cheapest = _cheapest(terms)

    def spot(self, view: PolicyView) -> int | None:
        if len(self._markets) == 1:
            return 0 if view.quotes[0].up else None
        lost = self._markets[view.market].region if view.market != NOWHERE else None
        present = [index for index, quote in enumerate(view.quotes) if quote.up]
        return min(
            present,
            key=lambda index: (self._markets[index].region == lost, view.quotes[index].usd_hr),
            default=None,
        )

    def on_demand(self, view: PolicyView) -> int:
        return view.market if view.market != NOWHERE else self._cheapest


def _cheapest(terms: JobTerms) -> int:
    rates = [market.on_demand_usd_hr for market in terms.markets]
    return rates.index(min(rates))


POLICIES: Mapping[str, PolicyMaker] = {
    "auto": DeadlinePolicy,
    "uniform-progress": UniformProgress,
    "greedy": GreedyPolicy,
    "on-demand": OnDemandPolicy,
    "spot-only": SpotOnlyPolicy,
}
# Other names of policies, such as the values of `resources.spot`
ALIASES: Mapping[str, str] = {"up": "uniform-progress", "never": "on-demand", "only": "spot-only"}


def find_policy(name: str) -> PolicyMaker:
    """Return the constructor of the policy with this name. Raises KeyError for an unknown name."""
    return POLICIES[ALIASES.get(name, name)]
