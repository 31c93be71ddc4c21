"""Finds NVIDIA GPUs through NVML, the driver's library. The module needs no Python package.
Function names and constants are from NVIDIA's NVML API reference (nvml.h).

The output of nvidia-smi says which GPUs are joined by NVLink, within a host and across the hosts of
a rack such as GB200 NVL72; the slices of GPUs on which Cavvy can make MIG instances, and which
instances it has made. The texts about MIG are those that `supervisor.facts.read_mig` returns.
"""

import ctypes
import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress

from cavvy.catalog.accelerators import PROFILE
from cavvy.catalog.mig import MigProfile
from cavvy.domain.values import replace
from cavvy.providers.hosts.devices import DeviceReading, HostDevice, MachineSources, NvmlQueries

_LIBRARY = "libnvidia-ml.so.1"
_UUID_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE
_NAME_BYTES = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE
_MIB = 1 << 20
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines the header
_UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_PLAIN = re.compile(r"[1-9]g\.[1-9][0-9]*gb")  # without what other profiles say about engines
_PROFILE = re.compile(r"^\|\s+(\d+)\s+MIG (\S+)\s+(\d+)\s+\d+/\d+\s", re.MULTILINE)
_PLACES = re.compile(r"GPU\s+(\d+) Profile ID\s+(\d+) Placements?\s*:\s*\{([\d,]+)\}:(\d+)")
_INSTANCE = re.compile(r"^\|\s+(\d+)\s+MIG \S+\s+\d+\s+\d+\s+(\d+):(\d+)\s", re.MULTILINE)
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


def read_islands(links: str, devices: Sequence[HostDevice]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of whole GPUs that NVLink joins directly or through a switch, in the order
    of the devices. GPUs without NVLink are in no group. `links` is the output of `nvidia-smi topo
    -m`: a matrix in which NV12 stands for 12 NVLinks between two GPUs."""
    names = {
        f"GPU{each.index}": each.id
        for each in devices
        if each.vendor == "nvidia" and not each.profile
    }
    groups: dict[str, set[str]] = {}
    for one, other in _list_pairs(links):
        if one in names and other in names:
            joined = groups.get(one, {one}) | groups.get(other, {other})
            groups.update(dict.fromkeys(joined, joined))
    found = dict.fromkeys(
        tuple(each for each in names if each in group) for group in groups.values()
    )
    return tuple(sorted(tuple(names[each] for each in group) for group in found))


def _list_pairs(links: str) -> Sequence[tuple[str, str]]:
    """Return the pairs of GPUs that have NVLinks."""
    pairs: list[tuple[str, str]] = []
    header: Sequence[str] = ()
    for line in _ESCAPES.sub("", links).splitlines():
        cells = line.split()
        if not header and cells[:1] == ["GPU0"] and "X" not in cells:
            header = [each for each in cells if re.fullmatch(r"GPU\d+", each)]
        elif header and cells and cells[0] in header:
            row = zip(header, cells[1:], strict=False)
            pairs += [(cells[0], other) for other, cell in row if re.fullmatch(r"NV\d+", cell)]
    return pairs


def read_domain(fabric: str) -> str:
    """Return the name of the NVLink domain that the host shares with other hosts, or "". `fabric`
    has a line with the UUID of the domain and the number of its part (clique) for each GPU; hosts
    that share no domain have a UUID of zeros. The name is that of the label
    `nvidia.com/gpu.clique` of Kubernetes.
    """
    lines = {line.strip() for line in fabric.splitlines() if line.strip()}
    found = re.fullmatch(rf"({_UUID})\s*,\s*(\d+)", lines.pop()) if len(lines) == 1 else None
    if found is None or not found[1].strip("0-"):
        return ""
    return f"{found[1].lower()}.{found[2]}"


def list_profiles(texts: Mapping[str, str], index: int) -> Sequence[MigProfile]:
    """Return the profiles of the instances that Cavvy can make on the GPU with this index."""
    names = {
        number: name
        for gpu, name, number in _PROFILE.findall(texts.get("profiles", ""))
        if int(gpu) == index and _PLAIN.fullmatch(name)
    }
    return [
        MigProfile(names[number], int(size), tuple(map(int, starts.split(","))))
        for gpu, number, starts, size in _PLACES.findall(texts.get("places", ""))
        if int(gpu) == index and number in names
    ]


def list_free(
    texts: Mapping[str, str], index: int, uuid: str, profiles: Sequence[MigProfile]
) -> Sequence[int]:
    """Return the slices of a GPU on which no one but Cavvy has made an instance."""
    made = {each["start"] for each in _read_made(texts) if each.get("gpu") == uuid}
    slices = {at for each in profiles for start in each.starts for at in _cover(start, each.size)}
    for gpu, start, size in _INSTANCE.findall(texts.get("instances", "")):
        if int(gpu) == index and int(start) not in made:
            slices -= {*_cover(int(start), int(size))}
    return sorted(slices)


def list_made(texts: Mapping[str, str], gpu: str) -> Set[str]:
    """Return the UUIDs of the instances that agents have made. Of an agent that was killed before
    it could record a UUID, the profile is returned: any instance with it may be the agent's."""
    made = [each for each in _read_made(texts) if each.get("gpu") == gpu]
    return {str(each.get("uuid", each["profile"])) for each in made}


def _cover(start: int, size: int) -> range:
    return range(start, start + size)


def _read_made(texts: Mapping[str, str]) -> Sequence[Mapping[str, object]]:
    return [json.loads(line) for line in texts.get("made", "").splitlines()]
