"""The files that record gangs: small JSON files that appear whole or not at all.

gangs/NAME/gang.json          the intent: written before anything is started
gangs/NAME/removing.json      the gang is being removed; when it is killed
gangs/NAME/RANK/config.json   the agent's configuration (docs/concepts/agent-protocol.md)
gangs/NAME/RANK/started.json  the agent's process
gangs/NAME/RANK/dead.json     when the agent was first seen dead; never changes
gangs/NAME/RANK/...           the agent's files: lock, exit.json, agent.log, work, outbox
ended/NAME.json               the record of a gang that is over
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from cavvy.providers.base import NodeSeen
from cavvy.providers.local.processes import LocalProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalIntent:
    """A requested gang."""

    name: str
    installation: str
    nodes: int
    launched_at: datetime
    grace_s: float
    devices: Sequence[str] = ()  # held by all ranks together


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRemoval:
    """The removal of a gang; processes that live at `kill_at` are killed."""

    asked_at: datetime
    kill_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDeath:
    """The end of one rank. `in_order`: the agent exited by itself and delivered its reports."""

    at: datetime
    in_order: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LastDelivery:
    """An agent that only delivers; `done` if nothing is left, or no more tries are made."""

    process: LocalProcess
    tries: int
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGangEnd:
    """An ended gang. `seen_at` is when this was found; the record is kept from then on."""

    name: str
    installation: str
    reason: str
    exit_code: int | None
    ranks: Sequence[NodeSeen]
    seen_at: datetime
