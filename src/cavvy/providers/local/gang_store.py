"""Starts and watches the agents of this machine's gangs, and cleans up after the agents have ended.

The methods block briefly and run in threads, one at a time. All state is in files, so a server that
was killed at any point continues correctly after a restart. The intent is written before the first
agent starts, and each agent's process is recorded after the agent has started. An agent that was
started but not recorded is found by its command line.
"""

import fcntl
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Lock

from cavvy.agent.documents import AgentConfigFile
from cavvy.domain.values import Struct, field, replace
from cavvy.providers.base import GangSpec, NoCapacity, NodeSeen, Refused, TryAgain
from cavvy.providers.hosts.records import (
    AgentExit,
    HostGangEnd,
    note,
    read,
    read_file,
    settle,
    write,
)
from cavvy.providers.hosts.supervisor.processes import GANG_MARK, RANK_MARK
from cavvy.providers.hosts.supervisor.service import PARTS_SLACK, find_death
from cavvy.providers.local import processes
from cavvy.providers.local.processes import ForkServer, LocalProcess
from cavvy.providers.local.records import (
    EARLIER,
    LastDelivery,
    LocalIntent,
    LocalRemoval,
    RankDeath,
    RankRound,
    ReplacedRanks,
    take_over,
)
from cavvy.trees import remove_tree

REMEMBERED = timedelta(
    hours=2
)  # how long records of ended gangs are kept; the provider interface requires one hour
PATIENCE = timedelta(seconds=5)  # time for the agents' last reports, after the gang's grace period
REAPER = timedelta(seconds=3)  # time that the reaper of a killed agent has to end the work
FIRST_LOOK_S, LAST_LOOK_S = (
    0.05,
    5.0,
)  # pauses between polls of processes that do not exit; each is longer than the one before
CONTAINER_ENTRY = "entry.sh"  # exists in an agent's folder if the work runs in a container
DELIVERIES = 3  # maximum attempts to deliver the last reports of a killed agent
_NAME = re.compile(r"[a-z0-9-]{1,63}")


class LocalRank(Struct, frozen=True, kw_only=True):
    """One rank and its agent, as found by a poll."""

    number: int
    process: LocalProcess | None = None
    started_at: datetime | None = None  # if it replaces a lost rank; None: with its gang
    dead_at: datetime | None = None
    exit: AgentExit | None = None
    in_order: bool = False
    courier: LocalProcess | None = (
        None  # the process that delivers the reports of a killed agent or removes its container
    )
    # the reason why the rank has not ended although its agent is dead
    waits_for: str = ""
    # seconds until the next poll, if there is no process to watch; 0 if no poll is planned
    again_s: float = 0

    def see(self, intent: LocalIntent) -> NodeSeen:
        """Describe this node for the control plane. The node counts as running while processes of a
        dead agent still run, or while the agent's reports are being delivered.
        """
        return NodeSeen(
            rank=self.number,
            engine_id=str(self.process.pid) if self.process else "",
            started_at=self.started_at or intent.launched_at,
            ended_at=None if self.waits_for else self.dead_at,
            address="127.0.0.1",
        )


class LivingGang(Struct, frozen=True, kw_only=True):
    """A gang that has not ended."""

    intent: LocalIntent
    ranks: Sequence[LocalRank]
    removal: LocalRemoval | None = None
    replaced: Sequence[NodeSeen] = ()


