"""Evaluates a profile on every known accelerator: the memory of the step and whether it fits, the
step's time and how far it may be from a measured one, and the samples per second of a node."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import exp, hypot

from cavvy.catalog.accelerators import list_accelerators
from cavvy.domain.values import Struct, replace
from cavvy.planner.device_rates import DeviceRates, MeasuredRate, carry, device_of, is_rated
from cavvy.planner.estimate.kernels import (
    SCATTERS,
    KernelSetting,
    kernel_time,
)
from cavvy.planner.estimate.measured import DeviceProfile
from cavvy.planner.estimate.profile import PeakMemory, StepSettings, WorkProfile, optimizer_costs
from cavvy.planner.estimate.roofline import (
    StepTime,
    correct_step,
    estimate_step,
    find_correction,
)

MIB = 1 << 20

# PyTorch's allocator returns blocks that are up to 1 MiB larger than requested
# (c10/cuda/CUDACachingAllocator.cpp), and cuBLAS keeps 32 MiB per handle on Hopper. Together, these
# were measured at 0.1 to 0.4 GiB in steps of 2 to 46 GiB (docs/measured/estimate.md).
ROUNDING = 1.01
WORKSPACE_MIB = 64

# A compiled model keeps this share of the activations that it could recompute. The value is fitted
# to one model, GPT-2 (with 0, the estimate is 14 % below the measurement). ResNet-50 has almost
# nothing to recompute.
KEPT_COMPILED = 0.15

# Because of fragmentation, the allocator reserves more memory than the tensors use at their peak.
# A trace simulates these gaps (its file `allocator.py`). Added are a part of the largest tensor,
# for which another order of requests may leave no block, this share of the memory in use, and
# CONTEXT_MIB for the driver's context and loaded kernels. The values were chosen such that each
# measured step needs at least 3 % less (docs/measured/estimate.md), whether its profile was scaled
# to the batch or traced with it. Convolutions also work in memory that no trace sees, whose size is
# the library's choice: for a step with convolutions, more of the largest tensor is added.
GAPS = 0.07
LARGEST, LARGEST_CONV = 0.3, 1.5
CONTEXT_MIB = 300
# The gaps for profiles of earlier versions, as shares of the tensors of the step, and of parameters
# and optimizer state, which are allocated only once.
MARGIN, STATE_MARGIN = 0.25, 0.10
COUNTS = (1, 2, 3, 4, 6, 8, 10, 16)  # the numbers of accelerators per node that providers offer
# The part of the nominal memory that drivers and error correction use: about the difference
# that the vendors' tools show.
_RESERVED_MIB = 512


class MemoryEstimate(Struct, frozen=True, kw_only=True):
    """The memory on one accelerator, in MiB. `peak` is the memory of the tensors. `needed` is the
    memory that the device must have, including a margin.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float
    peak: float
    needed: float


class DeviceEstimate(Struct, frozen=True, kw_only=True):
    """The estimate for one accelerator."""

    device: DeviceRates
    memory: MemoryEstimate
    step: StepTime
    # nine of ten such steps take between the estimated time / spread and the time * spread
    spread: float

    @property
    def fits(self) -> bool:
        """Whether the device has enough memory, including a safety margin."""
        return fits_memory(self.memory.needed, self.device.memory_mib)


def fits_memory(needed_mib: float, memory_mib: int) -> bool:
    """Return whether an accelerator with `memory_mib` has `needed_mib` for a program."""
    return needed_mib <= memory_mib - _RESERVED_MIB


def list_devices() -> tuple[DeviceRates, ...]:
    """Return all accelerators of the catalog with known data sheets, one entry for each memory
    size.
    """
    found = (device_of(row.name, size.mib) for row in list_accelerators() for size in row.memory)
    return tuple(device for device in found if device is not None)


def estimate_on(
    profile: WorkProfile,
    device: DeviceRates,
    run: StepSettings,
    measured: Sequence[DeviceProfile] = (),
) -> DeviceEstimate:
    """Estimate the profile with these settings on accelerators of this kind. The kernels that were
    measured on the most similar device correct the time.
    """
    step = estimate_step(profile, device, run, measured=measured)
    known = any(each.device.name == device.name for each in measured)
    return DeviceEstimate(
        device=device,
        memory=estimate_memory(profile, run),
        step=step,
        spread=find_spread(profile, run, step, device, is_measured=known),
    )


def device_key(device: DeviceRates, count: int) -> str:
    """Return the key of `work.rates` for a node, such as "H100-80GB:8"."""
    return f"{device.name}-{device.memory_mib // 1024}GB:{count}"


