"""Measures recent rates: samples, dollars, FLOPs, memory, and the share of each part of a step."""

import os
from collections.abc import Mapping
from contextlib import suppress

import torch

from cavvy.train.clock import StepRecord
from cavvy.train.device import TrainDevice

# a variable that Cavvy sets: dollars per hour for all machines of the run
PRICE = "CAVVY_PRICE_USD_HR"


class Meter:
    """Sums up steps until `read` is called.

    Args: samples: samples of one epoch, or 0 if unknown. price: dollars per hour for all devices;
        by default from the variable PRICE. flops: FLOPs of the forward and backward pass for one
        sample. If `flops` is set, the meter also reports the MFU: the share of the device's peak
        FLOP/s that the run achieves. peaks: peak FLOP/s of one device, by a part of the device's
        name, such as {"H200": 989e12}.
    """

    def __init__(
        self,
        device: TrainDevice,
        ranks: int,
        *,
        samples: int = 0,
        price: float | None = None,
        flops: float = 0.0,
        peaks: "Mapping[str, float] | None" = None,
    ) -> None:
        self.samples, self.flops, self._device, self._ranks = samples, flops, device, ranks
        self.price = price if price is not None else _number(os.environ.get(PRICE))
        self.peak = next(
            (peak for name, peak in (peaks or {}).items() if name.lower() in device.name.lower()),
            0.0,
        )
        self._clear()

    def hear(self, record: StepRecord) -> None:
        self._steps += 1
        self._done += record.samples
        self._seconds += record.seconds
        for name, seconds in record.parts.items():
            self._parts[name] = self._parts.get(name, 0.0) + seconds

    def read(self) -> dict[str, float]:
        """Return the mean values since the last call. Unknown values are left out. Returns {} if
        there was no step.

        For each part of a step, the result contains the share of the host's time that the part
        took. A GPU works while the host continues. Its time therefore counts only when the host
        waits for it, and toward the part of the step in which the host waits.
        """
        if not self._steps or self._seconds <= 0:
            return {}
        each, rate = self._seconds / self._steps, self._done / self._seconds
        found = {"step_ms": each * 1e3, "samples_per_s": rate}
        parts = {name: seconds / self._seconds for name, seconds in self._parts.items()}
        found |= {
            f"share_{name}": part
            for name, part in {**parts, "own": max(1 - sum(parts.values()), 0.0)}.items()
        }
        if self.price is not None:
            found |= {
                "usd_per_step": each * self.price / 3600,
                "usd_per_1000_samples": 1000 / rate * self.price / 3600,
            }
            if self.samples:
                found["usd_per_epoch"] = self.samples / rate * self.price / 3600
        if self.flops and self.peak:
            found["mfu"] = rate * self.flops / (self._ranks * self.peak)
        if self._device.is_accelerator:
            found["memory_gib"] = self._device.peak_bytes() / 2**30
            with suppress(
                Exception
            ):  # left out if the library, driver, permission or GPU is missing
                found["gpu_busy_percent"] = float(
                    torch.cuda.utilization(self._device.torch)
                )  # from NVML: the share of time in which at least one kernel ran
        self._clear()
        return found

    def _clear(self) -> None:
        self._steps, self._done, self._seconds = 0, 0, 0.0
        self._parts: dict[str, float] = {}


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
