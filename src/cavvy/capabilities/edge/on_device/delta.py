"""What changed between two versions of a model's file, so that a device fetches only that.

A delta is a list of records. Each has a head (`HEAD`) and then a body that zlib has packed: at most
`RECORD` bytes of the new file, XORed with as many bytes of the old file from a place on, or as they
are if the place is `ALONE`. The bytes are grouped: of items of 4 bytes, first the lowest byte of
each item, then the next one. Weights that change little change their low bytes, and the groups of
the high ones pack to almost nothing.
"""

from __future__ import annotations

import struct
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

HEAD = struct.Struct("<BQII")  # item's bytes, place in the old file, bytes, packed bytes
ITEMS = (1, 2, 4, 8)
ALONE = (1 << 64) - 1
RECORD = 1 << 20
_MOST_PACKED = RECORD + (64 << 10)  # zlib adds some bytes to what it cannot pack


def apply_delta(old: BinaryIO, delta: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield the new file of `size` bytes in pieces; any delta needs some MiB of memory
    only. Raises ValueError if the delta does not fit: the caller still compares the SHA-256."""
    made = 0
    while made < size:
        item, place, length, packed = HEAD.unpack(_read(delta, HEAD.size))
        if item not in ITEMS or not 0 < length <= min(RECORD, size - made) or packed > _MOST_PACKED:
            raise ValueError(f"the delta has a wrong record after {made} of {size} bytes")
        piece = ungroup(_unpack(_read(delta, packed), length), item)
        if place != ALONE:
            old.seek(min(place, 1 << 62))
            piece = mix(piece, _read(old, length))
        made += length
        yield piece
    if delta.read(1):
        raise ValueError("the delta goes on after the end of the file")


def mix(one: bytes, two: bytes) -> bytes:
    """Return the XOR of texts of equal length."""
    mixed = int.from_bytes(one, "little") ^ int.from_bytes(two, "little")
    return mixed.to_bytes(len(one), "little")


def group(data: bytes, item: int) -> bytes:
    """Bring the first bytes of all items to the front, then the second ones, and so on."""
    return b"".join(data[index::item] for index in range(item)) if item > 1 else data


def ungroup(data: bytes, item: int) -> bytes:
    if item == 1:
        return data
    found, at = bytearray(len(data)), 0
    for index in range(item):
        count = len(range(index, len(data), item))
        found[index::item] = data[at : at + count]
        at += count
    return bytes(found)


def _unpack(packed: bytes, length: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(packed, length + 1)
    except zlib.error as error:
        raise ValueError(f"the delta cannot be unpacked: {error}") from error
    if len(data) != length or not stream.eof or stream.unused_data:
        raise ValueError(f"a record of the delta does not unpack to its {length} bytes")
    return data


def _read(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise ValueError(f"the delta needs {count - len(data)} bytes after the end of a file")
    return data
