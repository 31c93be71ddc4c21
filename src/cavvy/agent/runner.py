"""Controls one rank's work: claims it, prepares its folder, runs its setup and its task, and
finally reports its exit.
"""

from __future__ import annotations

import json
import os
import time

from .access.execs import RankExecs
from .config import BadConfig, read_work
from .control_client import LOST, ControlPlaneClient, complain
from .disk import read_text, write_whole
from .documents import PORT, WorkConfig
from .ends import (
    DONE,
    EX_TEMPFAIL,
    LONGEST_ERROR,
    MOVES,
    REPORTED,
    AgentState,
    describe_notice,
    describe_start,
    find_kept,
    judge,
    keeps_entries,
    may_leave,
    serve_on,
)
from .kept_program import KeptProgram
from .log import LogSpool, Redactor, make_redactor
from .notification_socket import TaskReports
from .outbox import MessageOutbox
from .step_runner import StepRunner, needs_preparing
from .tunnel import open_tunnel
from .verdict import ExitRecord, FailureCause
from .work.environment import add_keeping, add_python, make_environment
from .work.reaper import PR_SET_CHILD_SUBREAPER, ChildCommand, prctl

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .asks import TaskAsks
    from .config import AgentConfig, ConfigFields
    from .data.deposit import Ended, ResultsDeposit
    from .documents import ExecConfig
    from .held_ports import HeldPorts
    from .loop import EventLoop, LoopTimer
    from .notice_poll import NoticePoll
    from .notification_socket import NotificationListener, NotificationSocket
    from .tracking_door import TrackingDoor
    from .work.home_entries import HomeEntries

# If a killed process still exists after this many seconds, the node counts as broken.
KILL_WAIT_S = 30.0
FAREWELL_S = 2.0  # seconds for the last messages if SIGTERM arrives after the work has ended
# A line of the job's log.
UNPROTECTED = (
    b"cavvy: this machine offers no user namespaces, so this job can change the settings and "
    b"programs that Cavvy and the machine's user obey\n"
)
# Outcomes after which the agent waits on a kept node for the work of other jobs. The key is whether
# the node belongs to a `cavvy machine`.
SPARES_NODE = {False: ("succeeded", "exit"), True: ("succeeded", "exit", "setup", "stopped")}
# Outcomes after which the agent waits for the repair of its gang, if the work states for how long.
AWAITS_REPAIR = ("stopped", "exit")
SIGNAL_WAIT_S = {True: 0.5, False: 0.05}
# maximum seconds for which an agent started with --deliver tries to deliver messages
DELIVER_S = 20.0


