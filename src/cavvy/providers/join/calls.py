"""The requests of joined machines (`POST /nodes/v1/PROVIDER/CALL`) and the answers, both in JSON.
The code in `remote/` sends the requests.
"""

from collections.abc import Sequence

import msgspec

from cavvy.providers.hosts.fleet.machines import SupervisorFacts


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
