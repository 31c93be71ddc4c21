"""How often to save: from what a checkpoint costs and how often machines are lost.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974:
sqrt(2 x cost x mean time between losses), where cost is the time that a save keeps the computation
waiting.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

FIRST_S = 30.0  # the first save comes early, to learn what one costs
QUIET_H = 24.0  # mean hours between losses of one node, where nobody knows better: an assumption
LEAST_LOSSES = 1 / 24 / 365  # an hour: once a year, however quiet a market was
STALL = 0.01  # of all time, at most, spent waiting for saves
WRITING = (
    0.5  # of all time, at most, with a save in flight: it takes disk and processor from the program
)


@dataclass(slots=True)
class SaveInterval:
    """Seconds from one save to the next, on the clock of rank 0."""

    fixed_s: float | None = None
    losses_per_hour: float = 1 / QUIET_H
    stall_s: float | None = None  # measured: the longest that one of the last saves kept us waiting
    write_s: float = 0.0  # measured: until it was safe

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
    """The interval that the user says, or Cavvy does, or the one that follows from measuring."""
    if every != "auto":
        return SaveInterval(fixed_s=float(every))
    interval = SaveInterval()
    with suppress(KeyError, ValueError):
        interval.losses_per_hour = max(float(os.environ["CAVVY_LOSSES_PER_HOUR"]), LEAST_LOSSES)
    follow(interval)
    return interval


def follow(interval: SaveInterval) -> None:
    """What Cavvy says now: it knows the market, and may change its mind while the job runs."""
    said = os.environ.get("CAVVY_CHECKPOINT_EVERY_S")
    path = os.environ.get("CAVVY_CHECKPOINT_EVERY_FILE")
    if path:
        with suppress(OSError):
            said = Path(path).read_text().strip() or said
    with suppress(ValueError):
        interval.fixed_s = float(said) if said else interval.fixed_s
