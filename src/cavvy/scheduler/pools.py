"""The remaining capacity of offers that share nodes: a node taken for one offer reduces the
capacity of all of them. No I/O.

An offer's capacity is the number of nodes that would be available if only this offer were used. So
each used node takes 1/capacity of the pool, and the capacity of every other offer in the pool
shrinks by the same share. The result is exact if the sizes of the nodes divide each other.
Otherwise, slightly more is reserved until the provider reports its capacity again.
"""

from collections.abc import Mapping, MutableMapping
from fractions import Fraction

from cavvy.domain.offers import Offer


def pool_of(offer: Offer) -> str:
    """The name of the offer's pool; an offer without a pool forms a pool of its own."""
    return f"{offer.provider}/{offer.region}/{offer.pool}" if offer.pool else offer.key


def count_left(offer: Offer, used: Mapping[str, Fraction]) -> int | None:
    """How many of the offer's nodes are still available, or None if the provider does not report
    the capacity.
    """
    if offer.capacity is None:
        return None
    return max(0, int(offer.capacity * (1 - used.get(pool_of(offer), Fraction(0)))))


def take(used: MutableMapping[str, Fraction], offer: Offer, nodes: int) -> None:
    """Count nodes of the offer as used; `used` holds the used part of each pool."""
    if offer.capacity:
        pool = pool_of(offer)
        used[pool] = used.get(pool, Fraction(0)) + Fraction(nodes, offer.capacity)
