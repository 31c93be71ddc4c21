"""The sessions of joined machines, as records that all servers read, and the requests of the
machines (`POST /nodes/v1/PROVIDER/CALL`) with their answers, both in JSON; the code in `remote/`
sends them.

Each record says to which server the machine is connected. Other servers reach a machine through the
server to which it is connected.

The server to which the machine is connected writes the record of the session. It writes the record
when the session begins, when the machine stops or resumes its calls, and when the machine leaves. A
session's record is valid only while the server that wrote the record is alive.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from cavvy.domain.values import Struct
from cavvy.providers.base import NoCapacity, OtherServers, ProviderError, Refused, TryAgain
from cavvy.providers.hosts.connection import CannotConnect
from cavvy.providers.hosts.fleet.host_link import HostSetup
from cavvy.providers.hosts.fleet.machines import SupervisorFacts
from cavvy.providers.hosts.remote_calls import LinkLost
from cavvy.providers.ledger import ChangedElsewhere, LaunchLedger
from cavvy.providers.state import ProviderState

_T = TypeVar("_T")
ASK, CALL = "ask", "call"  # the two requests between servers


class MachineSession(Struct, frozen=True, kw_only=True):
    """One machine's session. `up` is False while the machine does not call its server."""

    name: str
    server: str
    session: str
    setup: HostSetup
    up: bool = True
    leaving: bool = False
    problem: str = ""


class MachineAsk(Struct, frozen=True, kw_only=True):
    """`ask`: send a request to the machine's supervisor, through the server that has the machine's
    session.
    """

    name: str
    session: str
    do: str
    fields: dict[str, Any]


class MachineAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The supervisor's answer. After an error, `kind` is a key of `_ERRORS`, and `error` is the
    text.
    """

    answer: Any = None
    kind: str = ""
    error: str = ""


class MachineCall(Struct, frozen=True, kw_only=True):
    """`call`: a request that the machine sent to a server that does not have the machine's
    session."""

    name: str
    call: str
    body: msgspec.Raw


# in the order in which an error is matched: subclasses come first
_ERRORS: Mapping[str, type[ProviderError]] = {
    "unconnected": CannotConnect,
    "lost": LinkLost,
    "busy": NoCapacity,
    "refused": Refused,
    "again": TryAgain,
}


class MachineSessions:
    """The sessions of one provider's machines. If `servers` is None, the server runs alone, and
    no records are written, because no other server would read them.
    """

    def __init__(self, provider: str, state: ProviderState, servers: OtherServers | None) -> None:
        self._provider, self._servers = provider, servers
        self._ledger = LaunchLedger(state, MachineSession, "sessions")

    async def refresh(self, name: str | None = None) -> None:
        """Read all records, or only the record of the machine `name`. Raises TryAgain."""
        if self._servers is not None:
            await self._ledger.refresh(name)

    def find(self, name: str) -> MachineSession | None:
        """Return the machine's session if another live server has this session."""
        found = self._ledger.get(name)
        if self._servers is None or found is None or not self._servers.is_alive(found.server):
            return None
        return found

    def is_mine(self, name: str, session: str) -> bool:
        """Return False if another server has begun a newer session of the machine."""
        found = self._ledger.get(name)
        return (
            self._servers is None
            or found is None
            or (found.server, found.session) == (self._servers.me, session)
        )

    async def begin(self, name: str, session: str, setup: HostSetup) -> None:
        """Record a new session, which replaces the machine's former session. Raises TryAgain."""
        if self._servers is None:
            return
        await self._ledger.refresh(name)
        await self._ledger.put(
            MachineSession(name=name, server=self._servers.me, session=session, setup=setup)
        )

    async def note(
        self, name: str, session: str, setup: HostSetup, *, up: bool, leaving: bool, problem: str
    ) -> None:
        """Record the state of a session of this server, unless another session has replaced it."""
        if self._servers is None or not self.is_mine(name, session):
            return
        with suppress(TryAgain):  # repeated at the next tick
            await self._ledger.put(
                MachineSession(
                    name=name,
                    server=self._servers.me,
                    session=session,
                    setup=setup,
                    up=up,
                    leaving=leaving,
                    problem=problem,
                )
            )

    async def drop(self, name: str) -> None:
        """Delete the record of a machine that was dismissed."""
        with suppress(ChangedElsewhere):
            await self._ledger.drop(name)

    async def ask(
        self, at: MachineSession, do: str, kind: type[_T], fields: Mapping[str, object]
    ) -> _T:
        """Send a request to the machine's supervisor through the server that has the machine's
        session. Raises CannotConnect, LinkLost, or the error that the supervisor returned.
        """
        asked = MachineAsk(
            name=at.name, session=at.session, do=do, fields=msgspec.to_builtins(dict(fields))
        )
        data = await self._send(at, ASK, msgspec.json.encode(asked))
        said = msgspec.json.decode(data, type=MachineAnswer)
        if said.kind:
            raise _ERRORS.get(said.kind, TryAgain)(said.error)
        return msgspec.convert(said.answer, kind)

    async def pass_on(self, at: MachineSession, call: str, body: bytes) -> bytes:
        """Forward a machine's call to the server that has the machine's session, and return that
        server's answer. Raises LinkLost.
        """
        passed = MachineCall(name=at.name, call=call, body=msgspec.Raw(body))
        return await self._send(at, CALL, msgspec.json.encode(passed))

    async def _send(self, at: MachineSession, call: str, body: bytes) -> bytes:
        assert self._servers is not None
        try:
            return await self._servers.ask(at.server, self._provider, call, body)
        except OSError as error:
            raise LinkLost(
                f"{at.name}: the server that has the machine's session does not answer: {error}"
            ) from error


