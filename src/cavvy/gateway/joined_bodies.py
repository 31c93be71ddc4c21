"""Joins the JSON bodies of requests into one body, and divides the response among the requests.

The format is defined by the prediction API of TensorFlow Serving, which is version 1 of KServe's
protocol. A request is `{"instances": [...], ...}`, and its response is `{"predictions": [...],
...}` with one prediction for each instance. The names of the two arrays can be configured, and a
response may also consist of the array of predictions alone. Numbers and texts are copied byte by
byte.
"""

from collections.abc import Iterable, Sequence

import msgspec

from cavvy.domain.values import Struct

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
