"""Identifies processes, and finds processes by marks in their environment variables. A process is
identified by PID, start time and boot, because PIDs are reused.

Finds the agents of gangs that run on this machine, whichever state folder they belong to, and
records when the agents of a gang that is being removed are killed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence

from .files import read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Fields = dict[str, Any]


GANG_MARK, RANK_MARK = (
    "CAVVY_GANG",
    "CAVVY_RANK",
)  # the environment variables that mark every process of a gang's rank


def boot() -> str:
    """Return an ID of the current boot of the host or, in a container, of the current run of the
    container. No process survives a reboot of the host or a restart of the container.
    """
    return read_text("/proc/sys/kernel/random/boot_id") + "/" + os.readlink("/proc/self/ns/pid")


def identify(pid: int) -> Fields | None:
    """Return the identity of the running process with this PID, or None if no such process runs. A
    zombie does not count as running.
    """
    stat = read_stat(pid)
    return (
        None
        if stat is None or stat[0] in ("Z", "X")
        else {"pid": pid, "start": int(stat[19]), "boot": boot()}
    )


def lives(process: Fields) -> bool:
    return identify(process["pid"]) == process


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def read_stat(pid: int | str) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the third field on (see proc(5)); the second field,
    the command's name, may contain spaces. Returns None if no such process exists.
    """
    text = read_text(f"/proc/{pid}/stat")
    return text[text.rindex(")") + 2 :].split() if ")" in text else None


def list_marked(gang: str, rank: str) -> list[int]:
    """Return the PIDs of a rank's running processes: this user's processes with the rank's
    environment variables, the descendants of these processes, and all processes in the sessions of
    these processes.
    """
    stats: dict[int, list[str]] = {}
    for name in own_pids():
        stat = read_stat(name)
        if stat is not None and stat[0] not in ("Z", "X"):
            stats[int(name)] = stat
    marks = {f"{GANG_MARK}={gang}", f"{RANK_MARK}={rank}"}
    marked = {pid for pid in stats if marks <= set(read_text(f"/proc/{pid}/environ").split("\0"))}
    sessions = {pid for pid in marked if int(stats[pid][3]) == pid}
    while True:
        more = {
            pid
            for pid, stat in stats.items()
            if pid not in marked and (int(stat[1]) in marked or int(stat[3]) in sessions)
        }
        if not more:
            return sorted(marked - {os.getpid()})
        marked |= more


def find_command(argument: str) -> Iterator[Fields]:
    """Yield the running processes of this user that were started with this argument."""
    for pid in own_pids():
        if argument in read_text(f"/proc/{pid}/cmdline").split("\0"):
            found = identify(int(pid))
            if found is not None:
                yield found


def own_pids() -> Iterator[str]:
    uid = os.getuid()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat("/proc/" + name).st_uid == uid:
                yield name
        except OSError:
            continue


def find_agents(gangs: Collection[str]) -> Mapping[str, Sequence[int]]:
    """Return the gangs that run on this machine as this user, with the PIDs of their agents. Finds
    none on systems without /proc.
    """
    marks = {f"{GANG_MARK}={gang}": gang for gang in gangs}
    parents: dict[str, dict[int, int]] = {}
    for name in _list_pids() if marks else ():
        stat = read_stat(name)
        if stat is None or stat[0] in ("Z", "X"):
            continue
        for mark in marks.keys() & set(read_text(f"/proc/{name}/environ").split("\0")):
            parents.setdefault(marks[mark], {})[int(name)] = int(stat[1])
    return {
        gang: sorted(pid for pid, parent in found.items() if parent not in found)
        for gang, found in parents.items()
    }


def _list_pids() -> Sequence[str]:
    try:
        return list(own_pids())
    except FileNotFoundError:
        return ()


def make_removal(seconds: float) -> Fields:
    """Return the record of a gang's removal whose agents are killed `seconds` from now.

    The time is measured by the clock that counts since the host's boot, because an administrator or
    a time service can set the clock of the date. The date counts only in records of another boot
    and in records of older supervisors.
    """
    return {
        "kill_at": time.time() + seconds,
        "boot": boot(),
        "kill_since_boot_s": time.monotonic() + seconds,
    }


def is_overdue(removal: Fields | None) -> bool:
    """Return whether the agents of a gang must be killed now."""
    if removal is None:
        return False
    if removal.get("boot") == boot():
        return bool(time.monotonic() >= removal["kill_since_boot_s"])
    return bool(time.time() >= removal["kill_at"])
