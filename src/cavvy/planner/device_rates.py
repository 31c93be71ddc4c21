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
    "Gaudi2": 0.969,
    "Gaudi3": 0.741,
    # Fitted by benchmarks/estimate_steps.py to vision models of timm; products alone reach 1.07.
    "RTX3090": 1.2,
    # The largest bf16 or fp16 products of 1,024 to 10,240 rows and columns in PyTorch, of which the
    # source has the median of several machines: github.com/zzc0721/torch-performance-test-data,
    # read 2026-11-28. Clocks of GeForce cards are higher than the data sheets assume, and cards
    # with little power reach less.
    "RTX5090": 1.13,
    "RTX5080": 0.91,
    "RTX4090": 1.0,
    "RTX4070S": 1.08,
    "RTX4060Ti": 1.08,
    "RTX4060": 1.08,
    "RTX3080Ti": 1.12,
    "RTX3080": 1.09,
    "RTX3060": 1.0,
    "RTX2080Ti": 0.84,
    "L40S": 0.74,
    "RTX6000-Ada": 0.63,  # an L40S's, in proportion to the power
    "A6000": 0.80,
    "A40": 0.82,
    "A4000": 0.85,
    "A10": 0.56,  # 70 TFLOP/s, by an A10G, which has the same chip and power
    "V100": 0.78,
    "T4": 0.65,
    "H20": 0.96,
}
# the same in fp32, where it was published, as shares of the fp32 peak; the others are assumed to
# reach what those of the same kind do (see `_fp32_share`)
ACHIEVED_FP32: dict[str, float] = {
    **{"RTX5090": 0.65, "RTX5080": 0.60, "RTX4090": 0.66, "RTX4070S": 0.70, "RTX4060Ti": 0.65},
    **{"RTX4060": 0.55, "RTX3090": 0.70, "RTX3080Ti": 0.71, "RTX3080": 0.72, "RTX3060": 0.64},
    **{"L40S": 0.51, "A6000": 0.62, "A40": 0.63, "A4000": 0.62, "A10": 0.67},
    **{"H100": 0.78, "H200": 0.77, "H20": 0.73, "V100": 0.92, "A100": 0.98, "P100": 0.93},
    **{"T4": 0.54},
}
# Assumed for models that the tables lack, from the tables' models of the same kind: those of the
# same vendor, and GeForce cards.
ACHIEVED_ELSEWHERE = {Vendor.NVIDIA: 0.80, Vendor.AMD: 0.55}
ACHIEVED_UNKNOWN = 0.60  # assumed for all other vendors
_ACHIEVED_GEFORCE, _FP32_GRAPHICS = 1.07, 0.64
_FP32, _FP32_HALF_LANES = 0.76, 0.95

# Cards whose data sheets state only the fp32 peak. Their tensor units have these multiples of it in
# half precision and in TF32 (NVIDIA, architecture white papers of Turing, GA102, Ada and RTX
# Blackwell: GeForce cards since Ampere accumulate in fp32 at half the rate of their chip).
_GEFORCE = re.compile(r"RTX[345]0[5-9]0\D*$")
_WORKSTATION = re.compile(r"(A[456]\d00|A40|A10|L40S?|L4|RTX\d000-Ada)$")
_TURING = re.compile(r"RTX20\d\d")

# Accelerators whose processors have 64 fp32 results per clock, where an H200's have 128 (NVIDIA,
# "CUDA C++ Programming Guide", throughput of arithmetic instructions: compute capabilities 6.0,
# 7.0, 7.5 and 8.0; AMD, white papers of CDNA 1 and 2)
_HALF_LANES = frozenset(
    {
        *("P100", "V100", "T4", "RTX8000", "RTX6000", "RTX5000", "RTX4000", "RTX2080Ti"),
        *("GTX1660S", "A100", "A800", "A30", "MI100", "MI210", "MI250", "MI250X"),
    }
)
_H200_FP32 = 67e12

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
    achieved: float  # share of the half-precision peak that matrix products reach
    achieved_tf32: float  # the same for TF32, or for fp32 if the device has no TF32
    achieved_fp32: float
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
    halves, tf32s = _tensor_multiples(row.name)
    half = row.peak.get(Precision.BF16) or row.peak.get(Precision.FP16)
    half = half or (fp32 * halves if fp32 else None)
    if bandwidth is None or half is None or size is None:
        return None
    wide = fp32 or half / 16
    tf32 = row.peak.get(Precision.TF32) or wide * tf32s
    achieved, slow = _achieved(row), _fp32_share(row)
    return DeviceRates(
        name=row.name,
        memory_mib=size,
        half=half,
        tf32=tf32 or wide,
        fp32=wide,
        fp8=row.peak.get(Precision.FP8) or half,
        achieved=achieved,
        achieved_tf32=achieved if tf32 else slow,
        achieved_fp32=slow,
        bandwidth=bandwidth * 1e9,
        link=_link(row.interconnect or ""),
    )


