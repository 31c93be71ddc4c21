"""Stores the task's output on disk until the control plane has received it, without blocking the
task, and removes the values of secrets from it.

`home/log/` contains the undelivered output in files, called segments. A segment's name is the
position of its first byte in the whole output. If all segments together exceed the limit, the
oldest segments are dropped. The start of the output, up to a tenth of the limit, is kept.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial

from .disk import open_entry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .documents import WorkConfig

CHUNK = 256 * 1024  # maximum bytes sent in one request
HELD = 4 * 1024 * 1024  # maximum bytes kept in memory while the disk is full


class LogSpool:
    """A queue of bytes: `write` appends bytes, `chunk` reads the first bytes, and `acknowledge`
    removes them.
    """

    def __init__(self, folder: str, limit_mib: float) -> None:
        self._folder = folder
        self.limit(limit_mib)
        self._segments: list[list[int]] = []  # [position, size] of each segment, oldest first
        self._held: dict[int, bytearray] = {}  # segments held in memory, by position
        self._file = -1
        self.size = 0  # length of the whole output so far, including dropped bytes
        self._acked = 0
        self._load()

    def limit(self, limit_mib: float) -> None:
        """Set the size limit, which is known only after the claim."""
        limit = int(limit_mib * 1024 * 1024)
        self._head = limit // 10
        self._limit = limit
        self._segment = max(64 * 1024, min(4 * 1024 * 1024, limit // 20))

    @property
    def backlog(self) -> int:
        """The number of bytes that are not delivered yet."""
        return self.size - self._acked

    @property
    def pending(self) -> bool:
        return self._acked < self.size

    def write(self, data: bytes) -> None:
        """Append the next bytes of the output. If the disk is full, up to HELD bytes are kept in
        memory, and further bytes are dropped.
        """
        try:
            if self._file < 0 or not self._segments or self._segments[-1][1] >= self._segment:
                self._begin()
            written = os.write(self._file, data)
        except OSError:
            self._end()
            written = 0
        if written:
            self._segments[-1][1] += written
        self.size += written
        if written < len(data):
            self._end()  # the data that did not fit on the disk begins a new segment
            self._hold(data[written:])
        self._trim()

    def chunk(self) -> tuple[int, int, bytes]:
        """Return the next bytes to send: their position in the output, the number of bytes lost
        just before them, and the bytes themselves.
        """
        while self._segments:
            position, size = self._segments[0]
            start = max(position, self._acked)
            if start < position + size:
                return start, start - self._acked, self._read(position, start - position)
            self._drop(0)
        return self.size, self.size - self._acked, b""

    def pieces(self) -> Iterator[tuple[int, int, int, Callable[[int, int], bytes]]]:
        """Yield the undelivered output in pieces. Each piece consists of its position, the number
        of bytes lost just before it, its size, and a function that reads the piece's bytes. Nothing
        is deleted.
        """
        end = self._acked
        for position, size in self._segments:
            start, lost = max(position, end), max(0, position - end)
            end = max(end, position + size)
            if start < end:
                yield start, lost, end - start, partial(self._read_at, position, start - position)
        if end < self.size:
            yield self.size, self.size - end, 0, lambda offset, length: b""

    def _read_at(self, position: int, skip: int, offset: int, length: int) -> bytes:
        return self._read(position, skip + offset, length)

    def acknowledge(self, wanted: int) -> None:
        """Delete the output before the position `wanted`, which is the position of the first byte
        that the server still needs. A later call may pass a lower position, but no byte from this
        position on may have been deleted.
        """
        self._acked = min(wanted, self.size)
        while self._segments and sum(self._segments[0]) <= self._acked:
            if (
                len(self._segments) == 1
                and self._file >= 0
                and self._segments[0][1] < self._segment
            ):
                break  # the last segment is still being written
            self._drop(0)

    @property
    def stored(self) -> bool:
        """Whether the disk holds all undelivered output."""
        return not self._held

    def close(self) -> None:
        self._end()

    def _begin(self) -> None:
        self._end()
        os.makedirs(self._folder, exist_ok=True)
        self._file = open_entry(
            self._folder, _name(self.size), os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        self._segments.append([self.size, 0])

    def _end(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _trim(self) -> None:
        """Drop the oldest segments until the total size is within the limit. The first bytes of the
        output, up to a tenth of the limit, are kept.
        """
        while sum(size for _, size in self._segments) > self._limit:
            for index, (position, _) in enumerate(self._segments[:-1]):
                if position >= self._head:
                    self._drop(index)
                    break
            else:
                return

    def _hold(self, data: bytes) -> None:
        if self._segments and not self._segments[-1][1]:
            # the segment's file was created but could not be written
            self._drop(len(self._segments) - 1)
        kept = data[: max(0, HELD - sum(map(len, self._held.values())))]
        last = self._segments[-1] if self._segments else [-1, 0]
        if kept and last[0] in self._held and sum(last) == self.size:
            self._held[last[0]] += kept
            last[1] += len(kept)
        elif kept:
            self._held[self.size] = bytearray(kept)
            self._segments.append([self.size, len(kept)])
        self.size += len(data)

    def _drop(self, index: int) -> None:
        position, _ = self._segments.pop(index)
        if not self._segments:
            self._end()
        if self._held.pop(position, None) is None:
            os.unlink(f"{self._folder}/{_name(position)}")

    def _read(self, position: int, skip: int, length: int = CHUNK) -> bytes:
        if position in self._held:
            return bytes(self._held[position][skip : skip + length])
        with open(open_entry(self._folder, _name(position), os.O_RDONLY), "rb") as file:
            file.seek(skip)
            return file.read(length)

    def _load(self) -> None:
        """Load the undelivered output that an earlier agent has stored. The server's later
        answers show how much of the output the server already has.
        """
        try:
            names = sorted(name for name in os.listdir(self._folder) if name.isdigit())
        except FileNotFoundError:
            return
        for name in names:
            self._segments.append([int(name), os.lstat(os.path.join(self._folder, name)).st_size])
        if self._segments:
            self._acked = self._segments[0][0]
            self.size = sum(self._segments[-1])


def _name(position: int) -> str:
    return f"{position:020d}"


# minimum bytes of a value that is hidden; hiding shorter values would make logs unreadable, and the
# gaps would reveal the values
SHORTEST = 4
SHORTEST_LINE = 8  # minimum bytes of a single line of a secret that is hidden on its own
MASK = b"***"


def make_redactor(work: WorkConfig) -> Redactor:
    """Return the redactor for this work's secrets."""
    login = (work.image_login or "").partition(":")[2]
    keys = {value for each in work.inputs for value in each.keys.values()}
    return Redactor([*work.secrets.values(), *([login] if login else []), *keys])


