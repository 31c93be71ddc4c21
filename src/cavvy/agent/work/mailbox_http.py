"""http.client through a mailbox, for processes of the agent that may block."""

from __future__ import annotations

import http.client
import io
import time

from ..mailbox import FIRST_PAUSE_S, LAST_PAUSE_S, AgentMailbox

PATIENCE_S = 60.0


class BlockingMailboxConnection(http.client.HTTPConnection):
    """One request after the other, each waiting for its answer."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = _Line(AgentMailbox(self._path))  # as much of a socket as http.client uses


class _Line:
    """Collects what is sent; reading posts it and waits for the answer."""

    def __init__(self, mailbox: AgentMailbox) -> None:
        self._mailbox = mailbox
        self._request = b""

    def sendall(self, data: bytes) -> None:
        self._request += data

    def makefile(self, mode: str) -> io.BytesIO:
        request, self._request = self._request, b""
        number = self._mailbox.post(request)
        due, pause = time.monotonic() + PATIENCE_S, FIRST_PAUSE_S
        while True:
            answer = self._mailbox.take(number)
            if answer is not None:
                return io.BytesIO(answer)
            if time.monotonic() >= due:
                self._mailbox.withdraw(number)
                raise TimeoutError("no answer came by mail")
            time.sleep(pause)
            pause = min(LAST_PAUSE_S, pause * 1.2)

    def close(self) -> None:
        """There is nothing to close."""
