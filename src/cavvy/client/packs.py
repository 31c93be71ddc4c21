"""Encodes and decodes packs, with which clients, agents and the server exchange many small blobs in
one request.

A pack is a sequence of entries: the SHA-256 in 64 lower-case hexadecimal digits, the size in
decimal, a line feed, and the bytes. The agent has its own code to read packs, because it imports no
other modules of Cavvy.
"""

import re
from collections.abc import Iterable

PACK_BYTES = 8 * 1024 * 1024  # maximum bytes of a whole pack
PACK_BLOBS = 2048  # maximum number of blobs in a pack; one request can store this many in time
SMALL = 256 * 1024  # maximum bytes of a blob in a pack; a larger blob is sent alone

_HEAD = re.compile(rb"([0-9a-f]{64})([0-9]{1,7})\n")
_HEAD_BYTES = 64 + 7 + 1


class TornPack(ValueError):
    """Raised if the bytes are not a valid pack. The message contains the position of the error."""


def make_entry(name: str, data: bytes) -> bytes:
    """Return one blob as an entry of a pack."""
    return b"%s%d\n%s" % (name.encode(), len(data), data)


def make_pack(blobs: Iterable[tuple[str, bytes]]) -> bytes:
    return b"".join(make_entry(name, data) for name, data in blobs)


def read_pack(data: bytes) -> dict[str, bytes]:
    """Return the blobs of a pack by name, without checking their hashes. Raises TornPack."""
    found: dict[str, bytes] = {}
    at = 0
    while at < len(data):
        head = _HEAD.match(data, at, at + _HEAD_BYTES)
        if head is None:
            raise TornPack(f"the pack has no hash and size at byte {at}, after {len(found)} blobs")
        name, size = head[1].decode(), int(head[2])
        if size > SMALL:
            raise TornPack(f"blob {name} has {size} bytes; a pack holds at most {SMALL} per blob")
        if len(data) - head.end() < size:
            raise TornPack(
                f"the pack ends in the middle of blob {name}: it has {len(data) - head.end()} of "
                f"{size} bytes"
            )
        at = head.end() + size
        found[name] = data[head.end() : at]
    return found


def size_in_pack(size: int) -> int:
    """Return the maximum number of bytes that the entry of a blob with `size` bytes can have."""
    return size + _HEAD_BYTES
