"""The observations that a deadline policy remembers about each market (`MarketMemory`), and the
job's remaining work, time and slack (`TimeLeft`). `auto` and `roam` use this module.
"""

from cavvy.planner.spot.spells import NOTHING_SEEN
from cavvy.planner.spot.view import UNSEEN, JobTerms, PolicyView, SpotQuote

_HOUR_S = 3600.0
# the assumed age in hours of the first observed state, because its start is unknown
_AGE_AT_START_HR = 0.5


class TimeLeft:
    """The remaining hours of work, the hours until the deadline, and the slack, which is the
    difference between the two.
    """

    __slots__ = ("left", "slack", "work")

    def __init__(self, view: PolicyView, terms: JobTerms) -> None:
        self.work = view.left_s / _HOUR_S
        self.left = (terms.deadline_s - view.now_s) / _HOUR_S
        self.slack = terms.slack_s(view) / _HOUR_S

    @classmethod
    def later(cls, moment: "TimeLeft", hours: float) -> "TimeLeft":
        """Return the state after this many hours without work."""
        after = cls.__new__(cls)
        after.work, after.left, after.slack = moment.work, moment.left - hours, moment.slack - hours
        return after


class MarketMemory:
    """The observations of one market. Spot that costs at least as much as on-demand is treated as
    unavailable.
    """

    __slots__ = ("_now", "_offered", "_since", "_started", "_unit", "away", "ratio", "stays", "up")

    def __init__(self, unit: float) -> None:
        self._unit = unit
        self._started = self._offered = False
        self._since = self._now = 0.0
        self.up, self.ratio = False, 1.0
        self.stays = self.away = NOTHING_SEEN

    def see(self, now: float, quote: SpotQuote) -> None:
        """Record an observed quote. If the availability of spot is unknown, only the price is
        recorded.
        """
        self._now, up = now, self._read(quote)
        if quote.since_s == UNSEEN:
            return
        if not self._started:
            self._started, self.up, self._since = True, up, now - _AGE_AT_START_HR
        elif up != self.up:
            since = self._begin(now, quote)
            if self.up:
                self.stays = self.stays.with_one(since - self._since)
            else:
                self.away = self.away.with_one(since - self._since)
            self.up, self._since = up, since
        self._offered = quote.up

    def shown(self, now: float, quote: SpotQuote) -> "MarketMemory":
        """Return a copy of the memory, as if this quote were observed at this time. The quote may
        be an assumption. Therefore the copy adopts the quote's state and the time since when this
        state lasts, but does not record a finished spell.
        """
        self._now, up = now, self._read(quote)
        if self._started and up == self.up and quote.since_s != UNSEEN:
            return self
        # This is faster than `copy`, which matters in the simulator.
        made = MarketMemory.__new__(MarketMemory)
        made._unit, made._started, made._offered = self._unit, self._started, self._offered
        made._now, made.ratio, made.up = now, self.ratio, up
        made.stays, made.away = self.stays, self.away
        if quote.since_s == UNSEEN or not self._started:
            made._since = now - _AGE_AT_START_HR
        else:
            made._since = self._begin(now, quote)
        return made

    def _begin(self, now: float, quote: SpotQuote) -> float:
        """Return the hour at which the new state began, or `now` if only the price has changed."""
        if quote.since_s is None or quote.up is self._offered:
            return now
        return max(quote.since_s / _HOUR_S, self._since)

    def _read(self, quote: SpotQuote) -> bool:
        self.ratio = quote.usd_hr / self._unit
        return quote.up and self.ratio < 1

    @property
    def age(self) -> float:
        return self._now - self._since

    @property
    def saving(self) -> float:
        return 1 - self.ratio if self.ratio < 1 else 0.0
