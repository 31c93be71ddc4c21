"""Decides how many waiting requests a replica gets as one batch, and how long to wait for more.

The time of a batch of n instances is modelled as t(n) = a * n + b. `BatchTimes` estimates the slope
a and the constant b from the past batches of one replica. A larger batch shares b among more
requests, so the module decides as follows:

    size    The batch is the longest run of the waiting requests, oldest first, that has at most
            `max` instances and would end before each of its requests is due. A request that would
            be late even in the smallest batch does not count. While a replica is new, a batch has
            at most twice as many instances as the largest batch that the replica has answered.
    wait    The batch waits for more requests only if the replica is the last free one. Even then,
            it waits only while waiting lowers the sum of the latencies (`pays_to_wait`).

The JSON bodies of the requests are joined into one body, and the response is divided among the
requests. The format is defined by the prediction API of TensorFlow Serving, which is version 1 of
KServe's protocol. A request is `{"instances": [...], ...}`, and its response is `{"predictions":
[...], ...}` with one prediction for each instance. The names of the two arrays can be configured,
and a response may also consist of the array of predictions alone. Numbers and texts are copied byte
by byte.
"""

from collections.abc import Iterable, Sequence
from math import ceil, inf, sqrt

import msgspec

from cavvy.capabilities.serving.loads import BatchFit
from cavvy.domain.values import Struct

_KEEP = 0.98  # the weight of a batch falls to a third within fifty batches
_KEEP_SCALE = 0.9
_OUTLIER = 4.0  # deviations further than so many usual ones count as if they were so far
_MARGIN = 2.0  # the usual deviations by which a batch may exceed its expected time
_FEW = 4.0  # batches from which the model is used
_KEEP_GAP = 0.9
_GAPS = 3.0  # an expected request that is so many gaps late is no longer expected


class WaitingRequest(Struct, frozen=True):
    """A waiting request: its number of instances, and the time at which its answer is due."""

    instances: int
    due_at: float


class BatchTimes:
    """The times that one replica took for its batches, and the model that fits them.

    The fit is by least squares with exponential forgetting. An outlier counts as only a few usual
    deviations, so that one slow batch changes little. The usual deviation grows with each outlier,
    so that the model adapts to a slower replica within about ten batches.
    """

    __slots__ = ("_nn", "_nt", "_scale", "_sum_n", "_sum_t", "_weight", "largest")

    def __init__(self) -> None:
        self._weight = self._sum_n = self._sum_t = self._nn = self._nt = 0.0
        self._scale = 0.0  # the usual deviation from the model, in seconds
        self.largest = 0  # instances

    @property
    def known(self) -> bool:
        """Whether enough batches were measured to use the model."""
        return self._weight >= _FEW

    @property
    def weight(self) -> float:
        """The number of batches that were measured, with older ones counting less."""
        return self._weight

    def add(self, instances: int, taken_s: float) -> None:
        """Record a batch."""
        self.largest = max(self.largest, instances)
        if self.known:
            expected_s = self.expect_s(instances)
            scale = max(self._scale, expected_s / 100)
            deviation = max(-_OUTLIER * scale, min(_OUTLIER * scale, taken_s - expected_s))
            self._scale = _KEEP_SCALE * scale + (1 - _KEEP_SCALE) * abs(deviation)
            taken_s = expected_s + deviation
        self._weight = _KEEP * self._weight + 1
        self._sum_n = _KEEP * self._sum_n + instances
        self._sum_t = _KEEP * self._sum_t + taken_s
        self._nn = _KEEP * self._nn + instances * instances
        self._nt = _KEEP * self._nt + instances * taken_s

    def fit(self) -> tuple[float, float]:
        """Return the coefficients a and b of t(n) = a * n + b, both at least 0. If all batches had
        nearly the same size, a and b cannot be determined separately, so b is set to 0, and the
        model predicts no gain from larger batches.
        """
        if not self._weight:
            return 0.0, 0.0
        mean_n, mean_t = self._sum_n / self._weight, self._sum_t / self._weight
        spread = self._nn / self._weight - mean_n * mean_n
        if sqrt(max(spread, 0.0)) < 0.05 * mean_n:
            return mean_t / mean_n, 0.0
        slope = max(0.0, (self._nt / self._weight - mean_n * mean_t) / spread)
        if slope * mean_n > mean_t:
            return self._nt / self._nn, 0.0
        return slope, mean_t - slope * mean_n

    def expect_s(self, instances: int) -> float:
        """Return the expected processing time of a batch."""
        slope, base = self.fit()
        return slope * instances + base

    def bound_s(self, instances: int) -> float:
        """Return a time that a batch is unlikely to exceed, or 0 while the model is unknown."""
        if not self.known:
            return 0.0
        return self.expect_s(instances) + _MARGIN * self._scale

    def count_work_s(self, instances: int, taken_s: float, most: int, most_s: float) -> float:
        """Return the time that the requests of a batch would have taken as their share of a full
        batch. A full batch has at most `most` instances and takes at most `most_s`. The autoscaler
        counts the result instead of the measured time, because a busy replica forms larger batches,
        and so answers more requests before it is full.
        """
        if not self.known:
            return taken_s
        slope, base = self.fit()
        most = _bound_size(slope, base, most, most_s)
        return min(taken_s, instances * (slope + base / max(most, instances)))


