"""What a joined machine says and is told, as JSON over `POST /nodes/v1/PLACE/CALL`; `far/`
speaks it without us.
"""

from collections.abc import Sequence

import msgspec

from cavvy.providers.hosts.herd.machines import Facts


class Enter(msgspec.Struct, frozen=True):
    """`enter`, with a token that is good once: join. The nonce makes a lost answer harmless."""

    nonce: str
    hostname: str = ""


class Entered(msgspec.Struct, frozen=True, kw_only=True):
    """Its name, the token that it shows from now on, and the folder of this installation below
    its own.
    """

    name: str
    token: str
    folder: str


class Parcels(msgspec.Struct, frozen=True, kw_only=True):
    """`parcels`: what to fetch by hash."""

    steward: str
    agent: str


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """`hello`: a session begins. `start` are the words that run a Python archive there."""

    session: str
    root: str
    cache: str
    start: Sequence[str]
    folder: str  # that holds the parcels
    facts: Facts


class Listen(msgspec.Struct, frozen=True, kw_only=True):
    """`listen`: wait for lines after this one."""

    session: str
    after: int
    wait_s: float = 0


class Heard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Lines for the steward; `again`: begin a new session; `leave`: end the work and go."""

    lines: Sequence[tuple[int, str]] = ()
    again: bool = False
    leave: bool = False


class Say(msgspec.Struct, frozen=True, kw_only=True):
    """`say`: the steward's lines, numbered from `first`."""

    session: str
    first: int
    lines: Sequence[str]


class Said(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The number of the next line that is wanted."""

    next: int = 0
    again: bool = False
