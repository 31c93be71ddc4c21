"""The rates of an accelerator: the peak rates of its data sheet (from the catalog), the share of
these peaks that real programs reach, and rates that a power law with a prior derives from rates of
other accelerators.
"""

import re
from collections.abc import Sequence
from math import exp, hypot, log

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
    "RTX3090": 1.2,
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


def is_rated(device: DeviceRates) -> bool:
    """Return whether the share of the peak that the device reaches was measured."""
    return any(device.name == name or device.name.startswith(f"{name}-") for name in ACHIEVED)


def peak_of(device: DeviceRates, precision: str) -> float:
    """Return the peak FLOP/s of the data sheet for matrix products at this precision."""
    if precision in ("bf16", "fp16"):
        return device.half
    return {"tf32": device.tf32, "fp8": device.fp8}.get(precision, device.fp32)


def _achieved(row: AcceleratorModel) -> float:
    for name in (row.name, row.family):
        if name in ACHIEVED:
            return ACHIEVED[name]
    return ACHIEVED_ELSEWHERE.get(row.vendor, ACHIEVED_UNKNOWN)


def _link(text: str) -> float:
    if found := re.search(r"([\d.]+) GB/s", text):
        return float(found[1]) * 1e9 / 2
    return next((rate for name, rate in _BUS.items() if name in text), 15.75e9)


# The spread of rates that are derived from one measurement, as natural logarithms: for another
# device, and for each factor of e between the two counts. `benchmarks/estimate.py` shows that 80 %
# of the measurements in public tables are within this spread (docs/reference/estimate.md).
_OTHER_DEVICE = 0.4
_OTHER_COUNT = 0.3


class MeasuredRate(Struct, frozen=True, kw_only=True):
    """The rate of a workload, measured on `count` accelerators."""

    device: DeviceRates
    count: int
    rate: float  # units of work per second


class ExponentPrior(Struct, frozen=True, kw_only=True):
    """The prior values of the exponents, and the weight of the prior against measurements."""

    arithmetic: float = 0.5  # exponent of achieved FLOP/s
    bandwidth: float = 0.4
    count: float = 0.92
    # The weight of the prior: it counts as this many measurements whose feature is a factor of e
    # away from the mean.
    firmness: float = 3.0


def carry(
    measured: Sequence[MeasuredRate],
    device: DeviceRates,
    count: int,
    precision: str,
    prior: ExponentPrior | None = None,
) -> float:
    """Return the expected rate on `count` accelerators of kind `device`. The rate follows the power
    law rate = c · FLOPs^a · bandwidth^b · count^n, whose constants are fitted to `measured`.

    The default exponents in `ExponentPrior` give FLOP/s and memory bandwidth about the same weight.
    Only measurements on several kinds of accelerators change the weights. Raises ValueError without
    measurements.
    """
    if not measured:
        raise ValueError("nothing was measured")
    known = prior or ExponentPrior()
    rows = [_features(each.device, each.count, precision) for each in measured]
    centre = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    level = sum(log(each.rate) for each in measured) / len(measured)
    powers = solve(*_equations(known, measured, rows, centre, level))
    target = _features(device, count, precision)
    steps = zip(powers, target, centre, strict=True)
    return exp(level + sum(power * (value - mean) for power, value, mean in steps))


def spread_of(measured: MeasuredRate, device: DeviceRates, count: int) -> float:
    """Return how uncertain a rate r is that `carry` has computed from one measurement. The result
    is a factor f: 80 % of measured rates are between r / f and r * f.
    """
    other = (device.name, device.memory_mib) != (measured.device.name, measured.device.memory_mib)
    return exp(hypot(_OTHER_DEVICE if other else 0.0, _OTHER_COUNT * log(count / measured.count)))


def _equations(
    known: ExponentPrior,
    measured: Sequence[MeasuredRate],
    rows: Sequence[Sequence[float]],
    centre: Sequence[float],
    level: float,
) -> tuple[list[list[float]], list[float]]:
    """Return the linear equations for the exponents, including the prior: the matrix and the right
    side.
    """
    wanted = (known.arithmetic, known.bandwidth, known.count)
    matrix = [[known.firmness if row == column else 0.0 for column in range(3)] for row in range(3)]
    right = [known.firmness * each for each in wanted]
    for row, each in zip(rows, measured, strict=True):
        moved = [value - mean for value, mean in zip(row, centre, strict=True)]
        for i in range(3):
            right[i] += moved[i] * (log(each.rate) - level)
            for j in range(3):
                matrix[i][j] += moved[i] * moved[j]
    return matrix, right


def _features(device: DeviceRates, count: int, precision: str) -> tuple[float, float, float]:
    return log(peak_of(device, precision) * device.achieved), log(device.bandwidth), log(count)


def solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a positive definite linear system by Gaussian elimination."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        for j in range(i + 1, size):
            ratio = rows[j][i] / rows[i][i]
            rows[j] = [below - ratio * above for below, above in zip(rows[j], rows[i], strict=True)]
    out = [0.0] * size
    for i in reversed(range(size)):
        out[i] = (rows[i][size] - sum(rows[i][k] * out[k] for k in range(i + 1, size))) / rows[i][i]
    return out