def slower_than_h200(device: DeviceRates) -> float:
    """Return how many times as long a device takes for instructions other than matrix products,
    such as those that compute the addresses of elements. The number of processors, multiplied by
    their clock, determines it: the fp32 peak, divided by the results of a processor per clock.
    """
    lanes = 0.5 if has_half_lanes(device) else 1.0
    return float(_H200_FP32 / device.fp32 * lanes)


def has_half_lanes(device: DeviceRates) -> bool:
    """Return whether a processor of the device has half of the fp32 results per clock of an H200's,
    for each of which it has twice the bandwidth of registers and shared memory.
    """
    return device.name in _HALF_LANES


def _tensor_multiples(name: str) -> tuple[float, float]:
    """Return the peaks of tensor units in half precision and in TF32 as multiples of the fp32 peak,
    for cards whose data sheets state none. The second is 0 without TF32.
    """
    if _GEFORCE.match(name):
        return 2.0, 1.0
    if _WORKSTATION.match(name):
        return 4.0, 2.0
    return (4.0, 0.0) if _TURING.match(name) else (1.0, 0.0)


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
    if _GEFORCE.match(row.name):
        return _ACHIEVED_GEFORCE
    return ACHIEVED_ELSEWHERE.get(row.vendor, ACHIEVED_UNKNOWN)


def _fp32_share(row: AcceleratorModel) -> float:
    """Return the share of the fp32 peak that matrix products without tensor units reach."""
    for name in (row.name, row.family):
        if name in ACHIEVED_FP32:
            return ACHIEVED_FP32[name]
    if row.name in _HALF_LANES:
        return _FP32_HALF_LANES
    if _GEFORCE.match(row.name) or _WORKSTATION.match(row.name):
        return _FP32_GRAPHICS
    return _FP32 if row.vendor is Vendor.NVIDIA else 0.95 * _achieved(row)


def _link(text: str) -> float:
    if found := re.search(r"([\d.]+) GB/s", text):
        return float(found[1]) * 1e9 / 2
    return next((rate for name, rate in _BUS.items() if name in text), 15.75e9)


# The spread of rates that are derived from one measurement, as natural logarithms: for another
# device, and for each factor of e between the two counts. `benchmarks/estimate.py` shows that 80 %
# of the measurements in public tables are within this spread (docs/measured/estimate.md).
_OTHER_DEVICE = 0.4
_OTHER_COUNT = 0.3


class MeasuredRate(Struct, frozen=True, kw_only=True):
    """The rate of a workload, measured on `count` accelerators."""

    device: DeviceRates
    count: int
    rate: float  # units of work per second


class ExponentPrior(Struct, frozen=True, kw_only=True):
    """The prior values of the exponents, and the weight of the prior against measurements."""

    # Fitted to Lambda's rates (benchmarks/estimate.py): exponents of the achieved FLOP/s, of the
    # bandwidth, and of the speed of other instructions (see `slower_than_h200`)
    arithmetic: float = 0.5
    bandwidth: float = 0.3
    instructions: float = 0.1
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
    law rate = c · FLOPs^a · bandwidth^b · instructions^i · count^n, whose constants are fitted to
    `measured`.

    Only measurements on several kinds of accelerators change the exponents of `ExponentPrior`.
    Raises ValueError without measurements.
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
    wanted = (known.arithmetic, known.bandwidth, known.instructions, known.count)
    size = range(len(wanted))
    matrix = [[known.firmness if row == column else 0.0 for column in size] for row in size]
    right = [known.firmness * each for each in wanted]
    for row, each in zip(rows, measured, strict=True):
        moved = [value - mean for value, mean in zip(row, centre, strict=True)]
        for i in size:
            right[i] += moved[i] * (log(each.rate) - level)
            for j in size:
                matrix[i][j] += moved[i] * moved[j]
    return matrix, right


def _features(device: DeviceRates, count: int, precision: str) -> tuple[float, ...]:
    share = {"tf32": device.achieved_tf32, "fp32": device.achieved_fp32}
    flops = peak_of(device, precision) * share.get(precision, device.achieved)
    return log(flops), log(device.bandwidth), -log(slower_than_h200(device)), log(count)


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
