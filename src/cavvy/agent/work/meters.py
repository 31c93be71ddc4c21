"""Meters of what the work uses: CPU, memory and how fast it reads, writes, sends and receives,
through /proc; and of accelerators and processors: their use, memory, power and energy, from
NVIDIA's library (NVML) or from files of Linux. Apple's counters (IOKit) are out of reach without
Apple's own programs and root, so work on Macs has no such figures.
"""

from __future__ import annotations

import glob
import json
import os
import time

from ..disk import read_process
from .reaper import descendants

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from typing import Any, Protocol

    class GpuMeter(Protocol):
        """Reads one GPU."""

        def read(self) -> dict[str, float]:
            """Return what is known of `gpu_percent`, `gpu_memory_mib`, `gpu_power_w` and `joules`,
            a counter of energy that only grows."""
            ...


EVERY_S = 2.0
VENDORS = ("nvidia", "amd", "intel")  # whose GPUs can be measured
MIB = 1 << 20
MOST_PROCESSES = 1024  # on one GPU
NO_VALUE = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE
LONGEST_FILE = 64  # bytes of a number
_PCI = {"amd": 0x1002, "intel": 0x8086}  # vendors, from the PCI ID repository
# Intel's graphics inside of CPUs have no memory of their own, and are no accelerators.
_OWN_MEMORY = {
    "amd": ("device/mem_info_vram_total",),
    "intel": ("device/tile*/physical_vram_size_bytes", "lmem_total_bytes"),
}
# The files below /sys/class/drm/cardN, with the units of the kernel's documentation: amdgpu
# (Documentation/gpu/amdgpu/thermal.rst, driver-misc.rst), xe and i915
# (Documentation/ABI/testing/sysfs-driver-intel-xe-hwmon, -i915-hwmon). The first that exists
# counts.
_PERCENT = ("device/gpu_busy_percent",)
_USED = ("device/mem_info_vram_used",)  # bytes
_POWER = ("device/hwmon/hwmon*/power1_average", "device/hwmon/hwmon*/power1_input")  # microwatts
_ENERGY = (  # microjoules: of the card, or of the package
    "device/hwmon/hwmon*/energy1_input",
    "device/hwmon/hwmon*/energy2_input",
)
# milliseconds in which a part of the GPU was idle; the busiest part counts
_IDLE = ("device/tile*/gt*/gtidle/idle_residency_ms", "gt/gt*/rc6_residency_ms")
# Above this number of threads, looking at all processes of the node costs less than asking each
# thread for its children.
THREADS = 256
# `port_rcv_data` and `port_xmit_data` of RDMA devices count words of 4 bytes
# (Documentation/ABI/stable/sysfs-class-infiniband of Linux).
RDMA = "/sys/class/infiniband/*/ports/*/counters/port_{}_data"
WORD = 4
# For each rate, its counter of `/proc/PID/io` or of the network.
_DISK = {"disk_read_mib_s": b"read_bytes", "disk_write_mib_s": b"write_bytes"}
_NET = ("net_in_mib_s", "net_out_mib_s")


def measure_gpus(
    vendor: str,
    devices: list[str] | None,
    indices: list[int],
    *,
    shared: bool = False,
    part: float = 1.0,
) -> int:
    """Print the usage of these GPUs (of all GPUs if None) as a line of JSON every two seconds:
    the mean use, the sums of the memory and of the power, and `joules` since the start, of which
    only `part` counts; of several GPUs also the values of each, such as `gpu_percent.0`. With
    `shared`, also print the memory of each process on an NVIDIA GPU. The
    function runs in a separate process, because a faulty GPU driver can hang forever.
    """
    meters: Sequence[GpuMeter]
    if vendor == "nvidia":
        meters = nvidia = list_nvidia(devices, indices)
    else:
        meters, nvidia = list_cards(vendor, devices), []
    sums = GpuSums(meters)
    while meters:
        values: dict[str, object] = {**sums.read(time.monotonic())}
        if "joules" in values:
            values["joules"] = round(sums.joules * part, 3)
        values.update(sums.each)
        if shared and nvidia:
            values["processes"] = nvidia[0].read_processes()
        os.write(1, (json.dumps(values) + "\n").encode())
        time.sleep(EVERY_S)
    return 0


