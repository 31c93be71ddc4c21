"""Estimates the peak memory of a step from its profile, and the memory that a device needs for the
step.
"""

from cavvy.domain.values import Struct
from cavvy.planner.estimate.profile import PeakMemory, WorkProfile
from cavvy.planner.estimate.settings import StepSettings, optimizer_costs

MIB = 1 << 20

# PyTorch's allocator returns blocks that are up to 1 MiB larger than requested
# (c10/cuda/CUDACachingAllocator.cpp), and cuBLAS keeps 32 MiB per handle on Hopper. Together, these
# were measured at 0.1 to 0.4 GiB in steps of 2 to 46 GiB (docs/reference/estimate.md).
ROUNDING = 1.01
WORKSPACE_MIB = 64

# A compiled model keeps this share of the activations that it could recompute. The value is fitted
# to one model, GPT-2 (with 0, the estimate is 14 % below the measurement). ResNet-50 has almost
# nothing to recompute.
KEPT_COMPILED = 0.15

# Because of fragmentation, the allocator reserves more memory than the tensors use at their peak:
# on an H200, at most 25 % more than the tensors of the step itself (docs/reference/estimate.md).
# Parameters and optimizer state are allocated only once, so a smaller margin is assumed for them.
# CONTEXT_MIB is added for the driver's context, loaded kernels and cuDNN's workspaces.
MARGIN, STATE_MARGIN = 0.25, 0.10
CONTEXT_MIB = 1024


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


def estimate_memory(profile: WorkProfile, run: StepSettings) -> MemoryEstimate:
    """Estimate the memory of `profile` with these settings. The result is the higher of two peaks:
    the peak of the forward and backward pass, and the peak of the optimizer step.
    """
    batch = run.batch or profile.batch
    scale = batch / profile.batch
    shards = run.accelerators if run.shard else 1
    parameters = profile.parameter_bytes / shards
    state, moved = (each / shards for each in optimizer_costs(profile, run))
    whole_gradients = profile.gradient_bytes / shards
    high, made = _passes(profile, run, scale, shards)
    # A step with state makes temporary tensors for the parameters that have gradients.
    step = whole_gradients * (2 if state and moved else 1)
    dynamic = max(high, step)
    held = (parameters + state + profile.buffer_bytes) / MIB
    return MemoryEstimate(
        parameters=parameters / MIB,
        gradients=whole_gradients / MIB,
        optimizer=state / MIB,
        activations=made / MIB,
        workspace=WORKSPACE_MIB,
        peak=held + dynamic * ROUNDING / MIB + WORKSPACE_MIB,
        needed=held * (1 + STATE_MARGIN)
        + dynamic * ROUNDING * (1 + MARGIN) / MIB
        + WORKSPACE_MIB
        + CONTEXT_MIB,
    )


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
