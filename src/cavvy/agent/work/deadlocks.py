"""Tells, from the system calls of its threads, that work waits for itself and never goes on."""

from __future__ import annotations

import os

from ..disk import read_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

# Numbers of Linux' system calls by machine: in these, a thread waits for another one, or for the
# end of a process that it has started.
FUTEX = {"x86_64": "202", "aarch64": "98"}
WAIT_CHILD = {"x86_64": ("61", "247"), "aarch64": ("260", "95")}  # wait4, waitid
PRIVATE, FUTEX_WAIT = 0x80, (0, 9)  # of linux/futex.h: only threads of this process can wake it
# Signals whose handlers wake no thread: Python's for Ctrl-C, those of faults, two of the C library.
HARMLESS = sum(1 << (number - 1) for number in (2, 4, 6, 7, 8, 11, 32, 33))


def is_deadlocked(pids: Collection[int]) -> bool:
    """Return whether nothing can wake any of these processes: each of their threads waits, without
    a limit of time, for another thread of its process or for the end of a child, and no handler of
    a signal could change that. False where this cannot be read."""
    machine = os.uname().machine
    futex, children = FUTEX.get(machine, ""), WAIT_CHILD.get(machine, ())
    found = False
    for pid in pids:
        if (read_process(pid) or [b"Z"])[0] == b"Z":  # it has ended
            continue
        try:
            with open(f"/proc/{pid}/status") as file:
                caught = next(line.split()[1] for line in file if line.startswith("SigCgt:"))
            calls = []
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/syscall") as file:
                    calls.append(file.read().split())
        except (OSError, StopIteration):
            return False
        if int(caught, 16) & ~HARMLESS:
            return False
        for call, *given in calls:
            if call == futex and _waits_for_own(given):
                found = True
            elif call not in children:
                return False
    return found


def _waits_for_own(given: list[str]) -> bool:
    """Return whether a call of `futex` waits for a thread of the same process, for ever: its second
    argument is what to do, the fourth the limit of time."""
    do, limit = int(given[1], 16), int(given[3], 16)
    return bool(do & PRIVATE) and do & 0x7F in FUTEX_WAIT and not limit
