"""Sends a share of a service's requests to the replicas of its newest revision, and counts the
responses of both revisions. A service without a canary does not use this module.

Of each hundred requests, exactly the requested share is sent to the canary. The requests are chosen
at random, because every n-th request could always come from the same client.
"""

from collections.abc import Sequence
from math import log
from random import Random

from cavvy.domain.service_updates import GROUP, RevisionSums, RevisionTraffic
from cavvy.gateway.balancing import FULL
from cavvy.gateway.config import CanaryShare

_FASTEST_S = 1e-6


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
