"""The vCPUs, memory and accelerators of Azure's VM sizes. The price table only guesses them from
names.

Source: Microsoft's pages "Sizes for virtual machines". A memory of 0 means unknown. A size of the N
series (with an accelerator) that is not in this file is left out of the snapshot, because its
accelerators would be a guess.
"""

import re
from typing import NamedTuple


class Size(NamedTuple):
    """One size. A `memory_gib` of 0 means unknown."""

    vcpus: float
    memory_gib: float
    accelerator: str | None = None
    count: int = 0
    part: float = 1.0  # the fraction of one accelerator that the size has
    accelerator_gib: float = 0  # the memory of this fraction


# name -> vCPUs, GiB, accelerator (with its memory if there are several sizes), number of
# accelerators, fraction, memory of the fraction
_ACCELERATED = {
    "NC4as_T4_v3": (4, 28, "T4", 1), "NC8as_T4_v3": (8, 56, "T4", 1), "NC16as_T4_v3": (16, 110, "T4", 1),
    "NC64as_T4_v3": (64, 440, "T4", 4),
    "NC24ads_A100_v4": (24, 220, "A100-80GB", 1), "NC48ads_A100_v4": (48, 440, "A100-80GB", 2),
    "NC96ads_A100_v4": (96, 880, "A100-80GB", 4),
    "NC40ads_H100_v5": (40, 320, "H100-NVL", 1), "NC80adis_H100_v5": (80, 640, "H100-NVL", 2),
    "NCC40ads_H100_v5": (40, 320, "H100-NVL", 1),
    "ND96asr_v4": (96, 900, "A100-40GB", 8), "ND96amsr_A100_v4": (96, 1900, "A100-80GB", 8),
    "ND96isr_H100_v5": (96, 1900, "H100-SXM", 8), "ND96isr_H200_v5": (96, 1850, "H200", 8),
    "ND96isr_MI300X_v5": (96, 1850, "MI300X", 8), "ND96is_MI300X_v5": (96, 1850, "MI300X", 8),
    "ND128isr_NDR_GB200_v6": (128, 900, "GB200", 4),
    "NV6ads_A10_v5": (6, 55, "A10", 1, 1 / 6, 4), "NV12ads_A10_v5": (12, 110, "A10", 1, 1 / 3, 8),
    "NV18ads_A10_v5": (18, 220, "A10", 1, 1 / 2, 12),
    "NV36ads_A10_v5": (36, 440, "A10", 1), "NV36adms_A10_v5": (36, 880, "A10", 1),
    "NV72ads_A10_v5": (72, 880, "A10", 2),
    "NP10s": (10, 168, "U250", 1), "NP20s": (20, 336, "U250", 2), "NP40s": (40, 672, "U250", 4),
}  # fmt: skip

