"""Chooses the replica for a request: pure functions over loads.

Without affinity, the request is sent to the replica with the fewest requests in flight among the
nearest replicas (the lowest tier) that have room. A replica's load is the number of its requests in
flight plus FARTHER for each tier, so that one comparison of loads also chooses the tier. With
affinity, replicas and keys are points of a circle. From the point of the request's key, the gateway
goes clockwise to the first replica whose load is at most `load_factor` times the mean load. The
method is consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016).
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b

POINTS = 64  # points of each replica on the ring
FARTHER = 1 << 20  # more than the requests that a replica can have in flight
FULL = 1 << 30  # the load of a replica that takes no more requests

Ring = tuple[Sequence[int], Sequence[int]]  # points in order, and the replica of each


def hash_key(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big")


def make_ring(ids: Sequence[str]) -> Ring:
    """Return a ring of replicas, each named by its position in `ids`."""
    points = sorted(
        (hash_key(b"%b/%d" % (name.encode(), point)), position)
        for position, name in enumerate(ids)
        for point in range(POINTS)
    )
    return [point for point, _ in points], [position for _, position in points]


def choose_least(loads: Sequence[int], start: int) -> int:
    """Return the position of the replica with the lowest load, or -1 if all replicas are FULL.

    If several replicas have the lowest load, the search begins at position `start` and chooses the
    first of these replicas. If the caller increases `start` with each request, equally loaded
    replicas take turns.
    """
    if len(loads) == 1:
        return 0 if loads[0] < FULL else -1
    least = min(loads, default=FULL)
    if least >= FULL:
        return -1
    try:
        return loads.index(least, start)
    except ValueError:
        return loads.index(least)


def choose_by_key(
    ring: Ring, key: int, loads: Sequence[int], total: int, load_factor: float
) -> int:
    """Return the position of the replica that gets the request. The search starts at the key's
    replica and continues clockwise on the ring until a replica's load is below the load limit. If
    every load has reached the limit, the first replica that is not FULL is chosen. If all replicas
    are FULL, the result is -1. `total` is the total load of all replicas.
    """
    points, owners = ring
    if not points:
        return -1
    bound = math.ceil(load_factor * (total + 1) / len(loads))
    first = bisect_right(points, key)
    fallback = -1
    for step in range(len(points)):
        at = owners[(first + step) % len(points)]
        if loads[at] < bound:
            return at
        if fallback < 0 and loads[at] < FULL:
            fallback = at
    return fallback
