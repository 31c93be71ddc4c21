"""Finds the ends of the bodies of HTTP/1.1 messages.

`feed` takes bytes as they arrive and returns the bytes that belong to the body; the bytes after the
body are in `rest`. Chunked bodies are decoded strictly and encoded again, so that no unusual chunk
is passed on. Only a complete small chunk in the form that `as_chunk` writes may be passed on
unchanged.
"""

import re

import msgspec

from cavvy.capabilities.serving.gateway.heads import NO_LENGTH, UNTIL_CLOSE, HeadError

# what msgspec raises at a body that is not JSON or not UTF-8, or is nested too deeply
NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# The size has at most eight digits; chunk extensions are dropped.
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})(?:;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_LINE_MAX = 256
_TRAILERS = re.compile(
    rb"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*\r\n)*\r\n",
)
_TRAILERS_MAX = 8192
LAST_CHUNK = b"0\r\n\r\n"
# the sizes of small chunks, as `as_chunk` writes them -> the number of bytes after the size's line
_AFTER_SIZE = {b"%x" % size: size + 2 for size in range(1, 2048)}


class LengthBody:
    """A body of a known length."""

    __slots__ = ("done", "left", "rest")

    def __init__(self, length: int) -> None:
        self.left = length
        self.done = length == 0
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        size = len(data)
        if size < self.left:
            self.left -= size
            return data
        self.done = True
        if size > self.left:
            self.rest = data[self.left :]
            data = data[: self.left]
        self.left = 0
        return data


class OpenBody:
    """A body that ends when its connection ends."""

    __slots__ = ("done", "rest")

    def __init__(self) -> None:
        self.done = False
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        return data


class ChunkedBody:
    """A chunked body. `feed` raises HeadError at the first invalid byte."""

    __slots__ = ("_buffer", "_left", "_trailers", "done", "rest")

    def __init__(self) -> None:
        self.done = False
        self.rest = b""
        self._buffer = b""
        self._left = 0  # bytes left of the current chunk, including its CRLF
        self._trailers = False

    def is_whole_chunk(self, data: bytes) -> bool:
        """Return whether the next bytes are one chunk that may be passed on unchanged, without
        `feed`. It takes less time to pass a chunk on than to decode it with `feed`. In a stream of
        events, most reads return exactly one chunk.
        """
        size, _, rest = data.partition(b"\r\n")
        return (
            _AFTER_SIZE.get(size) == len(rest)
            and rest.endswith(b"\r\n")
            and not (self._left or self._buffer or self._trailers)
        )

    def feed(self, data: bytes) -> bytes:
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        elif not (self._left or self._trailers):  # one whole chunk, which has an extension
            match = _SIZE.match(data)
            if match is not None:
                start = match.end()
                end = len(data) - 2
                if start < end == start + int(match[1], 16) and data.endswith(b"\r\n"):
                    return data[start:end]
        pieces: list[bytes] = []
        at = 0
        while at < len(data) and not self.done:
            if self._left:
                at = self._take(data, at, pieces)
            elif self._trailers:
                at = self._read_trailers(data, at)
            else:
                at = self._read_size(data, at)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _take(self, data: bytes, at: int, pieces: list[bytes]) -> int:
        size = len(data) - at
        if size < self._left:
            if self._left - size < 2:  # the CR of the chunk's end has arrived, its LF has not
                size = self._left - 2
                self._buffer = data[at + size :]
            if size:
                pieces.append(data[at : at + size])
            self._left -= size
            return len(data)
        end = at + self._left
        if data[end - 2 : end] != b"\r\n":
            raise HeadError(400, "a chunk does not have the stated size")
        if self._left > 2:
            pieces.append(data[at : end - 2])
        self._left = 0
        return end

    def _read_size(self, data: bytes, at: int) -> int:
        match = _SIZE.match(data, at)
        if match is None:
            if b"\n" in data[at:] or len(data) - at > _LINE_MAX:
                raise HeadError(400, "the size of a chunk is not valid")
            self._buffer = data[at:]
            return len(data)
        size = int(match[1], 16)
        if size:
            self._left = size + 2
        else:
            self._trailers = True
        return match.end()

    def _read_trailers(self, data: bytes, at: int) -> int:
        match = _TRAILERS.match(data, at)
        if match is None:
            if b"\r\n\r\n" in data[at:] or len(data) - at > _TRAILERS_MAX:
                raise HeadError(400, "the trailers of a chunked body are not valid")
            self._buffer = data[at:]
            return len(data)
        self.done = True
        self.rest = data[match.end() :]
        return len(data)


Body = LengthBody | OpenBody | ChunkedBody


def make_body(length: int) -> Body:
    """Return the body that a head announces."""
    if length == NO_LENGTH:
        return ChunkedBody()
    if length == UNTIL_CLOSE:
        return OpenBody()
    return LengthBody(length)


def as_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
