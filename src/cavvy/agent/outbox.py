"""Queues messages to the control plane. The messages are numbered, stored on disk until they are
acknowledged, and sent again after a failure.
"""

from __future__ import annotations

import json
import math
import os
import time

from .disk import open_own, open_private

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VOLATILE = (
    "progress",
    "telemetry",
)  # while the server does not answer, only the newest message of each of these kinds is kept
# messages that only tell figures, which may wait for others as long as the server permits
FIGURES = (*VOLATILE, "minute", "points")
SLACK_S = 0.5  # by which figures wait less, as the next ones may come just before the pause ends
MOST_HELD = 24  # figures of this many messages wait; the server takes up to 32 at once
VOLATILE_S = 0.5  # minimum seconds between two messages of these kinds when nothing else is sent
REWRITE_BYTES = 256 * 1024
BATCH_CHARACTERS = 4 << 20  # after which no message is added to a batch: servers take 16 MiB
MOST_WAITING = 16 << 20  # characters of messages that wait, after which pictures are dropped
LAST_SECOND = 253402300799.0  # the end of 9999, the last year that can be formatted
# The clock that counts on while the machine sleeps: on Linux, BOOTTIME; on macOS, MONOTONIC.
_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def since_boot() -> float:
    """Return seconds that grow steadily, also while the machine sleeps."""
    return time.clock_gettime(_SINCE_BOOT)


_BEGAN_AT = time.time() - since_boot()


