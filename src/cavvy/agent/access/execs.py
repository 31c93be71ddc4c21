"""Starts users' commands and remote sessions on a node, in the folder and environment of the work.
A command's output is sent to the user who requested the command; the control plane relays a
session's input. When the user disconnects, the command receives SIGHUP, and its output is closed.

A program that a user's command leaves behind, such as a tmux session or an editor server, runs
until the work ends.

Fetches the input that a user sends to a session, and writes it to the session's process as fast
as the process reads. The input of a command is empty; its end means that the user has gone.
"""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import time

from ..config import AgentConfig
from ..control_client import ControlPlaneClient, RetryingConnection, nothing
from ..documents import ExecConfig
from ..log import Redactor
from ..loop import WRITE
from ..work.process import WorkProcess
from ..work.reaper import ChildCommand

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..config import ConfigFields
    from ..control_client import ExecStream
    from ..loop import EventLoop


NOT_RUNNING = 126
# A session counts as a connection for this many seconds after its last byte: a shell without input
# and output, or a tunnel that nothing uses, does not keep a node.
QUIET_S = 60.0

WAIT_S = 20.0
PAUSE_S = 1.0  # seconds between two questions whether a command's user is still connected


class RankExecs:
    """The users' commands that have not finished. A command has finished when it has exited, no
    program that it started still runs, and its exit code has been delivered.
    """

    def __init__(self, loop: EventLoop, changed: Callable[[], None]) -> None:
        self._loop = loop
        self._changed = changed
        self._running: list[RankExec] = []

    @property
    def idle(self) -> bool:
        return not self._running

    @property
    def connected(self) -> bool:
        """Whether a user's command runs, or a session that was used within QUIET_S. Programs that
        an ended command has left behind are ignored.
        """
        now = time.monotonic()
        return any(not each.over and not each.is_quiet(now) for each in self._running)

    @property
    def reapers(self) -> list[int]:
        """The process ids of the reapers of all commands. A reaper is the parent process of one
        command and of the programs that the command left behind."""
        return [running.process.reaper for running in self._running]

    def start(
        self,
        command: ChildCommand,
        stream: ExecStream,
        secrets: list[str],
        inbox: ExecInbox | None = None,
        user: UserPresence | None = None,
    ) -> None:
        """Start a command or a session. If `user` is given, the command ends when the user
        disconnects.
        """
        command.leaves = True
        try:
            self._running.append(RankExec(self, command, stream, secrets, inbox, user))
        except OSError as error:
            if user is not None:
                user.close()
            self.refuse(stream, f"this node cannot start a process: {error}")

    def refuse(self, stream: ExecStream, reason: str) -> None:
        """Report to the user why the command was not run."""
        stream.write(f"cavvy: {reason}\n".encode())
        stream.end(NOT_RUNNING, lambda: None)

    def kill(self) -> None:
        for running in self._running:
            running.process.kill()

    def spawn(self, running: RankExec, command: ChildCommand) -> WorkProcess:
        return WorkProcess(
            self._loop,
            command,
            wrote=running.wrote,
            ended=running.ended,
            gone=running.gone,
        )

    def done(self, running: RankExec) -> None:
        self._running.remove(running)
        self._changed()


class RankExec:
    """One command that a user runs on this node."""

    def __init__(
        self,
        execs: RankExecs,
        command: ChildCommand,
        stream: ExecStream,
        secrets: list[str],
        inbox: ExecInbox | None,
        user: UserPresence | None,
    ) -> None:
        self._execs = execs
        self._stream = stream
        self._redactor = Redactor(secrets)
        self._reported = self._gone = self.over = False
        self._inbox, self._user = inbox, user
        self._moved_at = time.monotonic()
        if inbox is not None:
            inbox.moved = self._moved
        stream.drained = self._drained
        stream.begin()
        self.process = execs.spawn(self, command)
        if user is not None:
            user.gone = self.process.hang_up

    def is_quiet(self, now: float) -> bool:
        """Return whether this is a session whose user has neither sent nor got a byte of late."""
        return self._inbox is not None and now - self._moved_at > QUIET_S

    def _moved(self) -> None:
        self._moved_at = time.monotonic()

    def wrote(self, data: bytes) -> None:
        self._moved()
        self._stream.write(self._redactor.feed(data))
        if self._stream.full:
            # a user's command, unlike the work, may be paused until its output is delivered
            self.process.pause(True)

    def ended(self, code: int | None) -> None:
        self.over = True
        self.process.close()
        if self._inbox is not None:
            self._inbox.close()
        if self._user is not None:
            self._user.close()
        self._stream.write(self._redactor.flush())
        self._stream.end(137 if code is None else code, self._delivered)

    def _delivered(self) -> None:
        self._reported = True
        self._finish()

    def gone(self) -> None:
        self._gone = True
        self._finish()

    def _finish(self) -> None:
        if self._reported and self._gone:
            self._execs.done(self)

    def _drained(self) -> None:
        self.process.pause(False)


