"""The frames of a tunnel to a node: channel, kind and length (as `HEAD`), then the payload. Both
ends use this module. An end sends at most WINDOW bytes of data on a channel that the other end has
not confirmed.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HEAD = struct.Struct(">IBI")
OPEN, OPENED, FAILED, DATA, ERR, EOF, EXIT, CLOSE, CREDIT, CONTROL, CALL, REPLY, ACCEPTED = range(
    1, 14
)
WINDOW = 1024 * 1024
CHUNK = 64 * 1024  # maximum data bytes of one frame


def encode_frame(number: int, kind: int, payload: bytes = b"") -> bytes:
    return HEAD.pack(number, kind, len(payload)) + payload


def read_frames(
    buffer: bytearray, limit: Callable[[int, int], int] | None = None
) -> Iterator[tuple[int, int, bytes]]:
    """Remove each complete frame from the buffer. `limit` is the largest payload for a channel and
    kind. Raises ValueError for a larger one.
    """
    while len(buffer) >= HEAD.size:
        number, kind, size = HEAD.unpack_from(buffer)
        if limit is not None and size > limit(number, kind):
            raise ValueError("a frame too large")
        end = HEAD.size + size
        if len(buffer) < end:
            return
        payload = bytes(buffer[HEAD.size : end])
        del buffer[:end]
        yield number, kind, payload
