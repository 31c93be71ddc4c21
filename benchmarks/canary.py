"""Measures the test that judges a canary: how often it finds a worse revision within 2,000
requests, and how often it blames an equal one.

    python benchmarks/canary.py            # about 2 minutes of CPU
    python benchmarks/canary.py --quick    # 200 runs of each

Each run draws the requests of two revisions. Blocks have ten requests of the canary and, at a
weight of 10 %, ninety of the old revision. `2,000 of the canary` counts those of the canary only,
`2,000 in all` those of both. `best` is the power of the best test that looks only once, at the end,
knows the distribution and has the same share of false alarms (Neyman and Pearson): no test that
may stop early can do better. Two rules with fixed thresholds look after each 100 requests of the
canary, and roll back if it has half of the effect: 2.5 % more mean latency, or 0.5 % more errors
(`fixed`), or if five looks in all say so (`five looks`).
"""

import sys
from collections.abc import Callable
from math import exp, inf, log, sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cavvy.control.decide.canary import CanaryTerms, judge, observe
from cavvy.domain.service_updates import CanaryTrial, RevisionSums

REQUESTS = 2000
ALPHA = 0.01
BLOCK = 10
LOOK = 100
SLOWER, MORE_ERRORS = 1.05, 0.01
_NORMAL = NormalDist()

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, tuple[int, int]], Floats]


def lognormal(sigma: float) -> Draw:
    return lambda random, shape: np.exp(sigma * random.standard_normal(shape))


def gamma(random: np.random.Generator, shape: tuple[int, int]) -> Floats:
    return random.gamma(8.0, 1 / 8.0, shape)


