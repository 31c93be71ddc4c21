"""Measures through /proc how much of the node the work uses: CPU and memory, and how fast it reads
and writes disks and its node sends and receives.
"""

from __future__ import annotations

import glob
import os
import time

from ..disk import read_process
from .reaper import descendants

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection


# Above this number of threads, looking at all processes of the node costs less than asking each
# thread for its children.
THREADS = 256

MIB = 1 << 20
# `port_rcv_data` and `port_xmit_data` of RDMA devices count words of 4 bytes
# (Documentation/ABI/stable/sysfs-class-infiniband of Linux).
RDMA = "/sys/class/infiniband/*/ports/*/counters/port_{}_data"
WORD = 4
# For each rate, its counter of `/proc/PID/io` or of the network.
_DISK = {"disk_read_mib_s": b"read_bytes", "disk_write_mib_s": b"write_bytes"}
_NET = ("net_in_mib_s", "net_out_mib_s")


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


class RateMeter:
    """Measures rates in MiB/s since the previous measurement. Disks count what the processes of the
    work caused. The network counts all traffic of the interfaces that the work sees, except
    traffic inside of the node, and RDMA.
    """

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._files: dict[int, dict[str, int]] = {}
        self._net: tuple[int, ...] | None = None
        self.rates: dict[str, float] = {}

    def look(self, pids: Collection[int]) -> None:
        """Measure the rates now. Rates that cannot be measured are left out."""
        now = time.monotonic()
        seconds, self._at = max(now - self._at, 0.001), now
        moved: dict[str, int] = {}
        files = {pid: found for pid in pids if (found := read_io(pid))}
        for pid, found in files.items():
            before = self._files.get(pid, dict.fromkeys(found, 0))
            for name, size in found.items():
                moved[name] = moved.get(name, 0) + max(0, size - before[name])
        net = read_network(min(pids)) if pids else None
        if net is not None and self._net is not None:
            moved |= {
                name: max(0, size - before)
                for name, size, before in zip(_NET, net, self._net)  # noqa: B905  # Python 3.8
            }
        self._files, self._net = files, net
        self.rates = {name: round(size / MIB / seconds, 3) for name, size in moved.items()}


def read_io(pid: int) -> dict[str, int]:
    """Return the bytes that a process has read from disks and written to them, or {} if the agent
    may not see them.
    """
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            lines = dict(line.split(b": ") for line in file.read().splitlines())
        return {name: int(lines[key]) for name, key in _DISK.items()}
    except (OSError, ValueError, KeyError):
        return {}


def read_network(pid: int) -> tuple[int, int] | None:
    """Return the bytes that were received and sent by the interfaces that a process sees, without
    the loopback interface, or None if they are unknown.
    """
    try:
        with open(f"/proc/{pid}/net/dev", "rb") as file:
            rows = [line.split(b":") for line in file.read().splitlines()[2:]]
        counters = [rest.split() for name, rest in rows if name.strip() != b"lo"]
        received = sum(int(each[0]) for each in counters)
        sent = sum(int(each[8]) for each in counters)
    except (OSError, ValueError, IndexError):
        return None
    return received + _read_rdma("rcv"), sent + _read_rdma("xmit")


def _read_rdma(way: str) -> int:
    total = 0
    for path in glob.glob(RDMA.format(way)) if os.path.isdir("/sys/class/infiniband") else ():
        try:
            with open(path, "rb") as file:
                total += WORD * int(file.read())
        except (OSError, ValueError):
            continue  # a port that is down, or the counters of a driver that has none
    return total
