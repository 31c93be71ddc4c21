"""Evaluates a profile on every known accelerator: whether the step fits into memory, the step's
time, and the samples per second of a node.
"""

from collections.abc import Iterable, Mapping, Sequence

from cavvy.catalog.accelerators import list_accelerators
from cavvy.domain.values import Struct, replace
from cavvy.planner.estimate.devices import DeviceRates, device_of
from cavvy.planner.estimate.memory import MemoryEstimate, estimate_memory
from cavvy.planner.estimate.profile import WorkProfile
from cavvy.planner.estimate.roofline import StepTime, estimate_step
from cavvy.planner.estimate.settings import StepSettings
from cavvy.planner.estimate.transfer import MeasuredRate, carry

COUNTS = (1, 2, 3, 4, 6, 8, 10, 16)  # the numbers of accelerators per node that providers offer
# The part of the nominal memory that drivers and error correction use: about the difference
# that the vendors' tools show.
_RESERVED_MIB = 512


class DeviceEstimate(Struct, frozen=True, kw_only=True):
    """The estimate for one accelerator."""

    device: DeviceRates
    memory: MemoryEstimate
    step: StepTime

    @property
    def fits(self) -> bool:
        """Whether the device has enough memory, including a safety margin."""
        return self.memory.needed <= self.device.memory_mib - _RESERVED_MIB


def list_devices() -> tuple[DeviceRates, ...]:
    """Return all accelerators of the catalog with known data sheets, one entry for each memory
    size.
    """
    found = (device_of(row.name, size.mib) for row in list_accelerators() for size in row.memory)
    return tuple(device for device in found if device is not None)


def estimate_on(profile: WorkProfile, device: DeviceRates, run: StepSettings) -> DeviceEstimate:
    """Estimate the profile with these settings on accelerators of this kind."""
    return DeviceEstimate(
        device=device,
        memory=estimate_memory(profile, run),
        step=estimate_step(profile, device, run),
    )


def device_key(device: DeviceRates, count: int) -> str:
    """Return the key of `work.rates` for a node, such as "H100-80GB:8"."""
    return f"{device.name}-{device.memory_mib // 1024}GB:{count}"


def make_rates(
    profile: WorkProfile, run: StepSettings, counts: Iterable[int] = COUNTS
) -> dict[str, float]:
    """Return the samples per second of a node, for each device and number of accelerators that
    have enough memory for the step. The keys have the format of the keys in `work.rates`.
    """
    rates = {}
    for device in list_devices():
        for count in counts:
            found = estimate_on(profile, device, replace(run, accelerators=count))
            if found.fits:
                rates[device_key(device, count)] = found.step.samples_per_s
    return rates


def correct_rates(
    rates: Mapping[str, float],
    measured: Mapping[str, float],
    precision: str = "bf16",
    counts: Sequence[int] = COUNTS,
) -> dict[str, float]:
    """Replace estimates in `rates` with measurements where measurements exist. Multiply the
    remaining estimates by the median ratio of measurement to estimate.

    If `rates` is empty, the rates of all other accelerators are derived from the measurements.
    """
    read = {key: _read(key, rate) for key, rate in measured.items()}
    known = [each for each in read.values() if each is not None]
    others = {
        key: measured[key] for key, each in read.items() if each is None
    }  # rates of CPUs, and of devices without a known data sheet
    if not known:
        return {**rates, **others}
    if rates:
        factors = [
            each.rate / rates[key]
            for each in known
            if (key := device_key(each.device, each.count)) in rates
        ]
        factor = sorted(factors)[len(factors) // 2] if factors else 1.0
        return {**{key: rate * factor for key, rate in rates.items()}, **others, **_named(known)}
    carried = {
        device_key(device, count): carry(known, device, count, precision)
        for device in list_devices()
        for count in counts
    }
    return {**carried, **others, **_named(known)}


def _named(known: Iterable[MeasuredRate]) -> dict[str, float]:
    return {device_key(each.device, each.count): each.rate for each in known}


def _read(key: str, rate: float) -> MeasuredRate | None:
    name, _, count = key.partition(":")
    device = device_of(name)
    return None if device is None else MeasuredRate(device=device, count=int(count or 1), rate=rate)
