"""The frames that every link exchanges. A frame is a JSON object on one line, followed by `size`
bytes.

The control plane, the host supervisor and the login-node helper use this framing. A frame whose
object has no `size` has no bytes.
"""

from __future__ import annotations

import json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Fields = dict[str, Any]

LIMIT = 80 * 1024 * 1024  # maximum bytes of one frame; more than the largest message of an agent


def encode_frame(head: Fields, data: bytes = b"") -> bytes:
    """Encode one frame; `data` is included unchanged."""
    if data:
        head = dict(head, size=len(data))
    return json.dumps(head, separators=(",", ":")).encode() + b"\n" + data


class FrameReader:
    """Splits a stream into frames. The stream's bytes may arrive in pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._head: Fields | None = None  # the header of a frame whose bytes have not all arrived

    def feed(self, data: bytes) -> list[tuple[Fields, bytes]]:
        """Return the frames that `data` completes. Raises ValueError for an invalid frame."""
        self._buffer += data
        frames = []
        while True:
            if self._head is None:
                end = self._buffer.find(b"\n")
                if end < 0:
                    break
                self._head = json.loads(self._buffer[:end].decode())
                if not isinstance(self._head, dict):
                    raise ValueError("a frame must begin with a JSON object")
                del self._buffer[: end + 1]
            size = self._head.get("size", 0)
            if not isinstance(size, int) or not 0 <= size <= LIMIT:
                raise ValueError(f"the frame has an invalid size: {size!r}")
            if len(self._buffer) < size:
                break
            self._head.pop("size", None)
            frames.append((self._head, bytes(self._buffer[:size])))
            del self._buffer[:size]
            self._head = None
        if len(self._buffer) > LIMIT:
            raise ValueError(f"the frame is longer than {LIMIT} bytes")
        return frames
