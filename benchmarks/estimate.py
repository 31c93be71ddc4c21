"""How far the estimates are off: an H200's steps with each model left out, other tables with each
GPU left out.

Reads ../shared/data/performance (or CAVVY_DATA). `--write` renews docs/reference/estimate.md;
`--fit` prints the constants fitted on all rows, which planner/estimate/roofline.py carries.
"""

import argparse
import csv
import json
import os
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path

import numpy as np

from cavvy.cli.task.profiles import find_model
from cavvy.planner.estimate.devices import DeviceRates, device_of
from cavvy.planner.estimate.memory import estimate_memory
from cavvy.planner.estimate.profile import WorkProfile
from cavvy.planner.estimate.roofline import CALIBRATED, RooflineConstants, estimate_step
from cavvy.planner.estimate.settings import StepSettings
from cavvy.planner.estimate.transfer import MeasuredRate, carry, spread_of

DATA = (
    Path(os.environ.get("CAVVY_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    / "performance"
)
PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "estimate.md"
_NAMES = {"gpt2_1024": "gpt2", "bert_base_128": "bert-base"}

# What is believed before a step is measured, with a spread of 0.3 e-folds: real shapes reach about
# 0.6 of the best matrix product, convolutions 0.55 of that, streams 0.6 of the data sheet's
# bandwidth, and a launch from Python costs about 30 us.
PRIOR = RooflineConstants(
    half=0.56,
    tf32=0.37,
    fp32=0.87,
    conv=0.55,
    attention=0.60,
    memory=0.60,
    reduction=0.50,
    layout=3.0,
    host_us=28.0,
    host_conv_us=60.0,
)
_SPREAD, _NOISE = 0.3, 0.1


@dataclass(frozen=True)
class Step:
    """One measured step."""

    model: str
    profile: WorkProfile
    run: StepSettings
    step_s: float
    allocated_mib: float
    reserved_mib: float
    what: str


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
        name,
        profile,
        run,
        float(str(row["step_ms"])) / 1e3,
        float(str(row["peak_allocated_gib"])) * 1024,
        float(str(row["peak_reserved_gib"])) * 1024,
        f"{run.batch} {run.precision} {' '.join(flags)}".strip(),
    )


def fit(steps: Sequence[Step], device: DeviceRates) -> RooflineConstants:
    """The constants that fit `steps` best, held near PRIOR (Gauss-Newton on logarithms)."""
    names = [each.name for each in fields(RooflineConstants)]
    prior = np.log([getattr(PRIOR, name) for name in names])

    def residual(
        x: "np.ndarray[tuple[int], np.dtype[np.float64]]",
    ) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        constants = RooflineConstants(**dict(zip(names, np.exp(x).tolist(), strict=True)))
        off = [
            np.log(estimate_step(s.profile, device, s.run, constants).total / s.step_s)
            for s in steps
        ]
        return np.concatenate([np.array(off) / _NOISE, (x - prior) / _SPREAD])

    x, damping = prior.copy(), 1e-2
    f = residual(x)
    for _ in range(10):
        jacobian = np.array(
            [(residual(x + np.eye(len(x))[i] * 1e-4) - f) / 1e-4 for i in range(len(x))]
        ).T
        move = np.linalg.solve(jacobian.T @ jacobian + damping * np.eye(len(x)), -jacobian.T @ f)
        new = residual(x + move)
        if new @ new < f @ f:
            x, f, damping = x + move, new, damping / 5
        else:
            damping *= 10
    return RooflineConstants(**dict(zip(names, np.exp(x).tolist(), strict=True)))


def check_steps(say: Callable[[str], None]) -> None:
    """Each model left out of the calibration."""
    steps, device = read_steps(), device_of("H200")
    assert device is not None
    time_off, memory_off, below = [], [], 0
    say(
        "| model | batch, precision | step ms | estimated | off | peak GiB | estimated | off | "
        "reserved | with margin |"
    )
    say("|---|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for model in sorted({step.model for step in steps}):
        constants = fit([step for step in steps if step.model != model], device)
        for step in (each for each in steps if each.model == model):
            time = estimate_step(step.profile, device, step.run, constants).total
            memory = estimate_memory(step.profile, step.run)
            time_off.append(time / step.step_s - 1)
            memory_off.append(memory.peak / step.allocated_mib - 1)
            below += memory.needed < max(step.reserved_mib, step.allocated_mib)
            say(
                f"| {model} | {step.what} | {step.step_s * 1e3:.1f} | {time * 1e3:.1f} | "
                f"{time_off[-1]:+.0%} | "
                f"{step.allocated_mib / 1024:.2f} | {memory.peak / 1024:.2f} | "
                f"{memory_off[-1]:+.1%} | "
                f"{step.reserved_mib / 1024:.2f} | {memory.needed / 1024:.2f} |"
            )
    say("")
    say(
        f"Step time: median {_median(time_off):.1%}, worst {_worst(time_off):.0%} off (bar: median "
        "15 %)."
    )
    say(
        f"Peak memory: median {_median(memory_off):.1%}, worst {_worst(memory_off):.1%} off (bars: "
        "10 % and 20 %)."
    )
    say(
        f"Estimates with margin that are below the measured reserved memory: {below} of "
        f"{len(steps)} (bar: none)."
    )


def _median(values: Sequence[float]) -> float:
    return statistics.median(abs(each) for each in values)


def _worst(values: Sequence[float]) -> float:
    return max((abs(each) for each in values), default=0.0)


Row = tuple[
    tuple[str, ...], str, int, float, str
]  # workload, accelerator, how many, rate, precision


def read_lambda() -> Iterator[Row]:
    for row in _read("lambda_train_throughput_long.csv"):
        if row["model"] not in ("num_gpu", "watt", "price", "ssd"):
            precision = "bf16" if row["precision"] == "fp16" else "tf32"
            key = (row["suite"], row["model"], row["precision"])
            yield key, row["gpu"], int(row["gpus"]), float(row["throughput"]), precision


def read_mlperf() -> Iterator[Row]:
    for row in _read("mlperf_training_time_to_train.csv"):
        rate = 1 / float(row["mean_minutes_olympic"])
        yield (
            (row["round"], row["benchmark"]),
            row["accelerator"],
            int(row["accelerators"]),
            rate,
            "bf16",
        )


def read_foundry() -> Iterator[Row]:
    for row in _read("llm_foundry_mpt_training.csv"):
        precision = "fp8" if "fp8" in row["Precision"] else "bf16"
        key = (row["Model"], row["SeqLen (T)"], precision)
        yield key, row["GPU"], int(row["# GPUs"]), float(row["Throughput (T/s)"]), precision


def _read(name: str) -> list[dict[str, str]]:
    with (DATA / name).open() as file:
        return list(csv.DictReader(file))


_FOUND = re.compile(
    r"(GB300|GB200|B300|B200|GH200|H200|H100|A100|V100|MI\d{3}X|RTX 6000 Ada|RTX 8000|RTX 3090|RTX "
    r"4090|A6000|A5000|A10"
    r"|TPU-trillium|TPU-v5p)",
    re.IGNORECASE,
)
_CALLED = {"TPU-TRILLIUM": "TPU-v6e", "RTX 6000 ADA": "RTX6000-Ada", "RTX 8000": "RTX8000"}


def find_device(text: str) -> DeviceRates | None:
    """What a table calls an accelerator."""
    found = _FOUND.search(text)
    if found is None:
        return None
    name = _CALLED.get(found[1].upper(), found[1].upper())
    if name in ("H100", "H200") and "NVL" in text:
        name += "-NVL"
    elif name == "H100" and "PCI" in text.upper():
        name = "H100-PCIe"
    size = re.search(r"(16|40|80|96)\s?_?GB", text, re.IGNORECASE)
    return device_of(name, int(size[1]) * 1024 if size and name in ("A100", "V100") else None)


def check_table(rows: Sequence[Row], say: Callable[[str], None]) -> None:
    """Every row of an accelerator from the rows of the others alone."""
    loads: dict[tuple[str, ...], list[tuple[DeviceRates, str, int, float, str]]] = defaultdict(list)
    unknown = alone = 0
    for key, name, count, rate, precision in rows:
        device = find_device(name)
        if device is None:
            unknown += 1
        else:
            loads[key].append((device, name, count, rate, precision))
    off: dict[str, list[float]] = defaultdict(list)
    for group in loads.values():
        for device, _, count, rate, precision in group:
            others = [
                MeasuredRate(device=d, count=n, rate=r)
                for d, _, n, r, _ in group
                if d.name != device.name
            ]
            if others:
                off[device.name].append(carry(others, device, count, precision) / rate - 1)
            else:
                alone += 1
    say("| accelerator | rows | median error | median, signed |")
    say("|---|--:|--:|--:|")
    for name in sorted(off, key=lambda each: -len(off[each])):
        say(
            f"| {name} | {len(off[name])} | {_median(off[name]):.0%} | "
            f"{statistics.median(off[name]):+.0%} |"
        )
    every = [value for values in off.values() for value in values]
    say("")
    say(
        f"All {len(every)} rows: median {_median(every):.1%} off (bar: 15 %). Half of the "
        "accelerators are within "
        f"{statistics.median(_median(values) for values in off.values()):.0%}."
    )
    say(
        f"Left out: {alone} rows of workloads measured on one accelerator only, {unknown} on "
        "accelerators without "
        "known figures."
    )


def check_pairs(rows: Sequence[Row], say: Callable[[str], None]) -> list[float]:
    """Predict every row from each other row of its workload, as `work.duration` is scaled.
    Returns for each prediction whether the measured rate is within the range that plans show.
    """
    loads: dict[tuple[str, ...], dict[MeasuredRate, str]] = defaultdict(dict)
    for key, name, count, rate, precision in rows:
        if device := find_device(name):
            loads[key][MeasuredRate(device=device, count=count, rate=rate)] = precision
    kinds: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    for group in loads.values():
        for known, (wanted, precision) in product(group, group.items()):
            same_device, same_count = known.device == wanted.device, known.count == wanted.count
            if same_device and same_count:
                continue
            ratio = carry([known], wanted.device, wanted.count, precision) / wanted.rate
            spread = spread_of(known, wanted.device, wanted.count)
            kind = "the same" if same_device else "another"
            kind += " | the same" if same_count else " | another"
            kinds[kind].append((ratio - 1, 1 / spread <= ratio <= spread))
    say("| accelerator | count | pairs | median error | within the range |")
    say("|---|---|--:|--:|--:|")
    for kind, found in kinds.items():
        held = statistics.mean(inside for _, inside in found)
        say(f"| {kind} | {len(found)} | {_median([off for off, _ in found]):.0%} | {held:.0%} |")
    every = [each for found in kinds.values() for each in found]
    held = statistics.mean(inside for _, inside in every)
    say("")
    say(
        f"All {len(every)} pairs: median {_median([off for off, _ in every]):.1%} off; the range "
        f"holds {held:.0%} of them (bar: 80 %)."
    )
    return [float(inside) for _, inside in every]


TITLES: tuple[tuple[str, Callable[[], Iterator[Row]]], ...] = (
    ("Lambda's training throughput", read_lambda),
    ("MLPerf Training, time to train", read_mlperf),
    ("llm-foundry, MPT training", read_foundry),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--fit", action="store_true")
    given = parser.parse_args()
    if given.fit:
        device = device_of("H200")
        assert device is not None
        fitted = asdict(fit(read_steps(), device))
        print({name: round(value, 3) for name, value in fitted.items()}, "now:", asdict(CALIBRATED))
        return
    lines: list[str] = []
    lines += ["### One H200, each model left out", ""]
    check_steps(lines.append)
    for title, read in TITLES:
        lines += ["", f"### {title}, each accelerator left out", ""]
        check_table(list(read()), lines.append)
    for title, read in TITLES:
        lines += ["", f"### {title}, each measurement predicted from one other", ""]
        check_pairs(list(read()), lines.append)
    text = "\n".join(lines) + "\n"
    print(text)
    if given.write:
        page = PAGE.read_text()
        head, _, rest = page.partition("<!-- measured -->\n")
        _, _, tail = rest.partition("<!-- end -->")
        PAGE.write_text(f"{head}<!-- measured -->\n{text}<!-- end -->{tail}")


if __name__ == "__main__":
    main()