def describe_error(error: ProviderError) -> MachineAnswer:
    """Convert an error to the form in which another server receives it."""
    kind = next(kind for kind, each in _ERRORS.items() if isinstance(error, each))
    return MachineAnswer(kind=kind, error=str(error))


class EnterCall(msgspec.Struct, frozen=True):
    """`enter`: join with a single-use token. The nonce lets the machine repeat the request if the
    answer was lost.
    """

    nonce: str
    hostname: str = ""


class EnterAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The machine's name, its new token, and this installation's folder, relative to the machine's
    own folder.
    """

    name: str
    token: str
    folder: str


class BundlesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`bundles`: the hashes of the files that the machine must fetch."""

    supervisor: str
    agent: str


class HelloCall(msgspec.Struct, frozen=True, kw_only=True):
    """`hello`: begin a session. `start` is the command with which the machine runs a Python
    archive.
    """

    session: str
    root: str
    cache: str
    start: Sequence[str]
    folder: str  # the folder with the fetched bundles
    facts: SupervisorFacts


class ListenCall(msgspec.Struct, frozen=True, kw_only=True):
    """`listen`: wait for lines with numbers above `after`."""

    session: str
    after: int
    wait_s: float = 0


class ListenAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The numbered messages for the machine's supervisor. If `again` is True, the machine must
    start a new session. If `leave` is True, the machine must end its work and leave the
    installation. `servers` are the addresses of all servers, or () if the machine may use only the
    server through which it joined.
    """

    lines: Sequence[tuple[int, str]] = ()
    again: bool = False
    leave: bool = False
    servers: Sequence[str] = ()


class SayCall(msgspec.Struct, frozen=True, kw_only=True):
    """`say`: lines from the supervisor, numbered from `first`."""

    session: str
    first: int
    lines: Sequence[str]


class SayAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The number of the next line that the server expects. If `again` is True, the machine must
    start a new session.
    """

    next: int = 0
    again: bool = False


class SessionOfCall(msgspec.Struct, frozen=True):
    """The session that a call belongs to, in the body of `listen`, `say`, `leave` and `gone`."""

    session: str = ""