def make_rates(
    profile: WorkProfile,
    run: StepSettings,
    counts: Iterable[int] = COUNTS,
    measured: Sequence[DeviceProfile] = (),
    rates: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Return the samples per second of a node, for each device and number of accelerators that
    have enough memory for the step. The keys have the format of the keys in `work.rates`. The
    measured `rates` correct those that were not measured.
    """
    steps = {}
    for device in list_devices():
        for count in counts:
            found = estimate_on(profile, device, replace(run, accelerators=count), measured)
            if found.fits:
                steps[device_key(device, count)] = found.step
    factors = _find_factors(steps, rates or {})
    return {
        key: step.samples_per_s * step.total / correct_step(step, factors)
        for key, step in steps.items()
    }


def _find_factors(steps: Mapping[str, StepTime], rates: Mapping[str, float]) -> tuple[float, float]:
    """Return the median of the corrections of the device and of the host by measured rates."""
    known = _named(each for key, rate in rates.items() if (each := _read(key, rate)))
    found = [
        find_correction(step, step.total * step.samples_per_s / rate)
        for key, rate in known.items()
        if (step := steps.get(key)) is not None
    ]
    if not found:
        return 1.0, 1.0
    device, host = (sorted(each)[len(found) // 2] for each in zip(*found, strict=True))
    return device, host


def find_margin(
    profile: WorkProfile, run: StepSettings, measured: Sequence[DeviceProfile] = ()
) -> float:
    """Return the factor that nine of ten steps do not exceed on any accelerator whose memory is
    large enough, or 1 if no accelerator's is.
    """
    found = (estimate_on(profile, device, run, measured) for device in list_devices())
    return max((each.spread for each in found if each.fits), default=1.0)


def merge_rates(
    rates: Mapping[str, float],
    measured: Mapping[str, float],
    precision: str = "bf16",
    counts: Sequence[int] = COUNTS,
) -> dict[str, float]:
    """Replace estimates in `rates` with measurements where measurements exist. If `rates` is empty,
    the rates of all other accelerators are derived from the measurements.
    """
    read = {key: _read(key, rate) for key, rate in measured.items()}
    known = [each for each in read.values() if each is not None]
    others = {
        key: measured[key] for key, each in read.items() if each is None
    }  # rates of CPUs, and of devices without a known data sheet
    if known and not rates:
        rates = {
            device_key(device, count): carry(known, device, count, precision)
            for device in list_devices()
            for count in counts
        }
    return {**rates, **others, **_named(known)}


def _named(known: Iterable[MeasuredRate]) -> dict[str, float]:
    return {device_key(each.device, each.count): each.rate for each in known}


def _read(key: str, rate: float) -> MeasuredRate | None:
    name, _, count = key.partition(":")
    device = device_of(name)
    return None if device is None else MeasuredRate(device=device, count=int(count or 1), rate=rate)


def estimate_memory(profile: WorkProfile, run: StepSettings) -> MemoryEstimate:
    """Estimate the memory of `profile` with these settings. The result is the higher of two peaks:
    the peak of the forward and backward pass, and the peak of the optimizer step.
    """
    batch = run.batch or profile.batch
    scale = batch / profile.batch
    shards = run.shards
    parameters = profile.parameter_bytes / shards
    state, moved = (each / shards for each in optimizer_costs(profile, run))
    whole_gradients = profile.gradient_bytes / shards
    high, made = _passes(profile, run, scale, shards)
    # A step with state makes temporary tensors for the parameters that have gradients.
    step = whole_gradients * (2 if state and moved else 1)
    dynamic = max(high, step)
    held = (parameters + state + profile.buffer_bytes) / MIB
    peak = held + dynamic * ROUNDING / MIB + WORKSPACE_MIB
    return MemoryEstimate(
        parameters=parameters / MIB,
        gradients=whole_gradients / MIB,
        optimizer=state / MIB,
        activations=made / MIB,
        workspace=WORKSPACE_MIB,
        peak=peak,
        needed=peak + _gaps(profile, run, held, dynamic / MIB) + CONTEXT_MIB,
    )


def _gaps(profile: WorkProfile, run: StepSettings, held: float, dynamic: float) -> float:
    """Return the MiB that the allocator reserves beyond those in use at the peak, at most. A
    profile of an earlier version does not contain them.
    """
    if not profile.reserved:
        return held * STATE_MARGIN + dynamic * ROUNDING * MARGIN
    multiple = (run.batch or profile.batch) / profile.batch
    share = LARGEST_CONV if any(each.kind == "conv" for each in profile.kernels) else LARGEST
    rows = [(each.multiple, each.gaps + each.largest * share) for each in profile.reserved]
    below = [row for row in rows if row[0] <= multiple] or rows[:1]
    above = [row for row in rows if row[0] >= multiple] or rows[-1:]
    # The gaps of the nearest recorded batches grow in proportion to the batch, or less.
    found = [gaps * max(1.0, multiple / each) for each, gaps in (below[-1], above[0])]
    gaps = sum(found) / 2 / MIB
    return float(gaps / run.shards + GAPS * (held + dynamic))


def _passes(
    profile: WorkProfile, run: StepSettings, scale: float, shards: int
) -> tuple[float, float]:
    """Return the bytes in use at the peak of the forward and backward pass, and the number of these
    bytes that are activations.
    """
    more = _scores(profile) * scale if run.math_attention else 0.0
    # With sharding, the parameters of two layers are gathered at the same time. The model is
    # assumed to have at least 16 layers.
    if run.shard:
        more += profile.parameter_bytes / 8

    def height(peak: PeakMemory) -> tuple[float, float]:
        fixed = 0.0 if run.shard else peak.fixed
        made = (peak.activations - peak.fixed) * scale + fixed + more
        kept = profile.gradient_bytes if run.accumulate > 1 else peak.gradients
        return made + kept / shards, made

    high, made = max(map(height, profile.peaks))
    if not run.compile:
        return high, made
    low, least = max(map(height, profile.peaks_compiled))
    return low + KEPT_COMPILED * (high - low), least + KEPT_COMPILED * (made - least)


def _scores(profile: WorkProfile) -> float:
    """Return the additional bytes that attention needs without a fused kernel: the softmax of the
    scores of every layer, and twice the scores of the largest layer.
    """
    each = [
        (kernel.size[0] * kernel.size[1] * kernel.size[2] * (4 if kernel.wide else 2), kernel.count)
        for kernel in profile.kernels
        if kernel.kind == "attention" and not kernel.backward
    ]
    return sum(size * count for size, count in each) + max(
        (2 * size for size, _ in each), default=0
    )


_MEASURED_ON = "H200"
# accelerators on which whole steps were measured (benchmarks/estimate_steps.py)
STEPS_MEASURED_ON = ("A100", "H100", "H200", "RTX3090")
# Minimum shares of a step's time of kernels that no measured step has.
_MATTERS = 0.05

# Nine of ten logarithms of measured / estimated times are at most this, by the distance of the
# step's kernels from measured ones: so much at no distance, and so much more for each unit.
# `benchmarks/estimate.py` finds them on all measured steps, and tests such ranges on families of
# models whose steps are left out (docs/measured/estimate.md).
NEAR, FURTHER = 0.08, 0.08
# the same, added for an accelerator whose kernels were not measured (from the steps on an A100 and
# an RTX 3090), and for one whose share of the peak is unknown (assumed)
ELSEWHERE, UNRATED = 0.08, 0.20
# Nine of ten steps take at most this many times as long as an estimate that a rate measured on
# another accelerator corrected (docs/measured/estimate.md).
CARRIED = 1.19
UNMEASURED = 0.25  # the same, added for work that no measured step has (assumed)


def find_spread(
    profile: WorkProfile,
    run: StepSettings,
    step: StepTime,
    device: DeviceRates,
    *,
    is_measured: bool,
) -> float:
    """Return a factor f: nine of ten measured steps took between the estimate / f and the estimate
    * f. `is_measured` says whether kernels were measured on the accelerator.
    """
    near = NEAR + FURTHER * step.distance
    elsewhere = 0.0 if is_measured else ELSEWHERE if is_rated(device) else UNRATED
    unmeasured = UNMEASURED * len(list_unmeasured(profile, run))
    return exp(hypot(near, elsewhere, unmeasured))


def list_unmeasured(profile: WorkProfile, run: StepSettings) -> list[str]:
    """Return the properties of this step that none of the measured steps had. Each property is a
    noun phrase that can be inserted in a sentence. The list is empty if every property was
    measured.
    """
    found = []
    if profile.assumed:
        found.append("steps with assumptions")
    elif what := _find_rare(profile):
        found.append(what)
    if run.math_attention:
        found.append("attention that stores its scores")
    if (run.precision or profile.precision) == "fp8":
        found.append("fp8")
    if run.devices > 1:
        found.append("more than one accelerator")
    return found


def _find_rare(profile: WorkProfile) -> str:
    """Return a kind of work in this step that no measured step contains, or ""."""
    shares = _shares(profile)
    if sum(shares[name] for name in SCATTERS) >= _MATTERS:
        return "scattered sums, as in graph networks"
    bags = sum(share for name, share in shares.items() if name.startswith("_embedding_bag"))
    if bags >= _MATTERS:
        return "sums of embeddings"
    return ""


def _shares(profile: WorkProfile) -> Mapping[str, float]:
    """Return the shares of operations in a step's time on an H200, by PyTorch's names."""
    device = device_of(_MEASURED_ON)
    assert device is not None, "the catalog lacks the H200"
    setting = KernelSetting(
        device=device,
        run=StepSettings(),
        precision=profile.precision,
        scale=1.0,
    )
    shares: dict[str, float] = defaultdict(float)
    seconds = [kernel_time(each, setting) * each.count for each in profile.kernels]
    whole = sum(seconds) or 1.0
    for kernel, took in zip(profile.kernels, seconds, strict=True):
        shares[kernel.name] += took / whole
    return shares
