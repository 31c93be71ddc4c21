"""Reads messages of protobuf by the numbers of their fields, without their definitions."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_VARINT, _64_BITS, _BYTES, _32_BITS = 0, 1, 2, 5  # kinds of fields on the wire
_SIZES = {_64_BITS: 8, _32_BITS: 4}


def read_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field of a message: whole numbers, and the bytes of
    all others. Raises ValueError."""
    at, end = 0, len(data)
    while at < end:
        key = data[at]
        at += 1
        if key > 127:
            key, at = read_varint(data, at - 1)
        kind = key & 7
        if kind == _VARINT:
            value, at = read_varint(data, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            if at < end and data[at] < 128:
                size, at = data[at], at + 1
            else:
                size, at = read_varint(data, at)
        else:
            size = _SIZES.get(kind, -1)
            if size < 0:
                raise ValueError(f"a field of the unknown kind {kind}")
        stop = at + size
        if stop > end:
            raise ValueError("a field that has no end")
        yield key >> 3, data[at:stop]
        at = stop


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number, and the position behind it. Raises ValueError."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("a number that has no end")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
