"""The slices of Google's TPU pods: the names of the slice types, and their chips and topologies.

Google rents out TPUs in slices of fixed sizes. The number in the name of a type is the number of
chips for v5e and v6e (v5litepod-8 has 8 chips). For v5p and older generations, the number in the
name is the number of TensorCores (v4-8 has 4 chips). The column `vms` of the table describes the
machine of each host as chips:vCPUs:GiB.
"""

import re
from collections.abc import Iterator
from functools import cache
from math import prod
from typing import NamedTuple

from cavvy.catalog.accelerators import find_accelerator
from cavvy.catalog.tables import read_table
from cavvy.domain.tasks import AcceleratorNeed, ResourceSpec
from cavvy.domain.values import Struct, replace

_TYPE = re.compile(r"(?:tpu-?)?(v\d+[a-z]*)-(\d+)", re.IGNORECASE)
_TOPOLOGY = re.compile(r"\d+x\d+(x\d+)?")


class TpuSlice(Struct, frozen=True):
    """One size of slice. `type` is Google's name, such as v5litepod-8. `vcpus` and `memory_gib` are
    the sums over all hosts, or 0 if the table does not contain them.
    """

    type: str
    accelerator: str
    chips: int
    topology: str
    hosts: int
    vcpus: int
    memory_gib: int

    @property
    def instance_type(self) -> str:
        """The name of the slice in offers."""
        return f"tpu-{self.type}"


@cache
def list_slices() -> tuple[TpuSlice, ...]:
    """Return every slice of `tpu_slices.csv`, grouped by generation, smallest first."""
    return tuple(_read_slices())


def _read_slices() -> Iterator[TpuSlice]:
    for row in read_table(__package__, "tpu_slices"):
        # the maximum number of chips of a single host, and the chips per host of a slice with
        # several hosts
        most, each = (row["hosts_of"].split() * 2)[:2]
        vms = {
            int(chips): (int(vcpus), int(gib))
            for chips, vcpus, gib in (vm.split(":") for vm in row["vms"].split())
        }
        for size, topology in zip(row["chips"].split(), row["topologies"].split(), strict=True):
            chips = int(size)
            hosts = 1 if chips <= int(most) else chips // int(each)
            name = f"{row['type']}-{chips * int(row['cores'])}"
            vcpus, gib = vms.get(chips // hosts, (0, 0))
            yield TpuSlice(
                name, row["accelerator"], chips, topology, hosts, vcpus * hosts, gib * hosts
            )


def find_slice(name: str) -> TpuSlice | None:
    """Look up the type of a slice, such as "v5litepod-8", "tpu-v5litepod-8" or "TPU-v5e-8". Returns
    None if no known slice has this name.
    """
    match = _TYPE.fullmatch(name.strip())
    if match is None:
        return None
    plain = f"{match[1].lower()}-{match[2]}"
    known = find_accelerator(f"TPU-{match[1]}")
    for each in list_slices():
        if each.type == plain:
            return each
        # v5e-8 is another name for v5litepod-8.
        of_chips = known is not None and known.accelerator.name == each.accelerator
        if of_chips and each.type.partition("-")[2] == match[2]:
            return each
    return None


def count_chips(topology: str) -> int | None:
    """Return the number of chips of a topology such as 2x4 or 4x4x8, or None for other texts."""
    if not _TOPOLOGY.fullmatch(topology):
        return None
    return prod(map(int, topology.split("x")))


class HostNeed(NamedTuple):
    """The requirements of each host of a slice, and the number of hosts, which is 1 if no slice of
    several hosts is requested.
    """

    needs: ResourceSpec
    hosts: int


def spread_slices(needs: ResourceSpec) -> HostNeed:
    """Convert a request for a whole slice on one node to a request for the slice's hosts:
    TPU-v5e:16 means four hosts with four chips each, because no host has 16 chips. All alternatives
    must have the same number of hosts; otherwise the request is returned unchanged.
    """
    found = [each for choice in needs.choices for each in _spread(choice)]
    hosts = {count for _, count in found}
    if len(hosts) != 1 or hosts == {1}:
        return HostNeed(needs, 1)
    choices = tuple(dict.fromkeys(replace(each, any_of=(), ordered=False) for each, _ in found))
    if len(choices) > 1:
        return HostNeed(replace(choices[0], any_of=choices, ordered=needs.ordered), hosts.pop())
    return HostNeed(choices[0], hosts.pop())


def _spread(needs: ResourceSpec) -> Iterator[HostNeed]:
    """Yield one request for each accelerator that an alternative accepts."""
    for need in needs.accelerators:
        kind = find_requested(need)
        if kind is None or (needs.instance or kind.instance_type) != kind.instance_type:
            yield HostNeed(needs, 1)
            continue
        of_host = replace(need, count_min=kind.chips // kind.hosts, count_max=None)
        host = replace(needs, accelerators=(of_host,), instance=kind.instance_type)
        yield HostNeed(host, kind.hosts)
    if not needs.accelerators:
        yield HostNeed(needs, 1)


def find_requested(need: AcceleratorNeed) -> TpuSlice | None:
    """Return the slice of several hosts with exactly the requested number of chips. Returns None if
    no slice has this number of chips, or if a single host can have that many chips.
    """
    known = [each for each in list_slices() if each.accelerator == need.name]
    if need.count_max is not None or any(
        each.chips // each.hosts == need.count_min for each in known
    ):
        return None
    return next((each for each in known if each.chips == need.count_min), None)
