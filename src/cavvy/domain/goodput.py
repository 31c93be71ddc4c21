"""How fast a training makes progress on other numbers of nodes and with other batches: goodput,
which is throughput times statistical efficiency.

The formulas are those of Pollux (Qiao et al., OSDI'21, section 3) and of AdaptDL, its program:
* a step takes (T_grad^g + T_sync^g)^(1/g), where g from 1 to 10 states how much of the exchange of
  gradients is hidden by their computation (equation 11),
* T_grad = a + b x samples of one replica (equation 9), repeated for each accumulated part,
* T_sync is 0 on one replica, and otherwise a + b x (replicas - 2), with other values inside of a
  node than between nodes (equation 10),
* a batch of m samples makes (noise + m0) / (noise + m) as much progress per sample as one of m0
  (equation 6), with the gradient noise scale of McCandlish et al. (arXiv:1812.06162).

All formulas take numbers, and arrays of NumPy for the samples. Times are in seconds.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cavvy.domain.values import Struct

# The values of `overlap` that a fit tries, between "nothing is hidden" and "nearly all is".
_OVERLAPS = (1.0, 1.25, 1.6, 2.0, 2.6, 3.5, 5.0, 7.0, 10.0)
# What a fit adds to the error of an overlap, per (overlap - 1)^2, as AdaptDL does: of two that fit
# about equally well, the one that hides less is true more often.
_OVERLAP_ERROR = 1e-3
# How much slower the first exchange between nodes is assumed to be than inside of one.
_BETWEEN_NODES = 1.1
_TINY = 1e-8
# How many batches are compared to find the best one; AdaptDL compares as many.
_BATCHES = 50


class StepTimes(Struct, frozen=True, kw_only=True):
    """How long a step takes on one type of accelerator, in seconds. `inside_s` is the exchange of
    gradients in one node, `between_s` that of several nodes; both with 2 replicas."""

    compute_s: float
    compute_sample_s: float  # per sample of one replica
    inside_s: float = _TINY
    inside_replica_s: float = 0.0  # per replica above 2
    between_s: float = _TINY
    between_replica_s: float = 0.0  # per replica above 2
    overlap: float = 1.0

    def part_s(self, samples: Any) -> Any:
        """The computation of the gradients of so many samples on each replica."""
        return self.compute_s + self.compute_sample_s * samples

    def sync_s(self, nodes: int, replicas: int) -> float:
        """The exchange of gradients."""
        if replicas < 2:
            return 0.0
        if nodes > 1:
            return self.between_s + self.between_replica_s * (replicas - 2)
        return self.inside_s + self.inside_replica_s * (replicas - 2)

    def step_s(self, nodes: int, replicas: int, samples: Any, parts: Any = 1) -> Any:
        """A step of `parts` accumulated parts of so many samples on each replica."""
        part, sync = self.part_s(samples), self.sync_s(nodes, replicas)
        last = (part**self.overlap + sync**self.overlap) ** (1 / self.overlap)
        return (parts - 1) * part + last

    def scale(self, factor: float) -> "StepTimes":
        """Return the times on accelerators that need `factor` times as long."""
        return StepTimes(
            compute_s=self.compute_s * factor,
            compute_sample_s=self.compute_sample_s * factor,
            inside_s=self.inside_s * factor,
            inside_replica_s=self.inside_replica_s * factor,
            between_s=self.between_s * factor,
            between_replica_s=self.between_replica_s * factor,
            overlap=self.overlap,
        )


class GradientNoise(Struct, frozen=True, kw_only=True):
    """The squared length of the mean gradient, and the variance of one that is computed from
    `batch` samples."""

    batch: float
    square: float
    variance: float

    def efficiency(self, samples: Any) -> Any:
        """The progress per sample of a batch of so many samples, relative to one of `batch`."""
        scale = samples / self.batch
        below = self.variance + scale * self.square
        if isinstance(below, float) and below <= 0:
            return 1.0 / scale
        return (self.variance + self.square) / below


class BatchLimits(Struct, frozen=True, kw_only=True):
    """The batches that a job may have: all replicas together at least `least` and at most `most`
    samples, and one replica at once from `part_least` to `part_most`, by its memory."""

    least: int
    most: int
    part_least: int = 1
    part_most: int


class StepBatch(Struct, frozen=True, kw_only=True):
    """A step's batch: `parts` parts of `samples` samples on each replica, and what it is worth, in
    samples of the smallest batch per second."""

    samples: int
    parts: int
    goodput: float


def find_batch(
    times: StepTimes, noise: GradientNoise | None, limits: BatchLimits, nodes: int, replicas: int
) -> StepBatch | None:
    """Return the best batch on so many replicas, None if they are more than a batch can feed.
    Without `noise`, each sample counts the same. One replica that has a larger batch than the
    smallest one accumulates at least two parts, because noise can't be seen in one part."""
    first = max(limits.least, limits.part_least * replicas)
    if first > limits.most:
        return None
    best = None
    ratio = (limits.most / first) ** (1 / (_BATCHES - 1))
    seen = 0
    for number in range(_BATCHES):
        local = first * ratio**number / replicas
        parts = math.ceil(local / limits.part_most - _TINY)
        if replicas == 1 and local > limits.least + _TINY:
            parts = max(parts, 2)
        samples = math.ceil(local / parts - _TINY)
        total = samples * parts * replicas
        if total == seen or not limits.part_least <= samples <= limits.part_most:
            continue
        seen = total
        value = total / times.step_s(nodes, replicas, samples, parts)
        if noise is not None:
            value *= noise.efficiency(float(total))
        if best is None or value > best.goodput:
            best = StepBatch(samples=samples, parts=parts, goodput=value)
    return best


