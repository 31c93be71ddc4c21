"""Finds NVIDIA GPUs through NVML, the driver's library. The module needs no Python package.

Function names and constants are from NVIDIA's NVML API reference (nvml.h).
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from cavvy.catalog.accelerators import PROFILE
from cavvy.domain.values import replace
from cavvy.providers.hosts.devices import DeviceReading, HostDevice, MachineSources, NvmlQueries
from cavvy.providers.hosts.nvidia_smi import list_free, list_made, list_profiles

_LIBRARY = "libnvidia-ml.so.1"
_UUID_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE
_NAME_BYTES = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE
_MIB = 1 << 20
UNCORRECTED, SINCE_BOOT = 1, 0  # values of nvmlMemoryErrorType_t and nvmlEccCounterType_t


class _Memory(ctypes.Structure):
    """The struct nvmlMemory_t."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class NvmlLibrary:
    """The opened driver library. Methods raise OSError if a call fails."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._call("nvmlInit_v2")

    def count(self) -> int:
        number = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(number))
        return number.value

    def uuid(self, index: int) -> str:
        return self._text("nvmlDeviceGetUUID", index, _UUID_BYTES)

    def name(self, index: int) -> str:
        return self._text("nvmlDeviceGetName", index, _NAME_BYTES)

    def memory_mib(self, index: int) -> int:
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", self._device(index), ctypes.byref(memory))
        return int(memory.total) // _MIB

    def partitioned(self, index: int) -> bool:
        current, pending = ctypes.c_uint(), ctypes.c_uint()
        try:
            self._call(
                "nvmlDeviceGetMigMode",
                self._device(index),
                ctypes.byref(current),
                ctypes.byref(pending),
            )
        except OSError:
            return False  # a GPU that does not support MIG reports an error
        return current.value == 1

    def instances(self, index: int) -> Sequence[tuple[str, str]]:
        gpu, most = self._device(index), ctypes.c_uint()
        self._call("nvmlDeviceGetMaxMigDeviceCount", gpu, ctypes.byref(most))
        found: list[tuple[str, str]] = []
        for place in range(most.value):
            handle = ctypes.c_void_p()
            try:
                self._call(
                    "nvmlDeviceGetMigDeviceHandleByIndex",
                    gpu,
                    ctypes.c_uint(place),
                    ctypes.byref(handle),
                )
            except OSError:
                continue  # no instance has this place
            name = self._text_of(handle, "nvmlDeviceGetName", _NAME_BYTES)
            uuid = self._text_of(handle, "nvmlDeviceGetUUID", _UUID_BYTES)
            found.append((uuid, name.rpartition(" MIG ")[2].strip()))
        return found

    def problem(self, index: int) -> str:
        gpu, errors = self._device(index), ctypes.c_ulonglong()
        # rows remapped after corrected and after uncorrected errors, pending and failed remappings
        rows = [ctypes.c_uint() for _ in range(4)]
        # Older GPUs and drivers count neither.
        with suppress(OSError):
            kinds = (ctypes.c_int(UNCORRECTED), ctypes.c_int(SINCE_BOOT))
            self._call("nvmlDeviceGetTotalEccErrors", gpu, *kinds, ctypes.byref(errors))
        with suppress(OSError):
            self._call("nvmlDeviceGetRemappedRows", gpu, *map(ctypes.byref, rows))
        return explain_memory(errors.value, pending=bool(rows[2].value), failed=bool(rows[3].value))

    def close(self) -> None:
        self._call("nvmlShutdown")

    def _device(self, index: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        return handle

    def _text(self, function: str, index: int, size: int) -> str:
        return self._text_of(self._device(index), function, size)

    def _text_of(self, handle: ctypes.c_void_p, function: str, size: int) -> str:
        buffer = ctypes.create_string_buffer(size)
        self._call(function, handle, buffer, ctypes.c_uint(size))
        return buffer.value.decode(errors="replace")

    def _call(self, function: str, *arguments: object) -> None:
        try:
            code = getattr(self._library, function)(*arguments)
        except AttributeError as error:
            raise OSError(f"{_LIBRARY} has no {function}; the driver is too old") from error
        if code != 0:
            raise OSError(f"{function}: NVML error {code}")


def explain_memory(errors: int, *, pending: bool, failed: bool) -> str:
    """Return what is wrong with a GPU's memory, or ""."""
    if failed:
        return "the GPU could not repair its memory: remapping a row failed"
    if pending:
        return "the GPU must be reset, because it has to remap rows of its memory"
    return f"{errors} uncorrected memory errors since the driver started" if errors else ""


