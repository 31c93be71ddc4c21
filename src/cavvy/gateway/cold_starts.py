"""Measures how long a service without replicas takes until the first replica is ready, and
estimates when clients should retry."""

import math

WEIGHT = 0.3  # weight of the newest cold start in the smoothed value


class ColdStarts:
    """The cold starts of a service. A cold start begins with the first request that finds no
    replica."""

    __slots__ = ("_since", "count", "estimate_s")

    def __init__(self, estimate_s: float | None) -> None:
        self.estimate_s = estimate_s
        self.count = 0
        self._since: float | None = None

    def begin(self, now: float) -> None:
        if self._since is None:
            self._since = now

    def end(self, now: float) -> None:
        """Record that a replica has become ready."""
        if self._since is None:
            return
        took = now - self._since
        first = self.count == 0 or self.estimate_s is None
        self.estimate_s = took if first else took * WEIGHT + (self.estimate_s or 0) * (1 - WEIGHT)
        self.count += 1
        self._since = None

    def waited_s(self, now: float) -> float:
        return 0.0 if self._since is None else now - self._since


def estimate_retry_s(
    *,
    cold_start_s: float | None,
    waited_s: float,
    ready: int,
    backlog: int,
    slots: int,
    service_s: float,
) -> int | None:
    """Return the number of whole seconds after which a request is likely to succeed, for
    Retry-After, or None if this time is unknown.

    Without a ready replica, the estimate is the rest of the usual cold start. If the cold start
    takes longer than usual, the estimate is the time since the cold start began. With a ready
    replica, the estimate is the time in which the slots process the backlog at the mean service
    time.
    """
    if ready:
        return max(1, math.ceil(backlog * service_s / max(slots, 1)))
    if cold_start_s is None:
        return None
    left = cold_start_s - waited_s
    return max(1, math.ceil(left if left > 0 else waited_s))