class StepSeen(Struct, frozen=True, kw_only=True):
    """A measured step: the computation of one part, and the whole step with the exchange."""

    nodes: int
    replicas: int
    samples: int  # of one part on one replica
    part_s: float
    step_s: float


def fit_step_times(seen: Sequence[StepSeen]) -> StepTimes:
    """Return the times that fit the measured steps best, by squared relative error. What has not
    been measured is assumed to be fast, so that it is tried: the exchange, until there are two
    replicas; its growth, until there are three. Raises ValueError if nothing was measured."""
    if not seen:
        raise ValueError("no step was measured, so there are no step times to fit")
    compute, sample = _fit_compute(seen)
    fits = [_fit_overlap(seen, compute, sample, overlap) for overlap in _OVERLAPS]
    return min(fits, key=lambda each: each[0])[1]


def _fit_compute(seen: Sequence[StepSeen]) -> tuple[float, float]:
    points = [(float(each.samples), each.part_s) for each in seen]
    if len({samples for samples, _ in points}) == 1:
        half = sum(part for _, part in points) / len(points) / 2
        return half, half / points[0][0]
    return _fit_line(points)


def _fit_overlap(
    seen: Sequence[StepSeen], compute: float, sample: float, overlap: float
) -> tuple[float, StepTimes]:
    inside: list[tuple[float, float]] = []
    between: list[tuple[float, float]] = []
    for each in seen:
        if each.replicas < 2:
            continue
        hidden = each.step_s**overlap - min(each.part_s, each.step_s) ** overlap
        sync = max(hidden, 0.0) ** (1 / overlap)
        (between if each.nodes > 1 else inside).append((each.replicas - 2.0, sync))
    inside_s, inside_more = _fit_line(inside) if inside else (_TINY, 0.0)
    if between:
        between_s, between_more = _fit_line(between)
    else:
        between_s, between_more = inside_s * _BETWEEN_NODES, inside_more * _BETWEEN_NODES
    times = StepTimes(
        compute_s=compute,
        compute_sample_s=sample,
        inside_s=inside_s,
        inside_replica_s=inside_more,
        between_s=between_s,
        between_replica_s=between_more,
        overlap=overlap,
    )
    error = sum(
        math.log(times.step_s(each.nodes, each.replicas, each.samples) / each.step_s) ** 2
        for each in seen
    )
    return math.sqrt(error / len(seen)) + _OVERLAP_ERROR * (overlap - 1) ** 2, times


def _fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the start and the slope, neither below 0, of the line through the points (x, y) that
    differs least from them in proportion to y."""
    weights = [1 / max(y, _TINY) ** 2 for _, y in points]
    total = sum(weights)
    x = sum(w * p[0] for w, p in zip(weights, points, strict=True)) / total
    y = sum(w * p[1] for w, p in zip(weights, points, strict=True)) / total
    spread = sum(w * (p[0] - x) ** 2 for w, p in zip(weights, points, strict=True))
    both = sum(w * (p[0] - x) * (p[1] - y) for w, p in zip(weights, points, strict=True))
    slope = max(both / spread, 0.0) if spread > _TINY * total else 0.0
    start = y - slope * x
    if start < 0:
        squares = sum(w * p[0] ** 2 for w, p in zip(weights, points, strict=True))
        slope = sum(w * p[0] * p[1] for w, p in zip(weights, points, strict=True)) / squares
        start = 0.0
    return max(start, _TINY), max(slope, 0.0)


def guess_step_times(
    known: Mapping[str, StepTimes], kind: str, speeds: Mapping[str, float]
) -> StepTimes | None:
    """Return what is known of this type of accelerator, else what is known of another one, scaled
    by the ratio of their `speeds` (of one replica, such as in samples per second, from the
    planner's estimates); None if nothing is known."""
    if kind in known:
        return known[kind]
    for other, times in known.items():
        if speeds.get(other) and speeds.get(kind):
            return times.scale(speeds[other] / speeds[kind])
    return None