class Redactor:
    """Removes secrets from a stream. `feed` returns the bytes that are safe to show so far; `flush`
    returns the remaining bytes at the end of the stream.
    """

    def __init__(self, secrets: list[str]) -> None:
        values = set()
        for secret in secrets:
            values.add(secret.strip().encode())
            values.update(
                line.strip().encode()
                for line in secret.splitlines()
                if len(line.strip()) >= SHORTEST_LINE
            )
        self._values = sorted(
            (value for value in values if len(value) >= SHORTEST), key=len, reverse=True
        )
        self._pattern = (
            re.compile(b"|".join(re.escape(value) for value in self._values))
            if self._values
            else None
        )
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return the data, with each complete secret replaced by a mask. The last bytes are held
        until the next call if they may be the beginning of a secret.
        """
        if self._pattern is None:
            return data
        data = self._held + data
        parts, at, hold = [], 0, self._hold_from(data, 0)
        for match in self._pattern.finditer(data):
            if match.start() < at:
                continue
            if match.start() >= hold:  # a longer secret may begin at this position
                break
            parts += [data[at : match.start()], MASK]
            at = match.end()
            if at > hold:
                hold = self._hold_from(data, at)
        self._held = data[hold:]
        return b"".join(parts) + data[at:hold]

    def flush(self) -> bytes:
        """Return the bytes that `feed` has held. The caller calls this method at the end of the
        stream."""
        held, self._held = self._held, b""
        return self._pattern.sub(MASK, held) if self._pattern else held

    def text(self, text: str) -> str:
        """Redact the secrets in a text such as a reason or an event, and repair the text's
        Unicode."""
        data = text.encode("utf-8", "replace")
        return (self._pattern.sub(MASK, data) if self._pattern else data).decode("utf-8", "replace")

    def _hold_from(self, data: bytes, start: int) -> int:
        """Return the first position at or after `start` at which an incomplete secret may begin."""
        longest = 0
        for value in self._values:
            for size in range(min(len(value) - 1, len(data) - start), longest, -1):
                if data.endswith(value[:size]):
                    longest = size
                    break
        return len(data) - longest
