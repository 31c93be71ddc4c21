"""Reports a run's progress, speed and cost, both in the terminal or log and in a file for the
agent.
"""

import json
import logging
import os
import shutil
import sys
from time import monotonic
from typing import Any

import torch

from cavvy.train.clock import PARTS, Meter, StepRecord
from cavvy.train.world import RankWorld

log = logging.getLogger("cavvy.train")

PACE_S = (
    # seconds between two reports; each report waits until the loss has been read from the device
    1.0
)
LOG_S = 30.0  # seconds between two lines if the output is not a terminal
# the reported values in order of display, each with the text before the number, the text after it,
# and its format
SHOWN = {
    "samples_per_s": ("", "/s", ".4g"),
    "step_ms": ("", " ms", ".4g"),
    "usd_per_1000_samples": ("$", "/1k", ".3g"),
    "usd_left": ("$", " left", ".3g"),
    "usd_per_epoch": ("$", "/epoch", ".3g"),
    "usd_per_step": ("$", "/step", ".3g"),
    "mfu": ("MFU ", "", ".1%"),
    "memory_gib": ("", " GiB", ".4g"),
    "gpu_busy_percent": ("GPU ", "% busy", ".0f"),
    **{f"share_{part}": (f"{part} ", "", ".0%") for part in (*PARTS, "own")},
}


class ProgressReporter:
    """Receives the record of each step. Only rank 0 reports."""

    def __init__(self, world: RankWorld) -> None:
        self._world = world
        self._path = os.environ.get("CAVVY_PROGRESS_FILE", "")
        self._failed = False  # whether a write has failed and a warning was logged
        self._next, self._done, self._total, self._logged = 0.0, 0, 0, 0.0
        self._meter = Meter(world.device, world.size)

    def begin(self, done: int, total: int, epoch: int = 0) -> None:
        """Set the number of samples done so far, the total number, and the number in one epoch (0
        if unknown).
        """
        self._done, self._total, self._meter.samples = done, total, epoch

    def end(self) -> None:
        """Report that the work is complete, even if an earlier attempt completed it."""
        if self._world.is_first:
            self._report({}, {}, True)

    def measure(self, meter: Meter) -> None:
        """Also report the MFU, the share of the device's peak FLOP/s that the training uses. The
        share is computed from the meter's FLOPs per sample and peak FLOP/s.
        """
        self._meter.flops, self._meter.peak = meter.flops, meter.peak

    def hear(self, record: StepRecord) -> None:
        self._done += record.samples
        self._meter.hear(record)
        now = monotonic()
        last = self._done + record.samples > self._total  # No whole batch is left.
        if not self._world.is_first or (now < self._next and not last):
            return
        self._next = now + PACE_S
        self._report(
            {name: plain(value) for name, value in record.values.items()}, self._rates(), last
        )

    def _report(self, told: dict[str, object], rates: dict[str, float], last: bool) -> None:
        line = {"done": self._done, "total": self._total, "unit": "samples", "complete": last}
        line |= {**told, **rates}
        if self._path:
            self._write(line)
        parts = [f"{self._done}/{self._total} samples"]
        parts += [
            f"{name} {one:.4g}" if isinstance(one, float) else f"{name} {one}"
            for name, one in told.items()
        ]
        shown = {name: how for name, how in SHOWN.items() if name in rates}
        parts += [
            f"{before}{rates[name]:{kind}}{after}" for name, (before, after, kind) in shown.items()
        ]
        if sys.stderr.isatty():
            sys.stderr.write(
                "\r" + _fit(parts, shutil.get_terminal_size().columns - 1) + "\x1b[K" + "\n" * last
            )
            sys.stderr.flush()
        elif last or monotonic() >= self._logged:
            self._logged = monotonic() + LOG_S
            log.info("%s", "  ".join(parts))

    def _write(self, line: dict[str, object]) -> None:
        """Write the file for the agent. If a write fails, for example because the disk is full, the
        training continues.
        """
        try:
            with open(
                self._path + ".new", "w"
            ) as file:  # renamed when complete, because the agent may read it at any time
                file.write(json.dumps(line) + "\n")
            os.replace(self._path + ".new", self._path)
        except OSError as error:
            if not self._failed:
                log.warning("the progress file could not be written: %s", error)
            self._failed = True

    def _rates(self) -> dict[str, float]:
        found = self._meter.read()
        rates = {name: round(found[name], 9) for name in SHOWN if name in found}
        if self._meter.price is not None and found:
            left = max(self._total - self._done, 0)
            rates["usd_left"] = round(left / found["samples_per_s"] * self._meter.price / 3600, 4)
        return rates


def _fit(parts: list[str], width: int) -> str:
    """Join as many parts as fit on one line of the terminal, but at least the first part."""
    text = parts[0][:width]
    for part in parts[1:]:
        if len(text) + 2 + len(part) <= width:
            text += "  " + part
    return text


def plain(value: Any) -> object:
    """Convert a value that was passed to `run.log` to a number, a list or a string."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return value if isinstance(value, int | float | str | bool) else str(value)
