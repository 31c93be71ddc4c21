"""Shared hosts and the allocations on them: which job has which device is a row, written with the
launch intent.

Also the locations of volumes that can be used only there.
"""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine whose devices several gangs share. `name` is unique: provider/zone, or
    provider/region without one.
    """

    name: str
    cpus: float
    memory_mib: int
    devices: tuple[str, ...] = ()  # accelerator ids in index order, such as GPU UUIDs
    kinds: tuple[
        str, ...
    ] = ()  # kind of each device, as `Offer.instance_type`; () if all are of one kind
    # provider/region of offers that give each rank its own host; "": a gang is on one host
    group: str = ""
    ready: bool = True  # False: it does not answer, so nothing is placed there


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The devices, CPUs and memory that one rank holds on a shared host until its attempt has
    ended.

    No device is in two allocations of one host, and the sums of CPUs and memory never exceed the
    host's.
    """

    host: str
    gang: str
    rank: int
    project: str
    cpus: float
    memory_mib: int
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeLocation:
    """An existing volume, under each name that a task may use, and the only location whose nodes
    can mount it.
    """

    provider: str
    names: tuple[str, ...]
    region: str
    zone: str | None = None  # None: anywhere in the region


class SilentPlace(NamedTuple):
    """A provider, or a part of one, that did not answer, and why."""

    provider: str
    why: str

    def __str__(self) -> str:
        return f"{self.provider}: {self.why}"
