"""Fetches the input that a user sends to a session, and writes it to the session's process as fast
as the process reads. The input of a command is empty; its end means that the user has gone.
"""

from __future__ import annotations

import base64

from ..control_client import RetryingConnection, nothing
from ..loop import WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from ..config import ConfigFields
    from ..control_client import ControlPlaneClient

WAIT_S = 20.0
PAUSE_S = 1.0  # seconds between two questions whether a command's user is still connected


class ExecInbox:
    """One input stream, which the user or the process can close."""

    def __init__(self, link: ControlPlaneClient, exec_id: str, sink: socket.socket) -> None:
        self._loop, self._sink = link.loop, sink
        self.moved: Callable[[], None] = nothing  # is called when the user has sent something
        self._path = f"/agent/v1/execs/{exec_id}/input{link.query}"
        self._offset = 0
        self._waiting = bytearray()
        self._ended = self._closed = False
        self._channel = RetryingConnection(link, self._ask)
        sink.setblocking(False)
        self._ask()

    def close(self) -> None:
        """Stop fetching input, because the process has closed its standard input."""
        if not self._closed:
            self._closed = True
            self._channel.close()
            self._loop.unwatch(self._sink.fileno())
            self._sink.close()

    def _ask(self) -> None:
        if self._channel.idle and not self._waiting and not self._closed:
            path = f"{self._path}&offset={self._offset}&wait_s={WAIT_S:g}"
            self._channel.ask("GET", path, b"", self._got, WAIT_S + 30)

    def _got(self, fields: ConfigFields) -> None:
        if self._closed:
            return
        data = base64.b64decode(fields.read("data", "str", ""))
        if data:
            self.moved()
        self._offset += len(data)
        self._waiting += data
        self._ended = fields.read("end", "bool")
        self._pour(WRITE)

    def _pour(self, events: int) -> None:
        try:
            while self._waiting:
                del self._waiting[: self._sink.send(self._waiting[:65536])]
        except BlockingIOError:
            self._loop.watch(self._sink.fileno(), WRITE, self._pour)
            return
        except OSError:
            self.close()
            return
        self._loop.unwatch(self._sink.fileno())
        if self._ended:
            self.close()
        else:
            self._ask()


class UserPresence:
    """Asks the server whether a command's user is still connected, and calls `gone` once the user
    has disconnected. The server answers then, or after WAIT_S seconds.
    """

    def __init__(self, link: ControlPlaneClient, exec_id: str) -> None:
        self._loop = link.loop
        self.gone: Callable[[], None] = nothing
        self._path = f"/agent/v1/execs/{exec_id}/input{link.query}&offset=0&wait_s={WAIT_S:g}"
        self._channel = RetryingConnection(link, self._ask)
        # Most commands end before the first question.
        self._next = self._loop.after(PAUSE_S, self._ask)

    def close(self) -> None:
        self._loop.cancel(self._next)
        self._channel.close()

    def _ask(self) -> None:
        self._channel.ask("GET", self._path, b"", self._got, WAIT_S + 30)

    def _got(self, fields: ConfigFields) -> None:
        if fields.read("end", "bool"):
            self.close()
            self.gone()
        else:
            self._next = self._loop.after(PAUSE_S, self._ask)
