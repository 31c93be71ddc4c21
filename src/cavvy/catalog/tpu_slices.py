"""The slices of Google's TPU pods: the names of the slice types, and their chips and topologies.

Google rents out TPUs in slices of fixed sizes. The number in the name of a type is the number of
chips for v5e and v6e (v5litepod-8 has 8 chips). For v5p and older, it is the number of TensorCores
(v4-8 has 4 chips). The column `vms` of the table describes the machine of each host as
chips:vCPUs:GiB.
"""

import re
from collections.abc import Iterator
from functools import cache
from math import prod

from cavvy.catalog.accelerators import find_accelerator
from cavvy.catalog.tables import read_table
from cavvy.domain.values import Struct

_TYPE = re.compile(r"(?:tpu-?)?(v\d+[a-z]*)-(\d+)", re.IGNORECASE)
_TOPOLOGY = re.compile(r"\d+x\d+(x\d+)?")


class TpuSlice(Struct, frozen=True):
    """One size of slice. `type` is Google's name, such as v5litepod-8. `vcpus` and `memory_gib` are
    the sums over all hosts; they are 0 if the table does not have them.
    """

    type: str
    accelerator: str
    chips: int
    topology: str
    hosts: int
    vcpus: int
    memory_gib: int


@cache
def list_slices() -> tuple[TpuSlice, ...]:
    """Every slice of `tpu_slices.csv`, grouped by generation, smallest first."""
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
    None for other names.
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
    """The number of chips of a topology such as 2x4 or 4x4x8; None for other texts."""
    if not _TOPOLOGY.fullmatch(topology):
        return None
    return prod(map(int, topology.split("x")))
