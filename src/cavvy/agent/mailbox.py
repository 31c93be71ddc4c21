"""The transport for nodes without a network. Requests are files in a folder that the node shares
with a helper process on the cluster's login node.

A request is a file `SENDER@NUMBER`; its answer is the file `NUMBER` in the folder `SENDER`.
Requests and answers are written under a temporary name and renamed when they are complete.
Network file systems do not announce new files, so the agent polls with growing pauses. The agent
polls by listing the folder, because a listing bypasses the file system's cache.
"""

from __future__ import annotations

import os
import time

from .disk import open_private
from .loop import EventLoop, LoopTimer
from .wire import BackOff, RequestConnection, ServerAddress, parse_reply

FIRST_PAUSE_S = 0.02
LAST_PAUSE_S = 1.0
GROWTH = 1.2  # factor by which each pause is longer than the one before


class AgentMailbox:
    """Posts requests and reads answers. Raises OSError."""

    _count = 0  # requests of all mailboxes of this process, counted to make each number unique

    def __init__(self, path: str) -> None:
        self._path = path

    def post(self, request: bytes) -> str:
        """Send a request, and return the number of the expected answer."""
        AgentMailbox._count += 1
        number = f"{os.getpid()}-{time.monotonic_ns():x}-{AgentMailbox._count}"
        os.makedirs(self._path, mode=0o700, exist_ok=True)
        fresh = f"{os.path.dirname(self._path)}/.{os.path.basename(self._path)}-{number}"
        file = open_private(fresh, os.O_EXCL)
        try:
            rest = memoryview(request)
            while rest:
                rest = rest[os.write(file, rest) :]
        except OSError:
            os.unlink(fresh)  # partial requests must not fill the disk further
            raise
        finally:
            os.close(file)
        os.rename(fresh, self._letter(number))
        return number

    def take(self, number: str) -> bytes | None:
        """Remove and return the answer, or return None if it has not arrived."""
        if number not in os.listdir(self._path):
            return None
        path = f"{self._path}/{number}"
        with open(path, "rb") as file:
            answer = file.read()
        os.unlink(path)
        return answer

    def exchange(self, request: bytes, timeout_s: float) -> bytes | None:
        """Send a request and return its answer, or None if none arrives within `timeout_s`."""
        number, pause = self.post(request), make_pause()
        due = time.monotonic() + timeout_s
        while True:
            answer = self.take(number)
            if answer is not None:
                return answer
            if time.monotonic() >= due:
                self.withdraw(number)
                return None
            time.sleep(pause.next())

    def withdraw(self, number: str) -> None:
        """Delete the request and its answer, if they still exist."""
        for path in (self._letter(number), f"{self._path}/{number}"):
            try:
                os.unlink(path)
            except OSError:
                continue

    def _letter(self, number: str) -> str:
        return f"{self._path}@{number}"


def make_pause() -> BackOff:
    """Create a sequence of growing pauses between polls of a mailbox."""
    return BackOff(FIRST_PAUSE_S, LAST_PAUSE_S, GROWTH)


class MailboxConnection(RequestConnection):
    """Sends requests through a mailbox."""

    silence = "no answer arrived in the mailbox"

    def __init__(self, loop: EventLoop, address: ServerAddress, headers: str) -> None:
        super().__init__(loop, address, headers)
        self._mailbox = AgentMailbox(address.text.partition(":")[2])
        self._number = ""
        self._pause = make_pause()
        self._next_look: LoopTimer | None = None

    def _start(self) -> None:
        self._pause = make_pause()
        try:
            self._number = self._mailbox.post(self._request)
        except OSError as error:
            self._fail_later(f"cannot write to the mailbox: {error}")
            return
        self._look_later()

    def _disconnect(self) -> None:
        self._loop.cancel(self._next_look)
        if self._number:
            self._mailbox.withdraw(self._number)
            self._number = ""

    def _look_later(self) -> None:
        self._next_look = self._loop.after(self._pause.next(), self._look)

    def _look(self) -> None:
        try:
            answer = self._mailbox.take(self._number)
        except OSError as error:
            self._fail(f"cannot read the mailbox: {error}")
            return
        if answer is None:
            self._look_later()
            return
        self._number = ""
        try:
            found = parse_reply(bytearray(answer), True)
        except ValueError as error:
            self._fail(str(error))
            return
        if found is None:
            self._fail("an incomplete answer arrived in the mailbox")
        else:
            self._succeed(found[0], found[1])
