"""The measured errors of estimated step times, for each kind of model."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from enum import StrEnum

from cavvy.domain.values import Struct
from cavvy.planner.device_rates import device_of
from cavvy.planner.estimate.kernels import (
    KernelConstants,
    KernelSetting,
    kernel_time,
    name_kind,
)
from cavvy.planner.estimate.profile import StepSettings, WorkProfile

_MEASURED_ON = "H200"
# Minimum shares of a step's time. Kernels with a smaller share do not affect the kind of the model.
_MATTERS = 0.05
# minimum share of convolutions in a model that is classified as a convolutional network
_CONVOLUTIONAL = 0.2
_OTHER_KINDS = frozenset(  # kernels that occur only in networks other than transformers
    {"conv", "grouped_conv", "depthwise", "batch_norm", "group_norm", "pooling"}
)
# Operations that an image classifier does not need: concatenation of channels, as in a U-Net,
# upsampling, and losses for each pixel.
_FOREIGN = ("cat", "upsample", "nll_loss2d")
# the operation that computes a cross-entropy loss with one class per image
_CLASS_LOSS = "nll_loss_forward"
_SCATTERS = frozenset({"index_add", "scatter", "scatter_", "scatter_add", "scatter_reduce"})


class ModelKind(StrEnum):
    """The kinds of models whose steps were measured. Transformers and residual networks were
    measured on an H200. Networks for images that use convolutions but are not residual networks
    were measured only on an RTX 3090.
    """

    TRANSFORMER = "transformers"
    RESIDUAL = "residual networks"
    CONVOLUTIONAL = "other convolutional networks"
    OTHER = "other models"


class MeasuredError(Struct, frozen=True, kw_only=True):
    """The absolute errors of estimated step times, as fractions of the measured times, over `steps`
    steps. `most` is the largest error or, if `is_share` is true, the error that nine of ten steps
    do not exceed.
    """

    median: float
    most: float
    steps: int
    is_share: bool = False


# From docs/reference/estimate.md: the errors on one H200 if each family of models in turn is left
# out of the calibration, and the errors if each accelerator in turn is left out.
ERRORS = {
    ModelKind.TRANSFORMER: MeasuredError(median=0.07, most=0.27, steps=18),
    ModelKind.RESIDUAL: MeasuredError(median=0.1, most=0.21, steps=10),
}
ELSEWHERE = MeasuredError(median=0.1, most=0.48, steps=191, is_share=True)


def find_kind(profile: WorkProfile) -> ModelKind:
    """Return the kind of a model. The kind is derived from the shares of the model's kernels in the
    time of a step on an H200.
    """
    times, operations = _shares(profile)
    if profile.assumed or _find_rare(times, operations):
        return ModelKind.OTHER
    if times["attention"] and sum(times[kind] for kind in _OTHER_KINDS) < _MATTERS:
        return ModelKind.TRANSFORMER
    special = times["grouped_conv"] + times["depthwise"]
    is_image = times["conv"] + special >= _CONVOLUTIONAL and not times["attention"]
    is_foreign = any(name.startswith(_FOREIGN) for name in operations)
    if not is_image or is_foreign or _CLASS_LOSS not in operations:
        return ModelKind.OTHER
    is_residual = times["batch_norm"] and not special
    return ModelKind.RESIDUAL if is_residual else ModelKind.CONVOLUTIONAL


def find_error(
    profile: WorkProfile, run: StepSettings, accelerators: Collection[str]
) -> MeasuredError | None:
    """Return the error that was measured for similar steps on these accelerators, or None if no
    similar step was measured.
    """
    if list_unmeasured(profile, run):
        return None
    is_on_h200 = all(each.startswith(_MEASURED_ON) for each in accelerators)
    return ERRORS.get(find_kind(profile), ELSEWHERE) if is_on_h200 else ELSEWHERE


def list_unmeasured(profile: WorkProfile, run: StepSettings) -> list[str]:
    """Return the properties of this step that none of the measured steps had. Each property is a
    noun phrase that can be inserted in a sentence. The list is empty if every property was
    measured.
    """
    found = []
    if find_kind(profile) is ModelKind.OTHER:
        times, operations = _shares(profile)
        what = _find_rare(times, operations) or "models of this kind"
        found.append("steps with assumptions" if profile.assumed else what)
    if run.math_attention:
        found.append("attention that stores its scores")
    if (run.precision or profile.precision) == "fp8":
        found.append("fp8")
    if run.accelerators > 1:
        found.append("more than one accelerator")
    return found


def _find_rare(times: Mapping[str, float], operations: Mapping[str, float]) -> str:
    """Return a kind of work in this step that no measured step contains, or ""."""
    if sum(operations[name] for name in _SCATTERS) >= _MATTERS:
        return "scattered sums, as in graph networks"
    bags = sum(share for name, share in operations.items() if name.startswith("_embedding_bag"))
    if bags >= _MATTERS:
        return "sums of embeddings"
    return ""


def _shares(profile: WorkProfile) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Return the shares of a step's time on an H200, by kind of kernel and by operation."""
    device = device_of(_MEASURED_ON)
    assert device is not None, "the catalog lacks the H200"
    setting = KernelSetting(
        device=device,
        run=StepSettings(),
        precision=profile.precision,
        scale=1.0,
        constants=KernelConstants(),
    )
    times: dict[str, float] = defaultdict(float)
    operations: dict[str, float] = defaultdict(float)
    seconds = [kernel_time(each, setting) * each.count for each in profile.kernels]
    whole = sum(seconds) or 1.0
    for kernel, took in zip(profile.kernels, seconds, strict=True):
        times[name_kind(kernel)] += took / whole
        operations[kernel.name] += took / whole
    return times, operations
