"""The profiles in which MIG divides NVIDIA's GPUs, and the places on a GPU that they may have.

A GPU's memory has eight slices, or four on smaller models. An instance takes consecutive slices and
begins at one of a few of them, as `nvidia-smi mig -lgipp` lists (NVIDIA's MIG user guide). A host's
driver tells the places of its own GPUs; this table is for requests, prices and clusters that do not
tell them.
"""

from collections.abc import Collection, Sequence
from functools import cache

from cavvy.catalog.accelerators import PROFILE, instance_memory_mib
from cavvy.catalog.tables import read_table
from cavvy.domain.values import Struct

# slices of the GPU's memory -> slices of an instance's memory and processors -> its first slices
_STARTS = {
    8: {
        (1, 1): (0, 1, 2, 3, 4, 5, 6),
        (2, 1): (0, 2, 4, 6),
        (2, 2): (0, 2, 4),
        (4, 3): (0, 4),
        (4, 4): (0,),
        (8, 7): (0,),
    },
    4: {(1, 1): (0, 1, 2, 3), (2, 2): (0, 2), (4, 4): (0,)},
}


class MigProfile(Struct, frozen=True):
    """A profile such as 2g.20gb: how many slices of the GPU's memory it takes, and the slices at
    which it may begin."""

    name: str
    size: int
    starts: tuple[int, ...]


class MigTable(Struct, frozen=True, kw_only=True):
    """The profiles of the GPUs of these families that have this memory."""

    families: tuple[str, ...]
    memory_mib: int
    slices: int
    profiles: tuple[MigProfile, ...]


@cache
def list_tables() -> Sequence[MigTable]:
    return tuple(
        MigTable(
            families=tuple(row["families"].split()),
            memory_mib=int(row["gib"]) * 1024,
            slices=int(row["slices"]),
            profiles=_list_profiles(row["profiles"].split(), int(row["slices"])),
        )
        for row in read_table(__package__, "mig")
    )


def _list_profiles(names: Sequence[str], slices: int) -> tuple[MigProfile, ...]:
    one = instance_memory_mib(names[0])
    sizes = {name: round(instance_memory_mib(name) / one) for name in names}
    starts = {name: _STARTS[slices][sizes[name], int(name[0])] for name in names}
    return tuple(MigProfile(name, sizes[name], starts[name]) for name in names)


def find_tables(family: str) -> Sequence[MigTable]:
    """Return the tables of a family of GPUs, one for each memory that MIG can divide."""
    return [each for each in list_tables() if family in each.families]


def find_families(profile: str) -> Collection[str]:
    """Return the families of which some GPUs have this profile."""
    return {
        family
        for table in list_tables()
        for each in table.profiles
        if each.name == plain_profile(profile)
        for family in table.families
    }


def find_part(family: str, profile: str, memory_mib: int | None = None) -> float | None:
    """Return the part of a GPU's memory slices that the profile takes, or None if it is unknown. If
    the GPU's memory is unknown, the profile is one of the largest GPU of the family that has it."""
    parts = [
        each.size / table.slices
        for table in find_tables(family)
        for each in table.profiles
        if each.name == plain_profile(profile) and memory_mib in (None, table.memory_mib)
    ]
    return min(parts, default=None)


def plain_profile(profile: str) -> str:
    """Return the profile without what it says about engines, as in 1g.10gb+me."""
    found = PROFILE.fullmatch(profile.lower())
    return f"{profile[0]}g.{found[1]}gb" if found else profile
