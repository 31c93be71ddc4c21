"""Measures for how long processes want a CPU, to find those that compute."""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

# The part of its time for which a process wants a CPU if it computes; what only polls wants less.
BUSY = 0.1


class CpuUses:
    """For how long processes want a CPU, between the looks of the tool, which stops them."""

    def __init__(self, pids: Collection[int]) -> None:
        self._wanted = dict.fromkeys(pids, 0.0)
        self._spent = 0.0

    def rest(self, seconds: float) -> None:
        began, before = time.monotonic(), {pid: read_wanted(pid) for pid in self._wanted}
        time.sleep(seconds)
        for pid, each in before.items():
            self._wanted[pid] += max(0.0, read_wanted(pid) - each)
        self._spent += time.monotonic() - began

    def list_busy(self) -> set[int]:
        return {pid for pid, each in self._wanted.items() if each >= BUSY * self._spent > 0}


def read_wanted(pid: int) -> float:
    """Return for how many seconds the threads of a process have run, or waited for a CPU."""
    total = 0
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/schedstat") as file:
                run, waited, _ = file.read().split()
            total += int(run) + int(waited)
    except (OSError, ValueError):  # it has ended, or the kernel does not count
        pass
    return total / 1e9
