"""The socket `$CAVVY_NOTICE`, over which the agent and the task exchange messages, as lines of
JSON, and the record of what the task has reported.

The agent sends these messages to the task: {"every_s": n}, {"notice": {...}}, {"advice": {...}},
{"safe": {...}}. The task sends these messages to the agent: {"saved": {...}}, {"again": {}},
{"failed": {...}}, {"logged": {...}}, {"shown": {...}}, and {"ask": {...}}, which only its sender
gets an answer to (`asks.py`). A program that can be kept for the next attempt also exchanges the
messages of `kept_program.py` with the agent.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable

from .config import BadConfig, ConfigFields
from .control_client import complain
from .ends import describe_failure
from .loop import READ, WRITE, EventLoop

TYPE_CHECKING = False
if TYPE_CHECKING:
    # what a program asks, and the function that sends it the answer
    Asked = Callable[[ConfigFields, Callable[[dict[str, object]], None]], None]
    # what a program says that can be kept for the next attempt, and its connection
    Kept = Callable[[ConfigFields, "NotificationListener"], None]


NAME = "notice.sock"
LONGEST = 100  # maximum bytes of a path; the kernel takes 107, and some programs add a suffix
BACKLOG = 64
PIECE = 65536
MOST_DRAINED = 64  # pieces that are read after the work has ended
# maximum bytes of a line: a value of a dict or queue has 1 MiB, and is written in base64
LONGEST_LINE = 2 * 1024 * 1024
LONGEST_WAIT = 4 * 1024 * 1024  # bytes queued for a slow reader before it is disconnected
REMARK = "a line that the task sent to $CAVVY_NOTICE"

# the longest time for saving a checkpoint, in seconds, that a task may report
LONGEST_SAVE_S = 86400.0
MOST_PROCESSES = 4096  # on one node; this limits the memory that reports of failures use


def _ignore(*_: object) -> None:
    """Do nothing: no program is kept."""


class NotificationSocket:
    """Sends messages to the task's programs. Keeps the newest message of each kind for programs
    that connect later.
    """

    def __init__(
        self,
        loop: EventLoop,
        home: str,
        told: Callable[[ConfigFields], None],
        asked: Asked,
        kept: Kept = _ignore,
    ) -> None:
        self._loop = loop
        self._hears = (told, asked, kept)
        self._now: dict[str, object] = {}
        self._readers: dict[int, NotificationListener] = {}
        self._link = ""
        self.path = home + "/" + NAME
        if len(os.fsencode(self.path)) > LONGEST:
            from tempfile import mkdtemp

            self._link = mkdtemp(prefix="cavvy-") + "/h"
            os.symlink(home, self._link)
            self.path = self._link + "/" + NAME
        self._socket: socket.socket | None = None
        self._open()

    def say(self, kind: str, value: object) -> bool:
        """Send a message to every connected program, and to each program that connects later.
        Return whether a program is connected.
        """
        if self._now.get(kind) != value:
            self._now[kind] = value
            for reader in list(self._readers.values()):
                reader.send({kind: value})
        return bool(self._readers)

    def move(
        self, loop: EventLoop, told: Callable[[ConfigFields], None], asked: Asked, kept: Kept
    ) -> None:
        """Serve the programs of the next attempt, in another loop. The messages so far do not
        concern it."""
        self._loop, self._hears = loop, (told, asked, kept)
        self._now.clear()
        if self._socket is not None:
            loop.watch(self._socket.fileno(), READ, self._accept)
        for reader in list(self._readers.values()):
            reader.move(loop, *self._hears)

    def drain(self) -> None:
        """Read what programs that have ended have left."""
        for _ in range(BACKLOG):
            if self._socket is None or not self._accept(0):
                break
        for reader in list(self._readers.values()):
            reader.drain()

    def close(self) -> None:
        for reader in list(self._readers.values()):
            reader.close()
        if self._socket is not None:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None
            self._unlink(self.path)
        if self._link:
            self._unlink(self._link)
            os.rmdir(os.path.dirname(self._link))
            self._link = ""

    def _open(self) -> None:
        self._unlink(self.path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self.path)
            os.chmod(self.path, 0o600)
            listener.listen(BACKLOG)
        # this file system has no sockets; the notice file and the signal still work
        except OSError as error:
            complain(f"cannot create the notice socket at {self.path}: {error}")
            listener.close()
            self.path = ""
            return
        listener.setblocking(False)
        self._socket = listener
        self._loop.watch(listener.fileno(), READ, self._accept)

    def _accept(self, events: int) -> bool:
        """Take a connection; return whether there was one."""
        assert self._socket is not None
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return False
        reader = NotificationListener(self._loop, connection, self._gone, *self._hears)
        self._readers[connection.fileno()] = reader
        for kind, value in list(self._now.items()):
            reader.send({kind: value})
        return True

    def _gone(self, number: int) -> None:
        self._readers.pop(number, None)

    @staticmethod
    def _unlink(path: str) -> None:
        try:
            os.unlink(path)
        except OSError:
            return


class NotificationListener:
    """One connected program of the task."""

    def __init__(
        self,
        loop: EventLoop,
        connection: socket.socket,
        gone: Callable[[int], None],
        told: Callable[[ConfigFields], None],
        asked: Asked,
        kept: Kept,
    ) -> None:
        self._loop = loop
        self._connection: socket.socket | None = connection
        self._told, self._asked, self._kept = told, asked, kept
        self._gone = gone
        self._number = connection.fileno()
        self._in = b""
        self._out = b""
        connection.setblocking(False)
        loop.watch(self._number, READ, self._ready)

    def move(
        self, loop: EventLoop, told: Callable[[ConfigFields], None], asked: Asked, kept: Kept
    ) -> None:
        """Report in another loop, and to the agent of the next attempt."""
        self._loop, self._told, self._asked, self._kept = loop, told, asked, kept
        self._flush()

    @property
    def closed(self) -> bool:
        return self._connection is None

    def send(self, line: dict[str, object]) -> None:
        self._out += json.dumps(line).encode() + b"\n"
        self._flush()

    def close(self) -> None:
        if self._connection is not None:
            self._loop.unwatch(self._number)
            self._connection.close()
            self._connection = None
            self._gone(self._number)

    def _flush(self) -> None:
        if self._connection is None:
            return
        try:
            while self._out:
                self._out = self._out[self._connection.send(self._out) :]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        if len(self._out) > LONGEST_WAIT:
            self.close()
        else:
            self._loop.watch(self._number, READ | WRITE if self._out else READ, self._ready)

    def drain(self) -> None:
        """Read what has arrived, up to some megabytes."""
        for _ in range(MOST_DRAINED):
            if not self._read():
                return

    def _ready(self, events: int) -> None:
        if self._out:
            self._flush()
        if events & ~WRITE:
            self._read()

    def _read(self) -> bool:
        """Read what has arrived; return whether there was anything."""
        if self._connection is None:
            return False
        try:
            data = self._connection.recv(PIECE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data or len(self._in) > LONGEST_LINE:
            self.close()
            return False
        *lines, self._in = (self._in + data).split(b"\n")
        for line in lines:
            self._hear(line)
        return True

    def _hear(self, line: bytes) -> None:
        try:
            fields = ConfigFields(json.loads(line), REMARK)
            if (ask := fields.inner("ask")) is not None:
                self._asked(ask, self.send)
            elif fields.inner("keeps") is not None or fields.inner("apart") is not None:
                self._kept(fields, self)
            else:
                self._told(fields)
        except (ValueError, RecursionError, BadConfig) as error:
            complain(f"{REMARK} cannot be parsed: {error}")


class TaskReports:
    """The task's reports so far."""

    def __init__(self) -> None:
        self.again = False  # whether the task has saved its state and asked to be restarted
        # how the task failed, keyed by the number of the reporting process on this node
        self._failures: dict[int, str] = {}
        self.cost_s: float | None = None  # seconds that saving the newest checkpoint took
        # the number of checkpoints, and the seconds of all their pauses
        self._saves, self._saves_s = 0, 0.0

    @property
    def failure(self) -> str:
        """The newest report of how the task failed, or "" if no report was sent."""
        return next(reversed(self._failures.values()), "")

    def hear(self, fields: ConfigFields) -> None:
        """Record a report of the task. Raises BadConfig."""
        self.again = self.again or fields.inner("again") is not None
        failed, saved = fields.inner("failed"), fields.inner("saved")
        started = fields.inner("started")
        if started is not None:  # a new process has replaced the process that failed
            self._failures.pop(_read_process(started), None)
        if failed is not None:
            process, failure = _read_process(failed), describe_failure(failed)
            self._failures.pop(process, None)
            self._failures[process] = failure
        if saved is not None:
            seconds = saved.read("seconds", "float")
            if not 0 <= seconds <= LONGEST_SAVE_S:
                raise BadConfig(f"`saved.seconds` is {seconds!r}, which is not a valid duration")
            self.cost_s = seconds
            self._count(seconds)

    def saw(self, seconds: float) -> None:
        """Count a checkpoint that the agent has found, and record how long the task took to write
        the checkpoint. Do nothing if the task reports its checkpoints itself.
        """
        if self.cost_s is None:
            self._count(seconds)

    def _count(self, seconds: float) -> None:
        self._saves, self._saves_s = self._saves + 1, self._saves_s + seconds

    @property
    def totals(self) -> dict[str, float]:
        """The telemetry values about the checkpoints, or {} before the first checkpoint."""
        if not self._saves:
            return {}
        return {"checkpoints": self._saves, "checkpoint_pause_s": round(self._saves_s, 3)}


def _read_process(fields: ConfigFields) -> int:
    """Return the number of the reporting process on this node. Raises BadConfig."""
    process = int(fields.read("process", "int", 0))
    if not 0 <= process < MOST_PROCESSES:
        raise BadConfig(f"`process` is {process}, which is not below {MOST_PROCESSES}")
    return process
