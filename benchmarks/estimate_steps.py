"""Reads measured training steps, on which `benchmarks/estimate.py` measures the errors of `cavvy
estimate`.

There are five sets. The steps on one H200, and llm-foundry's MPT runs on A100 and H100, are in
../shared/data/performance (or CAVVY_DATA). Further steps on one H200 and one H100 are in
benchmarks/estimate_measured.jsonl, those of models of libraries, with the estimates of before, in
benchmarks/estimate_unseen.jsonl, and those of vision models on one RTX 3090 in
benchmarks/estimate_vision.csv. `scripts/estimate/measured.py` traces the models that `cavvy
estimate --model` does not know.
"""

import csv
import gzip
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from cavvy.cli.task.profiles import find_model, list_models
from cavvy.domain.values import replace
from cavvy.planner.device_rates import DeviceRates, device_of
from cavvy.planner.estimate.measured import DeviceProfile
from cavvy.planner.estimate.profile import StepSettings, WorkProfile, read_profile
from cavvy.planner.estimate.roofline import (
    HOST_US,
    count_launches,
    estimate_step,
    update_us,
)

DATA = (
    Path(os.environ.get("CAVVY_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    / "performance"
)
MEASURED = Path(__file__).with_name("estimate_measured.jsonl")
UNSEEN = Path(__file__).with_name("estimate_unseen.jsonl")
VISION = Path(__file__).with_name("estimate_vision.csv")
PROFILES = Path(__file__).with_name("estimate_profiles.jsonl.gz")
_NAMES = {"gpt2_1024": "gpt2", "bert_base_128": "bert-base", "vgg16": "vgg16 torchvision"}

# llm-foundry's MPT steps used FlashAttention in Triton (`attn_impl: triton` of its benchmarks),
# while PyTorch has FlashAttention-2. That is 1.3 to 1.5 times faster in the forward pass and about
# twice as fast in the backward pass (Dao 2023, "FlashAttention-2", section 4.1, on an A100). That
# Triton was older than the H100 (`triton_pre_mlir`, mosaicml/llm-foundry pull request 149), so an
# H100 was faster than an A100 only by its processors and its clock, 1.59 times by the data sheets,
# where the estimates of FlashAttention-2 are 2.46 and 2.13 times faster. The steps of MPT are
# estimated with so many times the time of attention, forward and backward.
_TRITON = {"A100": (1.4, 2.0), "H100": (1.4 * 2.46 / 1.59, 2.0 * 2.13 / 1.59)}

# What `fit_host` multiplies: microseconds of single operations, by `cavvy bench --kernels` on the
# hosts of an H200 and an H100. A time step of a recurrent layer launches two kernels, and the
# backward pass of a linear layer two products. Casts and views count on their own. The values of
# tensors and steps are rough.
SINGLE_US: Mapping[str, float] = {
    **{"view": 2.3, "recurrent": 16.0, "tensor": 12.0, "step": 500.0},
    **{"matmul": 36.0, "matmul backward": 24.0, "attention": 36.0, "attention backward": 69.0},
    **{"conv": 42.0, "conv backward": 51.0, "batch_norm": 56.0, "batch_norm backward": 47.0},
    **{"layer_norm": 18.0, "layer_norm backward": 59.0},
    **{"group_norm": 18.0, "group_norm backward": 59.0, "cast": 13.0, "cast backward": 20.0},
    **{"in place": 13.0, "in place backward": 20.0, "sum backward": 10.0},
    **{"other": 13.0, "other backward": 20.0},
}
# Steps of fewer kernels never fill the device's queue of launches. The host's time for them was
# measured if it is less than the second number's share of the step. The host limits steps whose
# kernels take less than the last share.
_QUEUE, _AHEAD, _LIMITED = 1024, 0.7, 0.8

# family of models -> how the names of its models start; each family is left out in turn
FAMILIES = {
    "decoders": "gpt mpt llama lora_llama qwen mixtral pythia",
    "encoders": "bert distilbert deberta clip wav2vec2",
    "encoders with decoders": "t5 whisper transformer_base",
    "recurrent networks": "lstm gru rnn bilstm",
    "recommenders": "dlrm",
    "U-Nets": "unet diffusion sd_unet",
    "transformers for images": "vit deit beit cait xcit crossvit pit twins swin nest levit coat "
    "eva maxvit mvit segformer",
    "residual networks": "resne wide_resnet seresnet resnext skresnet nf_res res2net gernet "
    "deeplabv3 r3d",
    "depthwise networks": "mobilenet mnasnet efficientnet ghostnet lcnet tinynet rexnet fbnet "
    "mixnet hardcorenas xception convnext edgenext mobilevit convmixer",
    "mixers": "mixer resmlp poolformer mlp",
    "other convolutional networks": "vgg repvgg densenet dpn inception dla hrnet cspdarknet vovnet "
    "darknet ese_vovnet selecsls regnet tcn",
}
# the libraries that the names of models begin with
_LIBRARY = re.compile("^(hf|timm|video)_")


@dataclass(frozen=True)
class Step:
    """One measured step. `allocated_mib`, `reserved_mib` and `host_s`, the host's time for one step
    with an empty queue, are 0 if they were not measured.
    """

    source: str  # H200, H100, RTX3090 or MPT
    model: str
    profile: WorkProfile
    run: StepSettings
    device: DeviceRates
    step_s: float
    allocated_mib: float
    reserved_mib: float
    what: str
    host_s: float = 0.0

    @property
    def family(self) -> str:
        """The family of the model. Raises LookupError if none is known."""
        for name, starts in FAMILIES.items():
            if _LIBRARY.sub("", self.model).startswith(tuple(starts.split())):
                return name
        raise LookupError(f"no family of {self.model}")


def read_steps() -> list[Step]:
    """The steps measured on the H200."""
    rows = [
        json.loads(line)
        for name in ("h200_training_steps.jsonl", "h200_training_more.jsonl")
        for line in (DATA / name).read_text().splitlines()[1:]
    ]
    return [_step(row) for row in rows]


def _step(row: dict[str, object]) -> Step:
    name = str(row["model"])
    checkpointed = bool(row["activation_checkpointing"])
    known = _NAMES.get(name, name)
    if known in list_models():
        profile = find_model(known, str(row["precision"]), checkpointed)
    else:
        profile = _profiles()[f"{known} checkpointed" if checkpointed else known]
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
    flags += ["checkpointed"] if checkpointed else []
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


def read_measured() -> list[Step]:
    """The steps of further models, measured on an H200 and an H100."""
    return [step for row in _rows(MEASURED) if (step := _measured(row)) is not None]


def read_unseen() -> list[tuple[Step, Mapping[str, Any]]]:
    """The steps of models of libraries, measured on an H200 after the formulas were written, and
    their rows, which contain the estimates of then.
    """
    found = [(_measured(row), row) for row in _rows(UNSEEN)]
    return [(step, row) for step, row in found if step is not None]


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, path.read_text().splitlines()[1:])
    return [{"activation_checkpointing": False, **row} for row in rows]


def _measured(row: Mapping[str, Any]) -> Step | None:
    """The step of a row of `MEASURED` or `UNSEEN`, or None if its model was not traced."""
    profile = _profiles().get(name_measured(row))
    if profile is None:
        return None
    run = StepSettings(
        batch=row["batch"],
        precision=row["precision"],
        optimizer=row["optimizer"] + ("_fused" if row["fused"] else ""),
        channels_last=row["channels_last"],
    )
    what = [str(row["batch"]), row["precision"]]
    words = (("channels-last", "channels_last"), ("fused", "fused"))
    what += [word for word, key in words if row[key]]
    return Step(
        row["device"],
        row["model"],
        profile,
        run,
        _device(row["device"]),
        row["step_ms"] / 1e3,
        row["peak_allocated_gib"] * 1024,
        row["peak_reserved_gib"] * 1024,
        " ".join([*what, "checkpointed"] if row["activation_checkpointing"] else what),
        row["host_ms"] / 1e3,
    )


def name_measured(row: Mapping[str, object]) -> str:
    """The name of the profile of a row of `MEASURED` or `UNSEEN`."""
    name = f"measured {row['model']}"
    name += " checkpointed" if row["activation_checkpointing"] else ""
    return f"{name} wide" if row["precision"] in ("fp32", "tf32") else name


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
        what, slow = f"{run.batch} {name}", _with_triton(profile, name)
        found.append(Step("MPT", profile.name, slow, run, device, step_s, 0, 0, what))
    return found


def _with_triton(profile: WorkProfile, device: str) -> WorkProfile:
    """Return the profile with the time of attention that its kernels in Triton take on a device.
    They count as several kernels each.
    """
    kernels = tuple(
        replace(each, count=round(each.count * _TRITON[device][each.backward]))
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


def error_of(
    step: Step, measured: Sequence[DeviceProfile] = (), host_us: Mapping[str, float] = HOST_US
) -> float:
    """The relative error of the estimate: the estimate divided by the measurement, minus 1."""
    found = estimate_step(step.profile, step.device, step.run, measured=measured, host_us=host_us)
    return found.total / step.step_s - 1


def fit_host(steps: Sequence[Step], measured: Sequence[DeviceProfile]) -> dict[str, float]:
    """Return the values of `HOST_US`: those of single operations, all multiplied by one number, the
    median ratio of measured times to those of the single operations. In a whole step, each
    operation also waits for Python. The number comes from the steps whose host's time is known:
    those that the host limits, and those in which it was measured and the queue of the device
    cannot have been full. Values that were fitted one by one had larger errors in other families.
    """
    ratios = []
    for step in steps:
        busy_s = estimate_step(step.profile, step.device, step.run, measured=measured).device
        launches = sum(each.count for each in step.profile.kernels)
        is_short = launches < _QUEUE and 0 < step.host_s < _AHEAD * step.step_s
        if not step.run.compile and (busy_s < _LIMITED * step.step_s or is_short):
            host_us = min(step.host_s or step.step_s, step.step_s) * 1e6
            counts = count_launches(step.profile, step.run)
            alone = sum(count * SINGLE_US[name] for name, count in counts.items())
            ratios.append((host_us - update_us(step.profile, step.run)) / alone)
    slower = median(ratios)
    return {name: each * slower for name, each in SINGLE_US.items()}
