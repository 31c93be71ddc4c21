"""The part of the markets that a simulated job sees: everything, or only what a production job
sees."""

from collections.abc import Sequence
from enum import StrEnum
from math import inf

from cavvy.domain.markets import ObservationKind
from cavvy.planner.deadline.beliefs import MarketBeliefs
from cavvy.planner.spot.view import NOWHERE, MarketPolicy, SpotQuote

_Quotes = tuple[SpotQuote, ...]


class Knows(StrEnum):
    """A job's knowledge of the markets."""

    EVERYTHING = "everything"  # the policy sees whether each market has spot, at every moment
    LAUNCHES = "launches"  # the policy sees only what production sees


class Watcher:
    """Passes new observations to the policy, and shows it the markets. This class shows every
    market at every moment.
    """

    def __init__(self, policy: MarketPolicy, quotes: _Quotes) -> None:
        self._policy, self._quotes = policy, quotes
        policy.learn(0.0, quotes)

    def change(self, now_s: float, quotes: _Quotes, own: int) -> bool:
        """The markets have these quotes now; `own` is where the job has spot. Whether the job
        notices.
        """
        self._quotes = quotes
        self._policy.learn(now_s, quotes)
        return True

    def launch(self, now_s: float, market: int, granted: bool) -> None:
        """The job requested spot there."""

    def leave(self, now_s: float, market: int) -> None:
        """The job released its spot."""

    def show(self, now_s: float, own: int) -> _Quotes:
        """The markets as the job believes them to be."""
        return self._quotes

    def wakes_at(self, now_s: float) -> float:
        """When these beliefs change next if nothing happens before."""
        return inf


class LaunchWatcher(Watcher):
    """As in production: only a launch shows whether a market has spot. Prices are always
    visible.
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
            quote if index == own else SpotQuote(self._beliefs.is_up(index, now_s), quote.usd_hr)
            for index, quote in enumerate(self._quotes)
        )

    def wakes_at(self, now_s: float) -> float:
        return self._beliefs.changes_at(now_s)

    def _note(self, now_s: float, markets: Sequence[int], kind: ObservationKind) -> None:
        for market in markets:
            self._beliefs.note(now_s, market, kind, self._quotes[market].usd_hr)
        self._policy.learn(now_s, self._beliefs.known)


def make_watcher(knows: Knows, policy: MarketPolicy, quotes: _Quotes) -> Watcher:
    """The watcher of one job, from its start."""
    made = Watcher if knows is Knows.EVERYTHING else LaunchWatcher
    return made(policy, quotes)