def open_nvml() -> NvmlQueries | None:
    """Open the driver's library. Return None if no driver is installed. Raises OSError if NVML
    fails.
    """
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    return NvmlLibrary(library)


def find_nvidia(sources: MachineSources) -> DeviceReading:
    """Return the GPUs in NVML's order, which is the order on the PCI bus. Instead of a GPU that MIG
    splits, the result has its instances; if it has none, a note states the omission.
    """
    try:
        nvml = sources.nvml()
    except OSError as error:
        return DeviceReading(
            notes=[f"NVIDIA: the driver reports an error, so no GPU is offered ({error})"]
        )
    if nvml is None:
        return DeviceReading()
    try:
        return _read(nvml, sources.environ.get("CUDA_VISIBLE_DEVICES"), sources.mig)
    except OSError as error:
        return DeviceReading(notes=[f"NVIDIA: no GPU is offered ({error})"])
    finally:
        nvml.close()


def _read(
    nvml: NvmlQueries, visible: str | None, read_mig: Callable[[], Mapping[str, str]]
) -> DeviceReading:
    devices: list[HostDevice] = []
    notes: list[str] = []
    texts: Mapping[str, str] | None = None
    allowed = None if visible is None else _wanted(visible)
    for index in range(nvml.count()):
        uuid = nvml.uuid(index)
        if allowed is not None and not any(
            w == str(index) or (w and uuid.startswith(w)) for w in allowed
        ):
            notes.append(
                f"NVIDIA: GPU {index} is not offered, because CUDA_VISIBLE_DEVICES hides it from "
                "the server"
            )
            continue
        gpu = HostDevice(
            id=uuid,
            index=index,
            vendor="nvidia",
            product=nvml.name(index),
            memory_mib=nvml.memory_mib(index),
            problem=nvml.problem(index),
        )
        if not nvml.partitioned(index):
            devices.append(gpu)
            continue
        texts = read_mig() if texts is None else texts
        instances = _list_instances(nvml, gpu, texts)
        devices += instances
        if not instances:
            notes.append(
                f"NVIDIA: GPU {index} is split by MIG, but has no instances (`nvidia-smi mig "
                "-cgi PROFILE -C` creates them, `nvidia-smi -mig 0` ends MIG)"
            )
    return DeviceReading(devices=devices, notes=notes)


def _list_instances(
    nvml: NvmlQueries, gpu: HostDevice, texts: Mapping[str, str]
) -> Sequence[HostDevice]:
    """Return the instances that people have made of a GPU, and the slices on which agents can make
    others. `texts` are those of `supervisor.facts.read_mig`."""
    made, profiles = list_made(texts, gpu.id), list_profiles(texts, gpu.index)
    return [
        *(
            replace(gpu, id=uuid, profile=profile)
            for uuid, profile in nvml.instances(gpu.index)
            if PROFILE.fullmatch(profile) and made.isdisjoint((uuid, profile))
        ),
        *(
            replace(gpu, id=f"{gpu.id}/{at}", profiles=profiles)
            for at in list_free(texts, gpu.index, gpu.id, profiles)
        ),
    ]


def _wanted(visible: str) -> Sequence[str]:
    return [
        part.strip()
        for part in visible.split(",")
        if part.strip() and part.strip() not in {"-1", "NoDevFiles"}
    ]
