"""The gangs of this machine: starts agents, looks after them and gives back what they leave, all by files.

Everything here blocks a little and is called in threads, one at a time. Nothing is believed that is not on disk, so
a server that was killed at any point goes on from there: an intent is written before the first agent starts, an
agent's process is recorded after, and one that was started in between is found by its command line.
"""

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Lock

from remuda.providers.base import GangSpec, NoCapacity, Refused, TryAgain
from remuda.providers.local import processes
from remuda.providers.local.processes import GANG_MARK, RANK_MARK, Process
from remuda.providers.local.records import AgentConfig, Ended, EndedRank, Exit, Intent, Removal, read, write

REMEMBERED = timedelta(hours=2)  # the seam asks for one at least
PATIENCE = timedelta(seconds=5)  # beyond the gang's own grace, for its agents' last words
NEVER_STARTED = timedelta(minutes=1)  # after which an intent without an agent is over
_NAME = re.compile(r"[a-z0-9-]{1,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One agent as a look found it."""

    number: int
    process: Process | None = None
    dead_at: datetime | None = None
    exit: Exit | None = None
    waits_for: str = ""  # why a dead agent's rank is not over yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Living:
    """A gang that is not over."""

    intent: Intent
    ranks: Sequence[Rank]
    removal: Removal | None = None


@dataclass(slots=True)
class Ground:
    """One installation's gangs under `home`. `command` starts an agent; its configuration's path is appended."""

    home: Path
    installation: str
    command: Sequence[str]
    environ: Mapping[str, str]
    now: Callable[[], datetime]
    _lock: Lock = field(default_factory=Lock)
    _seen_alive: set[Process] = field(default_factory=set)
    _ended: dict[str, Ended] | None = None

    def launch(self, spec: GangSpec, configs: Sequence[AgentConfig]) -> Living | None:
        """Start what is not started; None where the gang is over already. Raises NoCapacity, Refused, TryAgain."""
        with self._lock, _as_try_again():
            if _NAME.fullmatch(spec.name) is None or spec.installation != self.installation:
                raise Refused(f"{spec.name}: not a gang's name of this installation")
            if self._over(spec.name) is not None:
                return None
            folder = self._folder(spec.name)
            intent = read(folder / "gang.json", Intent)
            resumed = intent is not None
            if intent is None:
                self._check_free(spec, configs)
                intent = self._prepare(spec, configs)
            if intent.installation != self.installation:
                raise Refused(f"{spec.name}: another installation has a gang of this name on this machine")
            if not (folder / "removing.json").exists():
                self._start_missing(intent, resumed)
            return self._living(intent)

    def look(self, name: str | None = None) -> Sequence[Living | Ended]:
        """All gangs of this installation, or the one named; kills what dead agents left. Raises TryAgain."""
        with self._lock, _as_try_again():
            if name is None:
                self._forget()
            if name is not None:
                gang = self._over(name) or self._look(name)
                return [] if gang is None else [gang]
            living = (self._look(e.name) for e in self._scan("gangs") if self._over(e.name) is None)
            return [*(gang for gang in living if isinstance(gang, Living)), *self._remembered().values()]

    def remove(self, name: str) -> timedelta | None:
        """Start giving back. Answers how long until whatever still lives is killed. Raises TryAgain."""
        with self._lock, _as_try_again():
            folder = self._folder(name)
            intent = read(folder / "gang.json", Intent) if _NAME.fullmatch(name) else None
            if intent is None or intent.installation != self.installation:
                return None
            if self._over(name) is not None:
                self._discard(folder)
                return None
            if read(folder / "removing.json", Removal) is None:
                self._ask_to_leave(intent)
            gang = self._look(name)
            return gang.removal.kill_at - self.now() if isinstance(gang, Living) and gang.removal else None

    def empty_trash(self) -> None:
        """Delete what was discarded; may take long and needs no lock. What cannot be deleted is tried again later."""
        for entry in self._scan("trash"):
            shutil.rmtree(entry.path, ignore_errors=True)

    # Launching

    def _check_free(self, spec: GangSpec, configs: Sequence[AgentConfig]) -> None:
        """The control plane keeps the books; this catches books that were lost or restored from an old copy."""
        wanted = {device for config in configs for device in config.devices}
        if not wanted:
            return
        for entry in self._scan("gangs"):
            other = read(Path(entry.path) / "gang.json", Intent)
            if other is None or other.name == spec.name or not wanted & set(other.devices):
                continue
            gang = self._over(other.name) or self._look(other.name)
            if isinstance(gang, Living):
                raise NoCapacity(f"{', '.join(sorted(wanted & set(other.devices)))} in use by {other.name}")

    def _prepare(self, spec: GangSpec, configs: Sequence[AgentConfig]) -> Intent:
        """Write the intent and all configurations; they appear together, by one rename."""
        intent = Intent(
            name=spec.name,
            installation=spec.installation,
            nodes=spec.nodes,
            launched_at=self.now(),
            grace_s=spec.grace.total_seconds(),
            devices=[device for config in configs for device in config.devices],
        )
        fresh = self._folder(f".new-{spec.name}-{os.getpid()}")
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            fresh.mkdir(mode=0o700, parents=True)
            write(fresh / "gang.json", intent)
            for config in configs:
                rank = fresh / str(config.rank)
                rank.mkdir(mode=0o700)
                write(rank / "config.json", config)
            os.rename(fresh, self._folder(spec.name))
        except OSError:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        return intent

    def _start_missing(self, intent: Intent, resumed: bool) -> None:
        for number in range(intent.nodes):
            folder = self._folder(intent.name) / str(number)
            if resumed and (self._process(folder) is not None or _was_started(folder)):
                continue
            try:
                self._start(intent.name, number, ())
            except OSError as error:
                self._undo(intent)
                if isinstance(error, (FileNotFoundError, PermissionError)):
                    raise Refused(f"the agent cannot be started: {error}") from error
                raise TryAgain(f"the agent cannot be started now: {error}") from error

    def _start(self, gang: str, number: int, options: Sequence[str]) -> Process:
        folder = self._folder(gang) / str(number)
        environ = {**self.environ, GANG_MARK: gang, RANK_MARK: str(number)}
        command = [*self.command, *options, str(folder / "config.json")]
        process = processes.start(command, environ, folder / "agent.log")
        write(folder / "started.json", process)
        self._seen_alive.add(process)
        return process

    def _undo(self, intent: Intent) -> None:
        """All or none: what was started goes at once."""
        for number in range(intent.nodes):
            for process in processes.list_marked(intent.name, number):
                processes.send(process, signal.SIGKILL)
        self._discard(self._folder(intent.name))

    # Looking

    def _look(self, name: str) -> Living | Ended | None:
        folder = self._folder(name)
        intent = read(folder / "gang.json", Intent)
        if intent is None or intent.installation != self.installation:
            return None
        gang = self._living(intent)
        if any(rank.dead_at is None for rank in gang.ranks):
            return gang
        ended = self._close(gang)
        if gang.removal is not None:
            self._discard(folder)
        return ended

    def _living(self, intent: Intent) -> Living:
        removal = read(self._folder(intent.name) / "removing.json", Removal)
        overdue = removal is not None and self.now() >= removal.kill_at
        ranks = [self._rank(intent, number, overdue, removal) for number in range(intent.nodes)]
        return Living(intent=intent, ranks=ranks, removal=removal)

    def _rank(self, intent: Intent, number: int, overdue: bool, removal: Removal | None) -> Rank:
        folder = self._folder(intent.name) / str(number)
        dead_at = read(folder / "dead.json", datetime)
        process = self._process(folder)
        left = read(folder / "exit.json", Exit)
        if dead_at is not None:
            return Rank(number=number, process=process, dead_at=dead_at, exit=left)
        if process is not None and processes.lives(process) and not overdue:
            self._seen_alive.add(process)
            return Rank(number=number, process=process)
        if process is None and not _was_started(folder):
            if removal is None and self.now() - intent.launched_at < NEVER_STARTED:
                return Rank(number=number)
        elif (left is None or overdue) and self._kill_rest(intent.name, number):
            return Rank(number=number, process=process, waits_for="what its agent left behind is being killed")
        dead_at = self._died_at(intent, folder, process)
        write(folder / "dead.json", dead_at)
        return Rank(number=number, process=process, dead_at=dead_at, exit=left)

    def _process(self, folder: Path) -> Process | None:
        """The agent's process as recorded; one that was started just before we were killed is found and recorded."""
        process = read(folder / "started.json", Process)
        if process is None and (process := processes.find_command(str(folder / "config.json"))) is not None:
            write(folder / "started.json", process)
        return process

    def _kill_rest(self, gang: str, number: int) -> bool:
        """Kill every process of a rank; whether there was one."""
        left = processes.list_marked(gang, number)
        for process in left:
            processes.send(process, signal.SIGKILL)
        return bool(left)

    def _died_at(self, intent: Intent, folder: Path, process: Process | None) -> datetime:
        """When it left by its own record; else now if we saw it alive and were told, else its last sign of life."""
        now = self.now()
        try:
            at = datetime.fromtimestamp((folder / "exit.json").stat().st_mtime, UTC)
        except OSError:
            times = [entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(folder)]
            at = now if process in self._seen_alive else datetime.fromtimestamp(max(times, default=0), UTC)
        return min(max(at, intent.launched_at), now)

    def _close(self, gang: Living) -> Ended:
        first = next((rank.exit for rank in gang.ranks if rank.exit is not None and rank.exit.exit_code), None)
        lost = [rank.number for rank in gang.ranks if rank.exit is None]
        if gang.removal is not None:
            reason = "removed"
        elif lost:
            reason = f"the agent of rank {lost[0]} died without a word"
        else:
            reason = first.reason if first is not None and first.reason else "its agents left"
        ended = Ended(
            name=gang.intent.name,
            installation=gang.intent.installation,
            reason=reason,
            exit_code=first.exit_code if first else next((r.exit.exit_code for r in gang.ranks if r.exit), None),
            ranks=[_ended_rank(gang.intent, rank) for rank in gang.ranks],
            seen_at=self.now(),
        )
        (self.home / "ended").mkdir(mode=0o700, exist_ok=True)
        write(self.home / "ended" / f"{ended.name}.json", ended)
        self._remembered()[ended.name] = ended
        self._seen_alive -= {rank.process for rank in gang.ranks if rank.process is not None}
        return ended

    # Giving back

    def _ask_to_leave(self, intent: Intent) -> None:
        now = self.now()
        folder = self._folder(intent.name)
        removal = Removal(asked_at=now, kill_at=now + timedelta(seconds=intent.grace_s) + PATIENCE)
        write(folder / "removing.json", removal)
        for number in range(intent.nodes):
            process = self._process(folder / str(number))
            if process is not None:
                processes.send(process, signal.SIGTERM)

    def _forget(self) -> None:
        """Drop the record of gangs that ended long ago and were given back."""
        oldest = self.now() - REMEMBERED
        for name, ended in list(self._remembered().items()):
            if ended.seen_at < oldest and not self._folder(name).exists():
                (self.home / "ended" / f"{name}.json").unlink(missing_ok=True)
                del self._remembered()[name]

    def _discard(self, folder: Path) -> None:
        """Out of sight at once, by a rename; deleted by `empty_trash`."""
        trash = self.home / "trash"
        trash.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):
            os.rename(folder, trash / f"{folder.name}-{os.getpid()}-{len(os.listdir(trash))}")

    def _over(self, name: str) -> Ended | None:
        """The record of a gang that is over; looked for on disk too, since an older server may have written it."""
        ended = self._remembered().get(name) or read(self.home / "ended" / f"{name}.json", Ended)
        return ended if ended is not None and ended.installation == self.installation else None

    def _remembered(self) -> dict[str, Ended]:
        if self._ended is None:
            records = [read(Path(entry.path), Ended) for entry in self._scan("ended")]
            self._ended = {e.name: e for e in records if e is not None and e.installation == self.installation}
        return self._ended

    def _scan(self, folder: str) -> Sequence[os.DirEntry[str]]:
        try:
            return [entry for entry in os.scandir(self.home / folder) if not entry.name.startswith(".")]
        except FileNotFoundError:
            return []

    def _folder(self, gang: str) -> Path:
        return self.home / "gangs" / gang


def _was_started(folder: Path) -> bool:
    """Whether an agent has been here, even if no record of its process was left."""
    return any((folder / name).exists() for name in ("lock", "exit.json"))


def _ended_rank(intent: Intent, rank: Rank) -> EndedRank:
    assert rank.dead_at is not None
    engine_id = str(rank.process.pid) if rank.process is not None else ""
    return EndedRank(rank=rank.number, engine_id=engine_id, started_at=intent.launched_at, ended_at=rank.dead_at)


@contextmanager
def _as_try_again() -> Iterator[None]:
    """A disk that is full or away for a while is a passing fault."""
    try:
        yield
    except OSError as error:
        raise TryAgain(f"this machine's records cannot be read or written now: {error}") from error
