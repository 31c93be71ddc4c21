"""What a simulated job knows of the markets: everything, or only what a production job knows."""

from collections.abc import Sequence
from enum import StrEnum
from math import inf

from cavvy.domain.markets import ObservationKind
from cavvy.planner.deadline.beliefs import MarketBeliefs
from cavvy.planner.spot.view import NOWHERE, MarketPolicy, SpotQuote

_Quotes = tuple[SpotQuote, ...]


class Knows(StrEnum):
    """What a job knows of the markets."""

    EVERYTHING = "everything"  # at every moment, whether each market has spot
    LAUNCHES = "launches"  # prices, and what the job's own launches show, as in production


class Watcher:
    """Passes new observations to the policy and shows it the markets. This base class shows the
    true state of every market at every moment.
    """

    def __init__(self, policy: MarketPolicy, quotes: _Quotes) -> None:
        self._policy, self._quotes = policy, quotes
        policy.learn(0.0, quotes)

    def change(self, now_s: float, quotes: _Quotes, own: int) -> bool:
        """Record that the markets have these quotes now. `own` is the market where the job has
        spot. Returns whether the job notices the change.
        """
        self._quotes = quotes
        self._policy.learn(now_s, quotes)
        return True

    def launch(self, now_s: float, market: int, granted: bool) -> None:
        """Record that the job requested spot in a market, and whether it was granted."""

    def leave(self, now_s: float, market: int) -> None:
        """Record that the job released its spot in a market."""

    def show(self, now_s: float, own: int) -> _Quotes:
        """The quotes of the markets as the job knows or assumes them."""
        return self._quotes

    def wakes_at(self, now_s: float) -> float:
        """The time of the next change of the quotes of `show` if nothing happens earlier."""
        return inf


class LaunchWatcher(Watcher):
    """Shows what a production job knows: the prices of all markets, and which markets have spot as
    far as the job's own launches have shown it.
    """

    def __init__(self, policy: MarketPolicy, quotes: _Quotes) -> None:
        self._policy, self._quotes = policy, quotes
        self._beliefs = MarketBeliefs([quote.usd_hr for quote in quotes])
        self._note(0.0, range(len(quotes)), ObservationKind.PRICE)

    def change(self, now_s: float, quotes: _Quotes, own: int) -> bool:
        before, self._quotes = self._quotes, quotes
        dearer = [i for i, quote in enumerate(quotes) if quote.usd_hr != before[i].usd_hr]
        if dearer:
            self._note(now_s, dearer, ObservationKind.PRICE)
        if own == NOWHERE:
            return bool(dearer)
        if not quotes[own].up:
            self._note(now_s, (own,), ObservationKind.TAKEN)
        return bool(dearer) or quotes[own] != before[own]

    def launch(self, now_s: float, market: int, granted: bool) -> None:
        self._note(
            now_s, (market,), ObservationKind.GRANTED if granted else ObservationKind.REFUSED
        )

    def leave(self, now_s: float, market: int) -> None:
        self._note(now_s, (market,), ObservationKind.ENDED)

    def show(self, now_s: float, own: int) -> _Quotes:
        return tuple(
            quote._replace(up=True) if index == own else quote
            for index, quote in enumerate(self._beliefs.assume(now_s))
        )

    def wakes_at(self, now_s: float) -> float:
        return self._beliefs.changes_at(now_s)

    def _note(self, now_s: float, markets: Sequence[int], kind: ObservationKind) -> None:
        for market in markets:
            self._beliefs.note(now_s, market, kind, self._quotes[market].usd_hr)
        self._policy.learn(now_s, self._beliefs.known)


def make_watcher(knows: Knows, policy: MarketPolicy, quotes: _Quotes) -> Watcher:
    """Create the watcher of one job at its start."""
    made = Watcher if knows is Knows.EVERYTHING else LaunchWatcher
    return made(policy, quotes)
