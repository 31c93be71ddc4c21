"""Measures the parts of a step on this rank, for listeners such as trackers and profiles, and
recent rates: samples, dollars, FLOPs, memory, and the share of each part of a step.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter

import torch

from cavvy.train.device import TrainDevice

# a variable that Cavvy sets: dollars per hour for all machines of the run
PRICE = "CAVVY_PRICE_USD_HR"
PARTS = ("data", "transfer", "compute", "communication", "optimizer", "checkpoint")


@dataclass(slots=True)
class StepRecord:
    """The record of one step of one rank. Times are measured on the host: an accelerator can still
    be computing when a part ends.
    """

    step: int
    rank: int
    samples: int  # samples of all ranks
    seconds: float = 0.0  # seconds from the start of this step to the start of the next one
    parts: dict[str, float] = field(
        default_factory=dict
    )  # seconds of each part in PARTS; the remaining time is the user's own code
    values: dict[str, object] = field(default_factory=dict)  # values passed to `run.log`
    micro_batch: int = 0


Listener = Callable[[StepRecord], None]


class StepPart:
    """One part of the current step. One object serves all steps, because creating an object for
    each step would take too long if steps are short. `begun` is 0 while the part is not running.
    """

    __slots__ = ("_clock", "_name", "begun")

    def __init__(self, clock: "StepClock", name: str) -> None:
        self._clock, self._name, self.begun = clock, name, 0.0

    def __enter__(self) -> None:
        self.begun = perf_counter()

    def __exit__(self, *error: object) -> None:
        self._clock.parts[self._name] += perf_counter() - self.begun
        self.begun = 0.0


class StepClock:
    """Measures the parts of the current step. Listeners receive the record of a step when the next
    step begins.
    """

    def __init__(self, rank: int) -> None:
        self.listeners: list[Listener] = []
        self._rank = rank
        self._began = 0.0
        self.parts = dict.fromkeys(PARTS, 0.0)
        self._record: StepRecord | None = None
        self._named = {name: StepPart(self, name) for name in PARTS}

    def begin(self, step: int, samples: int) -> None:
        now = perf_counter()
        self.end(now)
        self._record = StepRecord(step=step, rank=self._rank, samples=samples)
        self._began = now

    def end(self, now: float | None = None) -> None:
        """End the current step, if a step is running."""
        record, self._record = self._record, None
        if record is None:
            return
        record.seconds = (perf_counter() if now is None else now) - self._began
        record.parts = self.parts
        self.parts = dict.fromkeys(PARTS, 0.0)
        for listener in self.listeners:
            listener(record)

    def forget(self) -> None:
        """Discard the current step."""
        self._record, self.parts = None, dict.fromkeys(PARTS, 0.0)

    def part(self, name: str) -> StepPart:
        return self._named[name]

    def note(self, **values: object) -> None:
        if self._record is not None:
            self._record.values.update(values)

    def micro(self, size: int) -> None:
        if self._record is not None:
            self._record.micro_batch = size


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