class GpuSums:
    """Adds up the meters of a node's GPUs. Where a GPU has no counter of energy, its power is taken
    to be constant until the next reading; where it has only the counter, the power is the mean.
    """

    def __init__(self, meters: Sequence[GpuMeter]) -> None:
        self._meters = meters
        self._before: list[dict[str, float]] = [{} for _ in meters]
        self._at: float | None = None
        self.joules = 0.0  # since the start
        # the last values of each GPU if there are several, such as `gpu_percent.0`
        self.each: dict[str, float] = {}

    def read(self, now: float) -> dict[str, float]:
        """Measure at the time `now` (seconds of a clock that only grows)."""
        seconds = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        found = [each.read() for each in self._meters]
        for values, before in zip(found, self._before):  # noqa: B905  # Python 3.8
            spent = values.get("gpu_power_w", 0.0) * seconds
            if "joules" in values and "joules" in before:
                counted = values["joules"] - before["joules"]
                if counted >= 0:  # otherwise, the driver was loaded anew
                    spent = counted
                if "gpu_power_w" not in values and seconds:
                    values["gpu_power_w"] = spent / seconds
            self.joules += max(0.0, spent)
        self._before = found
        busy = [each["gpu_percent"] for each in found if "gpu_percent" in each]
        sums = {"gpu_percent": round(sum(busy) / len(busy), 1)} if busy else {}
        for name in ("gpu_memory_mib", "gpu_power_w"):
            known = [each[name] for each in found if name in each]
            if known:
                sums[name] = round(sum(known), 1)
        if any("gpu_power_w" in each or "joules" in each for each in found):
            sums["joules"] = self.joules
        if len(found) > 1:
            self.each = {
                f"{name}.{number}": round(value, 1)
                for number, values in enumerate(found)
                for name, value in values.items()
                if name != "joules"
            }
        return sums


def list_nvidia(devices: list[str] | None, indices: list[int]) -> list[NvidiaMeter]:
    """Return the meters of these GPUs by their UUIDs or else their indices, or of all GPUs."""
    import ctypes

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2():
        return []
    if devices is None:
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        devices, indices = [""] * count.value, list(range(count.value))
    meters = []
    for at, device in enumerate(devices):
        handle = ctypes.c_void_p()
        failed = nvml.nvmlDeviceGetHandleByUUID(device.encode(), ctypes.byref(handle))
        if failed and at < len(indices):
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(indices[at], ctypes.byref(handle))
        if not failed:
            meters.append(NvidiaMeter(nvml, handle))
    return meters


