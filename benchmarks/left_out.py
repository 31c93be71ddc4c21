"""Measures the serving policy `steady` on each SpotHedge trace with weights that were chosen on the
other three traces only.

    python benchmarks/left_out.py    # about 3 minutes of CPU

The service asks for at most half of the time with too few replicas that SpotHedge has in the same
windows: it aims higher than what it must exceed. The weights are the best of 32 random choices of
powers of two. The best have the lowest score, averaged over the three traces: the cost relative to
SpotHedge's, plus a penalty for availability below SpotHedge's. One percentage point of missing
availability counts as much as the whole cost of SpotHedge. Then, for each of ten seeds, random
windows of the remaining trace compare the policy with SpotHedge.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from os import cpu_count, environ
from pathlib import Path
from random import Random

from cavvy.capabilities.serving.autoscaler.placement import (
    PlacementPolicy,
    ServiceTerms,
    SpotHedge,
    SteadyPlacement,
    SteadyWeights,
)
from cavvy.capabilities.simulation.traces.serving import SpotCapacity, read_capacity, serve, window
from cavvy.domain.values import asdict

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(environ.get("CAVVY_DATA", ROOT.parent / "shared" / "data"))
TRACES = ("AWS1", "AWS2", "AWS3", "GCP1")
TICKS, TICK_S, COLD_START_S = 2880, 30.0, 120.0  # one day, as in the evaluation of SpotHedge
TUNING_WINDOWS, DRAWS = 6, 32
SEEDS, WINDOWS = 10, 10
# the penalty in the score for availability below SpotHedge's, per fraction of the time
SHORT = 100.0
# the share of the time that SpotHedge misses in the same windows for which the service may have too
# few replicas
MISSED = 0.5
CHOICES: Mapping[str, Sequence[float]] = {
    "prior_losses": (0.25, 0.5, 1.0, 2.0),
    "prior_hr": (0.25, 0.5, 1.0, 2.0),
    "thrift": (0.5, 1.0, 2.0, 4.0),
    "scarce_backing": (1, 2, 3),
    "storm": (2, 3, 4),
    "spread": (1.0, 2.0, 4.0, 8.0),
    "near": (1.0, 2.0, 4.0, 8.0),
    "recent": (1.0, 2.0, 4.0, 8.0),
}
Windows = tuple[tuple[tuple[int, ...], ...], ...]


@cache
def read_trace(trace: str) -> SpotCapacity:
    return read_capacity(
        DATA / "traces/spothedge" / trace, tick_s=TICK_S, unlimited=trace == "AWS3"
    )


@cache
def draw_windows(trace: str, seed: str, count: int) -> Windows:
    capacity, random = read_trace(trace), Random(f"{trace}/{seed}")
    starts = [random.randrange(capacity.ticks - TICKS) for _ in range(count)]
    return tuple(tuple(window(capacity, start, TICKS)) for start in starts)


def serve_all(
    trace: str, windows: Windows, weights: SteadyWeights | None, availability: float
) -> tuple[float, float]:
    """The mean cost and availability of `steady` with these weights, or of SpotHedge if None."""
    cost = ready = 0.0
    for part in windows:
        service = ServiceTerms(
            replicas=3,
            zones=len(part),
            cold_start_s=COLD_START_S,
            tick_s=TICK_S,
            availability=availability,
            regions=read_trace(trace).regions,
        )
        policy: PlacementPolicy = (
            SpotHedge(service) if weights is None else SteadyPlacement(service, weights)
        )
        served = serve(part, service, policy)
        cost += served.cost / len(windows)
        ready += served.availability / len(windows)
    return cost, ready


@cache
def compare(
    trace: str, seed: str, count: int, weights: SteadyWeights
) -> tuple[float, float, float, float]:
    """The cost and availability of SpotHedge and of `steady` in the windows of one seed."""
    windows = draw_windows(trace, seed, count)
    cost, ready = _serve_hedge(trace, seed, count)
    return cost, ready, *serve_all(trace, windows, weights, 1 - MISSED * (1 - ready))


@cache
def _serve_hedge(trace: str, seed: str, count: int) -> tuple[float, float]:
    return serve_all(trace, draw_windows(trace, seed, count), None, 0.99)


def draw_weights() -> list[SteadyWeights]:
    random, drawn = Random("weights"), []
    for _ in range(DRAWS):
        values = {name: random.choice(choices) for name, choices in CHOICES.items()}
        whole = {name: int(values.pop(name)) for name in ("scarce_backing", "storm")}
        drawn.append(SteadyWeights(**values, **whole))  # type: ignore[arg-type]  # two kinds
    return drawn


def score(trace: str, weights: SteadyWeights) -> float:
    """The cost relative to SpotHedge's on this trace, plus the penalty for missing availability."""
    cost, ready, ours, our_ready = compare(trace, "tuning", TUNING_WINDOWS, weights)
    return ours / cost + SHORT * max(0.0, ready - our_ready)


def _score(task: tuple[str, SteadyWeights]) -> float:
    return score(*task)


def _test(task: tuple[str, int, SteadyWeights]) -> Mapping[str, object]:
    trace, seed, weights = task
    found = compare(trace, f"test {seed}", WINDOWS, weights)
    names = ("hedge_cost", "hedge_availability", "cost", "availability")
    return {
        "trace": trace,
        "seed": seed,
        "windows": WINDOWS,
        **{name: f"{100 * value:.4f}" for name, value in zip(names, found, strict=True)},
        **asdict(weights),
    }


def run_left_out() -> Iterator[Mapping[str, object]]:
    """Yield a row for each left-out trace and each seed."""
    drawn = draw_weights()
    tasks = [(trace, weights) for trace in TRACES for weights in drawn]
    with ProcessPoolExecutor(cpu_count(), mp_context=get_context("spawn")) as pool:
        scores = dict(zip(tasks, pool.map(_score, tasks, chunksize=DRAWS // 4), strict=True))
        chosen = {trace: _choose(trace, drawn, scores) for trace in TRACES}
        tests = [(trace, seed, chosen[trace]) for trace in TRACES for seed in range(SEEDS)]
        yield from pool.map(_test, tests)


def _choose(
    left_out: str, drawn: Sequence[SteadyWeights], scores: Mapping[tuple[str, SteadyWeights], float]
) -> SteadyWeights:
    """The weights with the lowest mean score on the other traces."""
    others = [trace for trace in TRACES if trace != left_out]
    return min(drawn, key=lambda weights: sum(scores[trace, weights] for trace in others))


def main() -> None:
    began = time.monotonic()
    for row in run_left_out():
        print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