def start_command(
    execs: RankExecs,
    link: ControlPlaneClient,
    asked: ExecConfig,
    command: ChildCommand,
    secrets: list[str],
) -> None:
    """Start a user's command. If the command is attached, the command ends when its user
    disconnects."""
    user = None
    if asked.attached:
        user = UserPresence(link, asked.id)
    execs.start(command, link.stream(asked.id), secrets, user=user)


def start_session(
    execs: RankExecs,
    link: ControlPlaneClient,
    exec_id: str,
    config: AgentConfig,
    command: ChildCommand,
    *,
    contained: bool,
) -> None:
    """Start a user's session with the folder, environment and mount namespace of `command`. If
    `contained`, the session's commands and paths are inside the container.
    """
    ours, theirs = socket.socketpair()
    command.channel = theirs.fileno()
    command.call = lambda channel: serve(command, config, exec_id if contained else "")
    stream = link.stream(exec_id)
    execs.start(command, stream, [], ExecInbox(link, exec_id, ours))
    theirs.close()


def serve(command: ChildCommand, config: AgentConfig, contained: str) -> int:
    """Serve the session; runs in the session's own process. `contained` is the session's ID if its
    commands and paths are inside the container, and otherwise empty."""
    from .session import RemoteSession, SessionTarget

    place = SessionTarget(command.env, command.cwd, lambda: "")
    if contained:
        from ..work.container import find_engine, follow_exec, make_name

        engine = find_engine() or ""
        place = SessionTarget(
            command.env,
            command.cwd,
            lambda: find_root(engine, make_name(config)),
            lambda number: follow_exec(config, f"{contained}-{number}"),
        )
    os.environ.clear()
    os.environ.update(command.env)
    return RemoteSession(command.channel, 1, place).serve()


def find_root(engine: str, container: str) -> str:
    """Return the container's root folder as seen from this node, or "" without a container. Raises
    OSError."""
    if os.path.basename(engine) not in ("podman", "docker"):
        return ""
    command = [engine, "inspect", "--format", "{{.State.Pid}}", container]
    try:
        said = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30, check=True
        ).stdout
        return f"/proc/{int(said)}/root"
    except (subprocess.SubprocessError, ValueError) as error:
        raise OSError(f"cannot access the container's files: {error}") from error


class ExecInbox:
    """One input stream, which the user or the process can close."""

    def __init__(self, link: ControlPlaneClient, exec_id: str, sink: socket.socket) -> None:
        self._loop, self._sink = link.loop, sink
        self.moved: Callable[[], None] = nothing  # is called when the user has sent something
        self._path = f"/agent/v1/execs/{exec_id}/input{link.query}"
        self._offset = 0
        self._waiting = bytearray()
        self._ended = self._closed = False
        self._channel = RetryingConnection(link, self._ask)
        sink.setblocking(False)
        self._ask()

    def close(self) -> None:
        """Stop fetching input, because the process has closed its standard input."""
        if not self._closed:
            self._closed = True
            self._channel.close()
            self._loop.unwatch(self._sink.fileno())
            self._sink.close()

    def _ask(self) -> None:
        if self._channel.idle and not self._waiting and not self._closed:
            path = f"{self._path}&offset={self._offset}&wait_s={WAIT_S:g}"
            self._channel.ask("GET", path, b"", self._got, WAIT_S + 30)

    def _got(self, fields: ConfigFields) -> None:
        if self._closed:
            return
        data = base64.b64decode(fields.read("data", "str", ""))
        if data:
            self.moved()
        self._offset += len(data)
        self._waiting += data
        self._ended = fields.read("end", "bool")
        self._pour(WRITE)

    def _pour(self, events: int) -> None:
        try:
            while self._waiting:
                del self._waiting[: self._sink.send(self._waiting[:65536])]
        except BlockingIOError:
            self._loop.watch(self._sink.fileno(), WRITE, self._pour)
            return
        except OSError:
            self.close()
            return
        self._loop.unwatch(self._sink.fileno())
        if self._ended:
            self.close()
        else:
            self._ask()


class UserPresence:
    """Asks the server whether a command's user is still connected, and calls `gone` once the user
    has disconnected. The server answers then, or after WAIT_S seconds.
    """

    def __init__(self, link: ControlPlaneClient, exec_id: str) -> None:
        self._loop = link.loop
        self.gone: Callable[[], None] = nothing
        self._path = f"/agent/v1/execs/{exec_id}/input{link.query}&offset=0&wait_s={WAIT_S:g}"
        self._channel = RetryingConnection(link, self._ask)
        # Most commands end before the first question.
        self._next = self._loop.after(PAUSE_S, self._ask)

    def close(self) -> None:
        self._loop.cancel(self._next)
        self._channel.close()

    def _ask(self) -> None:
        self._channel.ask("GET", self._path, b"", self._got, WAIT_S + 30)

    def _got(self, fields: ConfigFields) -> None:
        if fields.read("end", "bool"):
            self.close()
            self.gone()
        else:
            self._next = self._loop.after(PAUSE_S, self._ask)
