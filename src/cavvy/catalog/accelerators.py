"""The table of accelerators: canonical names, aliases, memory, bandwidth and peak rates. All
modules look up accelerator names in this module.

The values are for one accelerator (one GPU or one TPU chip) and come from the vendor's data sheet.
Rates are for dense operations, without sparsity. A value is None or absent if no reliable source
states it. `fp64` is the rate of the matrix unit if the product has one, and `fp32` is the rate of
the vector unit. `fp16`, `bf16` and `fp8` accumulate in 32 bits. Memory is the nominal size under
which the product is sold.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import cache, lru_cache

from cavvy.catalog.tables import read_table
from cavvy.domain.values import Struct, field

_TERA = 1e12


class Vendor(StrEnum):
    NVIDIA = "nvidia"
    AMD = "amd"
    INTEL = "intel"
    GOOGLE = "google"
    AWS = "aws"
    QUALCOMM = "qualcomm"


MIG = "-MIG-"  # NVIDIA's Multi-Instance GPU, in the names of instances
VGPU = "-vGPU-"  # NVIDIA's virtual GPUs, in the instance types of own hosts
PROFILE = re.compile(r"[1-9]g\.([1-9][0-9]{0,3})gb[a-z0-9+.-]{0,16}")


class AcceleratorKind(StrEnum):
    GPU = "gpu"
    TPU = "tpu"
    ASIC = "asic"
    FPGA = "fpga"


class Precision(StrEnum):
    FP64 = "fp64"
    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    INT8 = "int8"
    FP4 = "fp4"


class MemorySize(Struct, frozen=True):
    """A memory size in which a product is sold, and the memory bandwidth at this size."""

    mib: int
    gb_per_s: float | None = None


class AcceleratorModel(Struct, frozen=True, kw_only=True):
    """One product. A request for the product's `family` accepts every product of the family: for
    example, H100 accepts SXM, PCIe and NVL.
    """

    name: str
    family: str
    vendor: Vendor
    kind: AcceleratorKind
    year: int | None  # year of the announcement
    memory: tuple[MemorySize, ...]  # sizes in ascending order
    # peak rates in FLOP/s, or in OP/s for int8
    peak: Mapping[Precision, float] = field(default_factory=dict)
    # the link between the accelerators of a node, with its rate in GB/s
    interconnect: str | None = None
    tdp_w: int | None = None
    aliases: tuple[str, ...] = ()
    source: str

    def bandwidth(self, memory_mib: int | None = None) -> float | None:
        """Return the memory bandwidth in GB/s of the variant with this memory size. If no variant
        has this memory size, return the bandwidth of the largest variant. Returns None if the
        bandwidth is unknown.
        """
        for memory in self.memory:
            if memory.mib == memory_mib:
                return memory.gb_per_s
        return self.memory[-1].gb_per_s if self.memory else None


class KnownAccelerator(Struct, frozen=True):
    """The meaning of a name: a product and, if the name states it, the memory size."""

    accelerator: AcceleratorModel
    memory_mib: int | None = None


@cache
def list_accelerators() -> tuple[AcceleratorModel, ...]:
    """Return every accelerator of `accelerators.csv`, grouped by vendor, newest first."""
    return tuple(map(_make_row, read_table(__package__, "accelerators")))


def _make_row(row: Mapping[str, str]) -> AcceleratorModel:
    """Convert a row of the table. The column `memory` has the form "GiB[@GB/s] ...", and the column
    `peak` the form "precision TFLOPS ...".
    """
    peak = row["peak"].split()
    return AcceleratorModel(
        name=row["name"],
        family=row["family"] or row["name"],
        vendor=Vendor(row["vendor"]),
        kind=AcceleratorKind(row["kind"]),
        year=int(row["year"]) if row["year"] else None,
        memory=tuple(map(_make_memory, row["memory"].split())),
        peak={
            Precision(name): float(rate) * _TERA
            for name, rate in zip(peak[::2], peak[1::2], strict=True)
        },
        interconnect=row["interconnect"] or None,
        tdp_w=int(row["tdp_w"]) if row["tdp_w"] else None,
        aliases=tuple(row["aliases"].split()),
        source=row["source"],
    )


def _make_memory(text: str) -> MemorySize:
    size, _, bandwidth = text.partition("@")
    return MemorySize(int(size) * 1024, float(bandwidth) if bandwidth else None)


@lru_cache(maxsize=4096)
def find_accelerator(name: str) -> KnownAccelerator | None:
    """Look up a name such as "a100-80gb", "RTX 4090" or "NVIDIA A100-SXM4-80GB". Case and
    punctuation are ignored. Returns None for an unknown name.

    The result has a memory size if the name states one (A100-80GB).
    """
    known = next(filter(None, (_names().get(_plain(text)) for text in _shorter(name))), None)
    if known is None:
        return _find_virtual(name)
    if known.memory_mib is not None:
        return known
    size = _SIZE_IN_NAME.search(re.sub(r"[-_]", " ", name))
    sizes = {memory.mib for memory in known.accelerator.memory}
    return (
        KnownAccelerator(known.accelerator, int(size[1]) * 1024)
        if size and int(size[1]) * 1024 in sizes
        else known
    )


def identify(product: str, memory_mib: int | None = None) -> KnownAccelerator | None:
    """Identify a device by the name that a driver or provider reports ("NVIDIA A100-SXM4-80GB",
    "AMD Instinct MI300X"). Returns None for an unknown name.

    `memory_mib` is the memory that the driver reports. The result has the nominal memory size,
    which is slightly larger than `memory_mib`.
    """
    known = find_accelerator(product)
    if known is None or virtual_profile(product):
        return known
    return KnownAccelerator(
        known.accelerator, nominal_memory(known.accelerator, memory_mib) or known.memory_mib
    )


def virtual_profile(product: str) -> str:
    """Return the profile of a virtual GPU (NVIDIA vGPU) by the name that a guest's driver reports:
    10C for "NVIDIA A100-10C", and 1-10C for one backed by a MIG instance. Returns "" for other
    names."""
    found = _VIRTUAL.fullmatch(product.strip())
    return f"{found['slices'] or ''}{found['size']}".upper() if found else ""


def _find_virtual(product: str) -> KnownAccelerator | None:
    """Return the model and the memory of a virtual GPU. The letters after the model's number name
    the board: H100XM is an SXM5, H100L an NVL and A100D a PCIe card of 80 GB (NVIDIA's list of vGPU
    types)."""
    found = _VIRTUAL.fullmatch(product.strip())
    if found is None:
        return None
    board = found["board"]
    base = re.sub(r"(?<=[0-9])(X[LMS]?|DX?|L|P)$", "", board, flags=re.IGNORECASE)
    slot = {"": "-PCIe", "l": "-NVL"}.get(board.lower().removeprefix(base.lower()), "")
    names = (f"{base}{slot}", board, base)
    known = next(filter(None, map(find_accelerator, names)), None)
    memory_mib = int(found["gb"]) * 1024
    return KnownAccelerator(known.accelerator, memory_mib) if known else None


def nominal_memory(accelerator: AcceleratorModel, memory_mib: int | None) -> int | None:
    """Return the memory size of the product that is closest to the reported size. If no size of the
    product is within 12 % of the reported size, the reported size itself is returned.

    If no size was reported and the product has only one size, this size is returned, otherwise
    None.
    """
    if memory_mib is None:
        return accelerator.memory[0].mib if len(accelerator.memory) == 1 else None
    sizes = [
        memory.mib
        for memory in accelerator.memory
        if abs(memory.mib - memory_mib) <= 0.12 * memory.mib
    ]
    return min(sizes, key=lambda mib: abs(mib - memory_mib)) if sizes else memory_mib


@cache
def names_matching(name: str) -> frozenset[str]:
    """Return the canonical names of all products that satisfy a requirement. A requirement is a
    product, a family, a vendor (nvidia) or a kind (gpu, tpu, fpga).

    For an unknown name, the result contains only that name, so that users can request devices that
    the table lacks.
    """
    plain = _plain(name)
    rows = list_accelerators()
    for group in (
        frozenset(row.name for row in rows if row.kind == plain),
        frozenset(row.name for row in rows if row.vendor == plain),
        frozenset(row.name for row in rows if _plain(row.family) == plain),
    ):
        if group:
            return group
    known = find_accelerator(name)
    return frozenset({known.accelerator.name}) if known else frozenset({name})


def is_known(name: str) -> bool:
    """Return whether a requirement names a known product, family, vendor or kind."""
    return find_accelerator(name) is not None or names_matching(name) != {name}


def is_match(accelerator: str, wish: str | None) -> bool:
    """Return whether a device with this canonical name satisfies the requirement `wish`. If `wish`
    is None, every device satisfies it. An unknown device is treated as a GPU.
    """
    if wish is None or accelerator in names_matching(wish):
        return True
    return wish == AcceleratorKind.GPU and find_accelerator(accelerator) is None


def name_instance(family: str, profile: str) -> str:
    """Return the name of an instance that MIG makes of a GPU, such as A100-MIG-1g.10gb. It is the
    same for all products of the family."""
    return f"{family}{MIG}{profile}"


def split_instance(name: str) -> tuple[str, str] | None:
    """Return the family and the profile in the name of a MIG instance, or None for other names."""
    family, mig, profile = name.partition(MIG)
    return (family, profile) if mig else None


def instance_memory_mib(profile: str) -> int:
    """Return the nominal memory of a MIG instance with this profile, such as 1g.10gb. The first
    number of a profile counts slices of the GPU's processors (NVIDIA's MIG user guide)."""
    found = PROFILE.fullmatch(profile)
    return int(found[1]) * 1024 if found else 0


def suggest(name: str) -> str | None:
    """Return the known name that is most similar to a misspelt name, or None if no name is
    similar."""
    from difflib import get_close_matches

    alike = name.translate(_LOOKALIKES)
    if alike != name and find_accelerator(alike):
        return alike
    display = {
        _plain(text): text for row in list_accelerators() for text in (row.name, *row.aliases)
    }
    display |= {_plain(row.name): row.name for row in list_accelerators()}
    display |= {group: group for group in (*AcceleratorKind, *Vendor)}
    close = get_close_matches(_plain(name), display, n=1, cutoff=0.6)
    return display[close[0]] if close else None


_LOOKALIKES = str.maketrans("oOlI", "0011")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@cache
def _names() -> dict[str, KnownAccelerator]:
    names: dict[str, KnownAccelerator] = {}
    for row in list_accelerators():
        for text in (row.name, *row.aliases):
            names.setdefault(_plain(text), KnownAccelerator(row))
            for memory in row.memory:
                size = f"{memory.mib // 1024}"
                names.setdefault(_plain(text + size + "gb"), KnownAccelerator(row, memory.mib))
                names.setdefault(_plain(text + size + "g"), KnownAccelerator(row, memory.mib))
    return names


_SIZE_IN_NAME = re.compile(r"\b(\d+)\s*G[iI]?B?\b", re.IGNORECASE)
# GRID A100D-1-10C, NVIDIA A10-24Q: a model, MIG slices, GiB of memory, and the series (C computes)
_VIRTUAL = re.compile(
    r"(?:nvidia|grid)[ _-](?P<board>\S.*?)(?:[ _-]dc)?[ _-]"
    r"(?P<slices>[1-9]-)?(?P<size>(?P<gb>[1-9][0-9]{0,2})(?:[abcq]|b4)(?:me|nom|gfx)?)",
    re.IGNORECASE,
)
_SLOT = re.compile(r"\bPCI(e|[- ]express)\b", re.IGNORECASE)
_NOISE = re.compile(
    r"\b(nvidia|amd|intel\(r\)|intel|instinct|tesla|geforce|quadro|radeon|graphics|generation"
    r"|gpu|accelerator|"
    r"sxm\d?|hbm\d?e?|oam|corporation|server|edition|workstation)\b",
    re.IGNORECASE,
)


def _shorter(product: str) -> list[str]:
    """Return the forms of a name in the order in which the forms are looked up. The first form is
    the unchanged name. Each further form is the form before with something removed. Removed are, in
    this order: hyphens and underscores; words of vendors; the memory size; and the words for the
    slot with the remaining punctuation.
    """
    spaced = re.sub(
        r"^(nvidia|tesla)(?=[a-z]+[0-9])", r"\1 ", re.sub(r"[-_]", " ", product), flags=re.I
    )
    bare = _NOISE.sub(" ", spaced)
    sizeless = _SIZE_IN_NAME.sub(" ", bare)
    return [product, spaced, bare, sizeless, _SLOT.sub(" ", sizeless)]
