"""The files that record gangs. The files are small JSON files, which are written atomically.

gangs/NAME/RANK/...            the work's files, which the work can change
agents/NAME/gang.json          the intent, written before anything is started
agents/NAME/removing.json      exists during removal; contains the time of the kill
agents/NAME/replaced.json      the nodes that were lost and replaced by others of the same rank
agents/NAME/RANK/round.json    exists if the rank replaces a lost one
agents/NAME/RANK/config.json   the agent's configuration (docs/concepts/agent-protocol.md)
agents/NAME/RANK/started.json  the agent's process
agents/NAME/RANK/dead.json     when the agent was first found dead; never changes
agents/NAME/RANK/...           the agent's files: lock, claim, exit.json, agent.log, log, outbox
ended/NAME.json                the record of an ended gang

The work sees only its own gang's folder in `gangs`. The server and the agents obey only records in
`agents` and `ended`, because a job could change any other file.

Takes over gangs that an earlier version of the server started, whose records are in folders that
the work could change.

The server copies what it needs into its own folder once, and checks each value. No agent is started
again from these records. An agent that has ended is started only to deliver its reports.
"""

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import msgspec

from cavvy.agent.config import BadConfig, ConfigFields, read_record
from cavvy.agent.documents import LEAVES_AFTER_S, AgentConfigFile
from cavvy.domain.values import Struct, replace
from cavvy.providers.base import NodeSeen
from cavvy.providers.hosts.records import read, read_file, write
from cavvy.providers.local import processes
from cavvy.providers.local.processes import LocalProcess

# The file in the records of a rank whose agent keeps its files in the rank's home folder.
EARLIER = "earlier"
_LONGEST_GRACE_S = 30 * 24 * 3600.0
_ADDRESSES = ("unix:", "http://", "https://")


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


class RankRound(Struct, frozen=True, kw_only=True):
    """The record of a rank that replaces a lost one: the round that asked for it, and its start."""

    number: int
    started_at: datetime


class ReplacedRanks(Struct, frozen=True, kw_only=True):
    """The nodes of a gang that were lost and replaced."""

    nodes: Sequence[NodeSeen] = ()


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


def take_over(home: Path, gang: str, installation: str, now: datetime) -> LocalIntent | None:
    """Copy the records of a gang from `home`/gangs to `home`/agents. Return the gang's intent, or
    None if this installation has no such gang. Raises OSError.
    """
    old = home / "gangs" / gang
    found = read(old / "gang.json", LocalIntent)
    if found is None or (found.name, found.installation) != (gang, installation):
        return None
    ranks = [number for number in range(_count_ranks(old)) if (old / str(number)).is_dir()]
    intent = replace(
        found,
        nodes=min(max(found.nodes, 0), len(ranks)),
        launched_at=now if found.launched_at.tzinfo is None else min(found.launched_at, now),
        grace_s=min(max(found.grace_s, 0.0), _LONGEST_GRACE_S),
    )
    fresh = home / "agents" / f".new-{gang}"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700, parents=True)
    write(fresh / "gang.json", intent)
    for number in range(intent.nodes):
        _copy_rank(home, fresh / str(number), old / str(number))
    os.rename(fresh, home / "agents" / gang)
    return intent


def _count_ranks(folder: Path) -> int:
    return sum(name.isdigit() for name in os.listdir(folder))


def _copy_rank(home: Path, fresh: Path, old: Path) -> None:
    fresh.mkdir(mode=0o700)
    (fresh / EARLIER).touch()
    process = read(old / "started.json", LocalProcess)
    path = str(old / "config.json")
    if process is None or path not in processes.list_arguments(process):
        process = processes.find_command(path)
    if process is not None:
        write(fresh / "started.json", process)
    config = _read_config(old / "config.json")
    if config is not None and config.address.startswith(_ADDRESSES):
        checked = AgentConfigFile(
            gang=old.parent.name,
            rank=int(old.name),
            address=config.address,
            pin=config.pin,
            token=config.token,
            home=str(old),
            cache=str(home / "cache"),
            lease_s=config.lease_s,
            grace_s=config.grace_s,
            covers=False,
            leaves_after_s=LEAVES_AFTER_S,
            devices=[],
        )
        write(fresh / "config.json", checked)


def _read_config(path: Path) -> AgentConfigFile | None:
    """Return an agent's configuration, or None if the file does not contain one."""
    with suppress(msgspec.MsgspecError, BadConfig):
        fields = ConfigFields(msgspec.json.decode(read_file(path)), "configuration")
        return read_record(AgentConfigFile, fields)
    return None
