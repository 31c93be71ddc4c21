"""Chooses the replica for a request: pure functions over loads, and the share of a canary.

Without affinity, the request is sent to the replica with the fewest requests in flight among the
nearest replicas (the lowest tier) that have room. A replica's load is the number of its requests in
flight plus FARTHER for each tier, so that one comparison of loads also chooses the tier. With
affinity, replicas and keys are points of a circle. From the point of the request's key, the gateway
goes clockwise to the first replica whose load is at most `load_factor` times the mean load. The
method is consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016).

A canary is the set of replicas of the service's newest revision. Of each hundred requests, exactly
the requested share is sent to the canary. The requests are chosen at random, because every n-th
request could always come from the same client.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from math import log
from random import Random

from cavvy.capabilities.serving.gateway.config import CanaryShare
from cavvy.capabilities.serving.replicas import RevisionTraffic
from cavvy.domain.service_updates import GROUP, RevisionSums

POINTS = 64  # points of each replica on the ring
FARTHER = 1 << 20  # more than the requests that a replica can have in flight
FULL = 1 << 30  # the load of a replica that takes no more requests

Ring = tuple[Sequence[int], Sequence[int]]  # points in order, and the replica of each
_FASTEST_S = 1e-6


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


class _Counters:
    __slots__ = (
        "_begun",
        "errors",
        "groups",
        "logs",
        "mean_squares",
        "means",
        "requests",
        "squares",
        "timed",
    )

    def __init__(self) -> None:
        self.requests = self.errors = self.timed = self.groups = 0
        self.logs = self.squares = self.means = self.mean_squares = 0.0
        self._begun = 0.0  # the sum of the logarithms in the group that is not complete

    def add(self, value: float) -> None:
        """Add the logarithm of a request's latency."""
        self.timed += 1
        self.logs += value
        self.squares += value * value
        self._begun += value
        if not self.timed % GROUP:
            mean, self._begun = self._begun / GROUP, 0.0
            self.groups += 1
            self.means += mean
            self.mean_squares += mean * mean

    def describe(self) -> RevisionSums:
        return RevisionSums(
            requests=self.requests,
            errors=self.errors,
            timed=self.timed,
            logs=self.logs,
            squares=self.squares,
            groups=self.groups,
            means=self.means,
            mean_squares=self.mean_squares,
        )


class CanarySplit:
    """Divides the requests between the canary and the replicas of the serving revision."""

    def __init__(self, share: CanaryShare) -> None:
        self.share = share
        self._random = Random(share.revision)
        # for the rest of a hundred requests: whether each is sent to the canary
        self._turns: list[bool] = []
        self._old, self._new = _Counters(), _Counters()
        # for each replica, by position: whether it belongs to the canary
        self._are_new: tuple[bool, ...] = ()
        self._both = False

    def set_replicas(self, are_new: Sequence[bool]) -> None:
        self._are_new = tuple(are_new)
        self._both = len(set(are_new)) == 2

    def narrow(self, loads: Sequence[int]) -> Sequence[int]:
        """Return the replicas' loads, from which the caller chooses a replica. The canary's share
        decides which revision gets the request. If that revision has a free replica, the other
        revision's replicas get the load FULL, so that the caller does not choose them.
        """
        if not self._turns:
            percent = self.share.percent
            self._turns = [True] * percent + [False] * (100 - percent)
            self._random.shuffle(self._turns)
        turn = self._turns[-1]
        mine = [
            load if is_new is turn else FULL
            for load, is_new in zip(loads, self._are_new, strict=True)
        ]
        if min(mine, default=FULL) < FULL:
            self._turns.pop()
            return mine
        return loads

    def record(self, is_new: bool, failed: bool, taken_s: float) -> None:
        """Record that a request has ended. The request counts only while both revisions have
        replicas, because the revisions can be compared only in this period.
        """
        if not self._both:
            return
        counters = self._new if is_new else self._old
        counters.requests += 1
        if failed:
            counters.errors += 1
            return
        counters.add(log(max(taken_s, _FASTEST_S)))

    def describe(self) -> RevisionTraffic:
        return RevisionTraffic(
            revision=self.share.revision, old=self._old.describe(), new=self._new.describe()
        )
