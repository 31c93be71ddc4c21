"""Shared hosts and the allocations on them. An allocation records which devices a gang holds. The
allocation is stored in the same write as the gang's attempt.

The module also contains the locations of volumes: some volumes can be mounted only by nodes in one
location.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from cavvy.domain.tasks import LABEL_PATTERN
from cavvy.domain.values import Struct

NO_LABELS: Mapping[str, str] = {}
_LABEL_VALUE = r"[A-Za-z0-9]([A-Za-z0-9._:-]{0,126}[A-Za-z0-9])?"


class SlicedGpu(Struct, frozen=True, kw_only=True):
    """A GPU whose slices are devices of their host, named GPU/0, GPU/1 and so on. Agents make MIG
    instances on them. `profiles` has for each kind of instance its `Offer.instance_type`, the
    number of its slices, and the slices at which it may begin.
    """

    gpu: str
    profiles: tuple[tuple[str, int, tuple[int, ...]], ...]


class Host(Struct, frozen=True, kw_only=True):
    """A machine whose devices several gangs share. `name` is unique: provider/zone, or
    provider/region if the provider has no zones.
    """

    name: str
    cpus: float
    memory_mib: int
    # the free space on the disk of the jobs when the host was last looked at; None if unknown
    disk_gib: int | None = None
    # IDs of the accelerators, such as GPU UUIDs, in the order of their indices
    devices: tuple[str, ...] = ()
    kinds: tuple[
        str, ...
    ] = ()  # the `Offer.instance_type` of each device; () if all devices are of one type
    # Groups of devices that NVLink joins. A job that needs several whole devices gets those of as
    # few groups as possible.
    islands: tuple[tuple[str, ...], ...] = ()
    sliced: tuple[SlicedGpu, ...] = ()  # GPUs that MIG splits while jobs run
    # If this host belongs to a group, the provider/region of the group's offers; each rank of a
    # gang then gets its own host of the group. If "", all ranks of a gang share this host.
    group: str = ""
    ready: bool = True  # False if the host does not answer; nothing is placed on such a host
    problem: str = ""  # why the host is not ready
    cordoned: bool = False  # whether an operator keeps new work away
    sick: tuple[tuple[str, str], ...] = ()  # faulty devices, each with what is wrong
    notes: tuple[str, ...] = ()  # why accelerators of the host are not offered
    # False if jobs could read each other's files; the host then runs the jobs of only one project
    # at a time
    separates: bool = True
    # The location of the host in the network, such as (("block", "b1"), ("rack", "r1")): hosts with
    # the same value of a label are close to each other.
    labels: tuple[tuple[str, str], ...] = ()
    # why the host does not separate jobs although its settings require it
    obstacle: str = ""


def object_to_label(label: str, value: str) -> str:
    """Return why a node cannot have the label with this value, or ""."""
    if not re.fullmatch(LABEL_PATTERN, label):
        return (
            f"{label!r} cannot be a label: write letters, digits and . _ / -, at most 253, such as "
            "rack"
        )
    if not re.fullmatch(_LABEL_VALUE, value):
        return (
            f"{value!r} cannot be the value of label {label}: write letters, digits and . _ : -, "
            "at most 128, such as r1"
        )
    return ""


class Allocation(Struct, frozen=True, kw_only=True):
    """The devices, CPUs, memory and disk that one rank holds on a shared host until its attempt has
    ended.

    `part` is below 1 if the rank holds only this part of its one device. The parts of a device that
    are allocated at the same time add up to at most 1, so no device is in two whole allocations.
    The sums of allocated CPUs and memory never exceed the host's CPUs and memory.
    """

    host: str
    gang: str
    rank: int
    project: str
    cpus: float
    memory_mib: int
    devices: tuple[str, ...] = ()
    part: float = 1.0
    disk_gib: int = 0


class VolumeLocation(Struct, frozen=True, kw_only=True):
    """An existing volume: the names under which tasks may use it, and the only location whose nodes
    can mount it.
    """

    provider: str
    names: tuple[str, ...]
    region: str
    zone: str | None = None  # None if every zone of the region can mount the volume
    project: str = ""  # the only project whose tasks may use it; "" if those of all projects may
    problem: str = ""  # why no node can use it now, and what to do


class SilentPlace(NamedTuple):
    """A provider, or a part of a provider, that did not answer a request; `why` is the reason."""

    provider: str
    why: str

    def __str__(self) -> str:
        return f"{self.provider}: {self.why}"
