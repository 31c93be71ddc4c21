"""Measures the autoscaler on recorded requests against the rules of six other systems, each with
the best parameters of its grid.

    python benchmarks/autoscaling.py          # the replica-hours; about 25 minutes of CPU
    python benchmarks/autoscaling.py --quick  # the short traces only, about 8 minutes
    python benchmarks/autoscaling.py --scaled # a quarter, half and twice of their requests

A rule's best parameters are those with the fewest replica-hours among all that have the asked share
of requests on time, or those with the highest share if none has it. They are chosen on the trace
itself, which favours the rules. Rules by request rate are given the true mean time of service.

Cavvy's autoscaler has the weights that did best on the traces of the other sources. It is run once
for each share in `ASKED`, the one parameter that its users set, and must have at least the share of
requests on time of the rule's best run, with fewer replica-hours. `default_ratio` is the same ratio
with the default weights, which were chosen on all these traces. With other numbers of requests,
only the default weights are measured.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import product
from multiprocessing import get_context
from os import cpu_count, environ
from pathlib import Path
from random import Random
from typing import NamedTuple

from cavvy.capabilities.serving.autoscaler.terms import ScalingTerms, ScalingWeights
from cavvy.capabilities.simulation.serving.comparison import bound_replica_hours, scale_load
from cavvy.capabilities.simulation.serving.requests import RequestTrace, read_requests
from cavvy.capabilities.simulation.serving.rules import (
    AibrixRule,
    DstackRule,
    KedaRule,
    KnativeRule,
    RayServeRule,
    ScalingRule,
    SkyServeRule,
)
from cavvy.capabilities.simulation.serving.run import (
    AutoscalerController,
    RuleController,
    run_service,
)
from cavvy.capabilities.simulation.serving.service import ServiceSetting
from cavvy.domain.values import asdict

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(environ.get("CAVVY_DATA", ROOT.parent / "shared" / "data"))
SHARE = 0.95
ASKED = (0.5, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.999, 0.9999)
DRAWS = 10


class TraceFile(NamedTuple):
    """A trace, the source that published it, and how many requests a replica works on at once."""

    path: str
    source: str
    concurrency: int


TRACES: Mapping[str, TraceFile] = {
    "azure-code": TraceFile("azure/AzureLLMInferenceTrace_code.csv", "azure", 4),
    "azure-conv": TraceFile("azure/AzureLLMInferenceTrace_conv.csv", "azure", 4),
    "mooncake-conversation": TraceFile("mooncake/conversation_trace.jsonl.gz", "mooncake", 4),
    "mooncake-synthetic": TraceFile("mooncake/synthetic_trace.jsonl.gz", "mooncake", 4),
    "genai": TraceFile("genai2026/qps.tar.gz", "genai", 1),
}
LONG = {"genai"}
SCALES = (0.25, 0.5, 2.0)

_TARGETS = (0.7, 0.85, 1.0, 1.2, 1.5)
_RATES = (0.5, 0.6, 0.7, 0.8, 0.9)
GRID: Mapping[str, Sequence[ScalingRule]] = {
    "knative": [
        KnativeRule(target=target, stable_s=stable_s, delay_s=delay_s)
        for target, stable_s, delay_s in product(_TARGETS, (60, 180, 600), (0, 180, 600))
    ],
    "keda": [
        KedaRule(target=target, stabilisation_s=down_s)
        for target, down_s in product(_TARGETS, (60, 300, 900))
    ],
    "ray-serve": [
        RayServeRule(target=target, look_back_s=back_s, upscale_s=up_s, downscale_s=down_s)
        for target, back_s, up_s, down_s in product(_TARGETS, (30, 120), (0, 30), (60, 300, 600))
    ],
    "skyserve": [
        SkyServeRule(target=target, upscale_s=up_s, downscale_s=down_s)
        for target, up_s, down_s in product(_RATES, (20, 100, 300), (60, 300, 1200))
    ],
    "dstack": [
        DstackRule(target=target, window_s=window_s, upscale_s=up_s, downscale_s=down_s)
        for target, window_s, up_s, down_s in product(_RATES, (60, 300), (15, 60, 300), (60, 600))
    ],
    "aibrix": [
        AibrixRule(target=target, stable_s=stable_s, cooldown_s=down_s)
        for target, stable_s, down_s in product(_TARGETS, (60, 180, 600), (60, 300, 600))
    ],
}
CHOICES: Mapping[str, Sequence[float]] = {
    "slow_s": (120.0, 150.0, 200.0, 300.0),
    "burst": (3.0, 4.0, 6.0),
    "assumed_uneven": (2.0, 4.0, 8.0),
    "assumed_counts": (2.0, 5.0),
    "thrift": (1.0, 2.0),
    "budget_s": (600.0, 1200.0, 3600.0),
    "debt": (1.0, 3.0),
    "agree_min": (0.6, 0.87, 1.2),
    "most_agree_min": (3.0, 4.0, 6.0),
    "most_late": (0.5, 0.8),
    "uneven_s": (600.0, 1800.0),
}


class RunPoint(NamedTuple):
    """The share of requests on time and the replica-hours of one run."""

    on_time: float
    replica_hours: float


@cache
def read_trace(name: str) -> RequestTrace:
    """Return a trace of `TRACES`, or one with a multiple of its requests, such as `genai * 0.5`."""
    base, _, factor = name.partition(" * ")
    trace = read_requests(DATA / "traces" / TRACES[base].path)
    return scale_load(trace, float(factor or 1), seed=0)


def count_slots(name: str) -> int:
    return TRACES[name.partition(" * ")[0]].concurrency


def make_setting(name: str) -> ServiceSetting:
    return ServiceSetting(concurrency=count_slots(name))


def run_rule(task: tuple[str, str, int]) -> RunPoint:
    name, rule, number = task
    trace = read_trace(name)
    controller = RuleController(GRID[rule][number], trace.work_s / len(trace.services_s))
    score = run_service(rule, trace, make_setting(name), controller)
    return RunPoint(score.on_time, score.replica_hours)


def run_own(task: tuple[str, float, ScalingWeights]) -> RunPoint:
    name, on_time, weights = task
    trace = read_trace(name)
    terms = ScalingTerms(
        on_time=on_time,
        concurrency=count_slots(name),
        service_s=trace.work_s / len(trace.services_s),
        weights=weights,
    )
    score = run_service("cavvy", trace, make_setting(name), AutoscalerController(terms))
    return RunPoint(score.on_time, score.replica_hours)


def draw_weights() -> list[ScalingWeights]:
    """Random choices; the defaults, which were chosen on all traces, are not among them."""
    random, drawn = Random("weights"), []
    for _ in range(DRAWS):
        values = {name: random.choice(choices) for name, choices in CHOICES.items()}
        drawn.append(ScalingWeights(**values))  # type: ignore[arg-type]  # none is whole
    return drawn


def choose_best(points: Sequence[RunPoint], share: float) -> RunPoint:
    """The run with the fewest replica-hours among those with this share on time, or the one with
    the highest share.
    """
    enough = [point for point in points if point.on_time >= share]
    if enough:
        return min(enough, key=lambda point: point.replica_hours)
    return max(points, key=lambda point: (point.on_time, -point.replica_hours))


def compare(own: Sequence[RunPoint], best: RunPoint) -> RunPoint | None:
    """The own run with the fewest replica-hours that has at least the rule's share on time."""
    enough = [point for point in own if point.on_time >= best.on_time]
    return min(enough, key=lambda point: point.replica_hours, default=None)


