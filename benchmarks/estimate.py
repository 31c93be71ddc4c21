"""Measures the errors of `cavvy estimate` by families of models. The constants that were fitted to
steps, and the ranges of a family, come from the other families. Published steps and rates are
estimated with their GPU left out.

    python benchmarks/estimate.py [--bars | --fit | --unseen | --write]

Prints the bars first. Reads ../shared/data/performance (or CAVVY_DATA). `--bars` prints only the
bars, `--fit` the constants of the host that all measured steps give (`HOST_US`), `--unseen` only
the models that were measured after the formulas were written, and `--write` updates
docs/measured/estimate.md.
"""

import argparse
import csv
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from math import ceil, log
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.estimate_steps import (
    DATA,
    FAMILIES,
    Step,
    error_of,
    fit_host,
    read_measured,
    read_mpt,
    read_steps,
    read_unseen,
    read_vision,
)

from cavvy.cli.task.profiles import find_model, measured_devices
from cavvy.domain.values import replace as change
from cavvy.planner.device_rates import (
    DeviceRates,
    MeasuredRate,
    carry,
    device_of,
    spread_of,
)
from cavvy.planner.estimate.measured import DeviceProfile
from cavvy.planner.estimate.profile import StepSettings
from cavvy.planner.estimate.roofline import (
    StepTime,
    correct_step,
    estimate_step,
    find_correction,
)
from cavvy.planner.estimate.table import estimate_memory, find_spread

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "digits" / "train.py"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "measured" / "estimate.md"


def check_unseen(say: Callable[[str], None]) -> None:
    """Compare the steps of models that were measured after the formulas were written with the
    estimates of before any change, and with those of today, with the family of each left out.
    """
    rows = read_unseen()
    held = {each.step: each.error for each in hold_out()}
    say(
        "| model | batch, precision | ms | before | off | held out | off | host ms | peak GiB "
        "| before | now | need covers |"
    )
    say("|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|")
    before, now = list[tuple[float, float, bool]](), list[tuple[float, float, bool]]()
    for step, row in rows:
        memory, reserved = estimate_memory(step.profile, step.run), row["peak_reserved_gib"]
        peak, off = row["peak_allocated_gib"], row["estimated_ms"] / row["step_ms"] - 1
        covers = memory.needed / 1024 >= reserved
        before.append((off, row["estimated_gib"] / peak - 1, row["needed_gib"] >= reserved))
        now.append((held[step], memory.peak / 1024 / peak - 1, covers))
        say(
            f"| {step.model} | {step.what} | {row['step_ms']:.1f} | {row['estimated_ms']:.1f} "
            f"| {off:+.0%} | {row['step_ms'] * (1 + held[step]):.1f} | {held[step]:+.0%} "
            f"| {row['host_ms']:.1f} | {peak:.2f} | {before[-1][1]:+.1%} | {now[-1][1]:+.1%} "
            f"| {'yes' if covers else 'no'} |"
        )
    say("")
    for name, found in (("before", before), ("now, each family left out", now)):
        steps, peaks, covered = zip(*found, strict=True)
        near = sum(abs(each) <= 0.15 for each in steps)
        say(
            f"* {name}: {len(found)} steps, median {_median(steps):.1%}, worst "
            f"{_worst(steps):.0%}, {near} within 15 %; NEED covers {sum(covered)}; peak memory "
            f"median {_median(peaks):.1%}, worst {_worst(peaks):.0%} off."
        )


