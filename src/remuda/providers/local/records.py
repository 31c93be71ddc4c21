"""What is kept on disk about gangs, and how: small JSON files that appear whole or not at all.

gangs/NAME/gang.json          the intent: written before anything is started
gangs/NAME/removing.json      the gang is to go, and when the patience with it ends
gangs/NAME/RANK/config.json   the agent's configuration (docs/concepts/agent-protocol.md)
gangs/NAME/RANK/started.json  which process the agent is
gangs/NAME/RANK/dead.json     when the agent was first seen dead: never changes afterwards
gangs/NAME/RANK/...           the agent's own: lock, exit.json, agent.log, work, outbox
ended/NAME.json               what is remembered of a gang that is over
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import msgspec

from remuda.providers.local.processes import Process

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """A gang that was asked for."""

    name: str
    installation: str
    nodes: int
    launched_at: datetime
    grace_s: float
    devices: Sequence[str] = ()  # held by all ranks together


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """The gang is to go; whatever of it lives at `kill_at` is killed."""

    asked_at: datetime
    kill_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """One rank's configuration, as docs/concepts/agent-protocol.md describes it."""

    protocol: int = 1
    gang: str
    rank: int
    address: str
    token: str = field(repr=False)
    home: str
    cache: str
    lease_s: float
    grace_s: float
    devices: Sequence[str] = ()
    device_indices: Sequence[int] = ()
    vendor: str | None = None
    cpus: float | None = None
    memory_mib: int | None = None
    node_address: str = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """What an agent wrote when it left in order; fields that we do not need are ignored."""

    outcome: str = ""
    exit_code: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The end of one rank. `in_order`: the agent left by itself, and what it had to say is said."""

    at: datetime
    in_order: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """An agent that only delivers; `done` when nothing is left or nothing can be done."""

    process: Process
    tries: int
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRank:
    rank: int
    engine_id: str
    started_at: datetime
    ended_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A gang that is over. `seen_at` is when that was found out: it is remembered from then on."""

    name: str
    installation: str
    reason: str
    exit_code: int | None
    ranks: Sequence[EndedRank]
    seen_at: datetime


def write(path: Path, value: object) -> None:
    """Write a record in one piece, readable by its user only. Raises OSError."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(value))
        os.replace(fresh, path)
    except OSError:  # a full disk must not leave a torn file behind
        with suppress(OSError):
            os.unlink(fresh)
        raise


def read(path: Path, kind: type[_T]) -> _T | None:
    """A record; None where there is none or it makes no sense (records are written whole, so somebody changed it)."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None
