"""Starts processes that keep running when the server stops, sends signals to these processes, and
finds the processes of a rank by their environment variables.

A process is identified by its PID and its start time, because PIDs are reused. On Linux,
information about processes is read from /proc; on other systems, it is read from `ps`, which is
slower.

Reports the exit of processes immediately, through pidfds. On a system without pidfds, the next
poll detects that a process has exited.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from cavvy.agent.bundle import make_command
from cavvy.domain.values import Struct
from cavvy.providers.hosts.changed_gangs import ChangedGangs
from cavvy.providers.hosts.supervisor import processes as supervised
from cavvy.providers.hosts.supervisor.files import read_text
from cavvy.providers.hosts.supervisor.processes import GANG_MARK, RANK_MARK

_HAS_PROC = Path("/proc/self/stat").exists()
_ANSWER_S = 30.0  # how long a fork server may take to start and to answer
# Longer than any path of a configuration, and than the value of a mark: the arguments and the
# environment of an agent must fit into those of the fork server.
_LONGEST_PATH, _LONGEST_MARK = 4096, 255
_DEFAULTED = (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)

_RETRY_S = 2.0


class LocalProcess(Struct, frozen=True):
    """One process. `start` contains the boot id and the clock tick of the start. `start`
    distinguishes the process from later processes with the same PID.
    """

    pid: int
    start: str


def start(
    command: Sequence[str], environ: Mapping[str, str], output: Path, input_fd: int = -1
) -> LocalProcess:
    """Start a program in a new session. The program's input is empty unless `input_fd` is set, and
    the output is appended to a file. Raises OSError.

    posix_spawn does not copy the server's memory map, so the start takes well under a millisecond.
    """
    # links are not followed, because the work can create files in the folder
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    log = os.open(output, flags, 0o600)
    try:
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
            if input_fd < 0
            else (os.POSIX_SPAWN_DUP2, input_fd, 0),
            (os.POSIX_SPAWN_DUP2, log, 1),
            (os.POSIX_SPAWN_DUP2, log, 2),
        ]
        pid = os.posix_spawnp(
            command[0],
            list(command),
            dict(environ),
            file_actions=actions,
            setsid=True,
            setsigmask=(),
            setsigdef=_DEFAULTED,
        )
    finally:
        os.close(log)
    found, _ = _identify(pid)  # not None, because an exited child stays a zombie until it is reaped
    if found is None:
        raise ProcessLookupError(f"the process {pid} cannot be looked up")
    return found


class ForkServer:
    """A process that forks into agents of this installation (`cavvy.agent.main`), in less
    time than a new program needs to start. The agents are not children of this process. If the
    server of an installation ends, its fork server ends too, and its agents go on.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._process: LocalProcess | None = None
        self._line: socket.socket | None = None

    def start(
        self, command: Sequence[str], environ: Mapping[str, str], output: Path
    ) -> LocalProcess | None:
        """Start an agent as the function `start` does. Return None if this is impossible now; then
        no agent was started, except one that `find_command` finds.
        """
        try:
            if self._line is None:
                self._open()
            asked = {"arguments": [*command], "environ": {**environ}, "output": str(output)}
            pid = self._ask(asked).get("pid")
        except (OSError, ValueError):
            self.close()
            return None
        return None if pid is None else _identify(pid)[0]

    def reap(self, process: LocalProcess) -> int | None:
        """Reap an agent of this fork server, as the function `reap` does."""
        if self._line is None or _identify(process.pid) != (process, True):
            return None
        try:
            status = self._ask({"reap": process.pid}).get("status")
        except (OSError, ValueError):
            self.close()
            return None
        return None if status is None else _read_status(status)

    def close(self) -> None:
        """End the fork server."""
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._process is not None:
            send(self._process, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self._process.pid, 0)
            self._process = None

    def _open(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._line.settimeout(_ANSWER_S)
            marks = dict.fromkeys((GANG_MARK, RANK_MARK), "-" * _LONGEST_MARK)
            command = [*make_command(), "--forks", "-" * _LONGEST_PATH]
            environ = {**self._environ, **marks}
            self._process = start(command, environ, Path(os.devnull), theirs.fileno())

    def _ask(self, request: Mapping[str, object]) -> dict[str, int | None]:
        assert self._line is not None
        self._line.sendall(json.dumps(request).encode())
        answer = self._line.recv(65536)
        if not answer:
            raise BrokenPipeError
        return {key: value for key, value in json.loads(answer).items() if key != "error"}


def find(pid: int) -> LocalProcess | None:
    """Return the running process with this PID, or None. A zombie does not count as running."""
    found, zombie = _identify(pid)
    return None if zombie else found


def lives(process: LocalProcess) -> bool:
    """Return whether this process is still running."""
    return find(process.pid) == process


def forks(command: Sequence[str]) -> bool:
    """Return whether a fork server can start agents with this command here."""
    return _HAS_PROC and list(command) == make_command()


def reap(process: LocalProcess) -> int | None:
    """Reap a child of this process. Return the child's exit code, 128 + N if signal N killed the
    child, or None if the process is still running or is not a child.
    """
    if _identify(process.pid) != (process, True):
        return None
    try:
        pid, status = os.waitpid(process.pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return None if pid == 0 else _read_status(status)


def _read_status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def send(process: LocalProcess, number: signal.Signals) -> None:
    """Send a signal to this process if it is running. On Linux, the signal is never sent to another
    process with the same PID.
    """
    with suppress(ProcessLookupError):
        if not hasattr(os, "pidfd_open"):
            if lives(process):
                os.kill(process.pid, number)
            return
        descriptor = os.pidfd_open(process.pid)
        try:
            # checked while the descriptor keeps the PID from being reused
            if find(process.pid) == process:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def list_marked(gang: str, rank: int) -> Sequence[LocalProcess]:
    """Return a rank's running processes: this user's processes with the rank's marks, the
    descendants of these processes, and all processes in their sessions.

    The marks are environment variables that a process has when it starts. A child process without
    the marks is found through its parent or session.
    """
    if _HAS_PROC:
        return _find_all(supervised.list_marked(gang, str(rank)))
    marks = {f"{GANG_MARK}={gang}", f"{RANK_MARK}={rank}"}
    return _list_by_ps(lambda command: marks <= set(command.split()), "-E")


def find_command(argument: str) -> LocalProcess | None:
    """Return this user's running process that was started with this argument, such as the path of
    an agent's configuration, or None if no running process has this argument.
    """
    if _HAS_PROC:
        found = _find_all(each["pid"] for each in supervised.find_command(argument))
    else:
        found = _list_by_ps(lambda command: argument in command)
    return next(iter(found), None)


def list_arguments(process: LocalProcess) -> Sequence[str]:
    """Return the arguments of a running process, or nothing if the process has ended or the system
    has no /proc.
    """
    if not _HAS_PROC or not lives(process):
        return ()
    return read_text(f"/proc/{process.pid}/cmdline").split("\0")


def _find_all(pids: Iterable[int]) -> Sequence[LocalProcess]:
    return [process for pid in pids if (process := find(pid)) is not None]


def _list_by_ps(matches: Callable[[str], bool], *options: str) -> Sequence[LocalProcess]:
    """Return the processes with a matching command, on a system without /proc."""
    rows = _ps("-axww", *options, "-o", "pid=,command=").splitlines()
    pairs = (row.split(maxsplit=1) for row in rows)
    return _find_all(int(pair[0]) for pair in pairs if len(pair) == 2 and matches(pair[1]))


def _identify(pid: int) -> tuple[LocalProcess | None, bool]:
    """Return the process with this PID (None if no such process exists), and True if the process is
    a zombie."""
    if _HAS_PROC:
        stat = supervised.read_stat(pid)
        if stat is None:
            return None, False
        return LocalProcess(pid, f"{_boot()}/{int(stat[19])}"), stat[0] in ("Z", "X")
    words = _ps("-p", str(pid), "-o", "stat=,lstart=").split(maxsplit=1)
    if len(words) != 2:
        return None, False
    return LocalProcess(pid, words[1].strip()), words[0].startswith("Z")


@cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _ps(*arguments: str) -> str:
    done = subprocess.run(
        ["ps", *arguments], capture_output=True, text=True, timeout=10, check=False
    )
    return done.stdout


class ProcessWatch:
    """A queue of names. Each watched process has a name. When the process exits, the name is added
    to the queue.
    """

    def __init__(self) -> None:
        self._changes = ChangedGangs()
        self._descriptors: dict[LocalProcess, int] = {}

    async def changed(self) -> str:
        """Wait for the next name in the queue and return it."""
        return await self._changes.get()

    def announce(self, name: str, after_s: float = 0) -> None:
        """Add a name to the queue, immediately or after a delay."""
        if after_s:
            asyncio.get_running_loop().call_later(after_s, self.announce, name)
        else:
            self._changes.put(name)

    def add(self, name: str, process: LocalProcess) -> None:
        """Watch a process, unless the process is already watched. If the process has already
        exited, its name is added to the queue immediately.
        """
        if process in self._descriptors or not hasattr(os, "pidfd_open"):
            return
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            self.announce(name)
            return
        except OSError:  # no file descriptor is free; the next poll tries again
            self.announce(name, _RETRY_S)
            return
        if not lives(process):
            os.close(descriptor)
            self.announce(name)
            return
        self._descriptors[process] = descriptor
        asyncio.get_running_loop().add_reader(descriptor, self._ended, name, process)

    def close(self) -> None:
        """Stop watching. The method must be called in the event loop that watches the processes."""
        for descriptor in self._descriptors.values():
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
        self._descriptors.clear()

    def _ended(self, name: str, process: LocalProcess) -> None:
        descriptor = self._descriptors.pop(process)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        self.announce(name)
