"""Counts the requests of a service that must stay in certain places."""

from collections import Counter
from collections.abc import Iterable
from time import monotonic, time

from cavvy.domain.place_loads import PlaceLoad, PlaceLoads, write_places

_PLACES_MAX = 32  # sets of places; clients may name any
# the difference between the two clocks, read once, so that a time does not change between reports
_OFFSET_S = time() - monotonic()


class BoundArrivals:
    """For each set of places, the time when the last request that must stay in these places
    arrived. `unbound_at` is the arrival time of the last request that is not bound to a place.
    Times are in seconds of a monotonic clock.
    """

    __slots__ = ("_at", "unbound_at")

    def __init__(self) -> None:
        self._at: dict[frozenset[str], float] = {}  # the longest unused one first
        self.unbound_at: float | None = None

    def add(self, places: frozenset[str], now: float) -> None:
        """Record a request that must stay in these places."""
        self._at.pop(places, None)
        self._at[places] = now
        if len(self._at) > _PLACES_MAX:
            del self._at[next(iter(self._at))]

    def describe(self, waiting: Iterable[frozenset[str]]) -> PlaceLoads:
        """Return the requests by their places, or an empty result if no request had to stay in a
        place. `waiting` contains the places of each request that waits.
        """
        if not self._at:
            return {}
        counts = Counter(waiting)
        at = dict(self._at)
        if self.unbound_at is not None:
            at[frozenset()] = self.unbound_at
        return {
            write_places(places): PlaceLoad(waiting=counts[places], asked_at=_OFFSET_S + last)
            for places, last in at.items()
        }
