"""What is left where several offers draw from the same nodes: one that is taken takes its part of
all of them. Pure.

An offer's capacity says how often it could be taken while nothing else is. So each time it is taken
it uses one part in so many of its pool, and of every other offer of the pool the same part is gone.
That is exact where sizes divide each other; where they do not, it keeps a little back until the
place is asked again.
"""

from collections.abc import Mapping, MutableMapping
from fractions import Fraction

from cavvy.domain.offers import Offer


def pool_of(offer: Offer) -> str:
    """The pool of the offer; an offer without one is its own pool."""
    return f"{offer.provider}/{offer.region}/{offer.pool}" if offer.pool else offer.key


def count_left(offer: Offer, used: Mapping[str, Fraction]) -> int | None:
    """How many of the offer's nodes are still available; None if its provider does not
    report it.
    """
    if offer.capacity is None:
        return None
    return max(0, int(offer.capacity * (1 - used.get(pool_of(offer), Fraction(0)))))


def take(used: MutableMapping[str, Fraction], offer: Offer, nodes: int) -> None:
    """Count nodes of the offer as used; `used` holds the used part of each pool."""
    if offer.capacity:
        pool = pool_of(offer)
        used[pool] = used.get(pool, Fraction(0)) + Fraction(nodes, offer.capacity)