class NvidiaMeter:
    """Reads a GPU through NVML. Names and structs are from nvml.h."""

    def __init__(self, nvml: Any, handle: object) -> None:
        self._nvml, self._handle = nvml, handle

    def read(self) -> dict[str, float]:
        import ctypes

        rates = (ctypes.c_uint * 2)()  # nvmlUtilization_t: gpu, memory
        # nvmlMemory_v2_t: version, total, reserved, free, used. As in nvidia-smi, memory that the
        # driver reserves is not in use; `used` of version 1, for drivers before 510, contains it.
        memory = (ctypes.c_ulonglong * 5)(ctypes.sizeof(ctypes.c_ulonglong * 5) | 2 << 24)
        before = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used
        power, energy = ctypes.c_uint(), ctypes.c_ulonglong()  # mW, mJ since the driver was loaded
        values: dict[str, float] = {}
        if not self._nvml.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(rates)):
            values["gpu_percent"] = rates[0]
        if self._tells("nvmlDeviceGetMemoryInfo_v2", memory):
            values["gpu_memory_mib"] = memory[4] / MIB
        elif self._tells("nvmlDeviceGetMemoryInfo", before):
            values["gpu_memory_mib"] = before[2] / MIB
        if self._tells("nvmlDeviceGetPowerUsage", power):
            values["gpu_power_w"] = power.value / 1000
        if self._tells("nvmlDeviceGetTotalEnergyConsumption", energy):  # since Volta
            values["joules"] = energy.value / 1000
        return values

    def _tells(self, name: str, result: Any) -> bool:
        """Whether the library has the function, and the GPU an answer, now in `result`."""
        import ctypes

        call = getattr(self._nvml, name, None)
        return call is not None and not call(self._handle, ctypes.byref(result))

    def read_processes(self) -> dict[str, float] | None:
        """Return the GPU memory in MiB of each process on this GPU, by its ID. Return None if the
        driver does not tell it. The struct is nvmlProcessInfo_t.
        """
        import ctypes

        class Process(ctypes.Structure):
            _fields_ = (
                ("pid", ctypes.c_uint),
                ("used", ctypes.c_ulonglong),
                ("gpu_instance", ctypes.c_uint),
                ("compute_instance", ctypes.c_uint),
            )

        found: dict[str, float] = {}
        for kind in ("Compute", "MPSCompute"):  # the clients of MPS are listed apart
            read = getattr(self._nvml, f"nvmlDeviceGet{kind}RunningProcesses_v3", None)
            count, rows = ctypes.c_uint(MOST_PROCESSES), (Process * MOST_PROCESSES)()
            if read is None or read(self._handle, ctypes.byref(count), rows):
                if kind == "Compute":
                    return None
                continue
            for row in rows[: count.value]:
                if row.used == NO_VALUE:
                    return None
                found[str(row.pid)] = max(found.get(str(row.pid), 0), round(row.used / MIB, 1))
        return found


def list_cards(vendor: str, devices: list[str] | None, root: str = "/") -> list[CardMeter]:
    """Return the meters of AMD's or Intel's GPUs with these IDs, or of all with memory of their
    own."""
    found = []
    for card in glob.glob(os.path.join(root, "sys/class/drm/card[0-9]*")):
        if not card.rpartition("card")[2].isdigit():
            continue  # a connector, such as card0-DP-1
        if _read_number(f"{card}/device/vendor") != _PCI.get(vendor):
            continue
        if _find(card, _OWN_MEMORY[vendor]) and (devices is None or _names_of(card) & {*devices}):
            found.append(CardMeter(card))
    return found


def _names_of(card: str) -> set[str]:
    """Return the IDs that the server may have given to a card: of its serial number or its PCI
    address."""
    address = os.path.basename(os.path.realpath(f"{card}/device"))
    names = {f"intel-{address}"}
    try:
        domain, bus, place = address.split(":")
        slot, function = place.split(".")
        location = int(bus, 16) << 8 | int(slot, 16) << 3 | int(function, 16)
        names.add(f"amd-{int(domain, 16):x}-{location:x}")
    except ValueError:
        pass
    serial = _read_text(f"{card}/device/unique_id")
    return names | ({f"GPU-{serial.lower():0>16}"} if serial else set())


