"""Estimates the time of a step from its profile and a device: the time of the kernels, of the
optimizer step and of the communication. The host's time to launch the kernels is also a lower bound
of a step's time.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
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
# Microseconds of the host, including Python and autograd: for a step, a parameter tensor except its
# update, an operation without a kernel, a time step of a recurrent layer, and to launch a kernel by
# kind, forward and backward. They are the times of single operations that `cavvy bench --kernels`
# measured, all multiplied by one number: the median of whole steps (`fit_host` in
# benchmarks/estimate_steps.py).
HOST_US: Mapping[str, float] = {
    "view": 3.1,
    "recurrent": 21.3,
    "tensor": 16.0,
    "step": 665.7,
    "matmul": 47.9,
    "matmul backward": 32.0,
    "attention": 47.9,
    "attention backward": 91.9,
    "conv": 55.9,
    "conv backward": 67.9,
    "batch_norm": 74.6,
    "batch_norm backward": 62.6,
    "layer_norm": 24.0,
    "layer_norm backward": 78.6,
    "group_norm": 24.0,
    "group_norm backward": 78.6,
    "cast": 17.3,
    "cast backward": 26.6,
    "in place": 17.3,
    "in place backward": 26.6,
    "sum backward": 13.3,
    "other": 17.3,
    "other backward": 26.6,
}
# Microseconds of the host for each tensor of an optimizer's step (`cavvy bench --kernels` on one
# H200). Other optimizers take as long as AdamW.
_HOST_TENSOR = {"sgd": 3.6, "momentum": 3.6, "adamwfused": 4.1}
_HOST_TENSOR_ELSE = 14.7

# The gradient of a look-up sorts the rows, finds where each begins, and sums in two stages: about
# so many kernels (ATen/native/cuda: EmbeddingBackwardKernel.cu, EmbeddingBag.cu, Indexing.cu).
_SORTED = 12

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
    samples_per_s: float  # samples per second of all accelerators of a node together
    mfu: float  # achieved FLOP/s as a share of the data sheet's peak
    # How far the kernels of the step are from measured ones, by `DeviceProfile.correct`: from 0 to
    # 3. It is 3 if no device was measured, or if the host limits the step.
    distance: float
    # the part of the device's time during which the host waits instead of launching kernels
    alone: float = 0.0


def estimate_step(
    profile: WorkProfile,
    device: DeviceRates,
    run: StepSettings,
    measured: Sequence[DeviceProfile] = (),
    host_us: Mapping[str, float] = HOST_US,
) -> StepTime:
    """Return the time of one step of `accumulate` micro-batches on each accelerator. The kernels
    that were measured on the most similar of the `measured` devices correct it. `host_us` has the
    keys of `HOST_US`.
    """
    batch = run.batch or profile.batch
    scale = batch / profile.batch
    precision = run.precision or profile.precision
    setting = KernelSetting(
        device=device, run=run, precision=precision, scale=scale, tf32=profile.tf32
    )
    busy = arithmetic = far = alone = 0.0
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
        if _is_grouped(kernel):
            alone += seconds
    _, moved = optimizer_costs(profile, run)
    update = moved / run.shards / (bandwidth_of(device) * _UPDATE)
    busy *= _SHARED if run.devices > 1 else 1.0
    device_s = busy * run.accumulate + update
    host_s = _host_time(profile, run, host_us)
    waited = _EXPOSED * _communication(profile, device, run)
    alone *= run.accumulate
    total = _blend(device_s - alone, host_s) + alone + waited
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
        distance=FARTHEST if host_s > device_s else far / (busy or 1.0),
        alone=alone,
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
    busy = _blend((step.device - step.alone) * device, step.host * host)
    return busy + step.alone * device + step.communication


def _blend(device_s: float, host_s: float) -> float:
    return float((device_s**_BLEND + host_s**_BLEND) ** (1 / _BLEND))


def find_device(measured: Sequence[DeviceProfile], device: DeviceRates) -> DeviceProfile | None:
    """Return the measured device whose data sheet is most similar, or None if none was measured."""

    def differ(other: DeviceRates) -> tuple[bool, float]:
        ratios = (other.half / device.half, other.bandwidth / device.bandwidth)
        return other.name != device.name, sum(abs(log(each)) for each in ratios)

    return min(measured, key=lambda each: differ(each.device), default=None)


def _host_time(profile: WorkProfile, run: StepSettings, host_us: Mapping[str, float]) -> float:
    """Return the seconds that the host needs to launch all kernels of one step."""
    counts = count_launches(profile, run)
    micro = sum(count * host_us[name] for name, count in counts.items()) + update_us(profile, run)
    return micro * 1e-6 * (_COMPILED_LAUNCH if run.compile else 1.0)


def update_us(profile: WorkProfile, run: StepSettings) -> float:
    """Return the microseconds of the host for the tensors of the optimizer's step."""
    name = (run.optimizer or profile.optimizer).lower().replace("_", "")
    return profile.tensors * _HOST_TENSOR.get(name, _HOST_TENSOR_ELSE)


def count_launches(profile: WorkProfile, run: StepSettings) -> Mapping[str, float]:
    """Return how often the host does in one step what the keys of `HOST_US` name."""
    counts = defaultdict[str, float](float)
    counts["view"] = profile.views * run.accumulate
    for kernel in profile.kernels:
        name = _host_kind(kernel)
        count = kernel.count * run.accumulate
        count *= _launches(kernel)
        if name == "recurrent":
            counts[name] += count * kernel.size[0]
        else:
            counts[f"{name} backward" if kernel.backward else name] += count
    return counts | {"tensor": profile.tensors, "step": 1.0}


def _is_grouped(kernel: KernelProfile) -> bool:
    """Return whether an operation is a product for each group, for which the host first reads the
    sizes of the groups from the device. Only products of groups in bfloat16 are one kernel
    (ATen/native/cuda/GroupedBlas.cpp; `offs.cpu()` in ATen/native/GroupedMMUtils.h).
    """
    return kernel.name == "_grouped_mm" and kernel.wide


def _launches(kernel: KernelProfile) -> int:
    """Return how many kernels an operation launches."""
    if _is_grouped(kernel):
        return max(1, kernel.size[0])
    is_sorted = "embedding" in kernel.name or "index_put" in kernel.name
    return _SORTED if kernel.backward and is_sorted else 1


def _host_kind(kernel: KernelProfile) -> str:
    """Return the kind of a kernel that determines the host's time."""
    kind = "conv" if kernel.kind == "conv" else name_kind(kernel)
    if kernel.name == "_to_copy":
        kind = "cast"
    elif kind == "pointwise" and kernel.backward and kernel.name in ("add", "add_"):
        return "sum"  # of two gradients, by autograd alone
    elif kind == "pointwise" and kernel.name.endswith("_"):
        kind = "in place"
    return kind if kind in HOST_US else "other"


def _communication(profile: WorkProfile, device: DeviceRates, run: StepSettings) -> float:
    """Return the seconds of ring collectives in one step. Gradients are reduced once per step. With
    sharding, parameters are also gathered twice per micro-batch.
    """
    count = run.devices
    link = device.link * _LINK_SHARE
    stated = sum(each.bytes * each.count for each in profile.collectives) / link
    if count < 2:
        return stated
    around = (count - 1) / count / link
    if run.shard:
        return stated + around * profile.gradient_bytes * (2 * run.accumulate + 1)
    return stated + around * profile.gradient_bytes * 2
