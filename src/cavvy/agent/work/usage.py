"""Measures the node resources that the work uses: CPU and memory through /proc, NVIDIA GPUs through
the driver's own library.
"""

from __future__ import annotations

import json
import os
import time

from ..disk import read_process
from .rates import RateMeter
from .reaper import descendants

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

GPU_EVERY_S = 2.0
MOST_PROCESSES = 1024  # on one GPU
NO_VALUE = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE
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


def measure_gpus(devices: list[str] | None, indices: list[int], *, shared: bool = False) -> int:
    """Print the usage of these GPUs (of all GPUs if None) as a line of JSON every two seconds. With
    `shared`, also print the memory of each process. The function runs in a separate process,
    because a faulty GPU driver can hang forever.
    """
    import ctypes

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if nvml.nvmlInit_v2():
        return 0
    handles: list[object] = []
    if devices is None:
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        devices, indices = [""] * count.value, list(range(count.value))
    for at, device in enumerate(devices):
        handle = ctypes.c_void_p()
        failed = nvml.nvmlDeviceGetHandleByUUID(device.encode(), ctypes.byref(handle))
        if failed and at < len(indices):
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(indices[at], ctypes.byref(handle))
        if not failed:
            handles.append(handle)
    while handles:
        values: dict[str, object] = {**_read_gpus(nvml, handles)}
        if shared:
            values["processes"] = _read_processes(nvml, handles[0])
        os.write(1, (json.dumps(values) + "\n").encode())
        time.sleep(GPU_EVERY_S)
    return 0


def _read_processes(nvml: object, handle: object) -> dict[str, float] | None:
    """Return the GPU memory in MiB of each process on this GPU, by its ID. Return None if the
    driver does not tell it. Names and the struct nvmlProcessInfo_t are from nvml.h.
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
        read = getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses_v3", None)
        count, rows = ctypes.c_uint(MOST_PROCESSES), (Process * MOST_PROCESSES)()
        if read is None or read(handle, ctypes.byref(count), rows):
            if kind == "Compute":
                return None
            continue
        for row in rows[: count.value]:
            if row.used == NO_VALUE:
                return None
            found[str(row.pid)] = max(found.get(str(row.pid), 0), round(row.used / 1048576, 1))
    return found


def _read_gpus(nvml: object, handles: list[object]) -> dict[str, float]:
    import ctypes

    watts, power = list[float](), ctypes.c_uint()  # mW
    rates = (ctypes.c_uint * 2)()  # nvmlUtilization_t: gpu, memory
    memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used
    read_rates = nvml.nvmlDeviceGetUtilizationRates  # type: ignore[attr-defined]  # a CDLL
    read_memory = nvml.nvmlDeviceGetMemoryInfo  # type: ignore[attr-defined]  # a CDLL
    read_power = getattr(nvml, "nvmlDeviceGetPowerUsage", None)  # not in every library
    busy, used = [], 0
    for handle in handles:
        if not read_rates(handle, ctypes.byref(rates)):
            busy.append(rates[0])
        if not read_memory(handle, ctypes.byref(memory)):
            used += memory[2]
        if read_power is not None and not read_power(handle, ctypes.byref(power)):
            watts.append(power.value / 1000)
    values = {"gpu_memory_mib": round(used / 1048576, 1)}
    if busy:
        values["gpu_percent"] = round(sum(busy) / len(busy), 1)
    if watts:
        values["gpu_power_w"] = round(sum(watts), 1)
    return values