# Families in which the number in the name is not the number of vCPUs.
_BASIC = {
    "0": 1,
    "1": 1,
    "2": 2,
    "3": 4,
    "4": 8,
    "5": 2,
    "6": 4,
    "7": 8,
    "8": 8,
    "9": 16,
    "10": 8,
    "11": 16,
}
_D_OLD = {
    "1": (1, 3.5), "2": (2, 7), "3": (4, 14), "4": (8, 28), "5": (16, 56),
    "11": (2, 14), "12": (4, 28), "13": (8, 56), "14": (16, 112), "15": (20, 140),
}  # fmt: skip
_G = {"1": (2, 28), "2": (4, 56), "3": (8, 112), "4": (16, 224), "5": (32, 448)}
_B1 = {
    "B1ls": (1, 0.5), "B1s": (1, 1), "B1ms": (1, 2), "B2s": (2, 4), "B2ms": (2, 8), "B4ms": (4, 16), "B8ms": (8, 32),
    "B12ms": (12, 48), "B16ms": (16, 64), "B20ms": (20, 80),
}  # fmt: skip
_M = {
    "M8ms": (8, 218.75), "M16ms": (16, 437.5), "M32ts": (32, 192), "M32ls": (32, 256), "M32ms": (32, 875),
    "M64ls": (64, 512), "M64s": (64, 1024), "M64ms": (64, 1792), "M128s": (128, 2048), "M128ms": (128, 3892),
    "M208s_v2": (208, 2850), "M208ms_v2": (208, 5700), "M416s_v2": (416, 5700), "M416ms_v2": (416, 11400),
}  # fmt: skip
_HPC = {
    "HB120rs_v2": (120, 456), "HB120rs_v3": (120, 448), "HB60rs": (60, 228), "HC44rs": (44, 352),
    "HB176rs_v4": (176, 768), "HX176rs": (176, 1408),
    "H8": (8, 56), "H16": (16, 112), "H16r": (16, 112), "H8m": (8, 112), "H16m": (16, 224), "H16mr": (16, 224),
}  # fmt: skip
# Families with a fixed amount of memory per vCPU: (pattern of the name without "Standard_", GiB per
# vCPU, the largest number of vCPUs to which this applies).
_RATIOS: tuple[tuple[str, float, float], ...] = (
    (r"D\d+(a?d?s?)_v[345]", 4, 96),  # Dv3 ... Dadsv5
    (r"D\d+pd?s_v5", 4, 48),
    (r"D\d+p?ld?s_v5", 2, 96),
    (r"D\d+(a?d?s)_v6", 4, 192),
    (r"D\d+(a?ld?s)_v6", 2, 128),
    (r"D\d+pd?s_v6", 4, 96),
    (r"D\d+pld?s_v6", 2, 96),
    (r"DC\d+ad?s_v5", 4, 96),
    (r"DC\d+d?s_v3", 8, 48),
    (r"E\d+(a?d?s?)_v[345]", 8, 48),
    (r"E\d+pd?s_v5", 8, 32),
    (r"E\d+(a?d?s)_v6", 8, 64),
    (r"EC\d+ad?s_v5", 8, 64),
    (r"F\d+s?", 2, 16),
    (r"F\d+s_v2", 2, 72),
    (r"F\d+als_v6", 2, 64),
    (r"F\d+as_v6", 4, 64),
    (r"F\d+ams_v6", 8, 64),
    (r"L\d+s_v2", 8, 80),
    (r"L\d+a?s_v3", 8, 80),
    (r"B\d+a?p?s_v2", 4, 32),
    (r"B\d+a?p?ls_v2", 2, 32),
)
_EXACT_MEMORY = {
    "E64_v3": 432, "E64s_v3": 432, "E64i_v3": 432, "E64is_v3": 432, "E64_v4": 504, "E64s_v4": 504, "E64d_v4": 504,
    "E64ds_v4": 504, "E64a_v4": 512, "E64as_v4": 512, "E64_v5": 512, "E64s_v5": 512, "E64d_v5": 512,
    "E64ds_v5": 512, "E64as_v5": 512, "E64ads_v5": 512, "E96a_v4": 672, "E96as_v4": 672, "E96_v5": 672,
    "E96s_v5": 672, "E96d_v5": 672, "E96ds_v5": 672, "E96as_v5": 672, "E96ads_v5": 672, "D64ps_v5": 208,
    "D64pds_v5": 208, "A1_v2": 2, "A2_v2": 4, "A4_v2": 8, "A8_v2": 16, "A2m_v2": 16, "A4m_v2": 32, "A8m_v2": 64,
}  # fmt: skip


# Families whose sizes have as many vCPUs as the number in their name, or are in the tables above.
# PB has an FPGA, SQLG is sold with a database, H (not HB, HC, HX) is retired.
_FAMILIES = frozenset(
    ["A", "B", "D", "DC", "DS", "E", "EC", "F", "FX", "G", "GS", "HB", "HC", "HX", "L", "M"]
)


def find_size(instance_type: str) -> Size | None:
    """The facts about a size; None if the size must be left out of the snapshot."""
    if not instance_type.startswith("Standard_") or instance_type != instance_type.strip():
        return None
    name = instance_type.removeprefix("Standard_")
    if name.startswith("N"):
        return Size(*_ACCELERATED[name]) if name in _ACCELERATED else None
    for exact in (_B1, _M, _HPC):
        if name in exact:
            return Size(*exact[name])
    # A constrained size (E16-4s_v3) has the memory of the full size (E16s_v3) but fewer vCPUs.
    match = re.fullmatch(r"([A-Z]+)(\d+)(?:-(\d+))?(.*)", name)
    if match is None:
        return None
    family, number, constrained, rest = match.groups()
    if family not in _FAMILIES:
        return None
    old = _old_size(family, number, rest)
    vcpus, memory = old or (float(number), _memory(family + number + rest, float(number)))
    return Size(float(constrained) if constrained else vcpus, memory) if vcpus else None


def _old_size(family: str, number: str, rest: str) -> tuple[float, float] | None:
    if family == "A" and not rest and number in _BASIC:
        return _BASIC[number], 0
    if (
        family in ("D", "DS")
        and (rest in ("", "_v2", "_Promo", "_v2_Promo") or family == "DS")
        and number in _D_OLD
    ):
        return _D_OLD[number]
    if family in ("G", "GS") and number in _G:
        return _G[number]
    return None


def _memory(name: str, vcpus: float) -> float:
    if name in _EXACT_MEMORY:
        return _EXACT_MEMORY[name]
    for exact in (_M, _HPC):
        if name in exact:
            return exact[name][1]
    for pattern, per_vcpu, largest in _RATIOS:
        if vcpus <= largest and re.fullmatch(pattern, name):
            return per_vcpu * vcpus
    return 0
