"""Finds the files that processes have open for writing, also processes in containers."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from contextlib import suppress


def find_open(files: dict[int, int]) -> tuple[dict[int, bool], set[int]]:
    """Return the result of `find_writers` for the open files (inode -> descriptor), and the inodes
    for which this user may not know it.

    The kernel grants a read lease only for a file that no process has open for writing. This also
    shows processes whose open files this user may not list, such as those in a container.
    """
    written: set[int] = set()
    unknown: set[int] = set()
    for inode, file in files.items():
        try:
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # ignored by default
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError as error:
            (written if error.errno == errno.EAGAIN else unknown).add(inode)
    if not written and not unknown:
        return {}, set()
    found = find_writers(written | unknown)
    foreign = {inode for inode in unknown - found.keys() if _is_foreign(files[inode])}
    return {**dict.fromkeys(written, False), **found}, foreign


def _is_foreign(file: int) -> bool:
    return os.geteuid() not in (0, os.fstat(file).st_uid)


def find_writers(inodes: set[int], handled: set[int] | None = None) -> dict[int, bool]:
    """Return the inodes that a process of this user has open for writing, and whether every such
    process only appends. Processes whose files this user may not see are omitted. Adds to `handled`
    the inodes that a process with a handler of SIGTERM has open."""
    found: dict[int, bool] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            for file in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError, ValueError):
                    inode = os.stat(f"/proc/{pid}/fd/{file}").st_ino
                    if inode in inodes and (flags := _read_flags(pid, file)) & os.O_ACCMODE:
                        appends = bool(flags & os.O_APPEND)
                        found[inode] = appends and found.get(inode, True)
                        if handled is not None and _handles_sigterm(pid):
                            handled.add(inode)
    return found


def _handles_sigterm(pid: str) -> bool:
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as status:
        for line in status:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def _read_flags(pid: str, file: str) -> int:
    with open(f"/proc/{pid}/fdinfo/{file}", encoding="ascii") as info:
        for line in info:
            if line.startswith("flags:"):
                return int(line.split()[1], 8)
    return 0
