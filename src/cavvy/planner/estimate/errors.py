"""How far estimated step times are from measured ones."""

from collections import defaultdict
from collections.abc import Mapping
from math import exp, hypot

from cavvy.planner.device_rates import DeviceRates, device_of, is_rated
from cavvy.planner.estimate.kernels import (
    SCATTERS,
    KernelSetting,
    kernel_time,
)
from cavvy.planner.estimate.profile import StepSettings, WorkProfile
from cavvy.planner.estimate.roofline import StepTime

_MEASURED_ON = "H200"
# accelerators on which whole steps were measured (benchmarks/estimate_steps.py)
STEPS_MEASURED_ON = ("A100", "H100", "H200", "RTX3090")
# Minimum shares of a step's time of kernels that no measured step has.
_MATTERS = 0.05

# Nine of ten logarithms of measured / estimated times are at most this, by the distance of the
# step's kernels from measured ones: so much at no distance, and so much more for each unit.
# `benchmarks/estimate.py` finds them on all measured steps, and tests such ranges on families of
# models whose steps are left out (docs/reference/estimate.md).
NEAR, FURTHER = 0.08, 0.08
# the same, added for an accelerator whose kernels were not measured (from the steps on an A100 and
# an RTX 3090), and for one whose share of the peak is unknown (assumed)
ELSEWHERE, UNRATED = 0.08, 0.20
# Nine of ten steps take at most this many times as long as an estimate that a rate measured on
# another accelerator corrected (docs/reference/estimate.md).
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
    if run.accelerators > 1:
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
