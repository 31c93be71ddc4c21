"""The shared folder: its layout, and the files of a gang.

* `agents/HASH/` contains the programs that nodes run (`agent/` and `start.py`), by version.
* `storage/PROJECT/JOB/checkpoint` contains the checkpoints that a job keeps across attempts.
* `cache/NAME/` contains the fetched blobs, finished setups and image files of one project.
* `INSTALLATION/mail/` contains the agents' requests, and a folder of answers for each agent.
* `INSTALLATION/gangs/NAME/gang.json` contains the intent; Cavvy creates the whole folder `NAME`
  before the submission.
* `INSTALLATION/gangs/NAME/config.json` contains the agents' configuration with their token; the
  file's mode is 0600.
* `INSTALLATION/gangs/NAME/job` contains the batch job's id.
* The batch job writes `INSTALLATION/gangs/NAME/begun` (when and where the job began) and `end` (how
  the job ended).
* `INSTALLATION/gangs/NAME/seen` states when and where the job began, as the batch system reported.
* `INSTALLATION/gangs/NAME/removing` exists if Cavvy is removing the gang.
* `INSTALLATION/gangs/NAME/warned` exists if the batch system's time limit is near.
* `INSTALLATION/gangs/NAME/RANK/` is an agent's home folder.
* `INSTALLATION/ended/NAME` contains the record of an ended gang.
"""

import hashlib
import io
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

import msgspec

from cavvy.agent.documents import LEAVES_AFTER_S, AgentConfigFile, ReclaimSignal
from cavvy.domain.values import Struct, replace
from cavvy.providers.base import GangSeen, GangSpec, NodeSeen
from cavvy.providers.batch.login_session import LoginSession
from cavvy.providers.hosts.records import AgentExit

REMEMBERED = timedelta(hours=2)
_START = (Path(__file__).parent / "start.py").read_bytes()
_T = TypeVar("_T")


class BatchIntent(Struct, frozen=True, kw_only=True):
    """A requested gang."""

    name: str
    nodes: int
    asked_at: datetime


class GangStart(Struct, frozen=True, kw_only=True):
    """The start time and the nodes of a gang, as reported by the batch system."""

    at: datetime
    nodes: tuple[str, ...]


class BatchGangEnd(Struct, frozen=True, kw_only=True):
    """The record of an ended gang. The record never changes."""

    name: str
    job: str
    reason: str
    preempted: bool = False
    cancelled: bool = False
    exit_code: int | None = None
    began: GangStart | None = None  # None if the gang never ran
    ended_at: datetime
    noted_at: datetime


class BatchGangRecord(Struct, frozen=True, kw_only=True):
    """The files of one gang in the shared folder."""

    name: str
    intent: BatchIntent | None = None
    job: str = ""
    begun: str = ""
    end: str = ""
    refusal: str = ""
    seen: GangStart | None = None
    removing: bool = False


_FILES = ("gang.json", "job", "begun", "end", "refusal", "seen", "removing")


