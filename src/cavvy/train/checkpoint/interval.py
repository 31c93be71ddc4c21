"""How often to save: from the cost of a checkpoint and the rate of losses.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974:
sqrt(2 x cost x mean time between losses), where cost is the time that a save keeps the computation
waiting.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

FIRST_S = 30.0  # the first save comes early, to measure its cost
QUIET_H = 24.0  # assumed mean hours between losses of one node
LEAST_LOSSES = 1 / 24 / 365  # per hour: once a year, however quiet a market was
STALL = 0.01  # maximum share of all time spent waiting for saves
WRITING = 0.5  # maximum share of all time with a save in flight: it uses disk and processor


@dataclass(slots=True)
class SaveInterval:
    """Seconds from one save to the next, on the clock of rank 0."""

    fixed_s: float | None = None
    losses_per_hour: float = 1 / QUIET_H
    stall_s: float | None = None  # measured: the longest wait of the last saves
    write_s: float = 0.0  # measured: until the save was durable

    def measured(self, stall_s: float, write_s: float) -> None:
        self.stall_s = (
            stall_s if self.stall_s is None else max(stall_s, 0.5 * (self.stall_s + stall_s))
        )
        self.write_s = max(write_s, 0.5 * self.write_s)

    @property
    def seconds(self) -> float:
        if self.fixed_s is not None:
            return self.fixed_s
        if self.stall_s is None:
            return FIRST_S
        best = sqrt(2 * self.stall_s * 3600 / self.losses_per_hour)
        return max(best, self.stall_s / STALL, self.write_s / WRITING)


def told(every: "float | str") -> SaveInterval:
    """The interval set by the user or by Cavvy, or the measured one."""
    if every != "auto":
        return SaveInterval(fixed_s=float(every))
    interval = SaveInterval()
    with suppress(KeyError, ValueError):
        interval.losses_per_hour = max(float(os.environ["CAVVY_LOSSES_PER_HOUR"]), LEAST_LOSSES)
    follow(interval)
    return interval


def follow(interval: SaveInterval) -> None:
    """Use Cavvy's interval: Cavvy knows the market, and may change it while the job runs."""
    said = os.environ.get("CAVVY_CHECKPOINT_EVERY_S")
    path = os.environ.get("CAVVY_CHECKPOINT_EVERY_FILE")
    if path:
        with suppress(OSError):
            said = Path(path).read_text().strip() or said
    with suppress(ValueError):
        interval.fixed_s = float(said) if said else interval.fixed_s