class LocalGangStore(Struct):
    """One installation's gangs below the folder `home`. `command` starts an agent; the path of the
    agent's configuration is appended to the command.
    """

    home: Path
    installation: str
    command: Sequence[str]
    environ: Mapping[str, str]
    engine: Callable[[], str | None]  # returns "podman" or "docker", whichever works now, or None
    now: Callable[[], datetime]
    _lock: Lock = field(default_factory=Lock)
    _fork_server: ForkServer | None = None  # starts all agents of `make_command` but the first
    _has_started: bool = False
    _seen_alive: set[LocalProcess] = field(default_factory=set)
    # (gang, rank) -> the time since which the agent has been dead while its processes still run
    _orphaned: dict[tuple[str, int], datetime] = field(default_factory=dict)
    _ended: dict[str, HostGangEnd] | None = None
    # True at the start, because an earlier server may have left discarded folders
    has_trash: bool = True
    # working folders of ended gangs whose end cannot be recorded, because the disk is full
    _left: list[Path] = field(default_factory=list)

    def launch(self, spec: GangSpec, configs: Sequence[AgentConfigFile]) -> LivingGang | None:
        """Start the agents that are not started yet. Return None if the gang has already ended.
        Raises NoCapacity, Refused, TryAgain.
        """
        with self._alone(), _as_try_again():
            if _NAME.fullmatch(spec.name) is None or spec.installation != self.installation:
                raise Refused(f"{spec.name} is not the name of a gang of this installation")
            if self._over(spec.name) is not None:
                return None
            folder = self._folder(spec.name)
            intent = self._intent(spec.name)
            resumed = intent is not None
            if intent is None:
                self._check_free(spec, configs)
                intent = self._prepare(spec, configs)
            if intent.installation != self.installation:
                raise Refused(
                    f"{spec.name}: another installation has a gang of this name on this machine"
                )
            if not (folder / "removing.json").exists():
                self._start_missing(intent, resumed)
            return self._living(intent)

    def replace(self, spec: GangSpec, configs: Sequence[AgentConfigFile]) -> LivingGang | None:
        """Start a new agent for each of these configurations, in place of what is left of its rank.
        A rank that already got an agent in this round is left as it is. Return None if the gang has
        ended or is being removed. Raises Refused, TryAgain.
        """
        with self._alone(), _as_try_again():
            intent = self._intent(spec.name) if self._over(spec.name) is None else None
            if intent is None or (self._folder(spec.name) / "removing.json").exists():
                return None
            for config in configs:
                known = read(self._folder(spec.name) / str(config.rank) / "round.json", RankRound)
                if known is None or known.number != spec.round:
                    self._clear(intent, config.rank)
                    self._renew(spec, config)
            self._start_missing(intent, resumed=True)
            return self._living(intent)

    def look(self, name: str | None = None) -> Sequence[LivingGang | HostGangEnd]:
        """Return all gangs of this installation, or only the named gang, and kill the processes
        that dead agents left behind. Raises TryAgain.
        """
        with self._alone(), _as_try_again():
            if name is None:
                self._forget()
            if name is not None:
                gang = self._over(name) or self._look(name)
                return [] if gang is None else [gang]
            living = [self._look(each) for each in self._names() if self._over(each) is None]
            return [
                *(gang for gang in living if isinstance(gang, LivingGang)),
                *self._remembered().values(),
            ]

    def is_separated(self) -> bool:
        """Return whether every gang that has not ended runs separated from other jobs. A gang that
        was started without separation stays without separation. Raises TryAgain.
        """
        with self._alone(), _as_try_again():
            intents = [self._intent(each) for each in self._names() if self._over(each) is None]
            return all(each.separates for each in intents if each is not None)

    def remove(self, name: str) -> timedelta | None:
        """Start the removal of a gang. Return the time until the gang's remaining processes are
        killed, or None if nothing is left to remove. Raises TryAgain.
        """
        with self._alone(), _as_try_again():
            folder = self._folder(name)
            intent = self._intent(name) if _NAME.fullmatch(name) else None
            if intent is None or intent.installation != self.installation:
                return None
            if self._over(name) is not None:
                return None
            if read(folder / "removing.json", LocalRemoval) is None:
                self._ask_to_leave(intent)
            gang = self._look(name)
            return (
                gang.removal.kill_at - self.now()
                if isinstance(gang, LivingGang) and gang.removal
                else None
            )

    def close(self) -> None:
        """Write the records that were delayed by a full disk, and end the fork server."""
        with self._alone(), suppress(OSError):
            if self._fork_server is not None:
                self._fork_server.close()
            self._forget()

    def empty_trash(self) -> None:
        """Delete discarded folders. The deletion can take a long time. The caller needs no lock. A
        deletion that fails is repeated later.
        """
        self.has_trash = False
        while self._left:
            remove_tree(self._left.pop(), ignore_errors=True)
        for path in self._scan("trash"):
            remove_tree(path, ignore_errors=True)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the gangs against other threads, and against other servers that share the folder.
        The processes that the caller starts do not inherit the lock.
        """
        with self._lock, _as_try_again(), open(self.home / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    # Launching

    def _check_free(self, spec: GangSpec, configs: Sequence[AgentConfigFile]) -> None:
        """Raise NoCapacity if one of the devices is in use. A control plane that lost data, or was
        restored from an old backup, can wrongly consider devices free.
        """
        wanted = {device for config in configs for device in config.devices or ()}
        parts = min((config.device_part for config in configs), default=1)
        if not wanted:
            return
        for each in self._names():
            other = self._intent(each)
            if other is None or other.name == spec.name or not wanted & set(other.devices):
                continue
            gang = self._over(other.name) or self._look(other.name)
            if not isinstance(gang, LivingGang):
                continue
            parts += other.part
            if parts > 1 + PARTS_SLACK:
                raise NoCapacity(
                    f"the gang {other.name} is using "
                    f"{', '.join(sorted(wanted & set(other.devices)))}"
                )

    def _prepare(self, spec: GangSpec, configs: Sequence[AgentConfigFile]) -> LocalIntent:
        """Write the intent and all configurations to a folder, and rename the folder, so that all
        files become visible at the same time.
        """
        intent = LocalIntent(
            name=spec.name,
            installation=spec.installation,
            nodes=spec.nodes,
            launched_at=self.now(),
            grace_s=spec.grace.total_seconds(),
            devices=[device for config in configs for device in config.devices or ()],
            part=min((config.device_part for config in configs), default=1),
            separates=all(config.separates for config in configs),
        )
        for unfinished in self.home.glob("agents/.new-*"):  # of servers that were killed
            remove_tree(unfinished, ignore_errors=True)
        fresh = self._folder(f".new-{spec.name}")
        try:
            fresh.mkdir(mode=0o700, parents=True)
            write(fresh / "gang.json", intent)
            for config in configs:
                rank = fresh / str(config.rank)
                rank.mkdir(mode=0o700)
                write(rank / "config.json", config)
            os.rename(fresh, self._folder(spec.name))
        except OSError:
            remove_tree(fresh, ignore_errors=True)
            raise
        return intent

    def _clear(self, intent: LocalIntent, number: int) -> None:
        """Kill what is left of a rank, record its end, and discard its files. If the server is
        killed meanwhile, the rank counts as dead until it is replaced."""
        folder, home = self._folder(intent.name), self._home(intent.name, number)
        left = processes.list_marked(intent.name, number)
        for process in left:
            processes.send(process, signal.SIGKILL)
        known = read(folder / "replaced.json", ReplacedRanks) or ReplacedRanks()
        if (folder / str(number)).exists():
            death = read(folder / str(number) / "dead.json", RankDeath)
            rank = LocalRank(
                number=number,
                process=read(folder / str(number) / "started.json", LocalProcess),
                started_at=self._started_at(intent.name, number),
                dead_at=self.now() if death is None else death.at,
            )
            nodes = (*known.nodes, rank.see(intent))
            write(folder / "replaced.json", ReplacedRanks(nodes=nodes))
        trash = self.home / "trash"
        trash.mkdir(mode=0o700, exist_ok=True)
        self.has_trash = True
        for each in (folder / str(number), home):
            with suppress(FileNotFoundError):
                os.rename(each, trash / f"{intent.name}-{number}-{os.urandom(8).hex()}")
        self._orphaned.pop((intent.name, number), None)

    def _renew(self, spec: GangSpec, config: AgentConfigFile) -> None:
        fresh = self._folder(f".new-{spec.name}-{config.rank}")
        remove_tree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700, parents=True)
        write(fresh / "config.json", config)
        write(fresh / "round.json", RankRound(number=spec.round, started_at=self.now()))
        os.rename(fresh, self._folder(spec.name) / str(config.rank))

    def _started_at(self, gang: str, number: int) -> datetime | None:
        known = read(self._folder(gang) / str(number) / "round.json", RankRound)
        return None if known is None else known.started_at

    def _start_missing(self, intent: LocalIntent, resumed: bool) -> None:
        """Start the agents that were never started. The homes of all ranks exist before the first
        work can run, so that no work can put something else in their place.
        """
        for number in range(intent.nodes):
            self._home(intent.name, number).mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(intent.nodes):
            folder = self._folder(intent.name) / str(number)
            if resumed and (self._process(folder) is not None or _was_started(folder)):
                continue
            try:
                self._start(intent.name, number)
            except OSError as error:
                self._undo(intent)
                if isinstance(error, (FileNotFoundError, PermissionError)):
                    raise Refused(f"the agent cannot be started: {error}") from error
                raise TryAgain(f"the agent cannot be started now: {error}") from error

    def _start(self, gang: str, number: int) -> None:
        process = self._spawn(gang, number, ())
        write(self._folder(gang) / str(number) / "started.json", process)
        self._seen_alive.add(process)

    def _spawn(self, gang: str, number: int, options: Sequence[str]) -> LocalProcess:
        folder = self._folder(gang) / str(number)
        environ = {**self.environ, GANG_MARK: gang, RANK_MARK: str(number)}
        command = [*self.command, *options, str(folder / "config.json")]
        log = folder / "agent.log"
        if self._has_started and processes.forks(self.command):
            if self._fork_server is None:
                self._fork_server = ForkServer(self.environ)
            process = self._fork_server.start(command, environ, log)
            process = process or processes.find_command(command[-1])
            if process is not None:
                return process
        self._has_started = True
        return processes.start(command, environ, log)

    def _reap(self, process: LocalProcess) -> int | None:
        """Reap an agent. Return the agent's exit code, or None if it is still running or was
        started by an earlier server."""
        code = processes.reap(process)
        if code is None and self._fork_server is not None:
            code = self._fork_server.reap(process)
        return code

    def _undo(self, intent: LocalIntent) -> None:
        """Kill the agents that were started, because a gang starts as a whole or not at all."""
        for number in range(intent.nodes):
            for process in processes.list_marked(intent.name, number):
                processes.send(process, signal.SIGKILL)
        self._discard(intent.name)

    # Polling

    def _look(self, name: str) -> LivingGang | HostGangEnd | None:
        intent = self._intent(name)
        if intent is None or intent.installation != self.installation:
            return None
        gang = self._living(intent)
        if any(
            rank.process is None and rank.dead_at is None for rank in gang.ranks
        ):  # an earlier server was killed during a launch
            self._start_missing(intent, resumed=True)
            gang = self._living(intent)
        if any(rank.dead_at is None or rank.waits_for for rank in gang.ranks):
            return gang
        return self._close(gang)

    def _living(self, intent: LocalIntent) -> LivingGang:
        removal = read(self._folder(intent.name) / "removing.json", LocalRemoval)
        overdue = removal is not None and self.now() >= removal.kill_at
        ranks = [self._rank(intent, number, overdue, removal) for number in range(intent.nodes)]
        known = read(self._folder(intent.name) / "replaced.json", ReplacedRanks)
        nodes = () if known is None else known.nodes
        return LivingGang(intent=intent, ranks=ranks, removal=removal, replaced=nodes)

    def _rank(
        self, intent: LocalIntent, number: int, overdue: bool, removal: LocalRemoval | None
    ) -> LocalRank:
        folder = self._folder(intent.name) / str(number)
        if not folder.exists():  # an earlier server was killed while it replaced the rank
            return LocalRank(number=number, dead_at=self.now())
        process, began = self._process(folder), self._started_at(intent.name, number)
        death = read(folder / "dead.json", RankDeath)
        if death is None:
            rank = LocalRank(number=number, process=process, started_at=began)
            found = self._clear_rank(intent, rank, removal)
            if isinstance(found, LocalRank):
                return found
            death = found
            note(folder / "dead.json", death)
        files = self._agent_files(intent.name, number)
        left = read(files / "exit.json", AgentExit)
        rank = LocalRank(
            number=number,
            process=process,
            started_at=began,
            dead_at=death.at,
            in_order=death.in_order,
            exit=left,
        )
        owes = not death.in_order or (files / "undelivered").exists()
        if owes and (courier := self._deliver(intent.name, number, overdue, removal)) is not None:
            return replace(
                rank, courier=courier, waits_for="the agent's last messages are being delivered"
            )
        return rank

    def _clear_rank(
        self, intent: LocalIntent, rank: LocalRank, removal: LocalRemoval | None
    ) -> LocalRank | RankDeath:
        """End what remains of a rank. While a process or the container of the rank still runs,
        return the state of the rank; after that, return how the rank ended.
        """
        number, process = rank.number, rank.process
        folder = self._folder(intent.name) / str(number)
        overdue = removal is not None and self.now() >= removal.kill_at
        if process is not None and processes.lives(process) and not overdue:
            self._seen_alive.add(process)
            return rank
        if process is None and not _was_started(folder) and removal is None:
            return rank
        in_order = process is not None and self._reap(process) == 0
        if (not in_order or overdue) and (
            waited := self._rest_lives(intent.name, number, overdue)
        ) is not None:
            again_s = min(max(waited.total_seconds() / 4, FIRST_LOOK_S), LAST_LOOK_S)
            reason = "processes of the dead agent are being killed"
            return replace(rank, waits_for=reason, again_s=again_s)
        if not in_order and (remover := self._remove_container(intent.name, number)) is not None:
            reason = "the container of the dead agent is being removed"
            return replace(rank, courier=remover, waits_for=reason)
        files = self._agent_files(intent.name, number)
        return RankDeath(at=self._died_at(intent, files, process), in_order=in_order)

    def _rest_lives(self, gang: str, number: int, at_once: bool) -> timedelta | None:
        """Return how long processes of a rank have run since their agent died, or None if no
        process runs.

        Normally, an agent's reaper ends the agent's processes. If processes still run when the time
        `REAPER` has passed since the agent's death, this method kills these processes.
        """
        left = processes.list_marked(gang, number)
        if not left:
            self._orphaned.pop((gang, number), None)
            return None
        waited = self.now() - self._orphaned.setdefault((gang, number), self.now())
        if at_once or waited >= REAPER:
            for each in left:
                processes.send(each, signal.SIGKILL)
        return waited

    def _remove_container(self, gang: str, number: int) -> LocalProcess | None:
        """Remove the container of an agent that was killed together with its reaper. Return the
        container engine's process that removes the container, or None if no removal is running.
        """
        folder = self._folder(gang) / str(number)
        boxed = (self._home(gang, number) / CONTAINER_ENTRY).exists()
        engine = self.engine() if boxed else None
        if engine is None:
            return None
        remover = read(folder / "remover.json", LocalProcess)
        if remover is None:
            command = [engine, "rm", "-f", f"{gang}-{number}"]
            try:
                remover = processes.start(command, self.environ, folder / "agent.log")
            except (
                FileNotFoundError,
                PermissionError,
            ):  # the engine was uninstalled, and its containers with it
                return None
            note(folder / "remover.json", remover)
        if processes.lives(remover):
            return remover
        processes.reap(remover)
        return None

    def _deliver(
        self, gang: str, number: int, overdue: bool, removal: LocalRemoval | None
    ) -> LocalProcess | None:
        """Deliver the log and the exit record that a killed agent left on disk. Return the
        delivering process, or None if no delivery is running.
        """
        folder = self._folder(gang) / str(number)
        if (sweeper := self._sweep(gang, number)) is not None:
            return sweeper
        last = read(folder / "deliver.json", LastDelivery)
        if last is not None and processes.lives(last.process):
            if overdue:
                processes.send(last.process, signal.SIGKILL)
            return last.process
        if (
            (last is not None and last.done)
            or removal is not None
            or not (self._agent_files(gang, number) / "started").exists()
        ):
            return None
        tries = last.tries if last is not None else 0
        if last is not None and (self._reap(last.process) == 0 or tries >= DELIVERIES):
            note(folder / "deliver.json", replace(last, done=True))
            return None
        courier = self._spawn(gang, number, ("--deliver",))
        note(folder / "deliver.json", LastDelivery(process=courier, tries=tries + 1))
        return courier

    def _sweep(self, gang: str, number: int) -> LocalProcess | None:
        """Let an agent remove the MIG instance that a killed agent left. Return its process, or
        None if none runs."""
        folder = self._folder(gang) / str(number)
        config = read(folder / "config.json", AgentConfigFile)
        if config is None or not config.instance:
            return None
        sweeper = read(folder / "sweeper.json", LocalProcess)
        if sweeper is None:
            sweeper = self._spawn(gang, number, ("--sweep",))
            note(folder / "sweeper.json", sweeper)
        if processes.lives(sweeper):
            return sweeper
        self._reap(sweeper)
        return None

    def _process(self, folder: Path) -> LocalProcess | None:
        """Return the recorded process of the agent. If the server was killed before it recorded a
        process, find the process and record it.
        """
        process = read(folder / "started.json", LocalProcess)
        if (
            process is None
            and (process := processes.find_command(str(folder / "config.json"))) is not None
        ):
            write(folder / "started.json", process)
        return process

    def _died_at(self, intent: LocalIntent, folder: Path, process: LocalProcess | None) -> datetime:
        """Return the time when the agent exited, from the agent's own record. If this record is
        missing, return the current time if this server has seen the agent running; otherwise,
        return the time when the agent last wrote a file.
        """
        now = self.now()
        alive_at = now.timestamp() if process in self._seen_alive else None
        at = datetime.fromtimestamp(find_death(str(folder), alive_at), UTC)
        return min(max(at, intent.launched_at), now)

    def _close(self, gang: LivingGang) -> HostGangEnd:
        first = next(
            (rank.exit for rank in gang.ranks if rank.exit is not None and rank.exit.exit_code),
            None,
        )
        lost = [rank.number for rank in gang.ranks if not rank.in_order]
        if gang.removal is not None:
            reason = "removed"
        elif lost:
            reason = (
                f"the agent of rank {lost[0]} was killed or "
                f"failed{self._complaint(gang.intent.name, lost[0])}"
            )
        else:
            reason = first.reason if first is not None and first.reason else "the agents exited"
        ended = HostGangEnd(
            name=gang.intent.name,
            installation=gang.intent.installation,
            reason=reason,
            exit_code=first.exit_code
            if first
            else next((r.exit.exit_code for r in gang.ranks if r.exit), None),
            ranks=[rank.see(gang.intent) for rank in gang.ranks],
            replaced=gang.replaced,
            seen_at=self.now(),
        )
        (self.home / "ended").mkdir(mode=0o700, exist_ok=True)
        recorded = note(self.home / "ended" / f"{ended.name}.json", ended)
        self._remembered()[ended.name] = ended
        self._seen_alive -= {rank.process for rank in gang.ranks if rank.process is not None}
        if recorded:
            self._discard(ended.name)
        else:
            self._discard_work(gang)
        return ended

    def _complaint(self, gang: str, number: int) -> str:
        """Return a colon and the last line of the agent's log, or "" if the log is empty."""
        log = read_file(self._folder(gang) / str(number) / "agent.log")
        lines = log.decode(errors="replace").strip().splitlines()
        return f": {lines[-1][:500]}" if lines else ""

    # Removing

    def _ask_to_leave(self, intent: LocalIntent) -> None:
        now = self.now()
        folder = self._folder(intent.name)
        removal = LocalRemoval(
            asked_at=now, kill_at=now + timedelta(seconds=intent.grace_s) + PATIENCE
        )
        note(folder / "removing.json", removal)
        for number in range(intent.nodes):
            delivery = read(folder / str(number) / "deliver.json", LastDelivery)
            for process in (
                self._process(folder / str(number)),
                delivery.process if delivery else None,
            ):
                if process is not None:
                    processes.send(process, signal.SIGTERM)

    def _forget(self) -> None:
        """Write delayed records, and delete the records of gangs that ended long ago."""
        if settle():
            for each in self._names():
                # the end of this gang was recorded while the disk was full
                if self._over(each) is not None:
                    self._discard(each)
        self._learn_ends()
        oldest = self.now() - REMEMBERED
        for name, ended in list(self._remembered().items()):
            if ended.seen_at < oldest:
                (self.home / "ended" / f"{name}.json").unlink(missing_ok=True)
                del self._remembered()[name]

    def _discard(self, gang: str) -> None:
        """Move a gang's folders to the trash; `empty_trash` deletes them later."""
        trash = self.home / "trash"
        trash.mkdir(mode=0o700, exist_ok=True)
        self.has_trash = True
        for folder in (self.home / "gangs" / gang, self._folder(gang)):
            with suppress(FileNotFoundError):
                os.rename(folder, trash / f"{folder.name}-{os.urandom(8).hex()}")

    def _discard_work(self, gang: LivingGang) -> None:
        """Let `empty_trash` delete the working folders of a gang whose end cannot be recorded,
        because the disk is full. The work itself may have filled the disk.

        The gang's folder is kept, because a later server finds the gang only by this folder. The
        working folders are deleted in place, because a move to the trash needs space.
        """
        homes = [self._home(gang.intent.name, rank.number) for rank in gang.ranks]
        self._left += [home / "work" for home in homes]
        self.has_trash = True

    def _over(self, name: str) -> HostGangEnd | None:
        """Return the record of an ended gang, or None if the gang has not ended. The disk is also
        read, because another server may have written the record.
        """
        ended = self._remembered().get(name) or read(
            self.home / "ended" / f"{name}.json", HostGangEnd
        )
        return ended if ended is not None and ended.installation == self.installation else None

    def _remembered(self) -> dict[str, HostGangEnd]:
        if self._ended is None:
            self._ended = {}
            self._learn_ends()
        return self._ended

    def _learn_ends(self) -> None:
        """Read the records that another server has written about ended gangs."""
        known = self._remembered()
        for path in self._scan("ended"):
            ended = None if path.stem in known else read(path, HostGangEnd)
            if ended is not None and ended.installation == self.installation:
                known[ended.name] = ended

    def _scan(self, folder: str) -> Sequence[Path]:
        try:
            return [
                self.home / folder / name
                for name in os.listdir(self.home / folder)
                if not name.startswith(".")
            ]
        except FileNotFoundError:
            return []

    def _names(self) -> Sequence[str]:
        """Return the names of all gangs that have files here."""
        return sorted({path.name for folder in ("agents", "gangs") for path in self._scan(folder)})

    def _folder(self, gang: str) -> Path:
        """Return the folder of a gang's records, which the work does not see."""
        return Path(f"{self.home}/agents/{gang}")

    def _home(self, gang: str, number: int) -> Path:
        """Return the home folder of a rank, in which the work can change everything."""
        return Path(f"{self.home}/gangs/{gang}/{number}")

    def _agent_files(self, gang: str, number: int) -> Path:
        """Return the folder in which the agent of a rank keeps its records."""
        folder = self._folder(gang) / str(number)
        return self._home(gang, number) if (folder / EARLIER).exists() else folder

    def _intent(self, gang: str) -> LocalIntent | None:
        """Return the intent of a gang, or None if the gang does not exist. A gang that an earlier
        version of the server started is taken over first.
        """
        found = read(self._folder(gang) / "gang.json", LocalIntent)
        if found is not None or not (self.home / "gangs" / gang / "gang.json").exists():
            return found
        return take_over(self.home, gang, self.installation, self.now())


def _was_started(folder: Path) -> bool:
    """Return whether an agent ran in this folder, even if its process was not recorded."""
    return any((folder / name).exists() for name in ("lock", "exit.json", EARLIER))


@contextmanager
def _as_try_again() -> Iterator[None]:
    """Convert disk errors to TryAgain."""
    try:
        yield
    except OSError as error:
        raise TryAgain(f"this machine's records cannot be read or written now: {error}") from error
