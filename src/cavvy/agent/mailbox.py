"""The endpoint of nodes that reach nobody: requests are files in a folder that the node and a
login-node helper share.

A request is written beside the sender's own folder as `SENDER@NUMBER`, its answer appears in that
folder as `NUMBER`. Both appear whole, by a rename. Network file systems tell nobody of new files,
so one looks, ever more rarely; listing the folder is what makes them ask their server instead of
their cache.
"""

from __future__ import annotations

import os
import time

from .wire import parse_reply

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .loop import EventLoop, LoopTimer
    from .wire import Failed, Replied, ServerAddress

FIRST_PAUSE_S = 0.02
LAST_PAUSE_S = 1.0


class AgentMailbox:
    """Posts requests and takes answers. Raises OSError."""

    _count = 0  # of all mailboxes of this process, so that no two requests share a number

    def __init__(self, path: str) -> None:
        self._path = path

    def post(self, request: bytes) -> str:
        """Send; the number under which the answer will come."""
        AgentMailbox._count += 1
        number = f"{os.getpid()}-{time.monotonic_ns():x}-{AgentMailbox._count}"
        os.makedirs(self._path, mode=0o700, exist_ok=True)
        fresh = f"{os.path.dirname(self._path)}/.{os.path.basename(self._path)}-{number}"
        file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            rest = memoryview(request)
            while rest:
                rest = rest[os.write(file, rest) :]
        except OSError:
            os.unlink(fresh)  # a full disk must not fill with torn requests
            raise
        finally:
            os.close(file)
        os.rename(fresh, self._letter(number))
        return number

    def take(self, number: str) -> bytes | None:
        """The answer, None while there is none."""
        if number not in os.listdir(self._path):
            return None
        path = f"{self._path}/{number}"
        with open(path, "rb") as file:
            answer = file.read()
        os.unlink(path)
        return answer

    def withdraw(self, number: str) -> None:
        """Nobody waits for the answer any more."""
        for path in (self._letter(number), f"{self._path}/{number}"):
            try:
                os.unlink(path)
            except OSError:
                continue

    def _letter(self, number: str) -> str:
        return f"{self._path}@{number}"


class MailboxConnection:
    """As `wire.Connection`, through a mailbox."""

    def __init__(self, loop: EventLoop, address: ServerAddress, headers: str) -> None:
        self._loop = loop
        self.headers = headers
        self._mailbox = AgentMailbox(address.text.partition(":")[2])
        self._number = ""
        self._due = 0.0
        self._pause = FIRST_PAUSE_S
        self._timer: LoopTimer | None = None
        self._replied: Replied | None = None
        self._failed: Failed | None = None

    @property
    def busy(self) -> bool:
        return self._replied is not None

    def request(
        self,
        method: str,
        path: str,
        body: bytes,
        *,
        timeout_s: float,
        replied: Replied,
        failed: Failed,
    ) -> None:
        """Send; exactly one of `replied(status, body)` and `failed(reason)` is called later,
        from the loop.
        """
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{self.headers}Content-Length: "
            f"{len(body)}\r\n\r\n"
        )
        self._replied, self._failed = replied, failed
        self._due, self._pause = time.monotonic() + timeout_s, FIRST_PAUSE_S
        try:
            self._number = self._mailbox.post(head.encode("latin-1") + body)
        except OSError as error:
            reason = f"the mailbox takes nothing: {error}"
            self._timer = self._loop.after(0, lambda: self._fail(reason))
            return
        self._timer = self._loop.after(self._pause, self._look)

    def close(self) -> None:
        """Forget whatever was asked; no callback follows."""
        self._replied = self._failed = None
        self._loop.cancel(self._timer)
        if self._number:
            self._mailbox.withdraw(self._number)
            self._number = ""

    def _look(self) -> None:
        try:
            answer = self._mailbox.take(self._number)
        except OSError as error:
            self._fail(f"the mailbox cannot be read: {error}")
            return
        if answer is None and time.monotonic() >= self._due:
            self._fail("no answer came by mail")
        elif answer is None:
            self._pause = min(LAST_PAUSE_S, self._pause * 1.2)
            self._timer = self._loop.after(self._pause, self._look)
        else:
            self._number = ""
            self._read(bytearray(answer))

    def _read(self, answer: bytearray) -> None:
        try:
            found = parse_reply(answer, True)
        except ValueError as error:
            self._fail(str(error))
            return
        replied = self._replied
        if found is None:
            self._fail("a torn answer came by mail")
        elif replied is not None:
            self._replied = self._failed = None
            replied(found[0], found[1])

    def _fail(self, reason: str) -> None:
        failed = self._failed
        self.close()
        if failed is not None:
            failed(reason)
