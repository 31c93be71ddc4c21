"""Runs the steps of the work one after another: prepares the folder, runs the task, copies its
outputs.
"""

from __future__ import annotations

import json
import os
import socket
import time

from .control_client import complain
from .disk import read_text, write_whole
from .gpu_faults import GPU
from .images.own_command import names_own_command
from .work.environment import SHELL_LINE, find_shell, write_rank_files
from .work.process import WorkProcess
from .work.reaper import ChildCommand

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from .access.execs import RankExecs
    from .allowed_folders import AllowedFolders
    from .checkpoint_sync import CheckpointSync
    from .config import AgentConfig, ConfigFields
    from .data.bucket_mounts import BucketMounts
    from .data.output_sync import OutputSync
    from .data.stream import PipeStreams
    from .documents import WorkConfig
    from .loop import EventLoop
    from .sidecar import SidecarPlace
    from .work.checkpoint_files import CheckpointWatcher
    from .work.monitor import WorkMonitor
    from .work.setup_meter import SetupMeter

    Failure = tuple[str, int | None, str]  # outcome, exit code and reason

    class Owner(Protocol):
        """Callbacks from the step runner to the rank's runner."""

        execs: RankExecs

        def say(self, kind: str, **fields: object) -> None: ...
        def wrote(self, data: bytes) -> None: ...
        def prepares(self) -> None: ...
        def wrote_before_work(self) -> None: ...
        def hear_rest(self) -> None: ...
        def checked(self) -> None: ...
        def prepared(self, *, reused: bool) -> None: ...
        def failed(self, outcome: str, code: int | None, reason: str) -> None: ...
        def ran(self, code: int, oom_kills: int) -> None: ...


SIGNALLED = 128  # exit code of a program that a signal ended, without the signal's number
PHASE_S = 0.1  # seconds between checks of a container's phase
QUESTION_S = 0.5  # within which the output of a container arrives
GROUP_PREFIX = "cavvy-"
# the first words of lines that report an event
EVENTS = (b"check", b"image", b"moved", b"restored", b"waits")


