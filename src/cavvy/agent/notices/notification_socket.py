"""The socket `$CAVVY_NOTICE`, over which the agent and the task exchange messages, as
lines of JSON.

The agent sends these messages to the task: {"every_s": n}, {"notice": {...}}, {"advice": {...}},
{"safe": {...}}. The task sends these messages to the agent: {"saved": {...}}, {"again": {}},
{"failed": {...}}.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable

from ..config import BadConfig, ConfigFields
from ..control_client import complain
from ..loop import READ, WRITE, EventLoop

NAME = "notice.sock"
LONGEST = 100  # maximum bytes of a path; the kernel takes 107, and some programs add a suffix
BACKLOG = 64
LONGEST_LINE = 65536
LONGEST_WAIT = 1024 * 1024  # bytes queued for a slow reader before it is disconnected
REMARK = "a line that the task sent to $CAVVY_NOTICE"


class NotificationSocket:
    """Sends messages to the task's programs. Keeps the newest message of each kind for programs
    that connect later.
    """

    def __init__(self, loop: EventLoop, home: str, told: Callable[[ConfigFields], None]) -> None:
        self._loop = loop
        self._told = told
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

    def _accept(self, events: int) -> None:
        assert self._socket is not None
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return
        reader = NotificationListener(self._loop, connection, self._told, self._gone)
        self._readers[connection.fileno()] = reader
        for kind, value in list(self._now.items()):
            reader.send({kind: value})

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
        told: Callable[[ConfigFields], None],
        gone: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._connection: socket.socket | None = connection
        self._told = told
        self._gone = gone
        self._number = connection.fileno()
        self._in = b""
        self._out = b""
        connection.setblocking(False)
        loop.watch(self._number, READ, self._ready)

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

    def _ready(self, events: int) -> None:
        if self._out:
            self._flush()
        if self._connection is None or not events & ~WRITE:
            return
        try:
            data = self._connection.recv(LONGEST_LINE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or len(self._in) > LONGEST_LINE:
            self.close()
            return
        *lines, self._in = (self._in + data).split(b"\n")
        for line in lines:
            self._hear(line)

    def _hear(self, line: bytes) -> None:
        try:
            self._told(ConfigFields(json.loads(line), REMARK))
        except (ValueError, RecursionError, BadConfig) as error:
            complain(f"{REMARK} cannot be parsed: {error}")