def _bound_size(slope: float, base: float, most: int, most_s: float) -> int:
    """Return the number of instances in a full batch: at most `most`, and few enough for the batch
    to end within `most_s`."""
    if slope * most + base <= most_s:
        return most
    return max(1, int((most_s - base) / slope)) if slope else 1


def average_fits(
    replicas: Iterable[BatchTimes], instances: float, most: int, most_s: float
) -> BatchFit | None:
    """Return the mean of the replicas' models of batch time, or None if no replica has a model yet.
    The result counts requests, and assumes that each request has `instances` instances.
    """
    fits = [each.fit() for each in replicas if each.known]
    if not fits:
        return None
    slope, base = (sum(values) / len(fits) for values in zip(*fits, strict=True))
    full = _bound_size(slope, base, most, most_s)
    return BatchFit(slope_s=slope * instances, base_s=base, most=max(1.0, full / instances))


class ArrivalGaps:
    """The mean time between requests that may be joined. A gap longer than `longest_s` counts as
    `longest_s`."""

    __slots__ = ("_longest_s", "instances", "last_at", "mean_s")

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self.mean_s = longest_s
        self.last_at = -inf
        self.instances = 1.0  # the mean of a request

    def add(self, instances: int, now: float) -> None:
        # a request with a slow body is read after requests that arrived later
        gap_s = max(0.0, min(now - self.last_at, self._longest_s))
        self.mean_s = _KEEP_GAP * self.mean_s + (1 - _KEEP_GAP) * gap_s
        self.instances = _KEEP_GAP * self.instances + (1 - _KEEP_GAP) * instances
        self.last_at = max(now, self.last_at)


def choose_size(
    waiting: Sequence[WaitingRequest], times: BatchTimes, most: int, free: int, now: float
) -> int:
    """Return how many of the waiting requests, at least one, form the next batch. The requests are
    divided evenly among the `free` slots of the replicas.
    """
    most = min(most, 2 * max(times.largest, 1))
    smallest_s = times.bound_s(1)
    total, due_at, size = 0, inf, 0
    for each in waiting[: max(1, ceil(len(waiting) / max(free, 1)))]:
        total += each.instances
        if now + max(smallest_s, times.bound_s(each.instances)) <= each.due_at:
            due_at = min(due_at, each.due_at)
        if size and (total > most or now + times.bound_s(total) > due_at):
            break
        size += 1
    return size


def pays_to_wait(requests: int, more: float, gap_s: float, times: BatchTimes) -> bool:
    """Return whether a delay of the batch lowers the sum of the latencies. The batch has k requests
    (`requests`). The next request would have m instances (`more`), and is expected after the time g
    (`gap_s`).

    If the batch of n instances starts now, the total latency of the batch is k * t(n). The next
    request arrives g later and starts when the batch ends, so the latency of the next request is
    t(n) + t(m) - g. If the batch waits for the next request, the total latency of its k requests is
    k * (g + t(n + m)), and the latency of the next request is t(n + m). With t(n) = a * n + b, the
    sum of the latencies with waiting, minus the sum without waiting, is (k + 1) * g + k * a * m -
    b. If this difference is negative, the batch should wait.
    """
    if not times.known:
        return False
    slope, base = times.fit()
    return (requests + 1) * gap_s + requests * slope * more < base


def find_start(
    waiting: Sequence[WaitingRequest],
    first_at: float,
    gaps: ArrivalGaps,
    times: BatchTimes,
    most: int,
    wait_s: float,
    now: float,
) -> float:
    """Return when the batch of all waiting requests should start: `now`, or a later time if it pays
    to wait. The oldest request arrived at `first_at` and waits at most `wait_s` for further
    requests. The caller recomputes the start when another request arrives.
    """
    total = sum(each.instances for each in waiting)
    more = gaps.instances
    most = min(most, 2 * max(times.largest, 1))
    if total + more > most or not pays_to_wait(len(waiting), more, gaps.mean_s, times):
        return now
    due_at = min(each.due_at for each in waiting) - times.bound_s(ceil(total + more))
    until = min(first_at + wait_s, gaps.last_at + _GAPS * gaps.mean_s, due_at)
    return max(now, until)


