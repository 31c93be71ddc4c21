"""Computes the remaining capacity of offers that share nodes. Offers that share nodes form a pool:
a node used for one offer of the pool reduces the capacity of all its offers. The module does no
I/O.

An offer's capacity is the number of nodes that jobs can get of this offer while they use no other
offer of the pool. A node of an offer with the capacity c uses the share 1/c of the pool. The
capacity of each other offer in the pool shrinks by this share. The result is exact if each node
size is a multiple of all smaller node sizes; otherwise, the result is slightly too low until the
provider next reports its capacity.
"""

from collections.abc import Mapping, MutableMapping
from fractions import Fraction

from cavvy.domain.offers import Offer


def pool_of(offer: Offer) -> str:
    """Return the name of the offer's pool. An offer that shares no nodes has its own pool."""
    return f"{offer.account}/{offer.region}/{offer.pool}" if offer.pool else offer.key


def units_of(offer: Offer) -> int:
    """Return the units that a node of the offer counts as. Nodes of several sizes may share a
    pool."""
    return max(1, offer.accelerator_count)


def count_left(offer: Offer, used: Mapping[str, Fraction]) -> int | None:
    """Return how many nodes of the offer are still available. Returns None if the provider does not
    report the capacity.
    """
    if offer.capacity is None:
        return None
    return max(0, int(offer.capacity * (1 - used.get(pool_of(offer), Fraction(0)))))


def take(used: MutableMapping[str, Fraction], offer: Offer, nodes: int) -> None:
    """Count nodes of the offer as used. `used` maps each pool to the used share of its nodes."""
    if offer.capacity:
        pool = pool_of(offer)
        used[pool] = used.get(pool, Fraction(0)) + Fraction(nodes, offer.capacity)
