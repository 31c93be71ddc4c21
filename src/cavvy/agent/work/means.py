"""Computes means and totals of the work's resource use since the work began, for advice about the
work's costs."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_MEANS = {"cpu_percent": "cpu_mean_percent", "gpu_percent": "gpu_mean_percent"}


class UsageMeans:
    """Adds measurements up. Each measurement represents the time since the previous one.
    `measured_s` is the total time of all measurements.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._lengths: dict[str, float] = {}
        self._seconds = self._gpu_memory_mib = 0.0

    def add(self, values: Mapping[str, float], seconds: float) -> dict[str, float]:
        """Add a measurement; return the means and totals, keyed by name."""
        self._seconds += seconds
        for name in _MEANS:
            if name in values:
                self._sums[name] = self._sums.get(name, 0) + values[name] * seconds
                self._lengths[name] = self._lengths.get(name, 0) + seconds
        self._gpu_memory_mib = max(self._gpu_memory_mib, values.get("gpu_memory_mib", 0))
        found = {
            _MEANS[name]: round(self._sums[name] / max(self._lengths[name], 0.001), 1)
            for name in self._sums
        }
        found["measured_s"] = round(self._seconds)
        if self._gpu_memory_mib:
            found["gpu_memory_peak_mib"] = self._gpu_memory_mib
        return found
