"""Estimates the time of a step from its profile and a device: the time of the kernels, of the
optimizer step and of the communication. The host's time to launch the kernels is also a lower bound
of a step's time.
"""

from collections.abc import Sequence
from math import log

from cavvy.domain.values import Struct
from cavvy.planner.device_rates import DeviceRates, peak_of
from cavvy.planner.estimate.kernels import (
    PRODUCTS,
    KernelSetting,
    bandwidth_of,
    kernel_time,
    name_kind,
)
from cavvy.planner.estimate.measured import FARTHEST, DeviceProfile
from cavvy.planner.estimate.profile import (
    KernelProfile,
    StepSettings,
    WorkProfile,
    optimizer_costs,
)

_UPDATE = 0.74  # share of the bandwidth that the optimizer's step reaches
# Microseconds of the host: for an operation without a kernel, for a time step of a recurrent layer,
# for each parameter tensor except its update, and for each step.
_HOST_VIEW_US, _HOST_RECURRENT_US, _HOST_TENSOR_US, _HOST_STEP_US = 5.5, 21.0, 11.6, 500.0
# Microseconds of the host, including Python and autograd, to launch one kernel in the forward and
# in the backward pass. Fitted to the host times of steps of 24 models (`host_ms` in
# benchmarks/estimate_measured.jsonl), between the times of single operations that `cavvy bench
# --kernels` measures.
_HOST_US = {
    "matmul": (34.0, 28.0),
    "attention": (34.0, 28.0),
    "conv": (61.0, 74.0),
    "batch_norm": (57.0, 48.0),
    "layer_norm": (35.0, 52.0),
    "group_norm": (35.0, 52.0),
    "cast": (15.0, 15.0),
    "in place": (15.0, 24.0),
    "sum of gradients": (38.0, 8.5),
    "other": (38.0, 24.0),
}
# Microseconds of the host for each tensor of an optimizer's step (`cavvy bench --kernels` on one
# H200). Other optimizers take as long as AdamW.
_HOST_TENSOR = {"sgd": 3.6, "momentum": 3.6, "adamwfused": 4.1}
_HOST_TENSOR_ELSE = 14.7

# The host's time for a compiled step, as a share of its time for the uncompiled step. A compiled
# step has fewer kernels, and no Python runs between them.
_COMPILED_LAUNCH = 0.3
# Host and device work at the same time. If they alone take a and b, both together take (a^12 +
# b^12)^(1/12), which is close to the larger of the two.
_BLEND = 12
# share of the link's rate that ring collectives reach for large messages (assumed)
_LINK_SHARE = 0.7
# On several accelerators, kernels take this many times as long, because those of the communication
# use processors and bandwidth at the same time (from llm-foundry's MPT runs on eight A100).
_SHARED = 1.15
# Two hosts that launch the same step differ by up to this factor (the largest of the steps measured
# on an H200 and an H100, rounded up).
_HOSTS_DIFFER = 1.5
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
    # How far the kernels of the step are from measured ones, by `DeviceProfile.correct`: from 0 to
    # 3, or 3 if no device was measured. The host counts as a kernel at a distance of 1.
    distance: float


def estimate_step(
    profile: WorkProfile,
    device: DeviceRates,
    run: StepSettings,
    measured: Sequence[DeviceProfile] = (),
) -> StepTime:
    """Return the time of one step of `accumulate` micro-batches on each accelerator. The kernels
    that were measured on the most similar of the `measured` devices correct it.
    """
    batch = run.batch or profile.batch
    scale = batch / profile.batch
    precision = run.precision or profile.precision
    setting = KernelSetting(device=device, run=run, precision=precision, scale=scale)
    busy = arithmetic = far = 0.0
    nearest = find_device(measured, device)
    for kernel in profile.kernels:
        seconds = kernel_time(kernel, setting) * kernel.count
        # A compiler fuses kernels, so those of a compiled step are not measured ones.
        away = 1.0 if run.compile and nearest is not None else FARTHEST
        if nearest is not None and not run.compile:
            factor, away = nearest.correct(kernel, setting)
            seconds *= factor
        far += seconds * away
        busy += seconds
        if kernel.kind in PRODUCTS:
            arithmetic += seconds
    shards = run.accelerators if run.shard else 1
    _, moved = optimizer_costs(profile, run)
    update = moved / shards / (bandwidth_of(device) * _UPDATE)
    busy *= _SHARED if run.accelerators > 1 else 1.0
    device_s = busy * run.accumulate + update
    host_s = _host_time(profile, run)
    waited = _EXPOSED * _communication(profile, device, run)
    total = _blend(device_s, host_s) + waited
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
        distance=1.0 if host_s > device_s else far / (busy or 1.0),
    )


def find_correction(step: StepTime, measured_s: float) -> tuple[float, float]:
    """Return the factors by which the times of the device and of the host differ from an estimate,
    from the measured time of the step. If the device limits the step, only the device's factor
    differs from 1. If the host limits it, the time says nothing of kernels, and other machines have
    other hosts, so only the part counts by which hosts do not differ, such as a slow data loader.
    """
    ratio = measured_s / step.total
    if step.device >= step.host:
        return ratio, 1.0
    rest = ratio / min(max(ratio, 1 / _HOSTS_DIFFER), _HOSTS_DIFFER)
    return rest, rest


def correct_step(step: StepTime, factors: tuple[float, float]) -> float:
    """Return the seconds of a step with corrected times of the device and of the host."""
    device, host = factors
    return _blend(step.device * device, step.host * host) + step.communication


def _blend(device_s: float, host_s: float) -> float:
    return float((device_s**_BLEND + host_s**_BLEND) ** (1 / _BLEND))


def find_device(measured: Sequence[DeviceProfile], device: DeviceRates) -> DeviceProfile | None:
    """Return the measured device whose data sheet is most similar, or None if none was measured."""

    def differ(other: DeviceRates) -> tuple[bool, float]:
        ratios = (other.half / device.half, other.bandwidth / device.bandwidth)
        return other.name != device.name, sum(abs(log(each)) for each in ratios)

    return min(measured, key=lambda each: differ(each.device), default=None)


def _host_time(profile: WorkProfile, run: StepSettings) -> float:
    """Return the seconds that the host needs to launch all kernels of one step."""
    micro = profile.views * _HOST_VIEW_US
    for kernel in profile.kernels:
        each = _HOST_US.get(_host_kind(kernel), _HOST_US["other"])[kernel.backward]
        if kernel.kind == "recurrent":
            each = _HOST_RECURRENT_US * kernel.size[0]
        micro += each * kernel.count
    name = (run.optimizer or profile.optimizer).lower().replace("_", "")
    tensor = _HOST_TENSOR_US + _HOST_TENSOR.get(name, _HOST_TENSOR_ELSE)
    step = profile.tensors * tensor + _HOST_STEP_US
    seconds = (micro * run.accumulate + step) * 1e-6
    return seconds * _COMPILED_LAUNCH if run.compile else seconds


def _host_kind(kernel: KernelProfile) -> str:
    """Return the kind of a kernel that determines the host's time."""
    if kernel.kind == "conv":
        return "conv"
    if kernel.name == "_to_copy":
        return "cast"
    if kernel.kind == "pointwise":
        if kernel.backward and kernel.name in ("add", "add_"):
            return "sum of gradients"
        return "in place" if kernel.name.endswith("_") else "other"
    return name_kind(kernel)


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