def score(own: Sequence[RunPoint], bests: Mapping[str, RunPoint]) -> float:
    """The mean of the replica-hours relative to each rule's best run. A share that was not reached
    counts as half as many again, and five times what is missing.
    """
    total = 0.0
    for best in bests.values():
        found = compare(own, best)
        if found is None:
            total += 1.5 + 5 * (best.on_time - max(point.on_time for point in own))
        else:
            total += found.replica_hours / best.replica_hours
    return total / len(bests)


def measure(names: Sequence[str]) -> Iterator[Mapping[str, object]]:
    """Yield a row for each trace and rule."""
    drawn = [] if " * " in names[0] else draw_weights()
    rules = [(name, rule, at) for name in names for rule in GRID for at in range(len(GRID[rule]))]
    tried = [*drawn, ScalingWeights()]
    own = [(name, asked, weights) for name in names for weights in tried for asked in ASKED]
    with ProcessPoolExecutor(cpu_count(), mp_context=get_context("spawn")) as pool:
        ruled = dict(zip(rules, pool.map(run_rule, rules, chunksize=8), strict=True))
        owned = dict(zip(own, pool.map(run_own, own, chunksize=len(ASKED)), strict=True))
    bests = {
        name: {
            rule: choose_best(
                [ruled[name, rule, at] for at in range(len(grid))],
                SHARE,
            )
            for rule, grid in GRID.items()
        }
        for name in names
    }
    for name in names:
        others = [each for each in names if drawn and TRACES[each].source != TRACES[name].source]
        weights = min(
            drawn or tried,
            key=lambda weights: sum(
                score([owned[each, asked, weights] for asked in ASKED], bests[each])
                for each in others
            ),
        )
        bound = bound_replica_hours(read_trace(name), make_setting(name))
        for rule, best in bests[name].items():
            found = compare([owned[name, asked, weights] for asked in ASKED], best)
            usual = compare([owned[name, asked, tried[-1]] for asked in ASKED], best)
            yield {
                "trace": name,
                "rule": rule,
                "rule_on_time": f"{100 * best.on_time:.2f}",
                "rule_hours": f"{best.replica_hours:.2f}",
                "on_time": f"{100 * found.on_time:.2f}" if found else "not reached",
                "hours": f"{found.replica_hours:.2f}" if found else "-",
                "ratio": f"{found.replica_hours / best.replica_hours:.3f}" if found else "-",
                "default_ratio": f"{usual.replica_hours / best.replica_hours:.3f}"
                if usual
                else "-",
                "over_bound": f"{found.replica_hours / bound:.3f}" if found else "-",
                "weights": asdict(weights),
            }


def main() -> None:
    began = time.monotonic()
    quick = "--quick" in sys.argv[1:]
    scaled = "--scaled" in sys.argv[1:]
    names = [name for name in TRACES if not ((quick or scaled) and name in LONG)]
    missing = [name for name in names if not (DATA / "traces" / TRACES[name].path).exists()]
    if missing:
        sys.exit(f"{DATA} has no {', '.join(missing)}: set CAVVY_DATA to the folder of the data")
    fewer = usual = total = 0
    if scaled:
        names = [f"{name} * {factor}" for factor in SCALES for name in names]
    for row in measure(names):
        shown = {name: value for name, value in row.items() if name != "weights"}
        print(" ".join(f"{name}={value}" for name, value in shown.items()), flush=True)
        total += 1
        fewer += row["ratio"] != "-" and float(str(row["ratio"])) < 1
        usual += row["default_ratio"] != "-" and float(str(row["default_ratio"])) < 1
    print(f"fewer replica-hours at no lower share on time: {fewer} of {total}")
    print(f"with the default weights: {usual} of {total}")
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
