"""Measures the CPU and memory of the node that the work uses, through /proc."""

from __future__ import annotations

import os
import time

from ..disk import read_process
from .rates import RateMeter
from .reaper import descendants

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# Above this number of threads, looking at all processes of the node costs less than asking each
# thread for its children.
THREADS = 256


class UsageMeter:
    """Measures the CPU and memory that the work uses. Outside a container, these are all processes
    below a reaper. In a container, these are all processes with `mark` in their environment. The
    CPU use of commands that users run on the node is included; `others` returns the reapers of
    these commands.
    """

    def __init__(
        self, reaper: int, mark: bytes = b"", others: Callable[[], list[int]] = list
    ) -> None:
        self._reaper = reaper
        self._others = others
        self._mark = mark
        self.known = True  # whether the agent can see the processes of the container engine
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._before: dict[int, int] = {}
        self._at = time.monotonic()
        self._rates = RateMeter()
        self.cpu_percent = 0.0  # CPU use since the previous measurement, in percent of one CPU
        self.memory_mib = 0.0
        self.memory_peak_mib = 0.0  # the highest measurement so far

    def list_work(self) -> list[int]:
        """Return the IDs of the work's processes."""
        return list_marked(self._mark) if self._mark else list_below(self._reaper)

    def list_beside(self) -> list[int]:
        """Return the IDs of the processes of commands that users run on the node."""
        others = self._others()
        return list_below(*others) if others else []

    @property
    def rates(self) -> dict[str, float]:
        """The rates of disks and networks, by name; see RateMeter."""
        return self._rates.rates

    def look(self) -> None:
        """Measure the usage now. Processes that start and end between two measurements are
        not measured."""
        now, ticks, pages = time.monotonic(), {}, 0
        found = self.list_work()
        self.known = bool(found)
        for pid in {*found, *self.list_beside()}:
            if fields := read_process(pid):
                ticks[pid] = int(fields[11]) + int(fields[12])
                pages += int(fields[21]) if pid in found else 0
        used = sum(value - self._before.get(pid, 0) for pid, value in ticks.items())
        self.cpu_percent = round(100 * used / self._ticks / max(0.001, now - self._at), 1)
        self.memory_mib = round(pages * self._page / 1048576, 1)
        self.memory_peak_mib = max(self.memory_peak_mib, self.memory_mib)
        self._before, self._at = ticks, now
        self._rates.look(ticks)


def list_below(*roots: int) -> list[int]:
    """Return the same IDs as `descendants`, without reading all processes of the node, because
    a node with many jobs has many processes. A process that starts during the call may be missing.
    """
    found, todo, threads = list[int](), [*roots], 0
    while todo:
        folder = f"/proc/{todo.pop()}/task"
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            threads += 1
            try:
                with open(f"{folder}/{name}/children", "rb") as file:
                    below = [int(pid) for pid in file.read().split()]
            except (FileNotFoundError, ProcessLookupError):
                if os.path.isdir(f"{folder}/{name}"):  # the kernel does not list children
                    return descendants(*roots)
                continue
            found += below
            todo += below
        if threads > THREADS:
            return descendants(*roots)
    return found


def list_marked(mark: bytes) -> list[int]:
    """Return the IDs of the processes whose environment contains `mark`. Processes whose
    environment the agent cannot read are omitted.
    """
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if mark in file.read().split(b"\0"):
                        found.append(int(name))
            except OSError:
                continue
    return found
