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
    except (msgspec.DecodeError, KeyError, UnicodeDecodeError):
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
    except (msgspec.DecodeError, KeyError, UnicodeDecodeError):
        return None
    if len(rows) != sum(counts):
        return None
    parts, at = [], 0
    for count in counts:
        mine = rows[at : at + count]
        at += count
        parts.append(_encode(mine if table is None else {**table, name: mine}))
    return parts
