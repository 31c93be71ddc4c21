"""Processes of this machine: start one that outlives us, know it again, signal it, find those that bear a mark.

A process is known by its number and its start, never by the number alone, since numbers are used again.
Linux is read through /proc; elsewhere `ps` answers, more slowly.
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
GANG_MARK = "REMUDA_GANG"
RANK_MARK = "REMUDA_RANK"


@dataclass(frozen=True, slots=True)
class Process:
    """One process, for good: `start` is the boot and the clock tick in which it began."""

    pid: int
    start: str


@dataclass(frozen=True, slots=True)
class _Stat:
    """What /proc/PID/stat says, as far as it is needed here."""

    process: Process
    parent: int
    session: int


def start(command: Sequence[str], environ: Mapping[str, str], output: Path) -> Process:
    """Start a program in a session of its own, reading nothing and writing to `output`. Raises OSError.

    posix_spawn does not copy our memory map, so this costs well under a millisecond whatever our size.
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
    found = find(pid)
    return found if found is not None else Process(pid, "gone at once")


def find(pid: int) -> Process | None:
    """The living process of that number; None where there is none. A zombie does not live."""
    if not _HAS_PROC:
        words = _ps("-p", str(pid), "-o", "stat=,lstart=").split(maxsplit=1)
        return Process(pid, words[1].strip()) if len(words) == 2 and not words[0].startswith("Z") else None
    stat = _stat(pid)
    return stat.process if stat is not None else None


def lives(process: Process) -> bool:
    """Whether that very process still runs; reaps it where it was our child and has ended."""
    reap(process.pid)
    return find(process.pid) == process


def reap(pid: int) -> None:
    """Let a dead child go; nothing where it lives or is not ours."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def send(process: Process, number: signal.Signals) -> None:
    """Signal that very process; nothing where it is gone. A number used again meanwhile is never hit on Linux."""
    with suppress(ProcessLookupError):
        if not hasattr(os, "pidfd_open"):
            if lives(process):
                os.kill(process.pid, number)
            return
        descriptor = os.pidfd_open(process.pid)
        try:
            if find(process.pid) == process:  # checked while the descriptor pins the number's owner
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def list_marked(gang: str, rank: int) -> Sequence[Process]:
    """Every living process of ours that carries a rank's marks, with all that descend from it or share its session.

    The environment is the one at the process's start; a child that cleared it is found through its parent or session.
    """
    marks = {f"{GANG_MARK}={gang}".encode(), f"{RANK_MARK}={rank}".encode()}
    if not _HAS_PROC:
        lines = (line.split(maxsplit=1) for line in _ps("-axwwE", "-o", "pid=,command=").splitlines())
        pids = [int(words[0]) for words in lines if len(words) == 2 and marks <= set(words[1].encode().split())]
        return [process for pid in pids if (process := find(pid)) is not None]
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


def find_command(argument: str) -> Process | None:
    """The living process of ours that was started with this argument, such as the path of its configuration."""
    if not _HAS_PROC:
        lines = (line.split(maxsplit=1) for line in _ps("-axww", "-o", "pid=,command=").splitlines())
        pids = [int(words[0]) for words in lines if len(words) == 2 and argument in words[1]]
        return next((process for pid in pids if (process := find(pid)) is not None), None)
    wanted = argument.encode()
    return next((stat.process for stat in _list_stats() if wanted in _read(stat.process.pid, "cmdline")), None)


def _read(pid: int, name: str) -> list[bytes]:
    try:
        return (_PROC / str(pid) / name).read_bytes().split(b"\0")
    except OSError:  # gone, or not ours to see
        return []


def _list_stats() -> Iterator[_Stat]:
    uid = os.getuid()
    for entry in os.scandir(_PROC):
        if entry.name.isdigit():
            with suppress(OSError):
                if entry.stat().st_uid == uid and (stat := _stat(int(entry.name))) is not None:
                    yield stat


def _stat(pid: int) -> _Stat | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # proc(5): the fields from the third on; the name may hold blanks
    if fields[0] in (b"Z", b"X"):
        return None
    return _Stat(Process(pid, f"{_boot()}/{int(fields[19])}"), int(fields[1]), int(fields[3]))


@cache
def _boot() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def _ps(*arguments: str) -> str:
    done = subprocess.run(["ps", *arguments], capture_output=True, text=True, timeout=10, check=False)
    return done.stdout
