"""Runs the deadline policy of one job: the policy receives observations and returns decisions. The
control plane and the trace simulator use this module. Other simulators can use this module, too;
see docs/guides/simulate.md.
"""

from collections.abc import Sequence

from cavvy.domain.markets import ObservationKind
from cavvy.planner.deadline.beliefs import MarketBeliefs
from cavvy.planner.deadline.policy import DeadlinePolicy, PolicyMargins
from cavvy.planner.markets import BarrenLaunches
from cavvy.planner.spot.view import (
    NOWHERE,
    JobTerms,
    MarketPolicy,
    PolicyDecision,
    PolicyMaker,
    PolicyView,
    RunMode,
    SpotQuote,
)


class PolicySession:
    """The policy of one job, and the job's observations of its markets.

    Times are seconds since the job was submitted; observations from before the submission have
    negative times. Markets are numbered as in the terms. Calls must be made in order of time.
    """

    def __init__(
        self, policy: MarketPolicy, usd_hr: Sequence[float], works_after_s: float = 0.0
    ) -> None:
        """`works_after_s` is the time from a launch until the work starts."""
        self._policy, self._beliefs = policy, MarketBeliefs(usd_hr, works_after_s)
        self._shown: tuple[SpotQuote, ...] = ()

    def observe(
        self,
        at_s: float,
        market: int,
        kind: ObservationKind,
        usd_hr: float | None = None,
        lasted_s: float | None = None,
    ) -> None:
        """Record an observation. `usd_hr` is the spot price, and `lasted_s` the lifetime of a gang
        that ended, if they are known.
        """
        self._beliefs.note(at_s, market, kind, usd_hr, lasted_s)
        self._policy.learn(at_s, self._beliefs.known)

    def show(self, at_s: float, quotes: tuple[SpotQuote, ...]) -> None:
        """Record the true quotes of all markets, for simulations in which the job knows everything.
        The quotes are valid until the next call. A simulation calls either `show` or `observe`, but
        never both.
        """
        self._policy.learn(at_s, quotes)
        self._shown = quotes

    def quotes(self, now_s: float, own: int = NOWHERE) -> tuple[SpotQuote, ...]:
        """Return the known or assumed quotes. `own` is the market in which the job runs on spot."""
        if self._shown:
            return self._shown
        quotes = self._beliefs.assume(now_s)
        if own != NOWHERE and not quotes[own].up:
            quotes[own] = quotes[own]._replace(up=True)
        return tuple(quotes)

    def decide(self, view: PolicyView) -> PolicyDecision:
        """Return the decision for the job's current state. `view.quotes` is ignored.

        The caller must call the method again at the decision's `again_s`, at `changes_at`, and
        after each observation.
        """
        now_s, left_s, mode, market, loading_s, _, unsaved_s, budget_usd = view
        quotes = self.quotes(now_s, market if mode is RunMode.SPOT else NOWHERE)
        return self._policy.decide(
            PolicyView(now_s, left_s, mode, market, loading_s, quotes, unsaved_s, budget_usd)
        )

    def resting(self, now_s: float) -> dict[int, BarrenLaunches]:
        """Return the markets that rest because of several launches in a row that ended before the
        work started.
        """
        return {
            market: barren
            for market, barren in enumerate(self._beliefs.barren)
            if barren is not None and barren.count > 1 and barren.until_s > now_s
        }

    def changes_at(self, now_s: float) -> float:
        """Return the next time at which the session's assumptions change although nothing new was
        observed, for example because a refusal has become old. May be infinite.
        """
        return self._beliefs.changes_at(now_s)


def start_session(
    terms: JobTerms,
    usd_hr: Sequence[float],
    margins: PolicyMargins,
    make: PolicyMaker = DeadlinePolicy,
) -> PolicySession:
    """Start the session of one job. `usd_hr` are the current spot prices of the markets. The policy
    adds `margins` to the terms.
    """
    return PolicySession(make(margins.keep(terms)), usd_hr, terms.overhead_s)
