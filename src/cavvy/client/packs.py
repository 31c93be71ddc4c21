"""Packs: many small blobs in one body; clients, agents and the server send them to each other.

A pack is a row of entries: 64 digits of the SHA-256 in lower-case hexadecimal, the size in decimal,
a line's end, and the bytes. The agent, which imports nothing of ours, reads them by itself.
"""

import re
from collections.abc import Iterable

PACK_BYTES = 8 * 1024 * 1024  # of a whole pack
PACK_BLOBS = 2048  # in a pack; more would keep the disk busy for longer than a request should take
SMALL = (
    256 * 1024
)  # bytes of the largest blob in a pack; a larger one is worth a request of its own

_HEAD = re.compile(rb"([0-9a-f]{64})([0-9]{1,7})\n")
_HEAD_BYTES = 64 + 7 + 1


class TornPack(ValueError):
    """The bytes are no pack; the message says where they stop to be one."""


def make_entry(name: str, data: bytes) -> bytes:
    """One blob as a pack holds it."""
    return b"%s%d\n%s" % (name.encode(), len(data), data)


def make_pack(blobs: Iterable[tuple[str, bytes]]) -> bytes:
    return b"".join(make_entry(name, data) for name, data in blobs)


def read_pack(data: bytes) -> dict[str, bytes]:
    """The blobs by name, their hashes not checked. Raises TornPack."""
    found: dict[str, bytes] = {}
    at = 0
    while at < len(data):
        head = _HEAD.match(data, at, at + _HEAD_BYTES)
        if head is None:
            raise TornPack(f"the pack has no hash and size at byte {at}, after {len(found)} blobs")
        name, size = head[1].decode(), int(head[2])
        if size > SMALL:
            raise TornPack(f"blob {name} has {size} bytes; one of more than {SMALL} is sent alone")
        if len(data) - head.end() < size:
            raise TornPack(
                f"the pack ends in the middle of blob {name}: {len(data) - head.end()} of {size} "
                "bytes are here"
            )
        at = head.end() + size
        found[name] = data[head.end() : at]
    return found


def size_in_pack(size: int) -> int:
    """An upper bound of what a blob of this size takes of a pack."""
    return size + _HEAD_BYTES
