"""The link to one host's supervisor. Either the control plane or the host opens the connection.

The link raises these errors, grouped by the caller's reaction:

* CannotConnect(TryAgain): the host does not answer now, and no request was sent; a later call may
  succeed
* LoginRefused(Refused): a person must act
* LinkLost(TryAgain): the link broke after a request was sent; the host may have carried out the
  request
* TryAgain, NoCapacity, Refused: the supervisor answered with one of these errors
"""

from pathlib import PurePosixPath
from typing import Protocol, TypeVar

from cavvy.domain.values import Struct

_T = TypeVar("_T")
# time limit for one answer in seconds; enough because a request only writes a few files
ASK_TIMEOUT_S = 60


class HostSetup(Struct, frozen=True, kw_only=True):
    """The paths and commands that Cavvy uses on one prepared host."""

    root: str  # this installation's folder on the host
    cache: str
    agent: tuple[str, ...]  # the command that starts the agent; append the configuration's path
    supervisor: tuple[str, ...]

    @property
    def folder(self) -> str:
        """Cavvy's folder on the host; all installations share this folder."""
        return str(PurePosixPath(self.root).parent.parent)


class HostLink(Protocol):
    """The link to one host. Times are measured by the control plane's clock."""

    problem: str  # why the host is not connected
    leaving: bool  # True if the host accepts no new work
    let_in: bool  # False: the host answers but refuses the login
    silent_s: float  # how long all attempts to reach the host have failed

    @property
    def name(self) -> str: ...

    @property
    def up(self) -> bool: ...

    @property
    def target(self) -> tuple[str, int]:
        """The address and port of the host's SSH server, if known."""

    async def connect(self) -> HostSetup:
        """Connect to the host, unless the host itself opens the connection. Raises CannotConnect,
        LoginRefused."""

    async def ask(self, do: str, kind: type[_T], **fields: object) -> _T:
        """Send a request to the supervisor. Raises the errors in this module's docstring."""

    async def reaches(self, address: str, port: int) -> bool:
        """Check from this host whether an SSH server answers at the address. If a server answers,
        the host at the address is alive although the control plane cannot reach it.
        """
