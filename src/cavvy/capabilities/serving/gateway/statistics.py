"""The statistics of a service: counters that only grow, the length of cold starts, and the places
in which requests must stay. To measure a period, a program subtracts a counter's value at the start
of the period from the counter's value at the end.

The autoscaler reads the counters over the control socket. Times are in seconds of a monotonic
clock.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable
from secrets import token_hex
from time import monotonic, time

from cavvy.capabilities.serving.bills import KeyWork
from cavvy.capabilities.serving.gateway.batching import BatchTimes
from cavvy.capabilities.serving.loads import (
    BatchFit,
    PlaceLoad,
    PlaceLoads,
    PromptSums,
    TokenTimes,
    bucket_of,
    write_places,
)
from cavvy.capabilities.serving.replicas import RevisionTraffic
from cavvy.domain.values import Struct, field

PROCESS = token_hex(8)  # of this process, whose counters start at 0
WEIGHT = 0.3  # weight of the newest cold start in the smoothed value
_MEASURED = 15.0  # times of requests from which waits are predicted
_PLACES_MAX = 32  # sets of places; clients may name any
# the difference between the two clocks, read once, so that a time does not change between reports
_OFFSET_S = time() - monotonic()


class ReplicaFacts(Struct, frozen=True, kw_only=True):
    id: str
    in_flight: int
    served: int
    failed: int  # connections refused or lost in a request
    draining: bool
    adapters: tuple[str, ...] = ()  # that it has loaded on demand
    loads: int = 0  # of adapters


class BatchFacts(Struct, frozen=True, kw_only=True):
    formed: int  # batches of several requests
    joined: int  # the requests in them
    spoiled: int  # batches whose requests were sent again, in halves or each alone
    fit: BatchFit | None = None  # the time of a batch, once enough were measured


class ServiceFacts(Struct, frozen=True, kw_only=True):
    """The statistics of a service at one moment."""

    name: str
    at_s: float  # seconds of the gateway's monotonic clock
    arrivals: int
    answered: int
    refused: int  # refused by the gateway itself: keys, rates, a full queue, too late
    lost: int  # answered with 502
    retried: int
    aborted: int  # the client left
    started: int  # sent to a replica; twice if the first replica was lost
    late: int  # of these, the requests that waited for more than `late_s`
    in_flight: int
    in_flight_s: float  # the sum of the times since the requests in flight started
    backlog: int
    concurrency_s: float  # the integral of the requests in flight
    waited_s: float  # the sum of all waits for a replica
    service_s: float  # the sum of all times from the replica's start to its last byte; of requests
    # that may be joined, the share in the time of a full batch
    cold_starts: int
    cold_start_s: float | None  # measured, smoothed
    arrivals_per_s: tuple[int, ...]  # arrivals in each of the last 60 whole seconds, newest last
    latency_us: dict[int, int]  # bucket -> requests, from arrival to last byte
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    keys_used: dict[str, float]  # the last request of each key, in seconds since 1970
    replicas: tuple[ReplicaFacts, ...]
    canary: RevisionTraffic | None = None
    # by replica, including removed ones, and by client's key
    work: dict[str, dict[str, KeyWork]] = field(default_factory=dict)
    epoch: str = ""  # of `work`, which goes on when the gateway is restarted
    process: str = PROCESS  # of all other counters
    slow: int = 0  # of those answered, after more than `slow_s` since they arrived
    unserved: int = 0  # of those refused, by a full queue or because no replica took them in time
    shed: int = 0  # of those unserved, at once: the queue was full, or the wait too long
    fallbacks: dict[str, int] = field(default_factory=dict)  # answers by the fallback's ID
    batches: BatchFacts | None = None
    tokens: TokenTimes = TokenTimes()
    prompts: PromptSums = PromptSums()
    backlog_size: int = 0  # tokens in the prompts of those that wait
    places: PlaceLoads = field(default_factory=dict)


class ServiceCounters:
    """The counters of `ServiceFacts`, which each request changes."""

    __slots__ = (
        "_changed_at",
        "_seconds",
        "_seen",
        "aborted",
        "answered",
        "arrivals",
        "concurrency_s",
        "fallbacks",
        "in_flight",
        "late",
        "latency",
        "latency_s",
        "lost",
        "prompts",
        "refused",
        "retried",
        "service_s",
        "shed",
        "slow",
        "started",
        "starts_s",
        "unserved",
        "waited_s",
    )

    def __init__(self, now: float) -> None:
        self.arrivals = self.answered = self.refused = self.lost = 0
        self.retried = self.aborted = self.in_flight = 0
        self.started = self.late = self.slow = self.unserved = self.shed = 0
        self.fallbacks: dict[str, int] = {}
        self.concurrency_s = self.waited_s = self.service_s = self.latency_s = 0.0
        self.starts_s = 0.0  # the sum of the times at which the requests in flight started
        self.latency: dict[int, int] = {}
        self.prompts = [0.0] * len(PromptSums.__struct_fields__)
        self._changed_at = now
        self._seen = 0
        self._seconds: deque[int] = deque(maxlen=60)

    def change_in_flight(self, change: int, now: float, started_at: float = 0.0) -> None:
        """Add a request in flight that started at `started_at`; remove it if `change` is -1."""
        self.concurrency_s += self.in_flight * (now - self._changed_at)
        self._changed_at = now
        self.in_flight += change
        self.starts_s += change * started_at

    def record_arrival(self, size: int) -> None:
        """Count a request, whose prompt has `size` tokens."""
        self.arrivals += 1
        self.prompts[0] += size

    def record_answer(
        self, arrived_at: float, started_at: float, now: float, work_s: float, size: int = 1
    ) -> None:
        """Count an answer. `work_s` is the time for which the replica was busy with the request."""
        sums = self.prompts
        sums[1] += 1
        sums[2] += size
        sums[3] += work_s
        sums[4] += size * size
        sums[5] += size * work_s
        self.answered += 1
        self.waited_s += started_at - arrived_at
        self.service_s += work_s
        self.latency_s += now - arrived_at
        bucket = bucket_of(int((now - arrived_at) * 1e6))
        self.latency[bucket] = self.latency.get(bucket, 0) + 1

    def end_second(self) -> None:
        """Called once a second."""
        self._seconds.append(self.arrivals - self._seen)
        self._seen = self.arrivals

    def describe_prompts(self) -> PromptSums:
        return PromptSums(**dict(zip(PromptSums.__struct_fields__, self.prompts, strict=True)))

    def list_seconds(self) -> tuple[int, ...]:
        return tuple(self._seconds)


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

    def predict_s(self, now: float) -> float | None:
        """Return the rest of the cold start, or None if none was measured or it takes longer."""
        left_s = (self.estimate_s or 0.0) - self.waited_s(now)
        return left_s if self.count and left_s > 0 else None

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


class WaitingLine:
    """How long the requests of a service wait. The time of a request is a * n + b for n tokens of
    its prompt, as `BatchTimes` fits it to the requests that ended while others waited, so b has the
    usual completion. Requests without tokens have n = 1.
    """

    __slots__ = ("_count", "_longest_s", "_times", "_tokens")

    def __init__(self) -> None:
        self._times = BatchTimes()
        self._count = self._tokens = 0  # of those that wait
        self._longest_s = 0.0  # of those that were measured

    def enter(self, tokens: int) -> None:
        self._count += 1
        self._tokens += tokens

    def leave(self, tokens: int) -> None:
        self._count -= 1
        self._tokens -= tokens

    def record(self, tokens: int, taken_s: float) -> None:
        """Record the time for which a slot was busy with a request."""
        if self._count:
            self._times.add(tokens, taken_s)
            self._longest_s = max(self._longest_s, taken_s)

    def predict_s(self, slots: int, share: float = 1.0) -> float | None:
        """Return how long another request would wait behind the given share of those that wait, or
        None if none waits or too few times were measured. One of the requests in flight is expected
        to end after a part 1 / (slots + 1) of the mean time.
        """
        if self._times.weight < _MEASURED or not slots or not self._count:
            return None
        slope, base = self._times.fit()
        ahead_s = slope * self._tokens + base * self._count
        # the tokens of a body with an image are too many
        ahead_s = min(ahead_s, self._longest_s * self._count)
        return share * ahead_s / slots + ahead_s / self._count / (slots + 1)


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