class MessageOutbox:
    """Queues messages in a file with one message per line. Messages are numbered from 1.
    Acknowledged messages are removed from the file, so the file may begin with a later number.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._unsent: list[tuple[int, str]] = []  # unacknowledged
        self._taken = 0  # the server will store the messages up to this number soon
        self._sent = 0  # number of the last message that was sent
        self._urgent = 0  # number of the last message that waits for no other
        # when the server said that it has all that was sent; -inf: what waits is sent at once
        self._told_at = -math.inf
        self.pause_s = 0.0  # how long figures wait for others, as the server last said
        self._latest: dict[str, dict[str, Any]] = {}
        self._last = 0
        self._settled_at = 0.0
        self._unwritten = b""
        whole = _lines(path)
        for line in whole:
            message = json.loads(line)
            self._last = message["seq"]
            if (
                message["kind"] != "sent"
            ):  # a `sent` line only records the number of the last acknowledged message
                self._unsent.append((message["seq"], line))
        self._urgent = self._last
        self._file = open_private(path, os.O_APPEND)
        os.ftruncate(
            self._file, sum(len(line) + 1 for line in whole)
        )  # remove an incomplete last line before appending

    @property
    def empty(self) -> bool:
        return not self._unsent and not self._latest

    @property
    def holds(self) -> bool:
        """Whether all that the server does not have yet are figures that may wait."""
        return (
            time.monotonic() - self._told_at < self.pause_s - SLACK_S
            and self._urgent <= self._taken
            and self._count_untaken() < MOST_HELD
        )

    @property
    def stored(self) -> bool:
        """Whether the disk holds all undelivered messages."""
        return not self._unwritten and not self._latest

    @property
    def keeps(self) -> bool:
        """Whether more messages fit that the server has taken and not stored. If not, the server
        must store all now, so that the file can begin anew.
        """
        return os.fstat(self._file).st_size <= REWRITE_BYTES

    def has(self, kind: str) -> bool:
        """Return whether a message of this kind is unacknowledged."""
        return any(json.loads(line)["kind"] == kind for _, line in self._unsent)

    def put(self, kind: str, **fields: Any) -> None:
        """Queue a message. If the disk is full, the message stays in
        memory only."""
        if kind in VOLATILE:
            values = {**self._latest.get(kind, {}).get("values", {}), **fields["values"]}
            self._latest[kind] = dict(fields, values=values, at=now_text())
        elif not fields.get("examples") or self._count_waiting() < MOST_WAITING:
            self.settle()
            self._append(kind, dict(fields, at=now_text()))

    def settle(self) -> None:
        """Number the newest volatile messages and queue them."""
        latest, self._latest = self._latest, {}
        self._settled_at = time.monotonic()
        for kind, fields in latest.items():
            self._append(kind, fields)

    def batch(self, limit: int = 200) -> bytes:
        """Return the next messages to send as a JSON list, or b"" if there are none, or if all of
        them may wait.
        """
        if self.holds:
            return b""
        last = self._unsent[-1][0] if self._unsent else 0
        # no more are added to messages that are sent once more, or that the server cannot take
        grows = last <= self._taken or (last > self._sent and self._count_untaken() <= MOST_HELD)
        if grows and self._latest and time.monotonic() - self._settled_at > VOLATILE_S:
            self.settle()
        lines: list[str] = []
        size = 0
        for seq, line in self._unsent:
            if seq <= self._taken:
                continue
            if len(lines) == limit:
                break
            lines.append(line)
            self._sent = seq
            size += len(line)
            if size > BATCH_CHARACTERS:
                break
        return ("[" + ",".join(lines) + "]").encode() if lines else b""

    def _count_untaken(self) -> int:
        return sum(number > self._taken for number, _ in self._unsent)

    def _count_waiting(self) -> int:
        return sum(len(line) for _, line in self._unsent)

    def finish(self, exit: dict[str, object]) -> list[str]:
        """Return a list of all undelivered messages, each as JSON. If none of these messages is an
        `exited` message, the list also contains a new `exited` message with the fields of `exit`.
        The new message is not stored in the outbox.
        """
        self.settle()
        lines = [line for _, line in self._unsent]
        if not self.has("exited"):
            fields = {"seq": self._last + 1, "kind": "exited", "at": now_text()}
            lines.append(json.dumps(dict(fields, **exit)))
        return lines

    def acknowledge(self, seq: int, taken: int = 0) -> None:
        """Remove all messages up to number `seq`, which the server has stored. Those up to number
        `taken` are not sent again, unless a later answer of the server says that it has them no
        more, such as after a crash.
        """
        self._taken = max(seq, taken)
        # what the server has lost is sent again at once
        self._told_at = time.monotonic() if self._taken >= self._sent else -math.inf
        self._unsent = [(number, line) for number, line in self._unsent if number > seq]
        if not self._unsent and os.fstat(self._file).st_size > REWRITE_BYTES:
            os.ftruncate(self._file, 0)
            self._write(json.dumps({"seq": self._last, "kind": "sent"}))

    def _append(self, kind: str, fields: dict[str, object]) -> None:
        self._last += 1
        if kind not in FIGURES:
            self._urgent = self._last
        line = json.dumps(dict({"seq": self._last, "kind": kind}, **fields))
        self._unsent.append((self._last, line))
        self._write(line)

    def _write(self, line: str) -> None:
        self._unwritten += (line + "\n").encode()
        try:
            self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]
        except OSError:
            return  # The disk is full; the next write also adds the missing lines.


def now_text() -> str:
    """Return the time of this node's clock when this program began, plus the time since then, in
    the format of RFC 3339. So a clock that is set meanwhile does not change lengths of time.
    """
    return time_text(_BEGAN_AT + since_boot())


def file_time_text(seconds: float) -> str:
    """Return the time of a file, in seconds since the epoch by the system's clock, as a time of the
    clock of `now_text`, which differs if the system's clock was set since this program began.
    """
    return time_text(seconds + round(_BEGAN_AT + since_boot() - time.time(), 3))


def time_text(seconds: float) -> str:
    """Format seconds since the epoch as RFC 3339 with milliseconds, in UTC. A time that cannot be
    formatted, such as a wrong file time, is replaced by the nearest time that can be formatted.
    """
    seconds = max(0.0, min(seconds, LAST_SECOND))
    return (
        time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
        + f".{int(seconds % 1 * 1000):03d}Z"
    )


def _lines(path: str) -> list[str]:
    """Return the complete lines of the outbox file. An incomplete last line is omitted, because it
    was never sent.
    """
    try:
        with open(path, encoding="utf-8", opener=open_own) as file:
            return [line[:-1] for line in file if line.endswith("\n")]
    except FileNotFoundError:
        return []