def check_steps(steps: Sequence[Step], say: Callable[[str], None]) -> None:
    """Estimate each step on the H200 and the H100. The page lists the constants that were fitted to
    some of these steps.
    """
    known, time_off, memory_off = read_devices(), [], []
    say(
        "| on | model | batch, precision | step ms | estimated | off | peak GiB | estimated | off "
        "| reserved | need |"
    )
    say("|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for step in sorted(steps, key=lambda each: (each.model, each.source)):
        time_off.append(error_of(step, known))
        memory = estimate_memory(step.profile, step.run)
        memory_off.append(memory.peak / step.allocated_mib - 1)
        say(
            f"| {step.source} | {step.model} | {step.what} | {step.step_s * 1e3:.1f} | "
            f"{step.step_s * (1 + time_off[-1]) * 1e3:.1f} | {time_off[-1]:+.0%} | "
            f"{step.allocated_mib / 1024:.2f} | {memory.peak / 1024:.2f} | "
            f"{memory_off[-1]:+.1%} | "
            f"{step.reserved_mib / 1024:.2f} | {memory.needed / 1024:.2f} |"
        )
    say("")
    say(f"Peak memory: median {_median(memory_off):.1%}, worst {_worst(memory_off):.1%} off.")


@dataclass(frozen=True)
class HeldOut:
    """The error of a step, estimated with constants that were fitted without its family."""

    step: Step
    error: float  # the estimate divided by the measurement, minus 1
    score: float  # the error's logarithm as a share of the shipped range's


@cache
def hold_out() -> tuple[HeldOut, ...]:
    """Estimate every step with the constants that the other families give: those of the host, and
    the share of its peak that an RTX 3090 reaches.
    """
    measured, vision = (*read_steps(), *read_measured(), *_unseen()), read_vision()
    offs = {
        share: [(step.family, error_of(_at_share(step, share), read_devices())) for step in vision]
        for share in _SHARES
    }
    found = []
    for family in FAMILIES:
        host = fit_host([each for each in measured if each.family != family], read_devices())

        def off(share: float, family: str = family) -> float:
            return _median([error for name, error in offs[share] if name != family])

        share = min(_SHARES, key=off)
        mine = [each for each in (*measured, *vision, *read_mpt()) if each.family == family]
        found += [_hold_out(_at_share(step, share), host) for step in mine]
    return tuple(found)


def _unseen() -> list[Step]:
    return [step for step, _ in read_unseen()]


# shares of the peak of an RTX 3090 from which the best is chosen
_SHARES = (1.0, 1.1, 1.2, 1.3, 1.4)


def _at_share(step: Step, share: float) -> Step:
    if step.source != "RTX3090":
        return step
    return replace(step, device=change(step.device, achieved=share))


def _hold_out(step: Step, host: Mapping[str, float]) -> HeldOut:
    found = estimate_step(
        step.profile, step.device, step.run, measured=read_devices(), host_us=host
    )
    known = any(each.device.name == step.device.name for each in read_devices())
    spread = find_spread(step.profile, step.run, found, step.device, is_measured=known)
    ratio = found.total / step.step_s
    return HeldOut(step, ratio - 1, abs(log(ratio)) / log(spread))


def find_inside(held: Sequence[HeldOut]) -> dict[Step, bool]:
    """Return for each step whether its time is in the range whose width the other families give."""
    found = {}
    for family in FAMILIES:
        limit = _quantile([each.score for each in held if each.step.family != family])
        found |= {each.step: each.score <= limit for each in held if each.step.family == family}
    return found


def check_families(say: Callable[[str], None]) -> None:
    """Print the errors of each family, and how many are in the range of the other families."""
    held = hold_out()
    inside = find_inside(held)
    say("| family | steps | median error | worst | within 15 % | in the range | need covers |")
    say("|---|--:|--:|--:|--:|--:|--:|")
    for family in (*FAMILIES, "all"):
        mine = [each for each in held if family in ("all", each.step.family)]
        off, more = [each.error for each in mine], find_excess([each.step for each in mine])
        near = sum(abs(each) <= 0.15 for each in off)
        share = statistics.mean(inside[each.step] for each in mine)
        say(
            f"| {family} | {len(mine)} | {_median(off):.1%} | {_worst(off):.0%} | {near} | "
            f"{share:.0%} | {sum(each >= 0 for each in more)} of {len(more)} |"
        )
    say("")
    excess = find_excess([each.step for each in held])
    say(
        f"NEED exceeds the reserved memory by {statistics.median(excess):.0%} (median). Over all "
        f"families, nine of ten errors are at most {_quantile([each.score for each in held]):.2f} "
        "times the shipped range, as logarithms."
    )


def find_excess(steps: Sequence[Step]) -> list[float]:
    """Return by how much the estimated need exceeds what each step reserved, if that is known."""
    return [
        estimate_memory(step.profile, step.run).needed / step.reserved_mib - 1
        for step in steps
        if step.reserved_mib
    ]


def check_bars(say: Callable[[str], None]) -> dict[str, bool]:
    """Print every bar of the estimates and where it stands. Returns whether each is met."""
    held, found = hold_out(), dict[str, bool]()
    off, inside = [each.error for each in held], find_inside(held)
    say("| bar | value | measured | |\n|---|--:|--:|---|")

    def row(what: str, bar: str, value: str, is_met: bool) -> None:
        found[what] = is_met
        say(f"| {what} | {bar} | {value} | {'met' if is_met else 'missed'} |")

    count = f"{len(held)} steps, each family left out"
    median, worst = _median(off), _worst(off)
    row(f"median error of {count}", "<= 8 %", f"{median:.1%}", median <= 0.08)
    row("the worst of them", "<= 25 %", f"{worst:.0%}", worst <= 0.25)
    busy = [each.error for each in held if not waits_for_host(each.step)]
    row(
        f"the worst of {len(busy)} that kernels limit",
        "<= 25 %",
        f"{_worst(busy):.0%}",
        _worst(busy) <= 0.25,
    )
    doubtful = find_doubtful([each.step for each in held])
    sure = [each.error for each in held if each.step not in doubtful]
    row(
        f"the worst without {len(doubtful)} whose launches took {_HOSTS:g} times as long elsewhere",
        "<= 25 %",
        f"{_worst(sure):.0%}",
        _worst(sure) <= 0.25,
    )
    share = statistics.mean(inside.values())
    row("in the 90 % range of the other families", "85-95 %", f"{share:.0%}", 0.85 <= share <= 0.95)
    excess = find_excess([each.step for each in held])
    covered = sum(each >= 0 for each in excess)
    row(
        "NEED is at least what was reserved",
        "all",
        f"{covered} of {len(excess)}",
        covered == len(excess),
    )
    more = statistics.median(excess)
    row("median excess of NEED", "<= 15 %", f"{more:.0%}", more <= 0.15)
    for title, costs in check_cheapest(lambda line: None).items():
        near = statistics.mean(each <= 0.05 for each in costs)
        row(f"cheapest within 5 %: {title}", ">= 90 %", f"{near:.0%}", near >= 0.9)
    carried = _median(check_carried([*read_steps(), *read_measured()], lambda line: None))
    row(
        "median error after one bench on another accelerator",
        "<= 5 %",
        f"{carried:.1%}",
        carried <= 0.05,
    )
    for title, arguments in (("built-in model", ["--model", "gpt2"]), ("script", [str(SCRIPT)])):
        cpu_s = _time_estimate(arguments)
        row(
            f"CPU to estimate a {title} on all accelerators", "<= 5 s", f"{cpu_s:.1f} s", cpu_s <= 5
        )
    return found


def waits_for_host(step: Step) -> bool:
    """Return whether the host limits a step, by its estimate."""
    found = _estimate(step)
    return found.host > found.device


_HOSTS = 1.25


def find_doubtful(steps: Sequence[Step]) -> set[Step]:
    """Return the steps that no single figure fits well: the host limits them, and of the steps with
    the same launches, whatever their batch, the slowest took `_HOSTS` times as long as the fastest.
    """
    alike = defaultdict[tuple[object, ...], list[Step]](list)
    for step in steps:
        if waits_for_host(step):
            run = step.run
            alike[
                step.profile, run.precision, run.optimizer, run.channels_last, run.accumulate
            ].append(step)
    return {
        step
        for group in alike.values()
        if max(each.step_s for each in group) >= _HOSTS * min(each.step_s for each in group)
        for step in group
    }


def check_doubtful(say: Callable[[str], None]) -> None:
    """Print the steps of `find_doubtful`."""
    held = hold_out()
    doubtful = find_doubtful([each.step for each in held])
    say("| model | batch, precision | on | ms | off |")
    say("|---|---|---|--:|--:|")
    for each in sorted(held, key=lambda one: (one.step.model, one.step.step_s)):
        step = each.step
        if step in doubtful:
            say(
                f"| {step.model} | {step.what} | {step.source} | {step.step_s * 1e3:.1f} "
                f"| {each.error:+.0%} |"
            )


def _time_estimate(arguments: Sequence[str]) -> float:
    """Return the seconds of CPU of one `cavvy estimate`. Raises CalledProcessError."""
    before = os.times()
    command = [sys.executable, "-m", "cavvy", "estimate", *arguments]
    with tempfile.TemporaryDirectory(prefix="cavvy-estimate-") as home:
        env = {**os.environ, "CAVVY_HOME": home}
        subprocess.run(command, env=env, check=True, capture_output=True, timeout=120)
    after = os.times()
    return (
        after.children_user
        + after.children_system
        - before.children_user
        - (before.children_system)
    )


def _quantile(scores: Sequence[float]) -> float:
    """The conformal limit of nine of ten further scores (Vovk et al. 2005)."""
    return sorted(scores)[min(len(scores), ceil(0.9 * (len(scores) + 1))) - 1]


def check_carried(steps: Sequence[Step], say: Callable[[str], None]) -> list[float]:
    """Predict each step from the same step on another device, as a rate that `cavvy bench` measured
    on one accelerator corrects the estimates of others. Returns the errors.
    """
    every, found = list[float](), defaultdict[tuple[str, str], dict[str, Step]](dict)
    for step in steps:
        found[step.model, step.what][step.device.name] = step
    say("| measured on | predicted for | steps | median error | nine of ten within | worst |")
    say("|---|---|--:|--:|--:|--:|")
    for source, target in (("H100", "H200"), ("H200", "H100")):
        pairs = [(each[source], each[target]) for each in found.values() if len(each) == 2]
        off = []
        for one, other in pairs:
            factors = find_correction(_estimate(one), one.step_s)
            off.append(correct_step(_estimate(other), factors) / other.step_s - 1)
        say(f"| {source} | {target} | {_spread(off)} |")
        every += off
    return every


def _estimate(step: Step) -> StepTime:
    return estimate_step(step.profile, step.device, step.run, measured=read_devices())


def _check_devices(steps: Sequence[Step], say: Callable[[str], None]) -> None:
    """Estimate the steps on each device with the kernels that were measured on other devices."""
    say("| accelerator | steps | median error | nine of ten within | worst |")
    say("|---|--:|--:|--:|--:|")
    every: list[float] = []
    for name in ("H200", "H100", "A100", "RTX3090"):
        known = [each for each in read_devices() if each.device.name != name]
        mine = [each for each in steps if each.device.name == name]
        off = [error_of(each, known) for each in mine]
        say(f"| {name} | {_spread(off)} |")
        every += off
    say(f"| all | {_spread(every)} |")


def _spread(off: Sequence[float]) -> str:
    tenth = sorted(abs(each) for each in off)[int(0.9 * (len(off) - 1))]
    return f"{len(off)} | {_median(off):.1%} | {tenth:.0%} | {_worst(off):.0%}"


@cache
def read_devices() -> tuple[DeviceProfile, ...]:
    """The built-in profiles of devices, not those that this user measured."""
    return measured_devices(own=False)


def _median(values: Sequence[float]) -> float:
    return statistics.median(abs(each) for each in values)


def _worst(values: Sequence[float]) -> float:
    return max((abs(each) for each in values), default=0.0)


Row = tuple[
    tuple[str, ...], str, int, float, str
]  # (workload, accelerator, number of accelerators, rate, precision)


def read_lambda(everything: bool = False) -> Iterator[Row]:
    """Rates of training, and also prices and watts if `everything` is true."""
    for row in _read("lambda_train_throughput_long.csv"):
        if everything or row["model"] not in ("num_gpu", "watt", "price", "ssd"):
            is_half = row["precision"] == "fp16" and row["model"] not in _never_half()
            precision = "bf16" if is_half else "tf32"
            key = (row["suite"], row["model"], row["precision"])
            yield key, row["gpu"], int(row["gpus"]), float(row["throughput"]), precision


@cache
def _never_half() -> frozenset[str]:
    """The models of Lambda whose fp16 runs do not compute in half precision: the median of their
    rates is that in fp32, within 5 %.
    """
    ratios = defaultdict[str, dict[tuple[str, str], dict[str, float]]](lambda: defaultdict(dict))
    for row in _read("lambda_train_throughput_long.csv"):
        if row["model"] not in ("num_gpu", "watt", "price", "ssd"):
            place = (row["suite"], row["system"])
            ratios[row["model"]][place][row["precision"]] = float(row["throughput"])
    found = {
        model: statistics.median(
            each["fp16"] / each["fp32"] for each in places.values() if len(each) == 2
        )
        for model, places in ratios.items()
    }
    return frozenset(model for model, ratio in found.items() if 0.95 < ratio < 1.05)


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
    """Find an accelerator by the name that a table uses for it."""
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
    """Predict every row of an accelerator only from the rows of other accelerators."""
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
        f"The median error of all {len(every)} rows is {_median(every):.1%}; it must be at most 15 "
        "%. For half of the accelerators, the median error is at most "
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


# Dollars for one accelerator in an hour: the cheapest on-demand offers of the built-in price list
# of 2026-11-27, by name and GB.
PRICES = {
    **{"V100 16": 0.14, "RTX3090 24": 0.33, "A10 24": 1.29, "A6000 48": 0.47, "RTX4090 24": 0.40},
    **{"RTX6000-Ada 48": 0.37, "A100 40": 0.76, "A100 80": 0.87, "H100-PCIe 80": 1.90},
    **{"H100 80": 1.29, "GH200 96": 2.29, "H200 141": 2.00, "B200 180": 4.89, "B300 288": 6.94},
    **{"MI300X 192": 48.0, "MI355X 288": 68.8, "GB200 186": 42.0, "GB300 288": 72.0},
}
# Built-in profiles of Lambda's models. The batch sizes are those of large batches in 24 GB.
_TRACED = {
    "resnet50": ("resnet50", 128),
    "bert_base_squad": ("bert-base", 96),
    "bert_large_squad": ("bert-large-512", 16),
}
Rates = dict[DeviceRates, float]


def check_cheapest(say: Callable[[str], None]) -> dict[str, list[float]]:
    """Choose the accelerator that finishes a workload for the least money, from each set of five
    (or of all if there are fewer) that a table lists with the same count. Returns for each choice
    how much more it costs than the cheapest one, as a share.
    """
    paid = {
        name_of(device): rate
        for (_, model, _), name, count, rate, _ in read_lambda(everything=True)
        if model == "price" and count == 1 and (device := find_device(name))
    }
    lambdas, found, after = _medians(read_lambda(), 1), dict[str, list[float]](), {}
    traced = [(real, _predict(*key)) for key, real in lambdas.items() if key[0][1] in _TRACED]
    single, pods = list(_from_one(lambdas, 1)), list(_from_one(_medians(read_mlperf(), 8), 8))
    for title, cases, prices in (
        ("Lambda, Lambda's prices of systems, from a trace", traced, paid),
        ("Lambda, Lambda's prices of systems, from one measured rate", single, paid),
        ("Lambda, offers, from a trace", traced, PRICES),
        ("Lambda, offers, from one measured rate", single, PRICES),
        ("MLPerf, offers, from one measured rate", pods, PRICES),
        ("llm-foundry's MPT, offers, from a trace", list(_mpt_rates()), PRICES),
    ):
        found[title], after[title] = (
            [each for pair in cases for each in _choose(*pair, prices, count)] for count in (1, 2)
        )
    say(
        "| workloads and prices | choices | right | within 5 % of the best | mean extra cost "
        "| within 5 % after `bench` on the two cheapest |"
    )
    say("|---|--:|--:|--:|--:|--:|")
    for title, more in found.items():
        right, near = (statistics.mean(each <= most for each in more) for most in (1e-9, 0.05))
        mean = statistics.mean(more)
        second = statistics.mean(each <= 0.05 for each in after[title])
        say(f"| {title} | {len(more)} | {right:.0%} | {near:.0%} | {mean:.1%} | {second:.0%} |")
    return found


def name_of(device: DeviceRates) -> str:
    return f"{device.name} {device.memory_mib // 1024}"


def _medians(rows: Iterator[Row], count: int) -> dict[tuple[tuple[str, ...], str], Rates]:
    """The median rate of each workload on each device."""
    found = defaultdict[tuple[tuple[str, ...], str], dict[DeviceRates, list[float]]](dict)
    for key, name, accelerators, rate, precision in rows:
        if accelerators == count and (device := find_device(name)):
            found[key, precision].setdefault(device, []).append(rate)
    return {
        key: {device: statistics.median(each) for device, each in rates.items()}
        for key, rates in found.items()
    }


def _predict(key: tuple[str, ...], precision: str) -> Callable[[DeviceRates], float]:
    """Estimates of the rates of one of Lambda's models, from its trace."""
    model, batch = _TRACED[key[1]]
    profile = find_model(model, precision, False)
    run = StepSettings(batch=batch, precision=precision, channels_last=model == "resnet50")

    @cache
    def rate(device: DeviceRates) -> float:
        return estimate_step(profile, device, run, measured=read_devices()).samples_per_s

    return rate


def _from_one(
    loads: dict[tuple[tuple[str, ...], str], Rates], count: int
) -> Iterator[tuple[Rates, Callable[[DeviceRates], float]]]:
    """Each workload with the rates that follow from the rate on each one of the devices."""
    for (_, precision), real in loads.items():
        for device in real:
            known = MeasuredRate(device=device, count=count, rate=real[device])

            @cache
            def rate(
                other: DeviceRates, known: MeasuredRate = known, precision: str = precision
            ) -> float:
                if other == known.device:
                    return known.rate
                return carry([known], other, count, precision)

            yield real, rate


def _mpt_rates() -> Iterator[tuple[Rates, Callable[[DeviceRates], float]]]:
    """The best rates of each MPT model, measured and estimated."""
    real, made = defaultdict[str, Rates](dict), defaultdict[str, Rates](dict)
    for step in read_mpt():
        samples = (step.run.batch or 1) * step.run.accumulate
        for found, seconds in (
            (real, step.step_s),
            (made, estimate_step(step.profile, step.device, step.run).total),
        ):
            best = found[step.model].get(step.device, 0.0)
            found[step.model][step.device] = max(best, samples / seconds)
    for model, rates in real.items():
        yield rates, made[model].__getitem__


def _choose(
    real: Rates,
    predict: Callable[[DeviceRates], float],
    prices: dict[str, float],
    measured: int = 1,
) -> Iterator[float]:
    """How much more the chosen device costs than the best one, for each set of five devices, or of
    all if there are fewer. The best of the `measured` devices with the least predicted cost is
    chosen.
    """
    known = {device: prices[name_of(device)] for device in real if name_of(device) in prices}
    for group in combinations(known, min(5, len(known))) if len(known) > 1 else ():
        first = sorted(group, key=lambda each: known[each] / predict(each))[:measured]
        chosen, best = (min(known[each] / real[each] for each in some) for some in (first, group))
        yield chosen / best - 1


TITLES: tuple[tuple[str, Callable[[], Iterator[Row]]], ...] = (
    ("Lambda's training throughput", read_lambda),
    ("MLPerf Training, time to train", read_mlperf),
    ("llm-foundry, MPT training", read_foundry),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--bars", "--fit", "--unseen", "--write"):
        parser.add_argument(name, action="store_true")
    given = parser.parse_args()
    steps = [*read_steps(), *read_measured(), *_unseen()]
    if given.fit:
        print("".join(f'    "{k}": {v:.1f},\n' for k, v in fit_host(steps, read_devices()).items()))
        return
    if given.unseen:
        check_unseen(print)
        return
    lines = ["### Bars", ""]
    met = check_bars(lines.append)
    if given.bars:
        print("\n".join(lines))
        sys.exit(0 if all(met.values()) else 1)
    lines += ["", "### Each family of models left out", ""]
    check_families(lines.append)
    lines += ["", "### Steps of the same launches on hosts that differ", ""]
    check_doubtful(lines.append)
    lines += ["", "### Each step", ""]
    check_steps(steps, lines.append)
    lines += ["", "### Models measured after the formulas were written", ""]
    check_unseen(lines.append)
    lines += ["", "### Step times, each accelerator left out", ""]
    _check_devices([*steps, *read_vision(), *read_mpt()], lines.append)
    lines += ["", "### Step times, predicted from one other accelerator", ""]
    check_carried(steps, lines.append)
    lines += ["", "### Cheapest of five accelerators to finish", ""]
    check_cheapest(lines.append)
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
