"""Shared hosts and the allocations on them. An allocation records which devices a gang holds; it is
stored in the same write as the gang's attempt.

Also the locations of volumes that only the nodes of one location can mount.
"""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine whose devices several gangs share. `name` is unique: provider/zone, or
    provider/region if the provider has no zones.
    """

    name: str
    cpus: float
    memory_mib: int
    # ids of the accelerators, such as GPU UUIDs, in the order of their indexes
    devices: tuple[str, ...] = ()
    kinds: tuple[
        str, ...
    ] = ()  # the `Offer.instance_type` of each device; () if all devices are of one type
    # The provider/region of the offers for this group of hosts. Each rank of a gang gets its own
    # host of the group; if "", all ranks of a gang share this host.
    group: str = ""
    ready: bool = True  # False if the host does not answer; nothing is placed on such a host


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
    zone: str | None = None  # None if every zone of the region can mount it


class SilentPlace(NamedTuple):
    """A provider, or a part of a provider, that did not answer, and the reason."""

    provider: str
    why: str

    def __str__(self) -> str:
        return f"{self.provider}: {self.why}"
