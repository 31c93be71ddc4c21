"""Shared hosts and what is held on them: which job has which device is a row, written with the
launch intent.

And where volumes lie that can be used only there.
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
    ] = ()  # of each device, as `Offer.instance_type`; () where all are of one kind
    # provider/region of offers that give each rank of a gang a host; "": a gang is on one host
    group: str = ""
    ready: bool = True  # False: it does not answer now, and nothing is placed there until it does


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What one rank of a gang holds on a shared host until its attempt has ended.

    No device is in two holds of one host, and the sums of CPUs and memory never pass the host's.
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
    """A volume that exists, by each name that a task may call it, and the only place whose nodes
    can have it.
    """

    provider: str
    names: tuple[str, ...]
    region: str
    zone: str | None = None  # None: anywhere in the region


class SilentPlace(NamedTuple):
    """A place that did not answer, whole or in part, and why."""

    provider: str
    why: str

    def __str__(self) -> str:
        return f"{self.provider}: {self.why}"
