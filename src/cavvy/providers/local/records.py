"""The files that record gangs. The files are small JSON files, which are written atomically.

gangs/NAME/RANK/...            the work's files, which the work can change
agents/NAME/gang.json          the intent, written before anything is started
agents/NAME/removing.json      exists during removal; contains the time of the kill
agents/NAME/RANK/config.json   the agent's configuration (docs/concepts/agent-protocol.md)
agents/NAME/RANK/started.json  the agent's process
agents/NAME/RANK/dead.json     when the agent was first found dead; never changes
agents/NAME/RANK/...           the agent's files: lock, claim, exit.json, agent.log, log, outbox
ended/NAME.json                the record of an ended gang

The work sees only its own gang's folder in `gangs`. The server and the agents obey only records in
`agents` and `ended`, because a job could change any other file.
"""

from collections.abc import Sequence
from datetime import datetime

from cavvy.domain.values import Struct
from cavvy.providers.base import NodeSeen
from cavvy.providers.local.processes import LocalProcess


class LocalIntent(Struct, frozen=True, kw_only=True):
    """A requested gang."""

    name: str
    installation: str
    nodes: int
    launched_at: datetime
    grace_s: float
    devices: Sequence[str] = ()  # the devices of all ranks together
    part: float = 1.0  # below 1, the gang has only this part of its one device
    separates: bool = False  # whether the work is separated from that of other projects


class LocalRemoval(Struct, frozen=True, kw_only=True):
    """The record of a gang's removal. Processes that still run at `kill_at` are killed."""

    asked_at: datetime
    kill_at: datetime


class RankDeath(Struct, frozen=True, kw_only=True):
    """The record of how one rank ended. `in_order` is True if the agent exited normally and
    delivered its reports.
    """

    at: datetime
    in_order: bool


class LastDelivery(Struct, frozen=True, kw_only=True):
    """A process that delivers the reports of a killed agent. `done` is True if all reports were
    delivered or no more attempts will be made.
    """

    process: LocalProcess
    tries: int
    done: bool = False


class LocalGangEnd(Struct, frozen=True, kw_only=True):
    """The record of an ended gang. `seen_at` is the time when Cavvy detected that the gang had
    ended. Cavvy keeps the record for a fixed period that begins at `seen_at`.
    """

    name: str
    installation: str
    reason: str
    exit_code: int | None
    ranks: Sequence[NodeSeen]
    seen_at: datetime
