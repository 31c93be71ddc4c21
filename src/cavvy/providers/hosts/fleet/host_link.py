"""The link to one host's supervisor, regardless of which side connects.

Errors, by what the caller does next:

* CannotConnect(TryAgain): nothing answers now, and no request was sent; a later call may work
* LoginRefused(Refused): a person must act
* LinkLost(TryAgain): the link broke after a request, which may have been carried out
* TryAgain, NoCapacity, Refused: the supervisor's answer
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeVar

_T = TypeVar("_T")
ASK_TIMEOUT_S = 60  # time limit for one answer; a launch writes a few files


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSetup:
    """Paths and commands on a host that is set up."""

    root: str  # folder of this installation on this host
    cache: str
    agent: tuple[str, ...]  # starts the agent; append the configuration's path
    supervisor: tuple[str, ...]


class HostLink(Protocol):
    """One host. Times are on the control plane's clock."""

    problem: str  # why the host is not connected
    leaving: bool  # whether the host refuses new work
    let_in: bool  # False: the host answers but refuses the login
    heard_at: datetime | None
    silent_since: datetime | None
    silent_s: float  # how long all tries to reach the host have failed

    @property
    def name(self) -> str: ...

    @property
    def up(self) -> bool: ...

    @property
    def target(self) -> tuple[str, int]:
        """The address and port at which it listens, as far as known."""

    async def connect(self) -> HostSetup:
        """Connect, unless the host connects by itself. Raises CannotConnect, LoginRefused."""

    async def ask(self, do: str, kind: type[_T], **fields: object) -> _T:
        """Send the supervisor a request. Raises the errors in this module's docstring."""

    async def reaches(self, address: str, port: int) -> bool:
        """Whether an SSH server answers there, as seen from this host: a second observation of a
        silent host.
        """
