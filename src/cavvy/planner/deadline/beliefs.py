"""Infer whether spot is available in a job's markets, because no provider reports this. The
evidence is granted and refused launches, how nodes ended, and prices.
"""

from collections.abc import Sequence
from math import inf

from cavvy.domain.markets import ObservationKind
from cavvy.planner.markets import NO, cooldown_after
from cavvy.planner.spot.view import SpotQuote

_MEANS = {
    ObservationKind.GRANTED: True,
    ObservationKind.BOOTED: True,
    ObservationKind.ENDED: True,
    ObservationKind.REFUSED: False,
    ObservationKind.TAKEN: False,
}


class MarketBeliefs:
    """What is known of a job's markets, in the order of the job's terms. Times are seconds since
    the job was submitted.
    """

    def __init__(self, usd_hr: Sequence[float]) -> None:
        # The quote of each market as of its latest observation
        self.known = [SpotQuote(False, usd) for usd in usd_hr]
        self._refusals = [0] * len(usd_hr)  # refusals in a row
        self._rests_until = [-inf] * len(usd_hr)

    def note(
        self, at_s: float, market: int, kind: ObservationKind, usd_hr: float | None = None
    ) -> None:
        """Add one observation. Observations must be added in the order of their times."""
        old = self.known[market]
        up = _MEANS.get(kind, old.up)
        self.known[market] = SpotQuote(up, old.usd_hr if usd_hr is None else usd_hr)
        if kind in NO:
            self._refusals[market] += 1
            rest_s = cooldown_after(self._refusals[market]).total_seconds()
            self._rests_until[market] = at_s + rest_s
        elif kind is not ObservationKind.PRICE:
            self._refusals[market], self._rests_until[market] = 0, -inf

    def is_up(self, market: int, now_s: float) -> bool:
        """Whether spot counts as available: it does not while the market is in a cooldown after a
        refusal, preemption or failure.
        """
        return self._rests_until[market] <= now_s

    def changes_at(self, now_s: float) -> float:
        """The time when the next cooldown ends; infinite if no market is in a cooldown."""
        return min((at for at in self._rests_until if at > now_s), default=inf)
