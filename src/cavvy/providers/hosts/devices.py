"""Defines the data types for a machine's accelerators. All vendors use the same types."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from cavvy.catalog.mig import MigProfile
from cavvy.domain.values import Struct


class HostDevice(Struct, frozen=True, kw_only=True):
    """One whole accelerator, an instance that MIG has made of a GPU, or a slice of a GPU on which
    an agent can make one. `index` is the number of
    the accelerator or GPU among the vendor's accelerators, in the order used by the vendor's
    runtime.
    """

    id: str  # unique on this machine and stable, such as a GPU's UUID
    index: int
    vendor: str  # nvidia, amd, intel, apple
    product: str  # the driver's name for the product
    memory_mib: int  # memory as reported by the driver
    profile: str = ""  # of an instance: its MIG profile, such as 1g.10gb; the memory is the GPU's
    # of a slice: the profiles that the GPU's instances can have
    profiles: Sequence[MigProfile] = ()
    problem: str = ""  # what the driver's counters say about faulty memory


class DeviceReading(Struct, frozen=True, kw_only=True):
    """The devices that one vendor's reader found, and notes to users about omitted devices."""

    devices: Sequence[HostDevice] = ()
    notes: Sequence[str] = ()


class NvmlQueries(Protocol):
    """The NVML functions that Cavvy uses, as an interface that tests can replace. All functions may
    raise OSError.
    """

    def count(self) -> int: ...
    def uuid(self, index: int) -> str: ...
    def name(self, index: int) -> str: ...
    def memory_mib(self, index: int) -> int: ...
    def partitioned(self, index: int) -> bool:
        """Return whether MIG splits the GPU; a split GPU cannot be used as a whole."""

    def instances(self, index: int) -> "Sequence[tuple[str, str]]":
        """Return the UUID and profile of each instance that MIG has made of the GPU."""

    def problem(self, index: int) -> str:
        """Return what the driver's counters say about faulty memory of the GPU, or "" if nothing is
        wrong or counted."""

    def close(self) -> None: ...


class MachineSources(Struct, frozen=True, kw_only=True):
    """The folders, functions and values from which Cavvy reads facts about a machine. Tests can
    replace each folder and function.
    """

    root: Path = Path("/")  # the folder that contains proc/, sys/ and dev/
    environ: Mapping[str, str]
    system: str  # the system's name from uname: Linux, Darwin
    architecture: str = ""  # the CPU architecture from uname: x86_64, aarch64
    hostname: str
    cpus: Callable[[], int]  # number of CPUs that this process may run on
    memory_mib: Callable[[], int]  # installed memory
    disk_gib: Callable[[], int]  # free space on the jobs' disk
    nvml: Callable[[], NvmlQueries | None]  # returns None if no driver is installed
    links: Callable[[], str] = lambda: ""  # the output of `nvidia-smi topo -m`
    mig: Callable[[], Mapping[str, str]] = dict  # see `supervisor.facts.read_mig`
    sysctl: Callable[[str], str]  # reads a value by name, on Darwin
    usable: Callable[[Path], bool]  # returns True if this user may open a device file


def read_text(path: Path) -> str:
    """Return the text of a small file, stripped, or "" if the file is missing or unreadable."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def read_number(path: Path) -> int | None:
    """Return the number in a file (decimal, or hexadecimal with 0x), or None if the file contains
    no number.
    """
    try:
        return int(read_text(path), 0)
    except ValueError:
        return None
