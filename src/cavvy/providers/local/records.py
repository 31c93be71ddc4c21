"""What is kept on disk about gangs, and how: small JSON files that appear whole or not at all.

gangs/NAME/gang.json          the intent: written before anything is started
gangs/NAME/removing.json      the gang is to go, and when the patience with it ends
gangs/NAME/RANK/config.json   the agent's configuration (docs/concepts/agent-protocol.md)
gangs/NAME/RANK/started.json  which process the agent is
gangs/NAME/RANK/dead.json     when the agent was first seen dead: never changes afterwards
gangs/NAME/RANK/...           the agent's own: lock, exit.json, agent.log, work, outbox
ended/NAME.json               what is remembered of a gang that is over
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from cavvy.providers.base import NodeSeen
from cavvy.providers.local.processes import LocalProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalIntent:
    """A gang that was asked for."""

    name: str
    installation: str
    nodes: int
    launched_at: datetime
    grace_s: float
    devices: Sequence[str] = ()  # held by all ranks together


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRemoval:
    """The gang is to go; whatever of it lives at `kill_at` is killed."""

    asked_at: datetime
    kill_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDeath:
    """The end of one rank. `in_order`: the agent left by itself, and what it had to say is said."""

    at: datetime
    in_order: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LastDelivery:
    """An agent that only delivers; `done` when nothing is left or nothing can be done."""

    process: LocalProcess
    tries: int
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGangEnd:
    """A gang that is over. `seen_at` is when that was found out: it is remembered from then on."""

    name: str
    installation: str
    reason: str
    exit_code: int | None
    ranks: Sequence[NodeSeen]
    seen_at: datetime
