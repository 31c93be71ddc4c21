"""Runs the deadline policy of one job: the policy receives observations and returns decisions. The
control plane and the trace simulator use this module. Other simulators can use this module, too;
see docs/guides/simulate.md.
"""

from collections.abc import Sequence
from math import inf

from cavvy.domain.markets import ObservationKind
from cavvy.planner.deadline.policy import DeadlinePolicy, PolicyMargins
from cavvy.planner.markets import BarrenLaunches, MarketRest
from cavvy.planner.spot import view as spot


class PolicySession:
    """The policy of one job, and the job's observations of its markets.

    Times are seconds since the job was submitted; observations from before the submission have
    negative times. Markets are numbered as in the terms. Calls must be made in order of time.
    """

    def __init__(
        self, policy: spot.MarketPolicy, usd_hr: Sequence[float], works_after_s: float = 0.0
    ) -> None:
        """`works_after_s` is the time from a launch until the work starts."""
        self._policy, self._beliefs = policy, MarketBeliefs(usd_hr, works_after_s)
        self._shown: tuple[spot.SpotQuote, ...] = ()

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

    def show(self, at_s: float, quotes: tuple[spot.SpotQuote, ...]) -> None:
        """Record the true quotes of all markets, for simulations in which the job knows everything.
        The quotes are valid until the next call. A simulation calls either `show` or `observe`, but
        never both.
        """
        self._policy.learn(at_s, quotes)
        self._shown = quotes

    def quotes(self, now_s: float, own: int = spot.NOWHERE) -> tuple[spot.SpotQuote, ...]:
        """Return the known or assumed quotes. `own` is the market in which the job runs on spot."""
        if self._shown:
            return self._shown
        quotes = self._beliefs.assume(now_s)
        if own != spot.NOWHERE and not quotes[own].up:
            quotes[own] = quotes[own]._replace(up=True)
        return tuple(quotes)

    def decide(self, view: spot.PolicyView) -> spot.PolicyDecision:
        """Return the decision for the job's current state. `view.quotes` is ignored.

        The caller must call the method again at the decision's `again_s`, at `changes_at`, and
        after each observation.
        """
        now_s, left_s, mode, market, loading_s, _, unsaved_s, budget_usd = view
        quotes = self.quotes(now_s, market if mode is spot.RunMode.SPOT else spot.NOWHERE)
        return self._policy.decide(
            spot.PolicyView(now_s, left_s, mode, market, loading_s, quotes, unsaved_s, budget_usd)
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
    terms: spot.JobTerms,
    usd_hr: Sequence[float],
    margins: PolicyMargins,
    make: spot.PolicyMaker = DeadlinePolicy,
) -> PolicySession:
    """Start the session of one job. `usd_hr` are the current spot prices of the markets. The policy
    adds `margins` to the terms.
    """
    return PolicySession(make(margins.keep(terms)), usd_hr, terms.overhead_s)


# After a refusal, spot may have returned without being observed. Spot is assumed to have been back
# for this share of the time since the refusal. If spot returned only once at a random time, the
# mean share would be one half. Spot that comes and goes returned more recently than that.
_AGE_SHARE = 0.25
_MEANS = {
    ObservationKind.GRANTED: True,
    ObservationKind.BOOTED: True,
    ObservationKind.ENDED: True,
    ObservationKind.REFUSED: False,
    ObservationKind.TAKEN: False,
}


class MarketBeliefs:
    """The known facts about the markets in which a job may run. All lists have one element for each
    market, in the same order in which the job's terms list the markets. Times are seconds since the
    job was submitted.
    """

    def __init__(self, usd_hr: Sequence[float], works_after_s: float = 0.0) -> None:
        """`works_after_s` is the time from a launch until the work starts."""
        # the quote of each market at its latest observation
        self.known = [spot.SpotQuote(False, usd, since_s=spot.UNSEEN) for usd in usd_hr]
        self._seen_s = [-inf] * len(usd_hr)  # the time of the latest evidence for or against spot
        self._rests = [MarketRest(works_after_s) for _ in usd_hr]

    @property
    def barren(self) -> list[BarrenLaunches | None]:
        """The latest launches in each market that ended before the work started."""
        return [rest.barren for rest in self._rests]

    def note(
        self,
        at_s: float,
        market: int,
        kind: ObservationKind,
        usd_hr: float | None = None,
        lasted_s: float | None = None,
    ) -> None:
        """Add one observation. Observations must be added in order of time. `lasted_s` is the
        lifetime of a gang that ended. Without it, the gang was launched by the latest grant.
        """
        old, usd = self.known[market], usd_hr
        usd = old.usd_hr if usd is None else usd
        up = _MEANS.get(kind)
        if up is None:
            self.known[market] = old._replace(usd_hr=usd)
        else:
            since = old.since_s
            if since == spot.UNSEEN or kind is ObservationKind.TAKEN:
                since = at_s
            elif up is not old.up:
                # The change happened at an unknown time since the previous evidence.
                since = (self._seen_s[market] + at_s) / 2
            self.known[market] = spot.SpotQuote(up, usd, since_s=since)
            self._seen_s[market] = at_s
        self._rests[market].note(at_s, kind, lasted_s)

    def assume(self, now_s: float) -> list[spot.SpotQuote]:
        """Return the assumed quotes. Spot is assumed to be available unless the market is in a
        cooldown after a refusal, preemption or failure. If spot may have returned since a refusal,
        the policy assumes that spot has been available for the last quarter of the time since the
        refusal.
        """
        return [
            known if (rest.until_s <= now_s) is known.up else _reverse(known, seen_s, now_s)
            for known, seen_s, rest in zip(self.known, self._seen_s, self._rests, strict=True)
        ]

    def changes_at(self, now_s: float) -> float:
        """Return the time when the next cooldown ends; infinite if no market is in a cooldown."""
        ends_s = inf
        for rest in self._rests:
            if now_s < rest.until_s < ends_s:
                ends_s = rest.until_s
        return ends_s


def _reverse(known: spot.SpotQuote, seen_s: float, now_s: float) -> spot.SpotQuote:
    """Return the quote of a market in which spot is assumed to have changed since the latest
    observation, from available to unavailable or the reverse.
    """
    up, usd_hr, at_risk, since_s = known
    if since_s == spot.UNSEEN:
        return spot.SpotQuote(not up, usd_hr, at_risk, since_s)
    return spot.SpotQuote(not up, usd_hr, at_risk, now_s - _AGE_SHARE * (now_s - seen_s))
