"""Assigns replicas to tiers by the round trip between their node and a gateway.

The shortest of the last round trips is compared with the bounds of the tiers, because a busy
program or network can only make round trips longer. The tier changes only if the shortest round
trip is beyond the bound by a margin, so that a replica near a bound does not keep changing its
tier.
"""

from bisect import bisect_right

from cavvy.domain.values import Struct

# upper bounds of the tiers in seconds: a zone, a region, a continent; all others are farther
BOUNDS_S = (0.005, 0.03, 0.1)
FARTHEST = len(BOUNDS_S)
_KEPT = 6  # round trips
_MARGIN = 1.25


class RoundTrips(Struct, frozen=True, kw_only=True):
    """The last round trips to a replica in seconds, oldest first, and the tier of the replica. The
    tier is None until the first round trip has been measured.
    """

    last: tuple[float, ...] = ()
    tier: int | None = None


def add_round_trip(known: RoundTrips, seconds: float) -> RoundTrips:
    """Add a measurement to the round trips, and return them with the updated tier."""
    last = (*known.last, seconds)[-_KEPT:]
    shortest = min(last)
    if known.tier is None:
        return RoundTrips(last=last, tier=bisect_right(BOUNDS_S, shortest))
    least = bisect_right(BOUNDS_S, shortest / _MARGIN)
    most = bisect_right(BOUNDS_S, shortest * _MARGIN)
    return RoundTrips(last=last, tier=min(max(known.tier, least), most))
