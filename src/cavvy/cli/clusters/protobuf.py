"""Encodes and decodes protobuf messages without generated code. A message is a list of its fields:
https://protobuf.dev/programming-guides/encoding/
"""

import struct
from collections.abc import Iterable, Iterator, Mapping

# A whole number or boolean, a floating-point number, a string, or a message.
FieldValue = int | float | str | bytes
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WORD = 1 << 64


def encode(*fields: tuple[int, FieldValue]) -> bytes:
    """Return a message with these fields. As in proto3, fields that have their default are left
    out, except messages."""
    return b"".join(
        _encode_field(number, value) for number, value in fields if value or value == b""
    )


def encode_map(number: int, entries: Mapping[str, FieldValue]) -> Iterator[tuple[int, bytes]]:
    """Return the fields of a map with string keys."""
    return ((number, encode((1, key), (2, value))) for key, value in entries.items())


def decode(data: bytes) -> dict[int, list[int | bytes]]:
    """Return the values of each field, by its number. Numbers of a fixed size are returned as their
    bytes. Raises ValueError."""
    found: dict[int, list[int | bytes]] = {}
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        match tag & 7:
            case 0:
                value, at = _read_varint(data, at)
                found.setdefault(tag >> 3, []).append(value)
                continue
            case 2:
                size, at = _read_varint(data, at)
            case 1 | 5 as kind:
                size = 8 if kind == _FIXED64 else 4
            case kind:
                raise ValueError(f"unknown wire type {kind}")
        if at + size > len(data):
            raise ValueError("the message is cut off")
        found.setdefault(tag >> 3, []).append(data[at : at + size])
        at += size
    return found


def read_int(message: Mapping[int, list[int | bytes]], number: int) -> int:
    """Return a signed number, or 0 if the message has none."""
    value = next((each for each in message.get(number, [])[::-1] if isinstance(each, int)), 0)
    return value - _WORD if value >= _WORD >> 1 else value


def read_text(message: Mapping[int, list[int | bytes]], number: int) -> str:
    """Return a string, or "" if the message has none. Raises ValueError."""
    return next(iter(read_all(message, number)[::-1]), b"").decode()


def read_all(message: Mapping[int, list[int | bytes]], number: int) -> list[bytes]:
    """Return the messages or strings of a repeated field."""
    return [each for each in message.get(number, []) if isinstance(each, bytes)]


def read_map(message: Mapping[int, list[int | bytes]], number: int) -> dict[str, str]:
    """Return a map of strings. Raises ValueError."""
    entries: Iterable[dict[int, list[int | bytes]]] = map(decode, read_all(message, number))
    return {read_text(each, 1): read_text(each, 2) for each in entries}


def _encode_field(number: int, value: FieldValue) -> bytes:
    match value:
        case int():  # also a boolean
            return _varint(number << 3 | _VARINT) + _varint(value % _WORD)
        case float():
            return _varint(number << 3 | _FIXED64) + struct.pack("<d", value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | _BYTES) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(10):
        if at >= len(data):
            raise ValueError("the message is cut off")
        value |= (data[at] & 0x7F) << (7 * place)
        at += 1
        if data[at - 1] < 0x80:
            return value % _WORD, at
    raise ValueError("a number is too long")
