"""The accelerators of this machine: the shared code of the vendors' readers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDevice:
    """One whole accelerator. `index` counts within its vendor, in the order the vendor's runtime
    uses.
    """

    id: str  # unique on this machine and stable, such as a GPU's UUID
    index: int
    vendor: str  # nvidia, amd, intel, apple
    product: str  # the driver's name for it
    memory_mib: int  # memory reported by the driver


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReading:
    """What one vendor's reader found, and notes for people about missing devices."""

    devices: Sequence[HostDevice] = ()
    notes: Sequence[str] = ()


class NvmlQueries(Protocol):
    """The few functions of NVIDIA's library in use, so that tests can replace them. Errors are
    OSError.
    """

    def count(self) -> int: ...
    def uuid(self, index: int) -> str: ...
    def name(self, index: int) -> str: ...
    def memory_mib(self, index: int) -> int: ...
    def partitioned(self, index: int) -> bool:
        """Whether MIG splits the GPU, so that it cannot be used whole."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSources:
    """The sources of facts about the machine. Tests can replace any of them, including folders."""

    root: Path = Path("/")  # contains proc/, sys/ and dev/
    environ: Mapping[str, str]
    system: str  # from uname: Linux, Darwin
    hostname: str
    cpus: Callable[[], int]  # CPUs that this process may run on
    memory_mib: Callable[[], int]  # installed
    disk_gib: Callable[[], int]  # bytes free on the jobs' disk
    nvml: Callable[[], NvmlQueries | None]  # None: no driver
    sysctl: Callable[[str], str]  # Darwin's
    usable: Callable[[Path], bool]  # whether this user may open a device file


def read_text(path: Path) -> str:
    """A small file's text without its end of line; "" if it is missing or unreadable."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def read_number(path: Path) -> int | None:
    """A number in a file (decimal, or hexadecimal with 0x), or None."""
    try:
        return int(read_text(path), 0)
    except ValueError:
        return None
