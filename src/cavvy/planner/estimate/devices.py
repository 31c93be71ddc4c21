"""The rates of an accelerator: the peak rates of its data sheet (from the catalog), and the share
of these peaks that real programs reach.
"""

import re

from cavvy.catalog.accelerators import AcceleratorModel, Precision, Vendor, find_accelerator
from cavvy.domain.values import Struct

# The largest share of the peak that was measured for bf16 matrix products of any shape:
# stas00/ml-engineering, "Maximum Achievable Matmul FLOPS" (MAMF), tables read 2026-11-20 (torch 2.5
# to 2.10). For the H200 the source states "the same as H100".
ACHIEVED: dict[str, float] = {
    "A100": 0.869,
    "H100": 0.803,
    "H200": 0.803,
    "GH200": 0.838,
    "B200": 0.776,
    "B300": 0.786,
    "GB200": 0.729,
    "MI300X": 0.514,
    "MI325X": 0.604,
    "MI355X": 0.680,
    # Fitted by benchmarks/estimate_steps.py to vision models of timm. The measured rate exceeds the
    # peak of the data sheet, because the card's clock is higher than the data sheet assumes.
    "RTX3090": 1.37,
    "Gaudi2": 0.969,
    "Gaudi3": 0.741,
}
# Assumed for models that the table lacks, from the table's models of the same vendor.
ACHIEVED_ELSEWHERE = {Vendor.NVIDIA: 0.80, Vendor.AMD: 0.55}
ACHIEVED_UNKNOWN = 0.60  # assumed for all other vendors

# Bytes per second in one direction between accelerators that are connected only by PCIe. PCI-SIG:
# 16 lanes carry 15.75, 31.5 and 63 GB/s in each direction in generations 3, 4 and 5.
_BUS = {
    "PCIe 3.0 x16": 15.75e9,
    "PCIe 4.0 x16": 31.5e9,
    "PCIe 5.0 x16": 63e9,
    "PCIe 4.0 x8": 15.75e9,
}


class DeviceRates(Struct, frozen=True, kw_only=True):
    """The rates of one accelerator: peak FLOP/s by precision, the share of the peak that programs
    reach, and bandwidths in bytes per second.
    """

    name: str
    memory_mib: int
    half: float  # the peak in bf16, or in fp16 if the device has no bf16
    tf32: float  # the tf32 peak, or the fp32 peak if the device has no tf32
    fp32: float
    fp8: float  # the fp8 peak, or the half-precision peak if the device has no fp8
    achieved: float  # share of the peak that matrix products reach
    bandwidth: float  # bandwidth of the device's memory in bytes per second
    link: float  # bandwidth to the other accelerators of the node in bytes per second and direction


def device_of(name: str, memory_mib: int | None = None) -> DeviceRates | None:
    """Return the rates of the accelerator with this name. Returns None if the catalog does not
    contain the accelerator's data sheet.
    """
    known = find_accelerator(name)
    if known is None:
        return None
    row, size = known.accelerator, memory_mib or known.memory_mib
    if size is None and row.memory:
        size = row.memory[-1].mib
    bandwidth = row.bandwidth(size)
    fp32 = row.peak.get(Precision.FP32)
    half = row.peak.get(Precision.BF16) or row.peak.get(Precision.FP16) or fp32
    if bandwidth is None or half is None or size is None:
        return None
    wide = fp32 or half / 16
    return DeviceRates(
        name=row.name,
        memory_mib=size,
        half=half,
        tf32=row.peak.get(Precision.TF32) or wide,
        fp32=wide,
        fp8=row.peak.get(Precision.FP8) or half,
        achieved=_achieved(row),
        bandwidth=bandwidth * 1e9,
        link=_link(row.interconnect or ""),
    )


def _achieved(row: AcceleratorModel) -> float:
    for name in (row.name, row.family):
        if name in ACHIEVED:
            return ACHIEVED[name]
    return ACHIEVED_ELSEWHERE.get(row.vendor, ACHIEVED_UNKNOWN)


def _link(text: str) -> float:
    if found := re.search(r"([\d.]+) GB/s", text):
        return float(found[1]) * 1e9 / 2
    return next((rate for name, rate in _BUS.items() if name in text), 15.75e9)
