"""Encodes and decodes the frames of a tunnel to a node. A frame is a header (`HEAD`: channel, kind
and length) and a payload. The server and the node use this module for their ends of a tunnel. On
each channel, at most WINDOW bytes of data may be sent before the receiver confirms them.
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
    """Yield each complete frame and remove it from the buffer. `limit(channel, kind)` returns the
    largest allowed payload; a larger payload raises ValueError.
    """
    while len(buffer) >= HEAD.size:
        number, kind, size = HEAD.unpack_from(buffer)
        if limit is not None and size > limit(number, kind):
            raise ValueError("the frame is too large")
        end = HEAD.size + size
        if len(buffer) < end:
            return
        payload = bytes(buffer[HEAD.size : end])
        del buffer[:end]
        yield number, kind, payload