class StepRunner:
    """Runs each step in a process and reports the step's result to the owner."""

    def __init__(self, loop: EventLoop, config: AgentConfig, owner: Owner) -> None:
        self._loop = loop
        self._config = config
        self._owner = owner
        self.process: WorkProcess | None = None
        self._code: int | None = None
        # the task's exit code; set when the task has ended and its last files are still being sent
        self._task_code: int | None = None
        self.ended = False  # whether the task has ended; its last files may still be unsent
        self._oom_kills = 0
        self.gpu_excess = ""  # why the work was killed, if it used more GPU memory than its share
        self._asked = False  # whether the step's first process received SIGTERM before it ended
        self._was_killed = False  # whether the agent sent SIGKILL to the work
        self._was_asked = False  # whether the agent sent SIGTERM to the work
        self._patience_s = 0.0
        self._awaits_start = False  # whether SIGTERM waits for the start of a program
        self.interrupted = False  # whether the task itself received SIGTERM before it ended
        self._watch: WorkMonitor | None = None  # set while the task itself runs
        self._running = False  # whether the owner was notified that the task runs
        self._setup_meter: SetupMeter | None = None  # set while a setup runs
        self._group: str | None = None
        self._gpus: WorkProcess | None = None
        self._sweeper: WorkProcess | None = None
        self._stacks: WorkProcess | None = None  # takes the stacks of work that may hang
        self._streams: PipeStreams | None = None
        self.checkpoint_sync: CheckpointSync | None = (
            None  # uploads checkpoints if they are not on shared storage
        )
        # watches checkpoints if they are on shared storage
        self._checkpoints: CheckpointWatcher | None = None
        self._mounts: BucketMounts | None = None  # holds the mounts of buckets
        self.output_sync: OutputSync | None = None  # sends outputs while the work runs
        self._result: dict[str, object] = {}
        self._check_until: float | None = None
        self._touched = 0.0
        # called instead of a report when the processes of a discarded program have ended
        self._discarded: Callable[[], None] | None = None

    def ask(self, patience_s: float = 0) -> None:
        """Send SIGTERM to the current step's processes. A program that still starts has up to
        `patience_s` seconds to install its handler first."""
        if self.process is not None:
            if not self._was_asked:
                self._note_writers()
                self._look_for_question()
            self._was_asked = True
            self._patience_s = patience_s
            self.process.ask(patient=patience_s > 0)
        elif self._mounts is not None and not self._mounts.ready:
            self._mounts.kill()

    def insist(self) -> None:
        """Send SIGTERM now, if it waits for the start of a program."""
        if self._awaits_start and self.process is not None:
            self._awaits_start = False
            self._note_writers()
            self.process.ask()

    @property
    def can_rest(self) -> bool:
        """Whether the task itself runs, and nothing beside it that ends with it."""
        beside = (self.checkpoint_sync, self.output_sync, self._mounts, self._streams)
        return self._running and self.process is not None and not any(beside)

    def rest(self) -> None:
        """Leave the program of the task alone, which waits for the next attempt."""
        if self.process is not None:
            self.process.read_waiting()
        self._end_watch()
        self._running = False

    def go_on(self, loop: EventLoop, owner: Owner, work: WorkConfig, env: dict[str, str]) -> None:
        """Watch the program that waits, which goes on with the work of the next attempt."""
        self._take_over(loop, owner)
        self._work, self._env = work, env
        self._was_killed = self._was_asked = self.interrupted = self.ended = False
        self._code = self._task_code = None
        write_rank_files(self._config, work, env)
        if self._checkpoints is not None and work.checkpoint is not None:
            from .work.checkpoint_files import CheckpointWatcher

            folder = os.path.join(self._config.folder, work.checkpoint.path)
            place = work.checkpoint.storage or folder
            self._checkpoints = CheckpointWatcher(place, self._has_others(work))
        self._runs(reused=True)

    def _has_others(self, work: WorkConfig) -> bool:
        """Return whether processes that this agent does not see may write checkpoints, too. That is
        assumed of all work of several nodes, except on the server's own machine: only its agents
        have a folder of volumes, and all ranks of their work run there. Equal addresses would not
        show it: containers of one host share one, and nodes without a known one have 127.0.0.1."""
        return work.nodes > 1 and not self._config.volumes

    def discard(self, loop: EventLoop, owner: Owner, then: Callable[[], None]) -> None:
        """Kill the program that waits, and call `then` when its processes have ended."""
        self._take_over(loop, owner)
        self._discarded = then
        self.kill()

    def _take_over(self, loop: EventLoop, owner: Owner) -> None:
        self._loop, self._owner = loop, owner
        if self.process is not None:
            self.process.move(loop)

    def _note_writers(self) -> None:
        for each in (self.checkpoint_sync, self._checkpoints):
            if each is not None:
                each.note_writers()

    def _started(self, over: bool) -> None:
        if over:
            self.insist()
        else:
            self._awaits_start = True
            self._loop.after(self._patience_s, self.insist)

    def kill(self, *, save: bool = False) -> None:
        """Send SIGKILL to the current step's processes. Unless `save` is set, also kill the
        uploads."""
        if self.process is not None:
            if not self._was_killed:
                self._note_writers()
            self._was_killed = True
            self.process.kill()
        if not save:
            for each in self._rescuers():
                each.kill()

    def _rescuers(self) -> list[CheckpointSync | OutputSync | BucketMounts]:
        found = (self.checkpoint_sync, self.output_sync, self._mounts)
        return [each for each in found if each is not None]

    @property
    def finishing(self) -> bool:
        """Whether the work has ended and the upload of its last files is in progress."""
        return any(each.finishing for each in self._rescuers())

    def hurry(self) -> None:
        """Upload the work's files now, because the node may be reclaimed soon."""
        for each in self._rescuers():
            each.hurry()

    def reserve(self, seconds: float) -> float:
        """Return how many of a notice's `seconds` to reserve for uploading the work's last
        files."""
        self.hurry()
        needed = sum(
            1.5 * each.seconds + 1 if each.seconds else seconds / 4
            for each in self._rescuers()
            if each is not self._mounts or self._mounts.writable
        )
        return min(needed, seconds / 2)

    def check(self, work: WorkConfig, env: dict[str, str]) -> None:
        """Check the node; then call the owner's `checked` or `failed`."""
        from .node_check import LIMIT_S, check_node

        self._work = work
        self._check_until = time.monotonic() + LIMIT_S
        self._call(lambda channel: check_node(self._config, work, channel), env, self._checked)

    def prepare(self, work: WorkConfig, env: dict[str, str]) -> None:
        """Create the working folder and run the setup; then call the owner's `prepared` or
        `failed`."""
        from .work.prepare import prepare

        kept = ""
        if work.setup is not None and work.image is None:
            from .work.view import find_setup

            kept = find_setup(self._config, work)
            env["CAVVY_SETUP_DIR"] = kept + "/dir"
            if not self._config.boxed:  # an image has its own Python
                from .work.prepare import use_venv

                use_venv(env, kept + "/venv")

        def go() -> None:
            self._work = work
            if kept:
                self._owner.prepares()
            self._call(
                lambda channel: prepare(self._config, work, env, channel), env, self._prepared
            )
            if kept:
                self._measure_setup(kept)

        if not work.mounted:
            go()
            return
        from .data.bucket_mounts import BucketMounts

        try:
            self._mounts = BucketMounts(
                self._find_place(),
                work,
                mounted=go,
                failed=lambda: self._fail("setup", None, "a bucket could not be mounted"),
                stop=self.kill,
            )
        except OSError as error:
            self._fail("node", None, f"this node cannot start a process: {error}")

    def run(self, work: WorkConfig, env: dict[str, str], *, reused: bool) -> None:
        """Run the task; then call the owner's `ran` or `failed`."""
        self._work, self._env = work, env
        checkpoint = work.checkpoint
        if checkpoint is not None:
            folder = checkpoint.storage or os.path.join(self._config.folder, checkpoint.path)
            if checkpoint.sync and checkpoint.storage is None:
                from .checkpoint_sync import CheckpointSync

                given = None
                if work.volumes:
                    from .data.mounts import list_checkpoint_volumes

                    given = list_checkpoint_volumes(self._config, work)
                self.checkpoint_sync = CheckpointSync(
                    self._find_place(), folder, every_s=checkpoint.every_s, given=given
                )
            else:
                from .work.checkpoint_files import CheckpointWatcher

                self._checkpoints = CheckpointWatcher(folder, self._has_others(work))
        if work.mirrored:
            from .data.output_sync import OutputSync

            self.output_sync = OutputSync(self._find_place(), work)
        try:
            if work.streams:
                from .data.stream import PipeStreams

                self._streams = PipeStreams(self._find_place(), work, self.kill)
            self._run(work, env)
        except OSError as error:  # the disk is full, or no process can start
            replaced = isinstance(error, (IsADirectoryError, NotADirectoryError, FileExistsError))
            outcome = "setup" if replaced and work.setup is not None else "node"
            self._fail(outcome, None, f"this node cannot start the work: {error}")
            return
        if work.image is None:
            self._runs(reused=reused)

    def _find_place(self) -> SidecarPlace:
        from .sidecar import SidecarPlace

        return SidecarPlace(self._loop, self._config, self._owner.say)

    def _run(self, work: WorkConfig, env: dict[str, str]) -> None:
        write_whole(self._config.run_script, work.run + "\n")
        write_rank_files(self._config, work, env)
        if work.image is not None:
            self._run_container()
            return
        if names_own_command(work.run):  # this node was started from the image
            message = "the image's registry did not tell the image's command to the server"
            self._fail("setup", None, f"{message}; write `run`")
            return
        os.makedirs(self._config.folder, exist_ok=True)
        command = ChildCommand(
            [find_shell(), "-e", "-c", SHELL_LINE, self._config.run_script],
            env,
            self._config.folder,
        )
        if self._config.memory_mib:
            from .work.cgroup import make_group

            name = f"{GROUP_PREFIX}{self._config.gang}-{self._config.rank}"
            command.cgroup = self._group = make_group(name, self._config.memory_mib)
        self.share_view(command, work)
        command.status_path, command.notify = self._config.status_file, work.notify
        self._start(command, self._run_gone)

    def share_view(self, command: ChildCommand, work: WorkConfig | None = None) -> None:
        """Give a user's program the same view of the files as the work, in which one folder is
        hidden. While the work runs, the program also enters the work's namespaces. The work itself,
        which is given, also sees its volumes.
        """
        if self._config.covers:
            from .work.view import make_view

            volumes = []
            if work is not None and work.volumes:
                from .data.mounts import list_mounted

                volumes = list_mounted(self._config, work)
            command.view = make_view(self._config, volumes)
            if self._watch is not None and self.process is not None:
                command.beside = self.process.reaper

    def look(self) -> tuple[str, str] | None:
        """Report changes in the work. Returns the outcome and reason if the work must be ended, for
        example because it has been idle for too long.
        """
        if self._check_until is not None and time.monotonic() > self._check_until:
            self._check_until = None
            return GPU, "the node check timed out"
        if self._setup_meter is not None:
            self._setup_meter.tick()
        if self._watch is None or self._code is not None:
            return None
        self._use_cache()
        reason = self._watch.tick()
        if self._watch.too_large and not self._oom_kills:
            self._oom_kills = 1
            self.kill()
        if self._watch.gpu_excess and not self.gpu_excess:
            self.gpu_excess = self._watch.gpu_excess
            self.kill()
        return ("limit", reason) if reason else None

    def _run_container(self) -> None:
        from .work.container import make_container
        from .work.folder import CannotBuild

        try:
            command = make_container(self._config, self._work, self._env)
        except CannotBuild as error:
            self._fail("setup", None, str(error))
            return
        command.status_path, command.notify = self._config.status_file, self._work.notify
        self._owner.prepares()
        self._start(command, self._run_gone)
        self._measure_setup("")
        self._loop.after(PHASE_S, self._look_at_container)

    def _look_for_question(self) -> None:
        """Wait until a container asks whether its work is complete; then answer."""
        if self.process is None or self._work.image is None:
            return
        asked = os.path.exists(self._config.halted_file)
        # when it asks, what its programs have written last may still be on its way
        then = self._answer_question if asked else self._look_for_question
        self._loop.after(QUESTION_S if asked else PHASE_S, then)

    def _answer_question(self) -> None:
        from .work.container import answer_question

        answer_question(self._config, complete=self._is_complete())

    def _is_complete(self) -> bool:
        return self._watch is not None and self._watch.is_complete()

    def _measure_setup(self, kept: str) -> None:
        """Begin to report how much the setup writes, whose folder is `kept`."""
        if self.process is not None:
            from .work.setup_meter import SetupMeter

            self._setup_meter = SetupMeter(self._owner.say, self._config, kept, self.process.reaper)

    def _look_at_container(self, said: str = "") -> None:
        """Report the container's progress. The container's start is always reported before its
        end."""
        phase = self._read_phase()
        if self._running:
            return
        if phase == "run":
            self._runs(reused=False)
        elif self.process is not None:
            if phase == "setup" and said != phase:
                self._owner.say("setup")
            self._loop.after(PHASE_S, lambda: self._look_at_container(phase))

    def _runs(self, *, reused: bool) -> None:
        """Report that the task itself has started, and begin to watch it."""
        self._running, self._setup_meter = True, None
        self._owner.say("running", setup_reused=reused)
        if self.process is None:
            return  # the process has already ended
        from .images.devices import find_vendor
        from .work.meters import VENDORS, UsageMeter
        from .work.monitor import WorkMonitor

        mark = b"" if self._work.image is None else f"CAVVY_GANG={self._config.gang}".encode()
        self._watch = WorkMonitor(
            self._owner.say,
            UsageMeter(self.process.reaper, mark, lambda: self._owner.execs.reapers),
            progress=self._config.progress_file,
            checkpoints=self._checkpoints,
            idle_s=self._work.idle_s,
            idle_gpu_percent=self._work.idle_gpu_percent,
            connected=lambda: self._owner.execs.connected,
            stuck_s=self._work.stuck_s,
            alone=self._config.devices is None,
            event_folders=self._list_event_folders(),
            event_allowed=self._allow_event_folders(),
            # ranks may share a folder
            event_host=socket.gethostname() if self._config.rank else "",
        )
        if self._config.memory_mib and self._group is None and self._work.image is None:
            self._watch.memory_mib = self._config.memory_mib
        self._watch.gpu_memory_mib = self._config.device_memory_mib
        if (vendor := find_vendor(self._config)) in VENDORS:
            self._loop.after(1, lambda: self._measure_gpus(vendor))
        self._clean()

    def _list_event_folders(self) -> list[str]:
        """Return the folders in which the work's event files may be."""
        folders, checkpoint = [self._config.folder], self._work.checkpoint
        if checkpoint is not None:
            folders.append(os.path.join(self._config.folder, checkpoint.path))
        return folders

    def _allow_event_folders(self) -> AllowedFolders:
        """Return where the agent reads event files, even if the work replaces a folder by a link:
        in the working folder, and where this node keeps the checkpoints."""
        from .allowed_folders import AllowedFolders

        given: list[str] = []
        if self._work.checkpoint is not None and self._work.checkpoint.storage is not None:
            given.append(self._work.checkpoint.storage)
        if self._work.volumes:
            from .data.mounts import list_checkpoint_volumes

            given += list_checkpoint_volumes(self._config, self._work)
        return AllowedFolders([self._config.folder], given)

    def _clean(self) -> None:
        """Clean the machine's cache in a separate process, which is killed if it still runs when
        the work ends.
        """
        from .work.cache import is_due, sweep

        try:
            if not is_due(self._config.caches):
                return
            command = ChildCommand(
                [], {}, self._config.home, lambda channel: sweep(self._config.caches)
            )
            self._sweeper = WorkProcess(self._loop, command, wrote=log_failure)
        except OSError as error:
            complain(f"the cache cannot be cleaned: {error}")

    def _use_cache(self) -> None:
        """Mark the setup or image file in the cache as used, so that a cleaning of the cache does
        not remove it.
        """
        if self._work.setup is None and self._work.image is None:
            return
        from .work.cache import TOUCH_S, touch

        if time.monotonic() - self._touched < TOUCH_S:
            return
        self._touched = time.monotonic()
        if self._work.image is None:
            from .work.view import find_setup

            touch(find_setup(self._config, self._work) + "/finished")
        else:
            touch(
                read_text(self._config.private + "/sif")
            )  # the file `sif` exists only for Apptainer

    def _measure_gpus(self, vendor: str) -> None:
        """Measure the GPUs in a separate process, so that a hanging driver blocks nothing else."""
        if self._watch is None:
            return
        from .work.meters import measure_gpus

        config = self._config
        command = ChildCommand(
            [],
            self._env,
            config.home,
            lambda channel: measure_gpus(
                vendor,
                config.devices,
                config.device_indices,
                shared=config.device_part < 1,
                part=config.device_part,
            ),
        )
        try:
            self._gpus = WorkProcess(self._loop, command, wrote=self._gpus_measured)
        except OSError as error:
            complain(f"the GPUs cannot be measured: {error}")

    def _gpus_measured(self, data: bytes) -> None:
        try:
            values = json.loads(data.splitlines()[-1])
        except ValueError:
            return
        if self._watch is not None:
            if "processes" in values:
                self._watch.share_gpu(values.pop("processes"), values)
            self._watch.take_gpus(values)

    def _start(self, command: ChildCommand, gone: Callable[[], None]) -> None:
        """Start the process of a step; `gone` is called when all processes of the step have ended.
        Raises OSError."""
        self._code, self._result = None, {}
        self.process = WorkProcess(
            self._loop,
            command,
            wrote=self._wrote,
            heard=self._heard if command.call is not None else None,
            ended=self._ended,
            started=self._started,
            is_complete=self._is_complete,
            gone=lambda: self._gone(gone),
        )

    def _call(
        self, call: Callable[[int], int], env: dict[str, str], gone: Callable[[], None]
    ) -> None:
        """Run a step that is a Python function of the agent instead of a program."""
        try:
            self._start(ChildCommand([], env, self._config.home, call), gone)
        except OSError as error:
            self._fail("node", None, f"this node cannot start a process: {error}")

    def take_stacks(self, found: Callable[[dict[str, object]], None]) -> None:
        """Take the stacks of the work's Python processes, and pass them to `found`."""
        watch = self._watch
        if watch is None or self._stacks is not None:
            return
        from .work.stacks import choose_path, report_stacks

        pids, rank = watch.usage.list_work(), self._config.rank
        apart = bool(self._config.covers) or self._work.image is not None
        path = choose_path(self._env.get("PATH", ""), apart=apart)
        lines: list[bytes] = []
        command = ChildCommand(
            [], self._env, self._config.home, lambda channel: report_stacks(path, pids, rank)
        )

        def gone() -> None:
            self._stacks = None
            try:
                stacks = json.loads(b"".join(lines))
            except ValueError:
                stacks = {"stacks": [], "moved": False, "text": "no stacks: py-spy was killed"}
            found(stacks)

        try:
            self._stacks = WorkProcess(self._loop, command, wrote=lines.append, gone=gone)
        except OSError as error:
            found({"stacks": [], "moved": False, "text": f"no stacks: {error}"})

    def log(self, logged: ConfigFields) -> None:
        """Take values that the task reports. Raises BadConfig."""
        if self._watch is not None:
            self._watch.log(logged)

    def show(self, shown: ConfigFields) -> None:
        """Take a part of a picture or the like that the task reports. Raises BadConfig."""
        if self._watch is not None:
            self._watch.show(shown)

    def take_values(self, values: dict[str, float], step: float | None, age_s: float) -> None:
        """Take values that the task reports to the agent's tracking server."""
        if self._watch is not None:
            self._watch.take_values(values, step, age_s)

    def describe(self, params: dict[str, str]) -> None:
        """Take settings that the task reports to the agent's tracking server."""
        if self._watch is not None:
            self._watch.describe(params)

    def _wrote(self, data: bytes) -> None:
        if self._watch is not None:
            self._watch.wrote(data)
        self._owner.wrote(data)
        # A container's output was read before its phase, so it is the setup's if that runs still.
        if not self._running and (self._work.image is None or self._read_phase() != "run"):
            self._owner.wrote_before_work()

    def _ended(self, code: int | None) -> None:
        self._code = code
        if self.process is not None:
            self._oom_kills += self.process.oom_kills
            self._asked = self.process.interrupted

    def _gone(self, then: Callable[[], None]) -> None:
        """Clean up when every process of a step has ended, then call `then`."""
        self.process, self._setup_meter = None, None
        if self._discarded is not None:
            self._discarded()
            return
        self._end_watch()
        if self._streams is not None:
            self._streams.end()
        then()

    def _end_watch(self) -> None:
        """Report what is still to be reported of the task, and watch it no longer."""
        if self._watch is not None:
            self._owner.hear_rest()
            self._watch.end()
            self._watch = None
        for beside in (self._gpus, self._sweeper, self._stacks):
            if beside is not None:
                beside.kill()

    def _heard(self, line: bytes) -> None:
        """Handle a line that a step wrote. The line is one of these: `setup`; `sent` with the
        number of an output and the number of sent bytes; an event's name and text; the step's
        result as JSON.
        """
        word, _, text = line.partition(b" ")
        if line == b"setup":
            self._owner.say("setup")
        elif word == b"sent":
            output, size = text.split()
            self._owner.say("upload", number=int(output), sent=int(size))
        elif word in EVENTS:
            self._owner.say("event", name=word.decode(), text=text.decode("utf-8", "replace"))
        else:
            self._result = json.loads(line)

    def _checked(self) -> None:
        self._check_until = None
        if self._succeeded("the node check"):
            self._owner.checked()

    def _prepared(self) -> None:
        if self._succeeded("creating the working folder"):
            self._owner.prepared(reused=bool(self._result["reused"]))

    def _succeeded(self, step: str) -> bool:
        """Return whether the step succeeded; if it failed, report the failure to the owner."""
        result = self._result
        if not result:
            self._fail(*self._judge_lost(f"{step} was killed"))
        elif result["outcome"]:
            code = result["exit_code"]
            self._fail(
                str(result["outcome"]),
                code if isinstance(code, int) else None,
                str(result["reason"]),
            )
        return bool(result) and not result["outcome"]

    def _run_gone(self) -> None:
        self.interrupted = self._asked
        self._task_code, self.ended = self._code, True
        if self._work.image is not None:
            self._look_at_container()
        code = self._task_code or 0
        if self._checkpoints and (torn := self._checkpoints.explain_torn(failed=code != 0)):
            self._owner.say("event", name="unsafe", text=torn)
        if self.checkpoint_sync is None:
            self._send_rest()
        else:
            by_other = code > SIGNALLED and not (self._was_asked or self._was_killed)
            self.checkpoint_sync.cut(killed=by_other, failed=code != 0)
            self.checkpoint_sync.finish(self._send_rest)

    def _send_rest(self) -> None:
        if self.output_sync is None:
            self._unmount()
        else:
            self.output_sync.finish(self._unmount)

    def _unmount(self) -> None:
        if self._mounts is None:
            self._judge()
        else:
            self._mounts.finish(self._judge)

    def _fail(self, outcome: str, code: int | None, reason: str) -> None:
        """Report a failure to the owner, after the buckets are unmounted."""
        mounts = self._mounts
        if mounts is None:
            self._owner.failed(outcome, code, reason)
            return
        if mounts.failure:
            outcome, code, reason = mounts.outcome, None, mounts.failure
        mounts.finish(lambda: self._owner.failed(outcome, code, reason))

    def _judge(self) -> None:
        failure, code, oom_kills = self.verdict
        if failure is not None:
            self._fail(*failure)
        elif code == 0 and self._work.outputs:
            self._carry_out()
        else:
            self._owner.ran(code, oom_kills)

    @property
    def verdict(self) -> tuple[Failure | None, int, int]:
        """The result of the task: a failure (None if only the exit code decides), the exit code,
        and the number of processes that the kernel killed because of their memory use.
        """
        return self._find_failure(), self._task_code or 0, self._oom_kills

    @property
    def unsent(self) -> tuple[str, list[int]]:
        """The data that were not sent before the task ended: the checkpoint folder (or ""), and the
        indices of the outputs.
        """
        sync = self.checkpoint_sync
        failure, code, _ = self.verdict
        all_outputs = range(len(self._work.outputs))
        outputs = [at for at in all_outputs if "://" in self._work.outputs[at].target]
        if failure is not None or code:
            outputs = [at for at in outputs if at in self._work.mirrored]
        return "" if sync is None else sync.find_unsafe(), outputs

    def _find_failure(self) -> Failure | None:
        code = self._task_code
        if code is None:
            return self._judge_lost("the work's reaper process was killed")
        if self._result:
            return "setup", None, str(self._result["reason"])
        if self._streams is not None and self._streams.failure:
            return self._streams.outcome, None, self._streams.failure
        if self._mounts is not None and self._mounts.failure and (not code or self._mounts.lost):
            return self._mounts.outcome, None, self._mounts.failure
        if self._work.image is not None and self._read_phase() == "failed":
            return "setup", code, f"the setup ended with exit code {code}"
        return None

    def _judge_lost(self, lost: str) -> Failure:
        from .ends import judge_lost

        return judge_lost(read_text(self._config.started_file), lost)

    def _read_phase(self) -> str:
        """Read the phase that the container's script writes: setup, failed or run."""
        return read_text(self._config.phase_file)

    def _carry_out(self) -> None:
        from .work.prepare import carry_out

        self._call(
            lambda channel: carry_out(self._config, self._work, channel),
            self._env,
            self._carried_out,
        )

    def _carried_out(self) -> None:
        code = os.EX_IOERR if self._code is None else self._code
        if code:
            self._fail(
                "exit",
                code,
                "the work succeeded, but its outputs could not be copied; see the job's log",
            )
        else:
            self._owner.ran(0, 0)


def needs_preparing(work: WorkConfig) -> bool:
    """Return whether anything must be fetched, set up or copied before the task can run in its
    folder."""
    return bool(
        work.workdir
        or work.git
        or work.setup
        or work.inputs
        or work.volumes
        or work.checkpoint
        or work.tunnel
    )


def log_failure(data: bytes) -> None:
    """Write the output of a process to the agent's log. A step's process writes output only if the
    process fails."""
    complain(data.decode("utf-8", "replace").rstrip())
