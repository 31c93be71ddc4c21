"""Reads the measured profiles of the authors of Pollux and Sia: how long a step takes on which GPUs
with which batch, and how the gradients and the validation metric of six trainings develop.

Between measured points, values are interpolated as the authors' simulators do, so that their
figures can be reproduced: linearly over the batch for a measured placement, and otherwise linearly
over nodes, replicas and batch. Needs NumPy and SciPy.
"""

import csv
import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.interpolate import LinearNDInterpolator

# Epochs of each training, from the authors' simulators.
EPOCHS = {"bert": 2, "cifar10": 100, "ncf": 10, "imagenet": 90, "deepspeech2": 80, "yolov3": 50}
Steps = tuple[float, float]  # seconds of a step, and of its exchange of gradients


class Profile:
    """One training on one type of GPU. `most_part` limits the samples of one replica at once, and
    `per_placement` states that the limit is that of the placement (Sia), not of all (Pollux)."""

    def __init__(
        self, folder: Path, kind: str, most_part: int | None = None, per_placement: bool = False
    ):
        self.name, self.kind, self.per_placement = folder.name, kind, per_placement
        self.epochs = EPOCHS[self.name]
        self.curves = _read_curves(folder)
        self.placements = _read_placements(folder / f"placements-{kind}.csv")
        self.scaling = _read_scaling(folder / f"scalability-{kind}.csv")
        local = [samples for points in self.placements.values() for samples, *_ in points]
        self.least_part = int(min(local))
        self.most_part = most_part or int(max(local))
        self.least_batch, self.most_batch = min(self.curves), max(self.curves)
        self.steps = lru_cache(maxsize=None)(self._find_steps)
        self.gradients = lru_cache(maxsize=None)(self._find_gradients)
        self.part_limit = lru_cache(maxsize=None)(self._find_part_limit)
        self._sizes: dict[int, int] = {}
        for placement, points in self.placements.items():
            replicas = sum(placement)
            self._sizes[replicas] = max(
                self._sizes.get(replicas, 0), *(int(each[0]) for each in points)
            )

    def progress(self, epoch: int) -> float:
        """The progress after so many epochs, in steps of the smallest batch."""
        if epoch == 0:
            return 0.0
        return min(float(curve["progress"][epoch - 1]) for curve in self.curves.values())

    @cached_property
    def total(self) -> float:
        """The progress of the whole training."""
        return self.progress(self.epochs)

    @cached_property
    def speed(self) -> float:
        """Samples per second of one replica with its largest part, without an exchange."""
        points = self.placements[1,]
        return max(each[0] for each in points) / max(each[1] for each in points)

    def iterations(self, batch: int, epoch: int) -> float:
        """How many steps of this batch complete an epoch (counted from 0) and all before it."""
        return self._between(batch, "iteration", epoch)

    def measured_limit(self, replicas: int) -> int | None:
        """The most samples of one replica that were measured on so many replicas."""
        return self._sizes.get(replicas)

    def _find_gradients(self, batch: int, epoch: int) -> tuple[float, float]:
        """The squared length of the mean gradient, and the variance for the smallest batch."""
        return self._between(batch, "grad_sqr", epoch), self._between(batch, "grad_var", epoch)

    def _between(self, batch: int, column: str, epoch: int) -> float:
        lower = max(each for each in self.curves if each <= batch)
        upper = min(each for each in self.curves if each >= batch)
        low, high = (
            float(self.curves[lower][column][epoch]),
            float(self.curves[upper][column][epoch]),
        )
        if lower == upper:
            return low
        return ((batch - lower) * high + (upper - batch) * low) / (upper - lower)

    def _find_steps(self, placement: tuple[int, ...], samples: int) -> Steps | None:
        """A step with so many samples on each replica; None where the profiles say nothing."""
        turned = _turn(placement)
        if turned in self.placements:
            points = self.placements[turned]
            if not points[0][0] <= samples <= points[-1][0]:
                return None
            x = [each[0] for each in points]
            step, sync = (
                float(np.interp(samples, x, [each[i] for each in points])) for i in (1, 2)
            )
            return step, sync
        nodes, replicas = min(len(placement), 16), sum(placement)
        step, sync = self._surface([nodes, replicas, samples])[0]
        return None if math.isnan(step) else (float(step), float(sync))

    @cached_property
    def _surface(self) -> Any:
        groups: dict[tuple[int, int, float], list[Steps]] = defaultdict(list)
        for placement, points in self.placements.items():
            for samples, step, sync in points:
                groups[len(placement), sum(placement), samples].append((step, sync))
        rows = [(*key, *np.mean(values, axis=0)) for key, values in sorted(groups.items())]
        table = np.array([*rows, *self.scaling])
        return LinearNDInterpolator(table[:, :3], table[:, 3:])

    def _find_part_limit(self, placement: tuple[int, ...]) -> int:
        """The most samples of one replica at once."""
        if not self.per_placement:
            return self.most_part
        turned = _turn(placement)
        if turned in self.placements:
            return int(self.placements[turned][-1][0])
        nodes, replicas = len(placement), sum(placement)
        rows = [row[2] for row in self.scaling if row[0] >= nodes and row[1] >= replicas]
        return int(max(rows))


def _turn(placement: Sequence[int]) -> tuple[int, ...]:
    """The smallest of all rotations, by which placements are named."""
    whole = tuple(placement)
    return min(whole[at:] + whole[:at] for at in range(len(whole)))


def _read_rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def _read_curves(folder: Path) -> dict[int, dict[str, Any]]:
    curves = {}
    for path in folder.glob("validation-*.csv"):
        rows = _read_rows(path)
        curves[int(path.stem.split("-")[1])] = {
            name: np.array([float(row[name]) for row in rows]) for name in rows[0]
        }
    return dict(sorted(curves.items()))


def _read_placements(path: Path) -> dict[tuple[int, ...], list[tuple[float, float, float]]]:
    found: dict[tuple[int, ...], list[tuple[float, float, float]]] = defaultdict(list)
    for row in _read_rows(path):
        placement = tuple(int(digit) for digit in row["placement"])
        values = float(row["local_bsz"]), float(row["step_time"]), float(row["sync_time"])
        found[placement].append(values)
    return {placement: sorted(points) for placement, points in found.items()}


def _read_scaling(path: Path) -> list[tuple[float, ...]]:
    names = "num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time"
    return [tuple(float(row[name]) for name in names) for row in _read_rows(path)]
