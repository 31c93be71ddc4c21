"""Estimates the rate on one accelerator from rates that were measured on other accelerators. The
estimate is a power law with a prior.
"""

from collections.abc import Sequence
from math import exp, hypot, log

from cavvy.domain.values import Struct
from cavvy.planner.estimate.devices import DeviceRates
from cavvy.planner.estimate.roofline import peak_of

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
    powers = _solve(*_equations(known, measured, rows, centre, level))
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


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
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
