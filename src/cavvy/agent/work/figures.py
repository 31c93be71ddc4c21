"""Collects what is measured and reported on this node, and sends the figures of each minute."""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MOST_REPORTED = 32  # names that the task reports; the first are kept
ENERGY = "work_energy_j"  # joules of each minute; the control plane adds them up
# Reported values that are no figures, or that the agent measures itself.
OTHERS = frozenset(
    {
        "total",
        "complete",
        "left_s",
        "cpu_percent",
        "memory_mib",
        "gpu_percent",
        "gpu_memory_mib",
        "gpu_power_w",
        "cpu_power_w",
        ENERGY,
        "disk_read_mib_s",
        "disk_write_mib_s",
        "net_in_mib_s",
        "net_out_mib_s",
    }
)
LONGEST_NAME = 64
MINUTE_S = 60


class MinuteFigures:
    """The lowest, mean and highest value of each figure in the current minute of the node's clock.
    `say` sends a message to the control plane.
    """

    def __init__(self, say: Callable[..., None], clock: Callable[[], float] = time.time) -> None:
        self._say, self._clock = say, clock
        self._minute = int(clock()) // MINUTE_S
        self._reported: set[str] = set()
        self._joules = 0.0
        # lowest, sum, count, highest
        self._found: dict[str, tuple[float, float, int, float]] = {}

    def measure(self, values: Mapping[str, float]) -> None:
        """Add measurements of the agent."""
        for name, value in values.items():
            low, total, count, high = self._found.get(name, (value, 0.0, 0, value))
            self._found[name] = min(low, value), total + value, count + 1, max(high, value)

    def spend(self, joules: float) -> None:
        """Add energy that the work has used."""
        self._joules += joules

    def report(self, values: Mapping[str, object]) -> None:
        """Add the numbers that the task reports."""
        for name, value in values.items():
            if isinstance(value, str) or name in OTHERS or len(name) > LONGEST_NAME:
                continue
            if name not in self._reported:
                if len(self._reported) >= MOST_REPORTED:
                    continue
                self._reported.add(name)
            # the scanner gives numbers
            self.measure({name: float(value)})  # type: ignore[arg-type]

    def tick(self) -> None:
        """Send the figures of the minute that is over. To be called about once a second."""
        if int(self._clock()) // MINUTE_S != self._minute:
            self.send()

    def send(self) -> None:
        """Send the figures of the minute so far."""
        now = self._clock()
        found, self._found = self._found, {}
        if self._joules:
            found[ENERGY] = (self._joules, self._joules, 1, self._joules)
            self._joules = 0.0
        if found:
            figures = {
                name: [_short(low), _short(total / count), _short(high)]
                for name, (low, total, count, high) in found.items()
            }
            self._say(
                "minute", seconds=round(max(0.0, now - self._minute * MINUTE_S), 3), figures=figures
            )
        self._minute = int(now) // MINUTE_S


def _short(value: float) -> float:
    return float(f"{value:.5g}")
