"""Reads measured training steps, and fits constants to them. `benchmarks/estimate.py` uses the
steps to calibrate `cavvy estimate`, and to measure its errors.

There are three sets. The steps on one H200, and llm-foundry's MPT runs on A100 and H100, are in
../shared/data/performance (or CAVVY_DATA). The steps of vision models on one RTX 3090 are in
benchmarks/estimate_vision.csv. `scripts/estimate/measured.py` traces the models of the last two
sets.
"""

import csv
import gzip
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from cavvy.cli.task.profiles import find_model
from cavvy.domain.values import asdict, replace
from cavvy.planner.device_rates import DeviceRates, device_of
from cavvy.planner.estimate.kernels import KernelConstants
from cavvy.planner.estimate.profile import StepSettings, WorkProfile, read_profile
from cavvy.planner.estimate.roofline import RooflineConstants, estimate_step

DATA = (
    Path(os.environ.get("CAVVY_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    / "performance"
)
VISION = Path(__file__).with_name("estimate_vision.csv")
PROFILES = Path(__file__).with_name("estimate_profiles.jsonl.gz")
_NAMES = {"gpt2_1024": "gpt2", "bert_base_128": "bert-base"}

# The constants that are assumed before any measurement (the prior). The standard deviation of each
# is a factor of e^0.3. The rate of the largest products is known better, from the MAMF tables that
# `DeviceRates.achieved` cites.
PRIOR = RooflineConstants(
    kernels=KernelConstants(
        half=0.93,
        tf32=0.45,
        fp32=0.90,
        depth=300.0,
        conv=0.90,
        wide_conv=0.80,
        conv_depth=100.0,
        conv_columns=32.0,
        grouped_conv=0.30,
        attention=0.62,
        attention_backward=0.532,
        wide_attention=0.60,
        depthwise_rate=0.15,
        bandwidth_falloff=0.15,
        operands=0.60,
        depthwise=0.35,
        pointwise=0.65,
        copy=0.60,
        batch_norm=0.45,
        group_norm=0.35,
        layer_norm=0.50,
        softmax=0.50,
        pooling=0.45,
        look_up=0.40,
        reduction=0.45,
        layout=6.0,
    ),
    update=0.70,
    host_us=16.0,
    host_backward_us=16.0,
    host_conv_us=60.0,
    host_tensor_us=6.0,
    host_step_us=2000.0,
)
_SPREAD, _NOISE = 0.3, 0.08
# llm-foundry's MPT steps used FlashAttention in Triton (`attn_impl: triton` of its benchmarks),
# while PyTorch has FlashAttention-2. That is 1.3 to 1.5 times faster in the forward pass and about
# twice as fast in the backward pass (Dao 2023, "FlashAttention-2", section 4.1, on an A100). The
# steps of MPT are estimated with this many times the time of attention.
_TRITON, _TRITON_BACKWARD = 1.4, 2.0
_SPREADS = {
    "half": 0.15,
    # known from measurements of kernels
    "attention": 0.1,
    "attention_backward": 0.1,
    "bandwidth_falloff": 0.5,
    "depth": 0.6,
    "conv_depth": 0.6,
}
# The weight of each set. Published measurements weigh less, because they were made with other code
# and other versions than those on the H200.
_WEIGHT = {"H200": 1.0, "RTX3090": 0.5, "MPT": 0.5}

# family of models -> how the names of its models start; each family is left out in turn
FAMILIES = {
    "GPT": "gpt mpt",
    "BERT": "bert",
    "transformers for images": "vit deit beit cait xcit crossvit pit twins swin nest levit coat",
    "residual networks": "resne wide_resnet seresnet resnext skresnet nf_res res2net gernet",
    "depthwise networks": "mobilenet mnasnet efficientnet ghostnet lcnet tinynet rexnet fbnet "
    "mixnet hardcorenas xception convnext edgenext mobilevit convmixer",
    "mixers": "mixer resmlp poolformer",
    "other convolutional networks": "vgg repvgg densenet dpn inception dla hrnet cspdarknet vovnet "
    "darknet ese_vovnet selecsls",
}


@dataclass(frozen=True)
class Step:
    """One measured step. `allocated_mib` and `reserved_mib` are 0 if they were not measured."""

    source: str  # H200, RTX3090 or MPT
    model: str
    profile: WorkProfile
    run: StepSettings
    device: DeviceRates
    step_s: float
    allocated_mib: float
    reserved_mib: float
    what: str

    @property
    def family(self) -> str:
        """The family of the model. Raises LookupError if none is known."""
        for name, starts in FAMILIES.items():
            if self.model.startswith(tuple(starts.split())):
                return name
        raise LookupError(f"no family of {self.model}")


def read_steps() -> list[Step]:
    """The steps measured on the H200."""
    rows = [
        json.loads(line)
        for line in (DATA / "h200_training_steps.jsonl").read_text().splitlines()[1:]
    ]
    return [_step(row) for row in rows]


def _step(row: dict[str, object]) -> Step:
    name = str(row["model"])
    profile = find_model(
        _NAMES.get(name, name), str(row["precision"]), bool(row["activation_checkpointing"])
    )
    run = StepSettings(
        batch=int(str(row["batch"])),
        precision=str(row["precision"]),
        optimizer=str(row["optimizer"]),
        compile=bool(row["compiled"]),
        channels_last=bool(row["channels_last"]),
    )
    flags = [
        word for word, on in (("compiled", run.compile), ("channels-last", run.channels_last)) if on
    ]
    flags += ["checkpointed"] if row["activation_checkpointing"] else []
    flags += ["sgd"] if run.optimizer == "sgd" else []
    return Step(
        "H200",
        name,
        profile,
        run,
        _device("H200"),
        float(str(row["step_ms"])) / 1e3,
        float(str(row["peak_allocated_gib"])) * 1024,
        float(str(row["peak_reserved_gib"])) * 1024,
        f"{run.batch} {run.precision} {' '.join(flags)}".strip(),
    )


def read_vision() -> list[Step]:
    """The vision models measured on an RTX 3090."""
    profiles, found = _profiles(), []
    with VISION.open() as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            run = StepSettings(precision="fp16", optimizer="momentum", channels_last=True)
            step_s = float(row["step_ms"]) / 1e3
            profile, device = profiles[row["model"]], _device("RTX3090")
            found.append(
                Step("RTX3090", row["model"], profile, run, device, step_s, 0, 0, row["batch"])
            )
    return found


def read_mpt() -> list[Step]:
    """The MPT models that llm-foundry measured on eight A100 or H100 in bf16."""
    profiles, found = _profiles(), []
    with (DATA / "llm_foundry_mpt_training.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        length, count = int(row["SeqLen (T)"]), int(row["# GPUs"])
        checkpointed = " checkpointed" if row["Activation Checkpointing"] == "True" else ""
        profile = profiles.get(f"mpt-{row['Model']} {length}{checkpointed}")
        if profile is None or count > 8 or row["Precision"] != "amp_bf16":
            continue
        name, size = row["GPU"].upper().removesuffix("GB").split("_")
        run = StepSettings(
            batch=int(row["MicroBatchSize"]),
            accumulate=int(row["GradAccum"]),
            accelerators=count,
            shard=True,
        )
        device = _device(name, int(size) * 1024)
        tokens = int(row["MicroBatchSize"]) * int(row["GradAccum"]) * count * length
        step_s = tokens / float(row["Throughput (T/s)"])
        what, slow = f"{run.batch} {name}", _with_triton(profile)
        found.append(Step("MPT", profile.name, slow, run, device, step_s, 0, 0, what))
    return found


def _with_triton(profile: WorkProfile) -> WorkProfile:
    """Return the profile with the time of attention that its kernels in Triton take. They count as
    several kernels each.
    """
    kernels = tuple(
        replace(each, count=round(each.count * (_TRITON_BACKWARD if each.backward else _TRITON)))
        if each.kind == "attention"
        else each
        for each in profile.kernels
    )
    return replace(profile, kernels=kernels)


def _device(name: str, memory_mib: int | None = None) -> DeviceRates:
    found = device_of(name, memory_mib)
    assert found is not None
    return found


@cache
def _profiles() -> dict[str, WorkProfile]:
    lines = gzip.decompress(PROFILES.read_bytes()).splitlines()
    return {each.name: each for each in (read_profile(json.loads(line)) for line in lines)}


Vector = np.ndarray[tuple[int], np.dtype[np.float64]]


def fit(
    steps: Sequence[Step], start: RooflineConstants = PRIOR, rounds: int = 12
) -> RooflineConstants:
    """The constants that fit `steps` best, with a penalty for the distance from PRIOR. The method
    is Gauss-Newton on logarithms. It uses the pseudo-Huber loss, which limits the influence of
    steps that fit badly. The fraction of its peak that the RTX 3090 reaches is also fitted but not
    returned, because it is in `ACHIEVED`.
    """
    prior = np.append(np.log(list(flatten(PRIOR).values())), 0.0)
    spreads = np.array([*(_SPREADS.get(name, _SPREAD) for name in flatten(PRIOR)), _SPREAD])
    weights = np.array([_WEIGHT[step.source] / _NOISE for step in steps])

    def residual(x: Vector) -> Vector:
        constants, more = _unflatten(np.exp(x[:-1]).tolist()), float(np.exp(x[-1]))
        off = np.array([np.log(_time(step, constants, more) / step.step_s) for step in steps])
        off *= weights
        huber = np.sign(off) * np.sqrt(8 * (np.sqrt(1 + off * off / 4) - 1))
        return np.concatenate([huber, (x - prior) / spreads])

    x, damping = np.append(np.log(list(flatten(start).values())), 0.0), 1e-2
    f = residual(x)
    for _ in range(rounds):
        jacobian = np.array(
            [(residual(x + np.eye(len(x))[i] * 1e-4) - f) / 1e-4 for i in range(len(x))]
        ).T
        move = np.linalg.solve(jacobian.T @ jacobian + damping * np.eye(len(x)), -jacobian.T @ f)
        new = residual(x + move)
        if new @ new < f @ f:
            x, f, damping = x + move, new, damping / 5
        else:
            damping *= 10
    return _unflatten(np.exp(x[:-1]).tolist())


def _time(step: Step, constants: RooflineConstants, more: float) -> float:
    device = step.device
    if step.source == "RTX3090":
        device = replace(device, achieved=device.achieved * more)
    return estimate_step(step.profile, device, step.run, constants).total


def error_of(step: Step, constants: RooflineConstants) -> float:
    """The relative error of the estimate: the estimate divided by the measurement, minus 1."""
    return estimate_step(step.profile, step.device, step.run, constants).total / step.step_s - 1


def flatten(constants: RooflineConstants) -> dict[str, float]:
    """The constants by name."""
    every = asdict(constants)
    return {**every.pop("kernels"), **every}


def _unflatten(values: Iterable[float]) -> RooflineConstants:
    every = dict(zip(flatten(PRIOR), values, strict=True))
    inner = {name: every.pop(name) for name in asdict(PRIOR.kernels)}
    return RooflineConstants(kernels=KernelConstants(**inner), **every)
