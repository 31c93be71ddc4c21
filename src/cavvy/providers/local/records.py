"""The files that record gangs. They are small JSON files, which are written atomically.

gangs/NAME/gang.json          the intent, written before anything is started
gangs/NAME/removing.json      exists during removal; contains the time of the kill
gangs/NAME/RANK/config.json   the agent's configuration (docs/concepts/agent-protocol.md)
gangs/NAME/RANK/started.json  the agent's process
gangs/NAME/RANK/dead.json     when the agent was first found dead; never changes
gangs/NAME/RANK/...           the agent's files: lock, exit.json, agent.log, work, outbox
ended/NAME.json               the record of an ended gang
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
    devices: Sequence[str] = ()  # the devices of all ranks together


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRemoval:
    """The removal of a gang. Processes that still run at `kill_at` are killed."""

    asked_at: datetime
    kill_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDeath:
    """The end of one rank. `in_order` is True if the agent exited by itself and delivered its
    reports.
    """

    at: datetime
    in_order: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LastDelivery:
    """A process that delivers the reports of a killed agent. `done` is True if all reports were
    delivered or no more attempts will be made.
    """

    process: LocalProcess
    tries: int
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGangEnd:
    """The record of an ended gang. `seen_at` is the time when Cavvy found the end. The time for
    which the record is kept starts then.
    """

    name: str
    installation: str
    reason: str
    exit_code: int | None
    ranks: Sequence[NodeSeen]
    seen_at: datetime
