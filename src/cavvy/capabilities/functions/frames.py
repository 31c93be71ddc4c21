"""The frames that callers, the broker and workers exchange: a head of JSON and a body of bytes.

This file also runs on nodes, so it imports only the standard library.
"""

import json
import struct
from contextvars import ContextVar
from typing import Any

Head = dict[str, Any]

# names the file with the address of the broker, for functions that call functions
ADDRESS_VARIABLE = "CAVVY_FUNCTIONS"
# bytes of a body; longer values are sent in pieces and lie in files of the node meanwhile
MOST_BYTES = 128 << 10
PIECE = 128 << 10
_LENGTHS = struct.Struct(">II")
_MOST_HEAD = 1 << 20


# the call that runs here, while a function runs
current_call: ContextVar[Head | None] = ContextVar("current_call", default=None)


class WrongFrame(Exception):
    """Raised if the other end sends something else than frames."""


def pack(head: Head, body: bytes = b"") -> bytes:
    """Return a frame as bytes."""
    text = json.dumps(head, separators=(",", ":")).encode()
    return _LENGTHS.pack(len(text), len(body)) + text + body


def clean(text: object) -> str:
    """Return a text as UTF-8 can write it: names of files that are no UTF-8 have parts, in texts of
    errors too, that most programs refuse.
    """
    return str(text).encode("utf-8", "replace").decode()


def prove(key: str, role: str, nonces: str) -> str:
    """Return what only who has the key can say in answer to these nonces. The `role` keeps one
    side's proof from being that of the other.
    """
    from hmac import digest

    return digest(key.encode(), f"{role}:{nonces}".encode(), "sha256").hex()


class CallFrames:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def feed(self, data: bytes) -> list[tuple[Head, bytes]]:
        """Add received bytes, and return the frames that are complete. Raises WrongFrame."""
        kept, found, at = self._kept, [], 0
        kept += data
        while len(kept) - at >= _LENGTHS.size:
            head_length, body_length = _LENGTHS.unpack_from(kept, at)
            if head_length > _MOST_HEAD or body_length > MOST_BYTES + _MOST_HEAD:
                raise WrongFrame(f"a frame of {head_length} and {body_length} bytes")
            begin = at + _LENGTHS.size
            middle, end = begin + head_length, begin + head_length + body_length
            if len(kept) < end:
                break
            try:
                head = json.loads(kept[begin:middle])
            except (ValueError, RecursionError) as error:
                raise WrongFrame(f"a head that is no JSON: {error}") from None
            if not isinstance(head, dict):
                raise WrongFrame("a head that is no table")
            found.append((head, bytes(kept[middle:end])))
            at = end
        del kept[:at]
        return found