_decode_table = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_array = msgspec.json.Decoder(list[msgspec.Raw]).decode
_encode = msgspec.json.encode
# also what msgspec raises at bytes that are not UTF-8, and at JSON that is nested too deeply
_NOT_THIS_FORMAT = (msgspec.DecodeError, KeyError, UnicodeDecodeError, RecursionError)
_IDS_MAX = 4096  # bytes of the field with the IDs; servers such as gunicorn refuse 8 KiB
# Fields in which joined requests may differ. The replica does not get them.
_OF_ONE = frozenset(
    (
        *(b"content-length", b"x-request-id", b"x-forwarded-for", b"user-agent"),
        *(b"accept-encoding", b"idempotency-key", b"prefer", b"date", b"traceparent"),
        *(b"tracestate", b"baggage"),
    )
)


class JoinableBody(Struct, frozen=True):
    """The instances of a request's body, and all other values of the body as bytes. Bodies can be
    joined if all values except the instances are equal.
    """

    instances: tuple[msgspec.Raw, ...]
    others: bytes


def read_body(body: bytes, name: str) -> JoinableBody | None:
    """Return the parts of a body that contains the array `name`, or None if the body lacks this
    array or requests a stream.
    """
    try:
        table = _decode_table(body)
        instances = _decode_array(table.pop(name))
    except _NOT_THIS_FORMAT:
        return None
    if not instances or bytes(table.get("stream", b"")) == b"true":
        return None
    return JoinableBody(tuple(instances), _encode(dict(sorted(table.items()))) if table else b"{}")


def join_bodies(bodies: Iterable[JoinableBody], name: str) -> bytes:
    """Return one body with the instances of all `bodies`. All values of the bodies except the
    instances must be equal.
    """
    found = list(bodies)
    table: dict[str, object] = dict(_decode_table(found[0].others))
    table[name] = [each for body in found for each in body.instances]
    return _encode(table)


def split_response(body: bytes, name: str, counts: Sequence[int]) -> list[bytes] | None:
    """Return a response for each request, or None if the response does not have one prediction for
    each instance. `counts` contains each request's number of instances.
    """
    table: dict[str, object] | None = None
    try:
        if body.lstrip()[:1] == b"[":
            rows = _decode_array(body)
        else:
            found = _decode_table(body)
            rows = _decode_array(found[name])
            table = dict(found)
    except _NOT_THIS_FORMAT:
        return None
    if len(rows) != sum(counts):
        return None
    parts, at = [], 0
    for count in counts:
        mine = rows[at : at + count]
        at += count
        parts.append(_encode(mine if table is None else {**table, name: mine}))
    return parts


class BatchPart:
    """The contribution of a request to a batch. Requests with the same `group` can be joined. After
    a batch was refused, its requests are split into two halves, and `half` identifies a request's
    half. Only requests of the same half are joined again.
    """

    __slots__ = ("body", "group", "half", "instances", "request_id")

    def __init__(self, body: JoinableBody, out_head: bytes) -> None:
        start, *lines = out_head.split(b"\r\n")[:-2]
        shared = []
        self.request_id = b""
        for line in lines:
            name = line.partition(b":")[0].lower()
            if name == b"x-request-id":
                self.request_id = line.partition(b":")[2].strip()
            if name not in _OF_ONE:
                shared.append(line)
        self.body = body
        self.instances = len(body.instances)
        self.group = (b"\r\n".join((start, *shared)), body.others)
        self.half: object | None = None

    def write(self, others: Sequence["BatchPart"], name: str) -> bytes:
        """Return the request that sends the batch of this part and `others` to the replica."""
        body = join_bodies((each.body for each in (self, *others)), name)
        ids = _join_ids(each.request_id for each in (self, *others))
        return (
            b"%b\r\nX-Request-Id: %b\r\nCavvy-Batch-Requests: %b\r\nContent-Length: %d\r\n\r\n%b"
            % (self.group[0], self.request_id, ids, len(body), body)
        )


def _join_ids(ids: Iterable[bytes]) -> bytes:
    """Return the IDs, separated by commas; omit the last IDs if the header field would be too
    long."""
    joined = b",".join(ids)
    return joined if len(joined) <= _IDS_MAX else joined[: joined.rindex(b",", 0, _IDS_MAX)]
