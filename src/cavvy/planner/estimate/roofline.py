"""Estimate the time of a step from its profile and a device. Each kernel takes the time of its
arithmetic or of its memory traffic, whichever is longer; the host's launch time also limits a step.
"""

from dataclasses import dataclass

from cavvy.planner.estimate.devices import DeviceRates
from cavvy.planner.estimate.profile import KernelProfile, WorkProfile
from cavvy.planner.estimate.settings import StepSettings, optimizer_costs


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineConstants:
    """The calibrated constants of the model."""

    # The rate of matrix products with a model's shapes, as a share of the best rate over all shapes
    # (`DeviceRates.achieved`).
    half: float = 0.634
    tf32: float = 0.419
    fp32: float = 0.924
    conv: float = 0.572  # rate of convolutions as a share of the rate of matrix products
    attention: float = 0.618  # rate of attention as a share of the rate of matrix products
    memory: float = 0.524  # share of the bandwidth that pointwise kernels and copies reach
    reduction: float = 0.467  # share of the bandwidth that norms, softmax and look-ups reach
    # A half-precision convolution that is not channels-last moves this many times its bytes more.
    layout: float = 3.72
    host_us: float = 34.3  # microseconds to launch one kernel, including Python and autograd
    host_conv_us: float = 83.0  # microseconds to launch one convolution


# Fitted on the H200 steps of docs/reference/estimate.md (2026-11-20, torch 2.11) by
# `benchmarks/estimate.py`.
CALIBRATED = RooflineConstants()

# Slower devices come closer to the rates of their data sheets: real rates grow with the power 0.9
# (1 - _FALLOFF) of these. In the three tables of docs/reference/estimate.md the exponents of
# arithmetic and bandwidth add up to about 0.9.
_FALLOFF = 0.1
_H200_FLOPS, _H200_BANDWIDTH = 989.4e12, 4.8e12  # the device of the measurements

_KERNEL_FLOOR_S = 3e-6  # the shortest time from the start of one kernel to the start of the next
# The host's time of a compiled step as a share of the uncompiled one: there are fewer kernels, and
# no Python runs between them.
_COMPILED_LAUNCH = 0.3
# Host and device overlap: the time of both is (a^4 + b^4)^(1/4), close to the larger of the two.
_BLEND = 4
_LINK_SHARE = 0.7  # share of a link's rate that ring collectives of large messages reach (assumed)
_EXPOSED = 0.3  # share of communication that the backward pass does not hide (assumed)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The times of one optimizer step, in seconds. `device` and `host` overlap."""

    total: float
    device: float
    host: float
    communication: float  # the part that does not overlap with the backward pass
    arithmetic: float  # part of the device's time in matrix products, convolutions and attention
    samples_per_s: float  # of all accelerators together
    mfu: float  # achieved FLOP/s as a share of the data sheet's peak


def estimate_step(
    profile: WorkProfile,
    device: DeviceRates,
    run: StepSettings,
    constants: RooflineConstants = CALIBRATED,
) -> StepTime:
    """The time of one step of `accumulate` micro-batches on each accelerator."""
    batch = run.batch or profile.batch
    scale = batch / profile.batch
    precision = run.precision or profile.precision
    busy = arithmetic = host = 0.0
    for kernel in profile.kernels:
        seconds = _kernel_time(kernel, device, run, precision, scale, constants) * kernel.count
        busy += seconds
        if kernel.kind in ("matmul", "conv", "attention"):
            arithmetic += seconds
        host += (
            kernel.count
            * (constants.host_conv_us if kernel.kind == "conv" else constants.host_us)
            * 1e-6
        )
    if run.compile:
        host *= _COMPILED_LAUNCH
    shards = run.accelerators if run.shard else 1
    _, moved = optimizer_costs(run.optimizer or profile.optimizer)
    update = profile.parameters * moved / shards / (_bandwidth(device) * constants.memory)
    device_s = busy * run.accumulate + update
    host_s = host * run.accumulate
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


def peak_of(device: DeviceRates, precision: str) -> float:
    """The data sheet's FLOP/s for matrix products at this precision."""
    if precision in ("bf16", "fp16"):
        return device.half
    return {"tf32": device.tf32, "fp8": device.fp8}.get(precision, device.fp32)


def _kernel_time(
    kernel: KernelProfile,
    device: DeviceRates,
    run: StepSettings,
    precision: str,
    scale: float,
    constants: RooflineConstants,
) -> float:
    moved = kernel.fused_bytes if run.compile else kernel.bytes
    fixed = min(kernel.fixed_bytes, moved)
    moved = (moved - fixed) * scale + fixed
    if kernel.kind not in ("matmul", "conv", "attention"):
        share = constants.memory if kernel.kind in ("pointwise", "copy") else constants.reduction
        seconds = moved / (_bandwidth(device) * share)
        return seconds if run.compile else max(seconds, _KERNEL_FLOOR_S)
    bandwidth = _bandwidth(device) * constants.reduction
    rate = _rate(kernel, device, precision, constants)
    seconds = max(kernel.flops * scale / rate, moved / bandwidth)
    if kernel.kind == "conv" and _is_half(kernel, precision) and not run.channels_last:
        seconds += constants.layout * moved / bandwidth
    if kernel.kind == "attention" and run.math_attention:
        heads, queries, keys, _ = kernel.size
        # Scores, mask, softmax and product are each written to memory and read again.
        passes = 10 if kernel.backward else 8
        scores = heads * queries * keys * scale * (4 if kernel.wide else 2)
        seconds = kernel.flops * scale / rate + passes * scores / bandwidth
    return max(seconds, _KERNEL_FLOOR_S)


def _is_half(kernel: KernelProfile, precision: str) -> bool:
    return not kernel.wide and precision in ("bf16", "fp16", "fp8")


def _rate(
    kernel: KernelProfile, device: DeviceRates, precision: str, constants: RooflineConstants
) -> float:
    """The FLOP/s that a kernel reaches; `kernel` is a matrix product, convolution or attention."""
    if kernel.wide or precision in ("fp32", "tf32"):
        wide = device.tf32 if precision == "tf32" else device.fp32
        share = (
            constants.tf32 if precision == "tf32" and device.tf32 != device.fp32 else constants.fp32
        )
        rate = wide * share
    elif precision == "fp8" and kernel.kind == "matmul":
        rate = device.fp8 * constants.half
    else:
        rate = device.half * constants.half
    if kernel.kind == "conv":
        rate *= constants.conv
    elif kernel.kind == "attention":
        rate *= constants.attention
    return float(rate * device.achieved * (_H200_FLOPS / device.half) ** _FALLOFF)


def _bandwidth(device: DeviceRates) -> float:
    return float(device.bandwidth * (_H200_BANDWIDTH / device.bandwidth) ** _FALLOFF)


def _communication(profile: WorkProfile, device: DeviceRates, run: StepSettings) -> float:
    """Seconds of ring collectives in one step. Gradients are reduced once; with sharding, the
    parameters are also gathered twice in each micro-batch.
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