def bimodal(random: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """A cache that three of ten requests miss."""
    missed = random.random(shape) < 0.3
    return np.exp(0.1 * random.standard_normal(shape)) * np.where(missed, 3.0, 1.0)


def long_tailed(random: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Pareto's distribution with an exponent of 2.5: some requests take very long."""
    return 1 + random.pareto(2.5, shape)


class CanarySetting(NamedTuple):
    """Two revisions. `sigma` is the deviation of the logarithm of the latency."""

    name: str
    draw: Draw
    sigma: float
    base: float = 0.0  # the share of errors
    slower: float = 1.0
    more: float = 0.0


class AlarmRates(NamedTuple):
    """The shares of runs in which each rule rolls back, and the requests until ours does."""

    ours: float
    fixed: float
    five: float
    median: float


def latency_settings(slower: float) -> list[CanarySetting]:
    found = [
        CanarySetting(f"lognormal {sigma}", lognormal(sigma), sigma, slower=slower)
        for sigma in (0.1, 0.2, 0.3, 0.4, 0.5)
    ]
    found.append(CanarySetting("gamma, shape 8", gamma, 0.365, slower=slower))
    found.append(CanarySetting("bimodal, x3 in 30 %", bimodal, 0.513, slower=slower))
    found.append(CanarySetting("Pareto 2.5", long_tailed, 0.4, slower=slower))
    return found


def error_settings(more: float) -> list[CanarySetting]:
    return [
        CanarySetting(f"errors {base:.1%}", lognormal(0.3), 0.3, base=base, more=more)
        for base in (0.0, 0.001, 0.01, 0.05)
    ]


def draw_sums(
    setting: CanarySetting, random: np.random.Generator, blocks: int, size: int, *, new: bool
) -> tuple[list[RevisionSums], Floats, Floats]:
    """The sums of each block, and the latencies and the errors in it."""
    shape = (blocks, size)
    latency = setting.draw(random, shape) * (setting.slower if new else 1.0)
    errors = random.random(shape) < setting.base + (setting.more if new else 0.0)
    logs = np.where(errors, 0.0, np.log(latency))
    failed = errors.sum(1)
    sums = [
        RevisionSums(
            requests=size,
            errors=int(failed[block]),
            timed=size - int(failed[block]),
            logs=float(logs[block].sum()),
            squares=float((logs[block] ** 2).sum()),
        )
        for block in range(blocks)
    ]
    return sums, latency.mean(1), failed.astype(np.float64)


def run(setting: CanarySetting, seed: int, requests: int, share: float) -> tuple[float, int]:
    """After how many requests of the canary it is rolled back (inf: never), and how many looks of
    the fixed thresholds say so.
    """
    random = np.random.default_rng(seed)
    blocks, size = requests // BLOCK, round(BLOCK * (1 - share) / share)
    old, old_s, old_failed = draw_sums(setting, random, blocks, size, new=False)
    new, new_s, new_failed = draw_sums(setting, random, blocks, BLOCK, new=True)
    looks = 0
    for block in range(LOOK // BLOCK, blocks + 1, LOOK // BLOCK):
        past = slice(0, block)
        slower = new_s[past].mean() > (1 + (SLOWER - 1) / 2) * old_s[past].mean()
        more = new_failed[past].mean() / BLOCK - old_failed[past].mean() / size
        looks += bool(slower or more > MORE_ERRORS / 2)
    trial, terms = CanaryTrial(), CanaryTerms(alpha=ALPHA, requests=requests + 1)
    all_old = all_new = RevisionSums()
    for block in range(blocks):
        all_old, all_new = all_old + old[block], all_new + new[block]
        trial = observe(trial, all_old, all_new)
        if judge(trial, terms).end is not None:
            return (block + 1) * BLOCK, looks
    return inf, looks


def measure(setting: CanarySetting, runs: int, requests: int, share: float) -> AlarmRates:
    found = [run(setting, seed, requests, share) for seed in range(runs)]
    return AlarmRates(
        ours=sum(at < inf for at, _ in found) / runs,
        fixed=sum(looks >= 1 for _, looks in found) / runs,
        five=sum(looks >= 5 for _, looks in found) / runs,
        median=float(np.median([at for at, _ in found])),
    )


def bound_power(setting: CanarySetting, requests: int, share: float) -> float:
    """The power of the best test of so many requests of the canary, by normal approximation."""
    others = requests * (1 - share) / share
    asked = _NORMAL.inv_cdf(1 - ALPHA)
    if setting.slower > 1:
        error = setting.sigma * sqrt(1 / requests + 1 / others)
        return _NORMAL.cdf(log(setting.slower) / error - asked)
    base, worse = setting.base, setting.base + setting.more
    mean = (base * others + worse * requests) / (others + requests)
    equal = sqrt(mean * (1 - mean) * (1 / requests + 1 / others))
    error = sqrt(worse * (1 - worse) / requests + base * (1 - base) / others)
    return _NORMAL.cdf((setting.more - asked * equal) / error)


def show(settings: list[CanarySetting], runs: int, requests: int, share: float) -> list[AlarmRates]:
    """Print a row for each setting."""
    print(f"{'':>22} {'Cavvy':>7} {'best':>7} {'fixed':>7} {'five looks':>11} {'median':>8}")
    found = []
    for setting in settings:
        rates = measure(setting, runs, requests, share)
        worse = setting.slower > 1 or setting.more > 0
        best = f"{bound_power(setting, requests, share):7.1%}" if worse else f"{'':>7}"
        after = "" if rates.median == inf else f"{rates.median:.0f}"
        print(
            f"{setting.name:>22} {rates.ours:7.1%} {best} {rates.fixed:7.1%} {rates.five:11.1%} "
            f"{after:>8}",
            flush=True,
        )
        found.append(rates)
    return found


def main() -> None:
    runs = 200 if "--quick" in sys.argv[1:] else 1000
    for title, requests, share in (
        ("2,000 of the canary, weight 10 %", REQUESTS, 0.1),
        ("2,000 in all, weight 50 %", REQUESTS // 2, 0.5),
    ):
        print(f"\n{title}; {runs} runs. Rolled back: 5 % more latency, no errors")
        show(latency_settings(SLOWER), runs, requests, share)
        print(f"\n{title}; {runs} runs. Rolled back: 1 % more errors, lognormal 0.3")
        show(error_settings(MORE_ERRORS), runs, requests, share)
        print(f"\n{title}; {runs} runs. Rolled back although equal (false alarms)")
        equal = show([*latency_settings(1.0), *error_settings(0.0)], runs, requests, share)
        print(f"most false alarms: {max(each.ours for each in equal):.1%} (bar: 1 %)")
    for share, others in ((0.1, 18_000), (0.5, 1000)):
        requests = REQUESTS if share < 0.5 else REQUESTS // 2
        asked = _NORMAL.inv_cdf(1 - ALPHA) + _NORMAL.inv_cdf(0.99)
        sigma = log(SLOWER) / (asked * sqrt(1 / requests + 1 / others))
        print(
            f"weight {share:.0%}: no test can find 5 % in 99 % of runs if the deviation of the "
            f"logarithm is more than {sigma:.2f} (x{exp(sigma):.2f})"
        )


if __name__ == "__main__":
    main()
