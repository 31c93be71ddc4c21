"""The requests of joined machines and their answers, as JSON over `POST /nodes/v1/PROVIDER/CALL`;
`remote/` sends them.
"""

from collections.abc import Sequence

import msgspec

from cavvy.providers.hosts.fleet.machines import SupervisorFacts


class EnterCall(msgspec.Struct, frozen=True):
    """`enter`: join with a one-time token. The nonce makes a lost answer harmless."""

    nonce: str
    hostname: str = ""


class EnterAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The machine's name, its new token, and the folder of this installation below its own."""

    name: str
    token: str
    folder: str


class BundlesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`bundles`: the hashes of the files to fetch."""

    supervisor: str
    agent: str


class HelloCall(msgspec.Struct, frozen=True, kw_only=True):
    """`hello`: begin a session. `start` is the command that runs a Python archive there."""

    session: str
    root: str
    cache: str
    start: Sequence[str]
    folder: str  # folder of the bundles
    facts: SupervisorFacts


class ListenCall(msgspec.Struct, frozen=True, kw_only=True):
    """`listen`: wait for lines after this one."""

    session: str
    after: int
    wait_s: float = 0


class ListenAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Lines for the supervisor; `again`: start a new session; `leave`: end the work and leave."""

    lines: Sequence[tuple[int, str]] = ()
    again: bool = False
    leave: bool = False


class SayCall(msgspec.Struct, frozen=True, kw_only=True):
    """`say`: the supervisor's lines, numbered from `first`."""

    session: str
    first: int
    lines: Sequence[str]


class SayAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The number of the next expected line."""

    next: int = 0
    again: bool = False
