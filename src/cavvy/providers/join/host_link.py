"""The link to one joined machine. The machine sends requests, which carry numbered lines to and
from the machine's supervisor. If the machine is connected to another server, requests to the
machine's supervisor go through that server (`sessions`).

A session is one run of the supervisor on the machine. Lines are numbered in each direction and
repeated until they are confirmed, so that no line is lost if a request fails. When a new session
begins, all open requests fail, as if the connection had broken. `silent_s` is measured on the event
loop's clock.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeVar

from cavvy.providers.hosts.connection import CannotConnect
from cavvy.providers.hosts.fleet.host_link import ASK_TIMEOUT_S, HostSetup
from cavvy.providers.hosts.remote_calls import RemoteCalls
from cavvy.providers.hosts.supervisor.frames import FrameReader, encode_frame
from cavvy.providers.join.sessions import MachineSessions

_T = TypeVar("_T")
POLL_S = 20.0  # seconds that a machine's request waits for lines
_GONE_S = 10.0  # a machine counts as disconnected this many seconds after its last request
# At most this much of the time between two checks counts as silence of a machine, because the
# server itself may have been suspended.
_COUNTED_S = 60.0


class JoinLink:
    """Implements `HostLink`. `changed` is called with the name of a gang
    that changed, or with None when the machine connects or disconnects.
    """

    def __init__(
        self,
        name: str,
        changed: Callable[[str | None], None],
        now: Callable[[], datetime],
        sessions: MachineSessions,
    ) -> None:
        self.name = name
        self.problem = f"{name} has not connected yet"
        self.let_in = True
        self.heard_at: datetime | None = None
        self.silent_since: datetime | None = None
        self.silent_s = 0.0
        self.leaving = False
        # True: the server has dismissed the machine, so the machine must leave
        self.dismissed = False
        self.setup: HostSetup | None = None
        self.session = ""  # the session at this server
        self._changed = changed
        self._now = now
        self._sessions = sessions
        self._down: list[tuple[int, str]] = []  # the lines that the machine has not confirmed yet
        self._sent = 0
        self._heard = 0  # the number of the last line received from the machine
        self._calls = RemoteCalls(name, lambda: self.here)
        self._listening = 0
        self._last: float | None = None
        self._looked = 0.0
        self._news = asyncio.Event()

    @property
    def up(self) -> bool:
        if self.here:
            return True
        elsewhere = self._sessions.find(self.name)
        return elsewhere is not None and elsewhere.up

    @property
    def here(self) -> bool:
        """Whether the machine is connected to this server."""
        if not self.session or self.setup is None or self._last is None:
            return False
        return bool(self._listening) or asyncio.get_running_loop().time() - self._last < _GONE_S

    @property
    def target(self) -> tuple[str, int]:
        return self.name, 0

    async def reaches(self, address: str, port: int) -> bool:
        return False  # joined machines do not know each other

    async def connect(self) -> HostSetup:
        if self.here and self.setup is not None:
            return self.setup
        elsewhere = self._sessions.find(self.name)
        if elsewhere is None or not elsewhere.up:
            raise CannotConnect(self.problem or f"{self.name} is not calling the server")
        return elsewhere.setup

    async def ask(self, do: str, kind: type[_T], **fields: object) -> _T:
        await self.connect()
        elsewhere = None if self.here else self._sessions.find(self.name)
        if elsewhere is not None:
            return await self._sessions.ask(elsewhere, do, kind, fields)
        return await self._calls.ask(self._send, do, kind, timeout_s=ASK_TIMEOUT_S, **fields)

    def begin(self, session: str, setup: HostSetup) -> None:
        """Begin a new session."""
        self._drop()
        self.session, self.setup, self.leaving = session, setup, self.dismissed
        self._down, self._sent, self._heard = [], 0, 0
        self._touch()
        self._changed(None)

    def take(self, session: str, first: int, lines: Sequence[str]) -> int | None:
        """Accept lines from the machine, numbered from `first`. Return the number of the next
        expected line, or None if another session is running.
        """
        if session != self.session:
            return None
        self._touch()
        for number, line in enumerate(lines, first):
            if number == self._heard + 1:
                self._heard = number
                self._take_line(line)
        return self._heard + 1

    async def listen(
        self, session: str, after: int, wait_s: float
    ) -> Sequence[tuple[int, str]] | None:
        """Wait for lines that have numbers above `after` and must be sent to the machine. Return
        None if another session is running.
        """
        if session != self.session:
            return None
        self._down = [each for each in self._down if each[0] > after]
        self._listening += 1
        try:
            was_down = self.silent_since is not None
            self._touch()
            if was_down:
                self._changed(None)
            async with asyncio.timeout(min(wait_s, POLL_S)):
                while not self._down and session == self.session and not self.dismissed:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            pass
        finally:
            self._listening -= 1
            if session == self.session:
                self._touch()
        return self._down if session == self.session else None

    def wake(self) -> None:
        """Answer a waiting request immediately."""
        self._news.set()

    def leave(self, problem: str) -> None:
        """Mark the machine as leaving or dismissed. The machine gets no new work, but reports its
        gangs until they end.
        """
        self.leaving, self.problem = True, problem
        self.wake()
        self._changed(None)

    def follow(self) -> None:
        """Record that a session with another server has replaced the session with this server."""
        elsewhere = self._sessions.find(self.name)
        if elsewhere is None or self._sessions.is_mine(self.name, self.session):
            return
        if self.session:
            self.session, self._last = "", None
            self._drop()
        self.leaving = elsewhere.leaving or self.dismissed
        self.problem = elsewhere.problem

    async def note(self) -> None:
        """Record the state of this server's session for the other servers to read."""
        if self.session and self.setup is not None:
            await self._sessions.note(
                self.name,
                self.session,
                self.setup,
                up=self.here,
                leaving=self.leaving,
                problem=self.problem,
            )

    def hang_up(self, problem: str) -> None:
        """Mark the machine as permanently disconnected."""
        self.session, self._last, self.problem, self.leaving = "", None, problem, True
        self._drop()
        self._changed(None)

    def tick(self) -> bool:
        """Update the time for which the machine has been silent. Return True if the machine has
        just become silent.
        """
        now = asyncio.get_running_loop().time()
        passed, self._looked = min(now - (self._looked or now), _COUNTED_S), now
        if self.up:
            self.silent_since, self.silent_s = None, 0.0
            return False
        self.silent_s += passed
        if self.silent_since is not None:
            return False
        self.silent_since = self.heard_at or self._now()
        if not self.leaving and (self._last is not None or not self.problem):
            self.problem = f"{self.name} has stopped calling the server"
        self._drop()
        return True

    def _touch(self) -> None:
        self._last, self.heard_at = asyncio.get_running_loop().time(), self._now()
        self.silent_since, self.silent_s = None, 0.0
        if not self.leaving:
            self.problem = ""

    def _send(self, head: dict[str, Any]) -> None:
        self._sent += 1
        self._down.append((self._sent, encode_frame(head).decode().rstrip("\n")))
        self._news.set()

    def _take_line(self, line: str) -> None:
        with suppress(ValueError):  # the machine sent a line that is not a frame
            for head, _ in FrameReader().feed(f"{line}\n".encode()):
                if "changed" in head:
                    self._changed(head["changed"])
                else:
                    self._calls.take(head)

    def _drop(self) -> None:
        self._calls.give_up()
        self._down = []
        self._news.set()
