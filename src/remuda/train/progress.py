"""How far a run is, how fast and for how much: a line for people, and the file that the agent reads."""

import json
import logging
import os
import sys
from time import monotonic
from typing import Any

import torch

from remuda.train.clock import StepRecord
from remuda.train.see.meter import Meter
from remuda.train.world import World

log = logging.getLogger("remuda.train")

PACE_S = 1.0  # between two reports: reading a loss waits for the device
LOG_S = 30.0  # between two lines of a log that nobody watches
SHOWN = ("samples_per_s", "step_ms", "share_data", "usd_per_1000_samples", "memory_gib")


class Progress:
    """Hears each step's record; rank 0 reports."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._path = os.environ.get("REMUDA_PROGRESS_FILE", "")
        self._next, self._done, self._total, self._logged = 0.0, 0, 0, 0.0
        self._meter = Meter(world.device, world.size)

    def begin(self, done: int, total: int) -> None:
        self._done, self._total = done, total

    def hear(self, record: StepRecord) -> None:
        self._done += record.samples
        self._meter.hear(record)
        now = monotonic()
        if not self._world.is_first or now < self._next:
            return
        self._next = now + PACE_S
        self._report({name: plain(value) for name, value in record.values.items()} | self._rates())

    def _report(self, values: dict[str, object]) -> None:
        line = {"done": self._done, "total": self._total, "unit": "samples", **values}
        if self._path:
            with open(self._path + ".new", "w") as file:  # the agent reads the beginning of it, whenever it likes
                file.write(json.dumps(line) + "\n")
            os.replace(self._path + ".new", self._path)
        text = "  ".join(f"{n} {v:.4g}" if isinstance(v, float) else f"{n} {v}" for n, v in values.items())
        text = f"{self._done}/{self._total} samples  {text}"
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{text}\x1b[K")
            sys.stderr.flush()
        elif monotonic() >= self._logged:
            self._logged = monotonic() + LOG_S
            log.info("%s", text)

    def _rates(self) -> dict[str, object]:
        found = self._meter.read()
        rates: dict[str, object] = {name: round(found[name], 6) for name in SHOWN if name in found}
        if self._meter.price is not None and found:
            left = max(self._total - self._done, 0)
            rates["usd_left"] = round(left / found["samples_per_s"] * self._meter.price / 3600, 4)
        return rates


def plain(value: Any) -> object:
    """A number or text for what `run.log` was given."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return value if isinstance(value, int | float | str | bool) else str(value)
