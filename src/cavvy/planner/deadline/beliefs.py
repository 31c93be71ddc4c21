"""Infers whether spot is available in a job's markets, because no provider reports the
availability. The evidence consists of granted and refused launches, the reasons why nodes ended,
and prices.

A launch that was granted but ended before the work started is evidence against the market, like a
refusal, but costs money. Several such launches in a row show that the market has a bad period. Bad
periods have no typical length: a period that has lasted for some time is as likely as any other to
last as long again. Therefore the market rests for as long as its bad period has lasted so far.
"""

from collections.abc import Sequence
from math import inf

from cavvy.domain.markets import LIVES, ObservationKind
from cavvy.domain.values import Struct
from cavvy.planner.markets import NO, cooldown_after
from cavvy.planner.spot.view import UNSEEN, SpotQuote

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


class BarrenLaunches(Struct, frozen=True, kw_only=True):
    """The latest launches in a row in one market that ended before the work started. `since_s` is
    the time of the first of these launches. The market rests until `until_s`.
    """

    count: int
    since_s: float
    until_s: float


class MarketBeliefs:
    """The known facts about the markets in which a job may run. All lists have one element for each
    market, in the same order in which the job's terms list the markets. Times are seconds since the
    job was submitted.
    """

    def __init__(self, usd_hr: Sequence[float], works_after_s: float = 0.0) -> None:
        """`works_after_s` is the time from a launch until the work starts."""
        self._works_after_s = works_after_s
        # the quote of each market at its latest observation
        self.known = [SpotQuote(False, usd, since_s=UNSEEN) for usd in usd_hr]
        self._seen_s = [-inf] * len(usd_hr)  # the time of the latest evidence for or against spot
        self._refusals = [0] * len(usd_hr)  # number of refusals in a row
        self._rests_until = [-inf] * len(usd_hr)
        self._granted_s = [-inf] * len(usd_hr)  # the time of the latest granted launch
        self.barren: list[BarrenLaunches | None] = [None] * len(usd_hr)

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
            if since == UNSEEN or kind is ObservationKind.TAKEN:
                since = at_s
            elif up is not old.up:
                # The change happened at an unknown time since the previous evidence.
                since = (self._seen_s[market] + at_s) / 2
            self.known[market] = SpotQuote(up, usd, since_s=since)
            self._seen_s[market] = at_s
        if kind in NO:
            self._refusals[market] += 1
            rest_s = cooldown_after(self._refusals[market]).total_seconds()
            self._rests_until[market] = at_s + rest_s
        elif kind is not ObservationKind.PRICE:
            self._refusals[market], self._rests_until[market] = 0, -inf
        if kind is ObservationKind.GRANTED:
            self._granted_s[market] = at_s
        elif kind in LIVES:
            began_s = self._granted_s[market] if lasted_s is None else at_s - lasted_s
            self._note_life(began_s, at_s, market, kind)

    def _note_life(self, began_s: float, at_s: float, market: int, kind: ObservationKind) -> None:
        """Count a launch that ended before its work started, or end the count. The first of several
        such launches may be a coincidence; from the second on, the market rests for longer.
        """
        if at_s - began_s >= self._works_after_s:
            self.barren[market] = None
        elif kind is not ObservationKind.ENDED:
            old = self.barren[market]
            if old is not None and began_s - old.until_s > old.until_s - old.since_s:
                old = None  # The market was not tried for so long that its bad period may be over.
            count, since_s = (1, began_s) if old is None else (old.count + 1, old.since_s)
            rest_s = at_s - since_s if count > 1 else 0.0
            until_s = max(self._rests_until[market], at_s + rest_s)
            self._rests_until[market] = until_s
            self.barren[market] = BarrenLaunches(count=count, since_s=since_s, until_s=until_s)

    def assume(self, now_s: float) -> list[SpotQuote]:
        """Return the assumed quotes. Spot is assumed to be available unless the market is in a
        cooldown after a refusal, preemption or failure. If spot may have returned since a refusal,
        the policy assumes that spot has been available for the last quarter of the time since the
        refusal.
        """
        return [
            known if (rests_until <= now_s) is known.up else _reverse(known, seen_s, now_s)
            for known, seen_s, rests_until in zip(
                self.known, self._seen_s, self._rests_until, strict=True
            )
        ]

    def changes_at(self, now_s: float) -> float:
        """Return the time when the next cooldown ends; infinite if no market is in a cooldown."""
        ends_s = inf
        for at in self._rests_until:
            if now_s < at < ends_s:
                ends_s = at
        return ends_s


def _reverse(known: SpotQuote, seen_s: float, now_s: float) -> SpotQuote:
    """Return the quote of a market in which spot is assumed to have changed since the latest
    observation, from available to unavailable or the reverse.
    """
    up, usd_hr, at_risk, since_s = known
    if since_s == UNSEEN:
        return SpotQuote(not up, usd_hr, at_risk, since_s)
    return SpotQuote(not up, usd_hr, at_risk, now_s - _AGE_SHARE * (now_s - seen_s))
