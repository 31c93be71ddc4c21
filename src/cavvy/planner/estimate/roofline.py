"""Estimates the time of a step from its profile and a device: the time of the kernels, of the
optimizer step and of the communication. The host's time to launch the kernels is also a lower bound
of a step's time.
"""

from cavvy.domain.values import Struct, field
from cavvy.planner.device_rates import DeviceRates, peak_of
from cavvy.planner.estimate.kernels import (
    PRODUCTS,
    KernelConstants,
    KernelSetting,
    bandwidth_of,
    kernel_time,
)
from cavvy.planner.estimate.profile import StepSettings, WorkProfile, optimizer_costs


class RooflineConstants(Struct, frozen=True, kw_only=True):
    """The calibrated constants of the time estimate."""

    kernels: KernelConstants = field(default_factory=KernelConstants)
    update: float = 0.5695  # share of the bandwidth that the optimizer's step reaches
    # Microseconds of the host, including Python and autograd: to launch one forward kernel, to
    # launch one backward kernel, the additional time for a convolution, for each parameter tensor,
    # and for each optimizer step.
    host_us: float = 22.67
    host_backward_us: float = 36.64
    host_conv_us: float = 67.85
    host_tensor_us: float = 6.294
    host_step_us: float = 2250


# Fitted by `benchmarks/estimate.py --fit` (2026-11-24) on the measured steps of
# docs/reference/estimate.md.
CALIBRATED = RooflineConstants()

# The host's time for a compiled step, as a share of its time for the uncompiled step. A compiled
# step has fewer kernels, and no Python runs between them.
_COMPILED_LAUNCH = 0.3
# Host and device work at the same time. If they alone take a and b, both together take (a^6 +
# b^6)^(1/6), which is close to the larger of the two.
_BLEND = 6
# share of the link's rate that ring collectives reach for large messages (assumed)
_LINK_SHARE = 0.7
_EXPOSED = 0.3  # share of the communication that does not overlap with the backward pass (assumed)


class StepTime(Struct, frozen=True, kw_only=True):
    """The times of one optimizer step, in seconds. `device` and `host` overlap in time."""

    total: float
    device: float
    host: float
    # the part of the communication that does not overlap with the backward pass
    communication: float
    # the part of the device's time that is spent in matrix products, convolutions and attention
    arithmetic: float
    samples_per_s: float  # samples per second of all accelerators together
    mfu: float  # achieved FLOP/s as a share of the data sheet's peak


def estimate_step(
    profile: WorkProfile,
    device: DeviceRates,
    run: StepSettings,
    constants: RooflineConstants = CALIBRATED,
) -> StepTime:
    """Return the time of one step of `accumulate` micro-batches on each accelerator."""
    batch = run.batch or profile.batch
    scale = batch / profile.batch
    precision = run.precision or profile.precision
    setting = KernelSetting(
        device=device, run=run, precision=precision, scale=scale, constants=constants.kernels
    )
    busy = arithmetic = 0.0
    for kernel in profile.kernels:
        seconds = kernel_time(kernel, setting) * kernel.count
        busy += seconds
        if kernel.kind in PRODUCTS:
            arithmetic += seconds
    shards = run.accelerators if run.shard else 1
    _, moved = optimizer_costs(profile, run)
    update = moved / shards / (bandwidth_of(device, constants.kernels) * constants.update)
    device_s = busy * run.accumulate + update
    host_s = _host_time(profile, run, constants)
    waited = _EXPOSED * _communication(profile, device, run)
    total = (device_s**_BLEND + host_s**_BLEND) ** (1 / _BLEND) + waited
    samples = batch * run.accumulate * run.accelerators
    flops = profile.flops * scale * run.accumulate
    return StepTime(
        total=total,
        device=device_s,
        host=host_s,
        communication=waited,
        arithmetic=arithmetic * run.accumulate,
        samples_per_s=samples / total,
        mfu=flops / total / peak_of(device, precision),
    )


def _host_time(profile: WorkProfile, run: StepSettings, constants: RooflineConstants) -> float:
    """Return the seconds that the host needs to launch all kernels of one step."""
    micro = 0.0
    for kernel in profile.kernels:
        each = constants.host_backward_us if kernel.backward else constants.host_us
        if kernel.kind == "conv":
            each += constants.host_conv_us
        micro += each * kernel.count
    step = profile.tensors * constants.host_tensor_us + constants.host_step_us
    seconds = (micro * run.accumulate + step) * 1e-6
    return seconds * _COMPILED_LAUNCH if run.compile else seconds


def _communication(profile: WorkProfile, device: DeviceRates, run: StepSettings) -> float:
    """Return the seconds of ring collectives in one step. Gradients are reduced once per step. With
    sharding, parameters are also gathered twice per micro-batch.
    """
    count = run.accelerators
    link = device.link * _LINK_SHARE
    stated = sum(each.bytes * each.count for each in profile.collectives) / link
    if count < 2:
        return stated
    around = (count - 1) / count / link
    if run.shard:
        return stated + around * profile.gradient_bytes * (2 * run.accumulate + 1)
    return stated + around * profile.gradient_bytes * 2
