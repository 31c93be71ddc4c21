"""Processes of this machine: start one that outlives the server, recognise and signal it, find
processes by their marks.

A process is identified by its PID and its start, since PIDs are reused. Linux is read through
/proc; other systems through `ps`, which is slower.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_PROC = Path("/proc")
_HAS_PROC = Path("/proc/self/stat").exists()
_DEFAULTED = (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
# Environment variables that every process of a gang's rank carries.
GANG_MARK = "CAVVY_GANG"
RANK_MARK = "CAVVY_RANK"


@dataclass(frozen=True, slots=True)
class LocalProcess:
    """One process. `start` is the boot and the clock tick of its start, so that a reused PID
    differs.
    """

    pid: int
    start: str


@dataclass(frozen=True, slots=True)
class _Stat:
    """The fields of /proc/PID/stat that this module needs."""

    process: LocalProcess
    parent: int
    session: int
    zombie: bool


def start(command: Sequence[str], environ: Mapping[str, str], output: Path) -> LocalProcess:
    """Start a program in a new session, with empty input and output to a file. Raises OSError.

    posix_spawn does not copy the server's memory map, so this takes well under a millisecond.
    """
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
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
    found, _ = _identify(pid)  # a zombie at worst, until it is reaped
    if found is None:
        raise ProcessLookupError(f"the process {pid} cannot be looked up")
    return found


def find(pid: int) -> LocalProcess | None:
    """The living process with this PID, or None. A zombie does not count."""
    found, zombie = _identify(pid)
    return None if zombie else found


def lives(process: LocalProcess) -> bool:
    """Whether this process still runs."""
    return find(process.pid) == process


def reap(process: LocalProcess) -> int | None:
    """Reap a child of this process. Returns its exit code, 128 + N if signal N killed it, or None
    if it lives or is not a child.
    """
    if _identify(process.pid) != (process, True):
        return None
    try:
        pid, status = os.waitpid(process.pid, os.WNOHANG)
    except ChildProcessError:
        return None
    code = os.waitstatus_to_exitcode(status)
    return None if pid == 0 else code if code >= 0 else 128 - code


def send(process: LocalProcess, number: signal.Signals) -> None:
    """Signal this process, if it lives. On Linux, a process with a reused PID is never
    signalled."""
    with suppress(ProcessLookupError):
        if not hasattr(os, "pidfd_open"):
            if lives(process):
                os.kill(process.pid, number)
            return
        descriptor = os.pidfd_open(process.pid)
        try:
            if find(process.pid) == process:  # checked while the descriptor holds the process
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def list_marked(gang: str, rank: int) -> Sequence[LocalProcess]:
    """Every living process of this user that carries a rank's marks, with its descendants and the
    processes of its session.

    A process shows the environment of its start. A child that cleared it is found through its
    parent or session.
    """
    marks = {f"{GANG_MARK}={gang}".encode(), f"{RANK_MARK}={rank}".encode()}
    if not _HAS_PROC:
        return _list_by_ps(marks)
    stats = {stat.process.pid: stat for stat in _list_stats()}
    marked = {pid for pid in stats if marks <= set(_read(pid, "environ"))}
    sessions = {pid for pid in marked if stats[pid].session == pid}
    while True:
        more = {
            pid
            for pid, stat in stats.items()
            if pid not in marked and (stat.parent in marked or stat.session in sessions)
        }
        if not more:
            return [stats[pid].process for pid in sorted(marked) if pid != os.getpid()]
        marked |= more


def _list_by_ps(marks: set[bytes]) -> Sequence[LocalProcess]:
    """The marked processes of a system without /proc."""
    lines = (line.split(maxsplit=1) for line in _ps("-axwwE", "-o", "pid=,command=").splitlines())
    pids = [
        int(words[0])
        for words in lines
        if len(words) == 2 and marks <= set(words[1].encode().split())
    ]
    return [process for pid in pids if (process := find(pid)) is not None]


def find_command(argument: str) -> LocalProcess | None:
    """The living process of this user that was started with this argument, such as the path of its
    configuration.
    """
    if not _HAS_PROC:
        lines = (
            line.split(maxsplit=1) for line in _ps("-axww", "-o", "pid=,command=").splitlines()
        )
        pids = [int(words[0]) for words in lines if len(words) == 2 and argument in words[1]]
        return next((process for pid in pids if (process := find(pid)) is not None), None)
    wanted = argument.encode()
    return next(
        (stat.process for stat in _list_stats() if wanted in _read(stat.process.pid, "cmdline")),
        None,
    )


def _read(pid: int, name: str) -> list[bytes]:
    try:
        return (_PROC / str(pid) / name).read_bytes().split(b"\0")
    except OSError:  # it exited, or belongs to another user
        return []


def _identify(pid: int) -> tuple[LocalProcess | None, bool]:
    """The process with this PID, and whether it is a zombie."""
    if _HAS_PROC:
        stat = _stat(pid)
        return (None, False) if stat is None else (stat.process, stat.zombie)
    words = _ps("-p", str(pid), "-o", "stat=,lstart=").split(maxsplit=1)
    return (
        (LocalProcess(pid, words[1].strip()), words[0].startswith("Z"))
        if len(words) == 2
        else (None, False)
    )


def _list_stats() -> Iterator[_Stat]:
    uid = os.getuid()
    for name in filter(str.isdigit, os.listdir(_PROC)):
        with suppress(OSError):
            stat = _stat(int(name)) if os.stat(f"/proc/{name}").st_uid == uid else None
            if stat is not None and not stat.zombie:
                yield stat


def _stat(pid: int) -> _Stat | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[
        text.rindex(b")") + 2 :
    ].split()  # proc(5): the fields from the third on; the name may hold blanks
    process = LocalProcess(pid, f"{_boot()}/{int(fields[19])}")
    return _Stat(process, int(fields[1]), int(fields[3]), fields[0] in (b"Z", b"X"))


@cache
def _boot() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def _ps(*arguments: str) -> str:
    done = subprocess.run(
        ["ps", *arguments], capture_output=True, text=True, timeout=10, check=False
    )
    return done.stdout
