"""Measures how fast the work reads and writes disks, and how fast its node sends and receives."""

from __future__ import annotations

import glob
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

MIB = 1 << 20
# `port_rcv_data` and `port_xmit_data` of RDMA devices count words of 4 bytes
# (Documentation/ABI/stable/sysfs-class-infiniband of Linux).
RDMA = "/sys/class/infiniband/*/ports/*/counters/port_{}_data"
WORD = 4
# For each rate, its counter of `/proc/PID/io` or of the network.
_DISK = {"disk_read_mib_s": b"read_bytes", "disk_write_mib_s": b"write_bytes"}
_NET = ("net_in_mib_s", "net_out_mib_s")


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
