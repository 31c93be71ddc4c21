"""The checkpoint interval, which is derived from the cost of a checkpoint and the rate at which
machines are lost.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974:
sqrt(2 x cost x mean time between losses). The cost of a save is the time for which the save pauses
the computation.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

FIRST_S = 30.0  # seconds until the first save, which is early so that its cost can be measured
QUIET_H = 24.0  # assumed mean hours between losses of one node
# minimum number of losses per hour: one a year, even in a market without losses
LEAST_LOSSES = 1 / 24 / 365
STALL = 0.01  # maximum share of time for which saves may pause the computation
# maximum share of time in which a save may be running, because a save uses disk and CPU
WRITING = 0.5


@dataclass(slots=True)
class SaveInterval:
    """The time between two saves, measured by the clock of rank 0."""

    fixed_s: float | None = None
    losses_per_hour: float = 1 / QUIET_H
    stall_s: float | None = None  # measured seconds for which recent saves paused the computation
    write_s: float = 0.0  # measured seconds until a recent save was durable

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
    """Return the interval that the user or Cavvy set, otherwise an interval that is derived from
    measured costs.
    """
    if every != "auto":
        return SaveInterval(fixed_s=float(every))
    interval = SaveInterval()
    with suppress(KeyError, ValueError):
        interval.losses_per_hour = max(float(os.environ["CAVVY_LOSSES_PER_HOUR"]), LEAST_LOSSES)
    follow(interval)
    return interval


def follow(interval: SaveInterval) -> None:
    """Adopt the current interval that Cavvy derives from the market. Cavvy can change the interval
    while the job runs.
    """
    said = os.environ.get("CAVVY_CHECKPOINT_EVERY_S")
    path = os.environ.get("CAVVY_CHECKPOINT_EVERY_FILE")
    if path:
        with suppress(OSError):
            said = Path(path).read_text().strip() or said
    with suppress(ValueError):
        interval.fixed_s = float(said) if said else interval.fixed_s