class CardMeter:
    """Reads a GPU through the files of its driver in /sys/class/drm/cardN."""

    def __init__(self, card: str) -> None:
        self._card = card
        self._idle: tuple[float, list[float]] | None = None

    def read(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, patterns, unit in (
            ("gpu_percent", _PERCENT, 1),
            ("gpu_memory_mib", _USED, MIB),
            ("gpu_power_w", _POWER, 10**6),
            ("joules", _ENERGY, 10**6),
        ):
            number = next(iter(_find(self._card, patterns)), None)
            if number is not None and number >= 0:
                values[name] = number / unit
        if "gpu_percent" not in values:
            self._read_idle(time.monotonic(), values)
        return values

    def _read_idle(self, now: float, values: dict[str, float]) -> None:
        idle: list[float] = [*_find(self._card, _IDLE)]
        before, self._idle = self._idle, (now, idle)
        if before is not None and idle and len(before[1]) == len(idle):
            passed = max(1e-3, now - before[0])
            rest = [(new - old) / 1000 / passed for new, old in zip(idle, before[1])]  # noqa: B905
            values["gpu_percent"] = 100 * min(1.0, max(0.0, 1 - min(rest)))


class CpuMeter:
    """Reads the energy of the node's processors and their memory through Intel's and AMD's counters
    (RAPL) where the agent may read them: since Linux 5.10, only as root, and not in most virtual
    machines.
    """

    def __init__(self, root: str = "/") -> None:
        self._root = root
        self._zones: dict[str, int] = {}  # the counter and the number at which it begins anew
        for folder in sorted(glob.glob(os.path.join(root, "sys/class/powercap/intel-rapl:*"))):
            # `core` and `uncore` are parts of the package; `psys` is the package and more
            if _read_text(folder + "/name").startswith(("package-", "dram")):
                path = folder + "/energy_uj"
                if _read_number(path) is not None:
                    self._zones[path] = _read_number(folder + "/max_energy_range_uj") or 0
        self._before: dict[str, int] = {}
        self._stat = (0, 0)
        self._at = 0.0
        self.watts: float | None = None  # of the work, since the previous reading

    def read(self, now: float, cpu_percent: float | None = None) -> float:
        """Return the joules since the previous reading. With `cpu_percent` (percent of one CPU),
        only the part of work that used so much of the CPU time that all programs of the node used.
        """
        if not self._zones:
            return 0.0
        counted = {path: _read_number(path) for path in self._zones}
        found = {path: number for path, number in counted.items() if number is not None}
        spent = 0
        for path, number in found.items():
            grown = number - self._before.get(path, number)
            spent += grown if grown >= 0 else max(0, grown + self._zones[path])
        seconds, self._before, self._at = now - self._at, found, now
        joules = spent / 10**6 * self._share(seconds, cpu_percent)
        self.watts = round(joules / seconds, 1) if spent and seconds > 0 else None
        return joules

    def _share(self, seconds: float, cpu_percent: float | None) -> float:
        if cpu_percent is None:
            return 1.0
        try:
            with open(os.path.join(self._root, "proc/stat"), "rb") as file:
                ticks = [int(each) for each in file.readline().split()[1:9]]
        except (OSError, ValueError):
            return 0.0
        busy = sum(ticks) - sum(ticks[3:5])  # without idle and iowait
        before, self._stat = self._stat, (busy, sum(ticks))
        used = cpu_percent / 100 * seconds * os.sysconf("SC_CLK_TCK")
        return min(1.0, used / max(1, busy - before[0])) if before[1] else 0.0


def _find(card: str, patterns: Sequence[str]) -> list[int]:
    """Return the numbers in the files of the first pattern that has any."""
    for pattern in patterns:
        numbers = [_read_number(path) for path in sorted(glob.glob(f"{card}/{pattern}"))]
        known = [each for each in numbers if each is not None]
        if known:
            return known
    return []


def _read_number(path: str) -> int | None:
    try:
        return int(_read_text(path), 0)
    except ValueError:
        return None


def _read_text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(LONGEST_FILE).decode("ascii", "replace").strip()
    except OSError:
        return ""


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

    def measure_memory(self) -> float:
        """Return the work's memory in MiB, in which memory that processes share, such as that of
        a process and its copies, counts once. This takes longer than `look`, which counts it for
        each process, and is exact only where the kernel tells it."""
        kib = 0
        for pid in self.list_work():
            try:
                with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                    kib += next(int(x.split()[1]) for x in file if x.startswith(b"Pss:"))
            except ProcessLookupError:
                continue  # it has ended
            except (OSError, StopIteration):
                return self.memory_mib
        return round(kib / 1024, 1)

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
