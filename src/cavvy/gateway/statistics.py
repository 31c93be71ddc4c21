"""The statistics of a service: counters that only grow. To measure a period, a program subtracts a
counter's value at the start of the period from the counter's value at the end.

The autoscaler reads the counters over the control socket. Times are in seconds of a monotonic
clock.
"""

from collections import deque
from collections.abc import Mapping
from secrets import token_hex

from cavvy.domain.batch_fits import BatchFit
from cavvy.domain.place_loads import PlaceLoads
from cavvy.domain.request_bills import KeyWork
from cavvy.domain.service_updates import RevisionTraffic
from cavvy.domain.values import Struct, field

PROCESS = token_hex(8)  # of this process, whose counters start at 0
_SUB_BITS = 2  # each power of two has four buckets; a quantile is at most 25 % above the truth


def bucket_of(latency_us: int) -> int:
    """Return the bucket of a latency; there are four buckets for each power of two."""
    if latency_us < 4:
        return max(latency_us, 0)
    shift = latency_us.bit_length() - 1 - _SUB_BITS
    return ((shift + 1) << _SUB_BITS) + ((latency_us >> shift) & 3)


def upper_bound_of(bucket: int) -> int:
    """Return the smallest latency, in microseconds, that is too large for the bucket."""
    if bucket < 4:
        return bucket + 1
    shift = (bucket >> _SUB_BITS) - 1
    return ((bucket & 3) + 5) << shift


def find_quantile(buckets: Mapping[int, int], share: float) -> float | None:
    """Return the latency in seconds that this share of the requests did not exceed, or None without
    requests."""
    total = sum(buckets.values())
    seen = 0
    for bucket in sorted(buckets):
        seen += buckets[bucket]
        if seen >= share * total:
            return upper_bound_of(bucket) / 1e6
    return None


class ReplicaFacts(Struct, frozen=True, kw_only=True):
    id: str
    in_flight: int
    served: int
    failed: int  # connections refused or lost in a request
    draining: bool


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
    batches: BatchFacts | None = None
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
        "in_flight",
        "late",
        "latency",
        "lost",
        "refused",
        "retried",
        "service_s",
        "slow",
        "started",
        "starts_s",
        "unserved",
        "waited_s",
    )

    def __init__(self, now: float) -> None:
        self.arrivals = self.answered = self.refused = self.lost = 0
        self.retried = self.aborted = self.in_flight = 0
        self.started = self.late = self.slow = self.unserved = 0
        self.concurrency_s = self.waited_s = self.service_s = 0.0
        self.starts_s = 0.0  # the sum of the times at which the requests in flight started
        self.latency: dict[int, int] = {}
        self._changed_at = now
        self._seen = 0
        self._seconds: deque[int] = deque(maxlen=60)

    def change_in_flight(self, change: int, now: float, started_at: float = 0.0) -> None:
        """Add a request in flight that started at `started_at`; remove it if `change` is -1."""
        self.concurrency_s += self.in_flight * (now - self._changed_at)
        self._changed_at = now
        self.in_flight += change
        self.starts_s += change * started_at

    def record_answer(
        self, arrived_at: float, started_at: float, now: float, work_s: float
    ) -> None:
        """Count an answer. `work_s` is the time for which the replica was busy with the request."""
        self.answered += 1
        self.waited_s += started_at - arrived_at
        self.service_s += work_s
        bucket = bucket_of(int((now - arrived_at) * 1e6))
        self.latency[bucket] = self.latency.get(bucket, 0) + 1

    def end_second(self) -> None:
        """Called once a second."""
        self._seconds.append(self.arrivals - self._seen)
        self._seen = self.arrivals

    def list_seconds(self) -> tuple[int, ...]:
        return tuple(self._seconds)
