"""How far a run is, for people and for Remuda: a line now and then, and the file of progress that the agent reads."""

import json
import os
import sys
from time import monotonic
from typing import Any

import torch

from remuda.train.clock import StepRecord
from remuda.train.world import World

PACE_S = 1.0  # between two reports: reading a loss waits for the device


class Progress:
    """Hears each step's record; rank 0 reports."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._path = os.environ.get("REMUDA_PROGRESS_FILE", "")
        self._next, self._done, self._total = 0.0, 0, 0

    def begin(self, done: int, total: int) -> None:
        self._done, self._total = done, total

    def hear(self, record: StepRecord) -> None:
        self._done += record.samples
        now = monotonic()
        if not self._world.is_first or now < self._next:
            return
        self._next = now + PACE_S
        self._report({name: plain(value) for name, value in record.values.items()})

    def _report(self, values: dict[str, object]) -> None:
        line = {"done": self._done, "total": self._total, "unit": "samples", **values}
        if self._path:
            with open(self._path, "a") as file:
                file.write(json.dumps(line) + "\n")
        elif sys.stderr.isatty():
            text = "  ".join(f"{n} {v:.4g}" if isinstance(v, float) else f"{n} {v}" for n, v in values.items())
            sys.stderr.write(f"\r{self._done}/{self._total} samples  {text}")
            sys.stderr.flush()


def plain(value: Any) -> object:
    """A number or text for what `run.log` was given."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return value if isinstance(value, int | float | str | bool) else str(value)