class RankRunner:
    """Runs one rank's work. The event loop, the connection and the processes call the methods of
    this object. No method blocks.
    """

    def __init__(
        self,
        loop: EventLoop,
        config: AgentConfig,
        nonce: str,
        kept: KeptProgram | None = None,
    ) -> None:
        self._loop = loop
        self._before = kept  # the program of the former attempt, until it goes on or is discarded
        # the program that can be kept for the next attempt, and the one that is
        self._program: NotificationListener | None = None
        self._first_program: NotificationListener | None = None
        self.kept_program: KeptProgram | None = None
        self._config = config
        self._outbox = MessageOutbox(config.outbox_file)
        self._log = LogSpool(config.log_folder, 1024)
        self._redactor = Redactor([])
        self._work: WorkConfig | None = None
        self._env: dict[str, str] = {}
        self._first_env: dict[str, str] = {}  # before the setup has changed them
        # outcome and reason, set when something other than the work itself ends the work
        self._ending: tuple[str, str] | None = None
        self._noticed_why = ""  # what this node itself has learnt of its loss
        self._kill_timer: LoopTimer | None = None
        self._state = AgentState.WAITING
        self._exit = ExitRecord(config)
        self._steps = StepRunner(loop, config, self)
        self._ports: HeldPorts | None = None
        self._cache_use: int | None = None  # see `own_cache`
        self._home_entries: HomeEntries | None = None
        self._work_from = 0  # where the output of the work itself begins in the log
        self._line_open = False  # whether the last line of the work's output has no end yet
        self._cause = FailureCause()
        self._notification_socket: NotificationSocket | None = None
        self._tracking: TrackingDoor | None = None
        # The task may end because it has read a notice there, before SIGTERM reaches it.
        self._heard_notice = False
        self._asks: TaskAsks | None = None
        self._polls: list[NoticePoll] = []
        self._deposit: ResultsDeposit | None = None
        self._every_s: float | None = None
        self.reports = TaskReports()
        self.execs = RankExecs(loop, self.delivered)
        # Set when the agent exits after its work: how many seconds the node's next agent waits
        # for more work.
        self.keep_s = 0.0
        self._terminated = False  # whether SIGTERM has arrived
        self._waiting: LoopTimer | None = None  # the timer that ends the wait for more work
        self.link = ControlPlaneClient(loop, config, nonce, self._outbox, self._log, self)

    def claim(self, waits_s: float | None = None) -> None:
        """Request work and run it. `waits_s` is set if earlier work ran on this node: the agent
        exits if no new work arrives within this many seconds.
        """
        self.link.claim(self._begin)
        if waits_s is not None:
            self._waiting = self._loop.after(waits_s, self._give_up_waiting)
        self._loop.after(1, self._tick)

    def kept(self, seconds: float) -> None:
        """If earlier work ran on this node, wait for more work until `seconds` from now."""
        if self._waiting is not None:
            self._loop.cancel(self._waiting)
            self._waiting = self._loop.after(seconds, self._give_up_waiting)

    def recover(self, *, patient: bool) -> None:
        """Deliver the messages of an earlier agent whose work has ended and is not started again.

        Unless `patient` is set, exit after DELIVER_S seconds even if messages remain.
        """
        self._move(AgentState.EXITED if self._outbox.has("exited") else AgentState.OVER)
        if not self._exit.read():
            outcome, code, reason = self._exit.find_lost()
            self._open_home_entries(find_kept(read_text(self._config.started_file)), resume=True)
            reason = self._close_home_entries(reason)
            self._exit.write(self._describe_exit(outcome, code, reason))
        self._loop.after(1, self._tick)
        if not patient:
            self._loop.after(DELIVER_S, self._leave)
        self.link.refusals = LOST
        self.link.hurry = True
        self.link.pump()
        self.delivered()

    @property
    def _over(self) -> bool:
        return self._state in DONE

    def _move(self, to: AgentState) -> bool:
        """Change the state if this change is allowed; return whether the state changed."""
        legal = (self._state, to) in MOVES
        if legal:
            self._state = to
        return legal

    # Calls from the control-plane connection.

    def ordered(self, kind: str, seconds: float, reason: str) -> None:
        """Handle a `stop` or a `notice` from the control plane."""
        if kind == "notice":
            reason = self._noticed_why or reason
            reserve = self._steps.reserve(seconds)
            self._write_notice(seconds - reserve, reason)
            reason = reason or "the provider is reclaiming the node"
            if on := serve_on(self._work, seconds - reserve):
                self._loop.after(on, lambda: self._end("preempted", reason, seconds - on, reserve))
            else:
                self._end("preempted", reason, seconds, reserve)
        elif kind == "stop":
            self._end("stopped", reason or "a stop was requested", seconds)
        elif kind == "stacks":
            self._steps.take_stacks(self._tell_stacks)
        else:
            complain(f"this agent does not know the order {kind!r}")

    def _tell_stacks(self, found: dict[str, object]) -> None:
        """Report where the work's processes are, and write their stacks to the log."""
        text = str(found.pop("text"))
        start = "\n" if self._line_open else ""
        if found["stacks"] or (self._work is not None and self._work.stuck_s is not None):
            # the log of work without the limit need not tell that there are none
            self.wrote(f"{start}cavvy: {text}\n".encode(errors="replace"))
        self.say(
            "stacks",
            **found,
            text="" if found["stacks"] else self._redactor.text(text.partition("\n")[0]),
        )

    def asked(self, asked: ExecConfig) -> None:
        """Start a user's command or remote session."""
        stream = self.link.stream(asked.id)
        if self._work is None or self._over or not (asked.command or asked.session):
            self.execs.refuse(stream, "the work is not running on this node")
            return
        contained = self._work.image is not None
        folder = self._config.folder if os.path.isdir(self._config.folder) else self._config.home
        command = ChildCommand(asked.command, self._env, folder)
        if contained:
            from .work.container import enter_container

            enter_container(self._config, command, asked.id)
        else:
            self._steps.share_view(command)
        from .access.execs import start_command, start_session

        if asked.session:
            start_session(
                self.execs, self.link, asked.id, self._config, command, contained=contained
            )
        else:
            start_command(self.execs, self.link, asked, command, [*self._work.secrets.values()])

    def dismissed(self, reason: str) -> None:
        """Stop all work without a report, because another agent now holds the claim."""
        self._move(AgentState.DISMISSED)
        if self._steps.process is None:
            self._leave()
            return
        complain(reason)
        self._steps.kill()
        self._loop.after(KILL_WAIT_S, self._leave)

    def delivered(self) -> None:
        """Handle the delivery of messages or output. Once the whole log is delivered, send the exit
        message, which is the last message. Once all messages are delivered, exit.
        """
        if self._state is AgentState.OVER and not self._log.pending:
            self._move(AgentState.EXITED)
            self._outbox.put("exited", **self._exit.fields)
            self.link.release()
        replying = any(poll.replying for poll in self._polls)
        if (
            self._state in REPORTED
            and self._outbox.empty
            and not self._log.pending
            and self.execs.idle
            and not replying
        ):
            work, outcome = self._work, self._exit.fields.get("outcome")
            if work is not None and self._state is AgentState.EXITED and not self._terminated:
                spared = outcome in SPARES_NODE[work.machine]
                self.keep_s = work.keep_s if spared else 0.0
                if outcome in AWAITS_REPAIR:
                    self.keep_s = max(self.keep_s, work.repair_s)
            self._leave()

    def terminated(self) -> None:
        """Handle SIGTERM: the provider removes the gang or reclaims the node."""
        taken, self._terminated = self._config.taken, True
        if taken is not None:
            self._move(AgentState.RECLAIMED)
        if self._over or self._work is None:
            self._loop.after(FAREWELL_S if self._over else 0, self._leave)
        elif taken is not None and (taken.unless is None or not os.path.exists(taken.unless)):
            self.noticed(taken.seconds, taken.source, f"{taken.source} is reclaiming the node")
        else:
            self._end("stopped", "the gang was removed", self._config.grace_s)

    def _look_for_warning(self) -> None:
        """Check for the file that the provider writes when the job's time limit is near. Listing
        the folder makes network file systems query their server.
        """
        taken = self._config.taken
        if taken is None or taken.warning is None or self._work is None or self._ending is not None:
            return
        folder, name = os.path.split(taken.warning)
        try:
            warned = name in os.listdir(folder)
        except OSError:
            return  # the folder cannot be listed now; the next tick checks again
        if warned:
            self.warned()

    def warned(self) -> None:
        """Handle the provider's file or signal, which warns that the job's time limit is near."""
        taken = self._config.taken
        if taken is not None and self._work is not None and not self._over:
            self._move(AgentState.RECLAIMED)
            self.noticed(
                taken.warning_s,
                taken.source,
                f"the time that {taken.source} allows is nearly over",
            )

    # Calls from the node's notice polls.

    def noticed(self, seconds: float, source: str, reason: str) -> None:
        """Handle a notice that the node will be reclaimed: notify the task and the control plane,
        and begin to end the work.
        """
        if self._ending is None:
            self.say("notice", seconds=seconds, source=source)
        self._noticed_why = self._noticed_why or reason
        self.ordered("notice", seconds, reason)

    def advised(self, source: str, reason: str) -> None:
        """Handle a warning that the node is at risk. The work continues. If the task saves a
        checkpoint, the agent uploads the checkpoint early.
        """
        if self._ending is None:
            self.say("event", name="advice", text=reason)
            advice = {"source": source, "reason": reason}
            self._write(self._config.advice_file, json.dumps(advice))
            self._tell_task("advice", advice)
            self._steps.hurry()

    # Messages to and from the task over its socket.

    def paced(self, every_s: float) -> None:
        """Pass the new checkpoint interval from the control plane to the task."""
        if every_s != self._every_s:
            self._every_s = every_s
            self._tell_task("every_s", every_s)
            self._write(self._config.every_file, json.dumps(every_s))

    def _tell_task(self, kind: str, value: object) -> bool:
        listener = self._notification_socket
        return listener is not None and listener.say(kind, value)

    def _hear_task(self, fields: ConfigFields) -> None:
        """Handle a report of the task. Raises BadConfig."""
        logged, shown = fields.inner("logged"), fields.inner("shown")
        if logged is not None:
            self._steps.log(logged)
        elif shown is not None:
            self._steps.show(shown)
        else:
            self.reports.hear(fields)

    def hear_rest(self) -> None:
        """Read what the task's programs have reported before they ended."""
        if self._notification_socket is not None:
            self._notification_socket.drain()

    def _ask(self, ask: ConfigFields, answer: Callable[[dict[str, object]], None]) -> None:
        """Pass on what a program of the work asks the control plane. Raises BadConfig."""
        if self._asks is None:
            from .asks import TaskAsks

            self._asks = TaskAsks(self.link)
        self._asks.add(ask, answer)

    # A program that is kept for the next attempt; see `kept_program.py`.

    @property
    def _can_keep(self) -> bool:
        program = self._program
        return program is not None and not program.closed and self._steps.can_rest

    def _hear_program(self, fields: ConfigFields, program: NotificationListener) -> None:
        """Handle a message of a program that can be kept. Raises BadConfig."""
        keeps, apart = fields.inner("keeps"), fields.inner("apart")
        if keeps is not None:
            # With a second program, the nodes of the job may be at different ones.
            self._first_program = self._first_program or program
            stays = program is self._first_program and keeps.read("kept", "int")
            self._program = program if stays else None
        if apart is None:
            return
        code, error = apart.read("code", "int"), apart.read("error", "str", "")[:LONGEST_ERROR]
        stopped = self._ending is None or self._ending[0] == "stopped"
        going = self._state in (AgentState.WORKING, AgentState.ENDING)
        if self._work is None or not (stopped and going and self._can_keep):
            program.send({"leave": {}})
            return
        self._keep(self._work, program, code, error)

    def _keep(self, work: WorkConfig, program: NotificationListener, code: int, error: str) -> None:
        """Report the end of the work, whose program stays. `error` says how its connection to
        another rank was lost."""
        assert self._notification_socket is not None
        program.send({"stay": {}})
        self._steps.interrupted = self._ending is not None
        self._steps.rest()
        outcome, exit_code, reason = self._judge(code, 0)
        if outcome == "exit" and error:
            reason = self._cause.cut_off(self._redactor.text(error))
        self.kept_program = KeptProgram(
            work, self._first_env, self._env, self._steps, self._notification_socket, program
        )
        self._conclude(outcome, exit_code, reason)

    def _rejoin(self, kept: KeptProgram, work: WorkConfig) -> None:
        """Let the program of the former attempt go on."""
        self._before, self._program, self._steps = None, kept.program, kept.steps
        self._first_program = kept.program
        changes = kept.find_changes(self._env)
        self._env = {**kept.program_env, **changes}
        self._steps.go_on(self._loop, self, work, self._env)
        kept.program.send({"rejoin": {"env": changes}})

    def _discard(self, kept: KeptProgram, fields: ConfigFields) -> None:
        """End the program of another work, and then begin."""

        def begin() -> None:
            from .work.trees import remove_tree

            remove_tree(self._config.folder)
            self._begin(fields)

        self._before = None
        kept.steps.discard(self._loop, self, begin)

    # The steps of the work, and their callbacks.

    def _begin(self, fields: ConfigFields) -> None:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            work = read_work(fields)
            if self._before is not None and not self._before.fits(work):
                self._discard(self._before, fields)
                return
            write_whole(self._config.started_file, "")
            self._work = work
            self._move(AgentState.WORKING)
        except (BadConfig, OSError) as error:
            self._conclude("node", None, f"this agent cannot start its work: {error}")
            return
        add_python(self._config, work)
        self._redactor = make_redactor(work)
        if self._config.boxed:
            work.image = None
        if self._config.storage is not None and work.checkpoint is not None:
            work.checkpoint.storage = (
                f"{self._config.storage}/{work.project}/{work.job_id}/checkpoint"
            )
        if self._config.hides or self._config.own_cache:
            from .work.cache import open_cache
            from .work.view import list_shown

            try:
                self._cache_use = open_cache(self._config)
            except OSError as error:
                self._conclude("node", None, f"the node's cache cannot be used: {error}")
                return
            self._config.shown = list_shown(self._config, work)
            self._config.kept = f"{self._config.cache}/homes/{work.project}"
        self._write(self._config.started_file, describe_start(self._config, work))
        self._open_channels(work)
        self._log.limit(work.log_limit_mib)
        if self._config.hides and not self._config.covers and work.image is None:
            self.wrote(UNPROTECTED)
        if keeps_entries(self._config, work):
            self._open_home_entries(self._config.kept)
        self.link.listen_soon()
        self._begin_steps(work)

    def _begin_steps(self, work: WorkConfig) -> None:
        fault = "" if work.tunnel is None else open_tunnel(self._config, work.tunnel)
        if fault:
            self._conclude("setup", None, fault)
        elif work.ports and (taken := self._hold_ports(work)):
            self._conclude("exit", None, taken)
        elif self._before is not None:
            self._rejoin(self._before, work)
        elif work.check is not None:
            self._steps.check(work, self._env)
        else:
            self._go_on(work)

    def _hold_ports(self, work: WorkConfig) -> str:
        """Hold the ports of a service's program; return why one cannot be used, or ""."""
        from .held_ports import HeldPorts

        self._ports = HeldPorts()
        return self._ports.hold(work.ports)

    def _run(self, work: WorkConfig, *, reused: bool) -> None:
        """Run the task. Its program may bind its port without SO_REUSEADDR."""
        if self._ports is not None:
            self._ports.release(PORT)
        self._steps.run(work, self._env, reused=reused)

    def _open_channels(self, work: WorkConfig) -> None:
        """Open the socket to the task, and start polling for the node's notices."""
        hears = self._hear_task, self._ask, self._hear_program
        if self._before is None:
            from .notification_socket import NotificationSocket

            self._notification_socket = NotificationSocket(self._loop, self._config.home, *hears)
        else:
            self._notification_socket = self._before.socket
            self._notification_socket.move(self._loop, *hears)
        self._env = make_environment(self._config, work, self._notification_socket.path)
        add_keeping(self._config, work, self._env)
        from .tracking_door import TrackingDoor

        self._tracking = TrackingDoor(
            self._loop, self._config.folder, self._steps.take_values, self._steps.describe
        )
        self._env.update(self._tracking.open(self._env))
        self._first_env = dict(self._env)
        every_s = None if work.checkpoint is None else work.checkpoint.every_s
        if every_s is not None and self._every_s is None:
            self.paced(every_s)
        if self._config.notices:
            from .notice_poll import NoticePoll

            self._polls = [NoticePoll(self._loop, each, self) for each in self._config.notices]
        if work.deposit_after_s and not self._config.leaves_after_s:
            from .data.deposit import ResultsDeposit

            self._deposit = ResultsDeposit(
                self._loop, self._config, work, self.link, self._outbox, self._log, self._foresee
            )

    def say(self, kind: str, **fields: object) -> None:
        """Queue a message to the control plane. Secrets are redacted from text that the task has
        written."""
        values = fields.get("values")
        if isinstance(values, dict):
            if kind == "telemetry":
                values = {**values, **self.reports.totals}
            fields["values"] = {
                self._clean(str(key)): self._clean(value) for key, value in values.items()
            }
        figures = fields.get("figures")
        if isinstance(figures, dict):
            fields["figures"] = {self._clean(name): found for name, found in figures.items()}
        params = fields.get("params")
        if isinstance(params, dict):
            fields["params"] = {
                self._clean(name): self._clean(text) for name, text in params.items()
            }
        if kind == "checkpoint":
            self.reports.saw(float(str(fields.get("cost_s", 0))))
            self._tell_task(
                "safe", {name: value for name, value in fields.items() if name != "newest_at"}
            )
            if self.reports.cost_s is not None:
                fields["cost_s"] = self.reports.cost_s
        if kind == "running":
            fields["log_bytes"] = self._work_from
        self._outbox.put(kind, **fields)
        if kind == "running":
            self.link.hold()
        else:
            self.link.release()

    def wrote(self, data: bytes) -> None:
        """Handle output of the work."""
        self._cause.feed(data)
        self._log.write(self._redactor.feed(data))
        self._line_open = data[-1:] != b"\n"
        self.link.pump()

    def prepares(self) -> None:
        """Report where in the log the output of the setup, or of the image's pull, begins."""
        self._work_from = self._log.size
        self.say("preparing", log_bytes=self._work_from)

    def wrote_before_work(self) -> None:
        """Handle that what was written so far is no output of the work itself."""
        self._work_from = self._log.size

    def _open_home_entries(self, kept: str, *, resume: bool = False) -> None:
        """Prepare to move the new entries of home folders from `kept` to these folders at the
        end. With `resume`, the work has ended together with an earlier agent."""
        if not kept:
            return
        from .work.home_entries import HomeEntries

        try:
            self._home_entries = HomeEntries(kept, self._config.obeys)
            if resume:
                self._home_entries.resume(os.stat(self._config.started_file).st_mtime)
            elif moved := self._home_entries.begin():
                self.wrote(f"cavvy: {moved}\n".encode(errors="replace"))
        except OSError as error:
            complain(f"new entries of home folders cannot be moved: {error}")

    def _close_home_entries(self, reason: str) -> str:
        """Move the new entries of home folders, and say in the log where they are. Return the
        reason of the work's end, followed by where entries are that were not moved."""
        entries, self._home_entries = self._home_entries, None
        if entries is None:
            return reason
        try:
            moved, left = entries.finish()
        except OSError as error:
            complain(f"new entries of home folders cannot be moved: {error}")
            return reason
        for text in (moved, left):
            if text:
                start = "\n" if self._line_open else ""
                self.wrote(f"{start}cavvy: {text}\n".encode(errors="replace"))
        return "; ".join(each for each in (reason, left) if each)

    def checked(self) -> None:
        """Continue with the work after a successful node check."""
        if (work := self._may_go_on()) is not None:
            self._go_on(work)

    def _go_on(self, work: WorkConfig) -> None:
        if needs_preparing(work):
            self._steps.prepare(work, self._env)
        else:
            self._run(work, reused=False)

    def prepared(self, *, reused: bool) -> None:
        """Run the task: the folder is ready, and every process that prepared it has ended."""
        if (work := self._may_go_on()) is not None:
            self._run(work, reused=reused)

    def _may_go_on(self) -> WorkConfig | None:
        """Return the work if the next step may start; otherwise end the work and return None."""
        if self._work is None or self._state is AgentState.DISMISSED:
            self._leave()
        elif self._ending is not None:
            self._conclude(self._ending[0], None, self._ending[1])
        else:
            return self._work
        return None

    def failed(self, outcome: str, code: int | None, reason: str) -> None:
        """End the work after a step has failed or was interrupted."""
        if self._state is AgentState.DISMISSED:
            self._leave()
        elif self._ending is not None:
            self._conclude(self._ending[0], code, self._ending[1])
        else:
            self._conclude(outcome, code, self._add_clue(outcome, reason))

    def ran(self, code: int, oom_kills: int) -> None:
        """Report the exit: all processes of the work have ended."""
        if self._state is AgentState.DISMISSED:
            self._leave()
        elif self._ending is None and self._config.taken is not None:
            # Batch systems send a signal to the work and the agent at the same time. The work may
            # end before the signal reaches the agent.
            self._loop.after(SIGNAL_WAIT_S[code != 0], lambda: self._ran(code, oom_kills))
        else:
            self._ran(code, oom_kills)

    def _ran(self, code: int, oom_kills: int) -> None:
        self._conclude(*self._judge(code, oom_kills))

    def _judge(self, code: int, oom_kills: int) -> tuple[str, int | None, str]:
        """Return the outcome, exit code and reason of work that ended with `code`."""
        interrupted = self._steps.interrupted or self._heard_notice
        interrupted = interrupted or self._state is AgentState.RECLAIMED
        code = EX_TEMPFAIL if code and self.reports.again else code
        outcome, code, reason = judge(code, self._ending if interrupted else None)
        if outcome == "exit":
            excess, failure = self._steps.gpu_excess, self.reports.failure
            if oom_kills:
                excess = (
                    "out of memory: the work used more than its limit of "
                    f"{self._config.memory_mib} MiB, and the kernel killed it"
                )
            reason = f"{failure}; {reason}" if failure else reason
            outcome, reason = self._cause.explain(code, reason, excess)
        return outcome, code, self._add_clue(outcome, reason)

    def _add_clue(self, outcome: str, reason: str) -> str:
        """Add to the reason of a failure what the task probably lacks."""
        if self._work is None or outcome not in ("exit", "setup"):
            return reason
        path = self._env.get("PATH", "")
        return self._cause.add_clue(reason, self._work, path, self._config.folder)

    def _foresee(self) -> Ended | None:
        """Return the ended work's exit message and unsent files, or None while the work runs."""
        if self._over:
            return None if self._state is AgentState.DISMISSED else (self._exit.fields, "", [])
        if not self._steps.ended:
            return None
        failure, code, oom_kills = self._steps.verdict
        verdict = self._judge(code, oom_kills) if failure is None else failure
        if failure is not None and self._ending is not None:
            verdict = self._ending[0], failure[1], self._ending[1]
        self._flush_output()
        return self._describe_exit(*verdict), *self._steps.unsent

    # The end.

    def _end(self, outcome: str, reason: str, seconds: float, reserve: float = 0.0) -> None:
        """End the work and its uploads within `seconds`; the work itself must end `reserve` seconds
        earlier. A stop takes precedence over a notice, and the earlier of two deadlines applies.
        """
        if self._over:
            return
        # If the work has already ended by itself, only the upload of its files is shortened. The
        # time to copy the outputs is not shortened: work without its outputs has not succeeded.
        finishing = self._steps.finishing
        asked = finishing or self._ending is not None
        if (not finishing or self._steps.process is not None) and (
            self._ending is None or outcome != "preempted"
        ):
            self._ending = (outcome, reason)
            self._move(AgentState.ENDING)
        if not asked and outcome == "stopped" and self._can_keep and self._program is not None:
            self._program.send({"regroup": {}})
            self._loop.after(seconds / 2, self._ask_late)
        elif not asked:
            # a stop ends work that has only begun; after a notice, the work goes on elsewhere
            self._steps.ask((seconds - reserve) / 2 if outcome == "preempted" else 0)
        elif outcome != "preempted":
            self._steps.insist()
        due = time.monotonic() + max(0.0, seconds)
        if self._kill_timer is None or due < self._kill_timer.due:
            self._loop.cancel(self._kill_timer)
            self._kill_timer = self._loop.after(max(0.0, seconds), self._kill)
        if reserve:
            self._loop.after(max(0.0, seconds - reserve), self._kill_work)

    def _ask_late(self) -> None:
        """Stop a program that could be kept, but does not answer."""
        if not self._over:
            self._steps.ask()

    def _kill_work(self) -> None:
        """Kill the work, and let the upload of its last checkpoint use the remaining time."""
        if not self._over and not self._steps.finishing:
            self._steps.kill(save=True)

    def _kill(self) -> None:
        if not self._over:
            self._steps.kill()
            self._loop.after(KILL_WAIT_S, self._give_up)

    def _give_up(self) -> None:
        if not self._over:
            self._conclude("node", None, "a process of the work could not be killed")

    def _conclude(self, outcome: str, code: int | None, reason: str) -> None:
        if not self._move(AgentState.OVER):
            return
        reason = self._close_home_entries(reason)
        self._flush_output()
        if self._ports is not None:
            self._ports.close()
        self.execs.kill()
        self._outbox.settle()
        self._exit.write(self._describe_exit(outcome, code, reason))
        if os.path.exists(self._config.private + "/links"):
            from .data.mounts import remove_links

            remove_links(self._config)
        for poll in self._polls:
            poll.reply(self.delivered)
        self.link.hurry = True
        self.link.pump()
        self.delivered()

    def _flush_output(self) -> None:
        if rest := self._redactor.flush():
            self._log.write(rest)

    def _describe_exit(self, outcome: str, code: int | None, reason: str) -> dict[str, object]:
        """Return the fields of the exit message."""
        described = self._cause.describe(outcome, code, self._redactor.text(reason))
        return {**described, "log_bytes": self._log.size}

    def _write_notice(self, seconds: float, reason: str) -> None:
        notice = describe_notice(seconds, reason)
        self._write(self._config.notice_file, json.dumps(notice))
        self._heard_notice = self._tell_task("notice", notice) or self._heard_notice

    def _write(self, path: str, text: str) -> None:
        try:
            write_whole(path, text)
        except OSError as error:
            complain(f"cannot write {path}; the work goes on without it: {error}")

    def _clean(self, value: object) -> object:
        """Redact secrets, and replace lone surrogates, which JSON cannot encode."""
        if not isinstance(value, str):
            return value
        return self._redactor.text(value).encode("utf-8", "replace").decode()

    def _tick(self) -> None:
        """Check once a second whether the lease has expired, whether the work is idle, and whether
        the work has new facts to report.
        """
        self._loop.after(1, self._tick)
        self.link.pump()
        self._look_for_warning()
        leaves = self._over and may_leave(
            self._config.leaves_after_s,
            time.monotonic() - self.link.heard_at,
            stored=self._exit.stored and self._log.stored and self._outbox.stored,
        )
        if leaves or (self._deposit is not None and self._deposit.is_complete()):
            self._leave()
            return
        if time.monotonic() > self.link.lease_until:
            if self._work is None or self._over:
                self._leave()
                return
            if self._ending is None:
                self.ordered(
                    "notice",
                    self._config.grace_s,
                    "the lease has expired: the control plane did not answer in time",
                )
        found = self._steps.look()
        if found is not None and self._ending is None:
            self._end(*found, self._config.grace_s)

    def _give_up_waiting(self) -> None:
        if self._work is None:
            self._leave()

    @property
    def owes(self) -> bool:
        """Whether there are undelivered messages that the server still accepts."""
        delivered = self._outbox.empty and not self._log.pending
        deposited = self._deposit is not None and self._deposit.stored
        return self._state is not AgentState.DISMISSED and not (delivered or deposited)

    def _leave(self) -> None:
        open_ones = (self._asks, self._tracking, self._deposit)
        socket = None if self.kept_program is not None else self._notification_socket
        for each in (*open_ones, socket, *self._polls):
            if each is not None:
                each.close()
        self.link.close()
        self._log.close()
        self._loop.stop()
