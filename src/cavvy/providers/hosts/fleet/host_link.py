"""The link to one host's supervisor, whichever side connects.

Errors, by what the caller does next:

* CannotConnect(TryAgain)  nothing answers now, and nothing was asked; a later call may work
* LoginRefused(Refused)    a person must act
* LinkLost(TryAgain)       the link broke after something was asked: it may have been done
* TryAgain, NoCapacity, Refused   what the supervisor answered
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeVar

_T = TypeVar("_T")
ASK_TIMEOUT_S = 60  # of one answer; a launch writes a few files


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSetup:
    """A host as it was set up for this connection."""

    root: str  # of this installation on this host
    cache: str
    agent: tuple[str, ...]  # starts the agent; the configuration's path is appended
    supervisor: tuple[str, ...]


class HostLink(Protocol):
    """One host. Times are the control plane's."""

    problem: str  # why it is not connected
    leaving: bool  # it takes no new work
    let_in: bool  # False: the host answers and refuses the login
    heard_at: datetime | None
    silent_since: datetime | None
    silent_s: float  # how long it has not been reached, as far as we tried

    @property
    def name(self) -> str: ...

    @property
    def up(self) -> bool: ...

    @property
    def target(self) -> tuple[str, int]:
        """Where it listens, as far as we know."""

    async def connect(self) -> HostSetup:
        """Be connected, where that is ours to do. Raises CannotConnect, LoginRefused."""

    async def ask(self, do: str, kind: type[_T], **fields: object) -> _T:
        """Have the supervisor do something. Raises what this module's head lists."""

    async def reaches(self, address: str, port: int) -> bool:
        """Whether an SSH server answers there, seen from this host: a second witness that the
        other host is alive.
        """