class SharedWorkspace:
    """One installation's part of the shared folder, accessed through a login session."""

    def __init__(self, login_session: LoginSession, installation: str, folder: str) -> None:
        self._login_session = login_session
        self._folder = folder
        self.mark = hashlib.sha256(installation.encode()).hexdigest()[:12]
        self._own = f"{folder}/{self.mark}"
        self.mail = f"{self._own}/mail"
        self._placed: str | None = None

    def gang(self, name: str) -> str:
        return f"{self._own}/gangs/{name}"

    def ended(self, name: str) -> str:
        return f"{self._own}/ended/{name}"

    async def place_agent(self, archive: bytes) -> str:
        """Copy the agent to the shared folder unless the folder already contains this version of
        the agent. Returns its folder.
        """
        if self._placed is None:
            folder = f"{self._folder}/agents/{hashlib.sha256(archive + _START).hexdigest()[:16]}"
            if not await self._login_session.has(f"{folder}/start.py"):
                # the archive is unpacked, so that Python can store compiled files next to sources
                with zipfile.ZipFile(io.BytesIO(archive)) as files:
                    agent = {
                        f"{folder}/agent/{name}": files.read(name) for name in files.namelist()
                    }
                await self._login_session.write(agent, keep=True)
                await self._login_session.write({f"{folder}/start.py": _START}, keep=True)
            self._placed = folder
        return self._placed

    async def note_intent(
        self,
        spec: GangSpec,
        now: datetime,
        own_cache: str,
        taken_s: float,
        warning_s: float,
        source: str,
    ) -> bool:
        """Record a gang before its submission. Return False if the name is already in use by a
        running or ended gang.
        """
        part = spec.offer.accelerator_part
        config = AgentConfigFile(
            gang=spec.name,
            # `start.py` adds the rank to the address of the mailbox, and sets rank and home
            address=f"{self.mail}/{spec.name}",
            rank=0,
            home="",
            token=spec.agent_endpoint.token,
            cache=f"{self._folder}/cache",
            own_cache=own_cache,
            storage=f"{self._folder}/storage",
            lease_s=spec.lease.total_seconds(),
            grace_s=spec.grace.total_seconds(),
            memory_mib=0,  # 0: no limit here, because the batch system limits the memory
            device_part=part,
            device_memory_mib=spec.offer.accelerator_memory_mib if part < 1 else 0,
            leaves_after_s=LEAVES_AFTER_S,
            taken=ReclaimSignal(
                unless=f"{self.gang(spec.name)}/removing",
                seconds=taken_s,
                warning=f"{self.gang(spec.name)}/warned",
                warning_s=warning_s,
                source=source,
            ),
        )
        intent = BatchIntent(name=spec.name, nodes=spec.nodes, asked_at=now)
        files = {
            "gang.json": msgspec.json.encode(intent),
            "config.json": msgspec.json.encode(
                {**asdict(config), "accelerators": spec.offer.accelerator_count}
            ),
        }
        return await self._login_session.make(self.gang(spec.name), files, [self.ended(spec.name)])

    async def note_job(self, name: str, job: str) -> None:
        await self._login_session.write({f"{self.gang(name)}/job": job.encode()}, keep=True)

    async def note_seen(self, name: str, began: GangStart) -> None:
        await self._login_session.write(
            {f"{self.gang(name)}/seen": msgspec.json.encode(began)}, keep=True
        )

    async def note_removal(self, name: str) -> None:
        await self._login_session.write({f"{self.gang(name)}/removing": b""}, keep=True)

    async def records(self) -> dict[str, BatchGangRecord]:
        """Return the records of all gangs that have a folder, by name."""
        tree = await self._login_session.tree(f"{self._own}/gangs", _FILES)
        return {name: _record(name, files) for name, files in tree.items()}

    async def record(self, name: str) -> BatchGangRecord | None:
        paths = {f"{self.gang(name)}/{file}": file for file in _FILES}
        found = await self._login_session.read(list(paths))
        return _record(name, {paths[path]: text for path, text in found.items()}) if found else None

    async def exits(self, name: str, nodes: int) -> Sequence[AgentExit]:
        """Return the records in which agents state how their work ended, sorted by rank. Missing
        records are omitted.
        """
        paths = [f"{self.gang(name)}/{rank}/exit.json" for rank in range(nodes)]
        found = await self._login_session.read(paths)
        exits = [_decode(found[path], AgentExit) for path in paths if path in found]
        return [each for each in exits if each is not None]

    async def ranks_with(self, file: str, name: str, nodes: int) -> Sequence[int]:
        """Return the ranks whose agents have written the file `file` into their home folders."""
        paths = {f"{self.gang(name)}/{rank}/{file}": rank for rank in range(nodes)}
        return [paths[path] for path in await self._login_session.read(list(paths))]

    async def last_words(self, name: str) -> str:
        """Return the last line of the batch job's log."""
        path = f"{self.gang(name)}/batch.log"
        lines = (await self._login_session.read([path])).get(path, "").split("\n")
        return next((line.strip()[:500] for line in reversed(lines) if line.strip()), "")

    async def forget(self, name: str, nodes: int) -> None:
        """Remove a gang's files."""
        letters = [f"{self.mail}/{name}.{rank}" for rank in range(nodes)]
        await self._login_session.drop([self.gang(name), *letters], f"{self._own}/trash")

    async def close(self, ended: BatchGangEnd, nodes: int) -> None:
        """Record that the gang has ended, then remove the gang's files."""
        await self._login_session.write(
            {self.ended(ended.name): msgspec.json.encode(ended)}, keep=True
        )
        await self.forget(ended.name, nodes)

    async def remembered(self, now: datetime) -> dict[str, BatchGangEnd]:
        """Return the records of ended gangs, and delete old records."""
        texts = await self._login_session.texts(f"{self._own}/ended")
        read = {name: _decode(text, BatchGangEnd) for name, text in texts.items()}
        kept = {
            name: ended
            for name, ended in read.items()
            if ended and now - ended.noted_at < REMEMBERED
        }
        if len(kept) < len(texts):
            await self._login_session.drop(
                [self.ended(name) for name in texts if name not in kept], f"{self._own}/trash"
            )
        return kept


def as_seen(ended: BatchGangEnd) -> GangSeen:
    """Convert the record of an ended gang to the status that the control plane reads."""
    nodes = list_nodes(ended.job, ended.began, ended.ended_at)
    seen = GangSeen.make_ended(ended.name, ended.reason, ended.exit_code, nodes)
    return replace(seen, engine_id=ended.job, preempted=ended.preempted, cancelled=ended.cancelled)


def list_nodes(
    job: str, began: GangStart | None, ended_at: datetime | None = None
) -> Sequence[NodeSeen]:
    """Return the status of a gang's nodes, sorted by rank."""
    if began is None:
        return ()
    return [
        NodeSeen(
            rank=rank,
            engine_id=f"{job}.{node}.{rank}",
            started_at=began.at,
            ended_at=None if ended_at is None else max(began.at, ended_at),
            address=node,
        )
        for rank, node in enumerate(began.nodes)
    ]


def _record(name: str, files: Mapping[str, str]) -> BatchGangRecord:
    return BatchGangRecord(
        name=name,
        intent=_decode(files.get("gang.json", ""), BatchIntent),
        job=files.get("job", "").strip(),
        begun=files.get("begun", "").strip(),
        end=files.get("end", "").strip(),
        refusal=files.get("refusal", "").strip(),
        seen=_decode(files.get("seen", ""), GangStart),
        removing="removing" in files,
    )


def _decode(text: str, kind: type[_T]) -> _T | None:
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(text, type=kind)
    return None
