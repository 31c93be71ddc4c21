"""Measures the test that judges a canary: how often it finds a worse revision within 2,000
requests, and how often it blames an equal one.

    python benchmarks/canary.py            # about 40 minutes of CPU
    python benchmarks/canary.py --quick    # 100 runs of each

Each run draws the requests of two revisions. Blocks have ten requests of the canary and, at a
weight of 10 %, ninety of the old revision. `2,000 of the canary` counts those of the canary only,
`2,000 in all` those of both. `best` is a bound on the power of every test, sequential or not, that
blames equal revisions in at most 1 % of trials, whatever their share of errors is: the power of the
likelihood ratio of the two revisions against two equal ones (Neyman and Pearson), for the share
of errors of the equal ones for which it is least. For latency, it supposes that the deviation of
the logarithm is known. `Fisher` is the power of Fisher's exact test, once, at the end. Two rules
with fixed thresholds look after each 100 requests of the canary, and roll back if it has half of
the effect: 2.5 % more mean latency, or 0.5 % more errors (`fixed`), or if five looks in all say so
(`five looks`).
"""

import sys
from collections.abc import Callable
from math import exp, inf, lgamma, log, log1p, sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cavvy.control.decide.canary import CanaryTerms, draw_failed, judge, observe
from cavvy.domain.service_updates import GROUP, PROMOTED, CanaryTrial, RevisionSums

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


def rarely_long(random: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """One of a hundred requests takes thirty times as long."""
    late = random.random(shape) < 0.01
    return np.exp(0.2 * random.standard_normal(shape)) * np.where(late, 30.0, 1.0)


def delayed_together(random: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Four requests in a row share half of the variance, because other work on the node delays them
    together.
    """
    blocks, size = shape
    shared = random.standard_normal((blocks, -(-size // 4))).repeat(4, axis=1)[:, :size]
    return np.exp(0.3 * sqrt(0.5) * (shared + random.standard_normal(shape)))


class CanarySetting(NamedTuple):
    """Two revisions. `sigma` is the deviation of the logarithm of the latency. `together` are the
    factor of the latency and the share of errors of each block, which both revisions have in
    common.
    """

    name: str
    draw: Draw
    sigma: float
    base: float = 0.0  # the share of errors
    slower: float = 1.0
    more: float = 0.0
    together: Callable[[np.random.Generator, int], tuple[Floats, Floats]] | None = None


def drift(random: np.random.Generator, blocks: int) -> tuple[Floats, Floats]:
    """The latency changes by 5 % from block to block, up or down."""
    return np.exp(0.05 * random.standard_normal(blocks).cumsum()), np.zeros(blocks)


def fail_together(random: np.random.Generator, blocks: int) -> tuple[Floats, Floats]:
    """In three of a hundred blocks, four of ten requests fail."""
    return np.ones(blocks), np.where(random.random(blocks) < 0.03, 0.4, 0.0)


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
        for base in (0.0, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1)
    ]


def common_settings() -> list[CanarySetting]:
    """Equal revisions whose requests are not alike over time, or very unlike each other."""
    plain = lognormal(0.3)
    return [
        CanarySetting("drift of latency", plain, 0.3, base=0.01, together=drift),
        CanarySetting("outages of both", plain, 0.3, base=0.01, together=fail_together),
        CanarySetting("x30 in 1 %", rarely_long, 0.4, base=0.01),
        CanarySetting("delayed by fours", delayed_together, 0.3),
    ]


def gross_settings() -> list[CanarySetting]:
    plain, wide = lognormal(0.3), lognormal(1.0)
    return [
        *(
            CanarySetting(f"errors 1 % + {more:.0%}", plain, 0.3, base=0.01, more=more)
            for more in (0.02, 0.05, 0.09, 0.2, 0.99)
        ),
        *(
            CanarySetting(f"lognormal {sigma}, x{slower}", draw, sigma, slower=slower)
            for sigma, draw in ((0.3, plain), (1.0, wide))
            for slower in (1.1, 1.2, 1.5, 2.0)
        ),
    ]


def group(logs: Floats) -> RevisionSums:
    """The sums of the groups in a block. Unlike the gateway's, no group is in two blocks."""
    groups = len(logs) // GROUP
    means = logs[: groups * GROUP].reshape(groups, GROUP).mean(1)
    return RevisionSums(
        groups=groups, means=float(means.sum()), mean_squares=float((means**2).sum())
    )


def draw_sums(
    setting: CanarySetting,
    random: np.random.Generator,
    size: int,
    together: tuple[Floats, Floats],
    *,
    new: bool,
) -> tuple[list[RevisionSums], Floats, Floats]:
    """The sums of each block, and the latencies and the errors in it."""
    times, failing = together
    blocks = len(times)
    shape = (blocks, size)
    latency = setting.draw(random, shape) * times[:, None] * (setting.slower if new else 1.0)
    share = np.maximum(setting.base + (setting.more if new else 0.0), failing)
    errors = random.random(shape) < share[:, None]
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
        + group(logs[block][~errors[block]])
        for block in range(blocks)
    ]
    return sums, latency.mean(1), failed.astype(np.float64)


def run(setting: CanarySetting, seed: int, requests: int, share: float) -> tuple[float, int]:
    """After how many requests of the canary it is rolled back (inf: never), and how many looks of
    the fixed thresholds say so.
    """
    random = np.random.default_rng(seed)
    blocks, size = requests // BLOCK, round(BLOCK * (1 - share) / share)
    together = np.ones(blocks), np.zeros(blocks)
    if setting.together is not None:
        together = setting.together(random, blocks)
    old, old_s, old_failed = draw_sums(setting, random, size, together, new=False)
    new, new_s, new_failed = draw_sums(setting, random, BLOCK, together, new=True)
    looks = 0
    for block in range(LOOK // BLOCK, blocks + 1, LOOK // BLOCK):
        past = slice(0, block)
        slower = new_s[past].mean() > (1 + (SLOWER - 1) / 2) * old_s[past].mean()
        more = new_failed[past].mean() / BLOCK - old_failed[past].mean() / size
        looks += bool(slower or more > MORE_ERRORS / 2)
    trial, terms = CanaryTrial(), CanaryTerms(alpha=ALPHA, requests=requests)
    all_old = all_new = RevisionSums()
    for block in range(blocks):
        all_old, all_new = all_old + old[block], all_new + new[block]
        trial = observe(trial, all_old, all_new, terms)
        if (end := judge(trial, terms).end) is not None and end not in PROMOTED:
            return (block + 1) * BLOCK, looks
    return inf, looks


def measure(setting: CanarySetting, runs: int, requests: int, share: float) -> AlarmRates:
    found = [run(setting, seed, requests, share) for seed in range(runs)]
    return AlarmRates(
        ours=sum(at < inf for at, _ in found) / runs,
        fixed=sum(looks >= 1 for _, looks in found) / runs,
        five=sum(looks >= 5 for _, looks in found) / runs,
        median=sorted(at for at, _ in found)[runs // 2],
    )


def bound_power(setting: CanarySetting, requests: int, share: float) -> float:
    """No test of so many requests of the canary finds the difference more often."""
    others = round(requests * (1 - share) / share)
    if setting.slower > 1:
        asked = _NORMAL.inv_cdf(1 - ALPHA)
        error = setting.sigma * sqrt(1 / requests + 1 / others)
        return _NORMAL.cdf(log(setting.slower) / error - asked)
    base, worse = setting.base, setting.base + setting.more
    mean = (base * others + worse * requests) / (others + requests)
    shares = (mean * by for by in np.geomspace(0.25, 2, 49))
    return min(_bound_errors(base, worse, equal, requests, others) for equal in shares)


def _bound_errors(base: float, worse: float, equal: float, requests: int, others: int) -> float:
    """The power of the likelihood ratio of errors with these shares against equal shares."""
    failed, old = _count(requests, (worse, equal)), _count(others, (base, equal))
    under = np.outer(_binomial(failed, requests, worse), _binomial(old, others, base)).ravel()
    null = np.outer(_binomial(failed, requests, equal), _binomial(old, others, equal)).ravel()
    order = np.argsort(-under / np.maximum(null, 1e-300), kind="stable")
    alarms = null[order].cumsum()
    last = int(np.searchsorted(alarms, ALPHA))
    powers = under[order].cumsum()
    rest = (ALPHA - (alarms[last - 1] if last else 0.0)) / null[order][last]
    return float((powers[last - 1] if last else 0.0) + rest * under[order][last])


def power_of_fisher(setting: CanarySetting, requests: int, share: float) -> float:
    """The power of Fisher's exact test of all requests."""
    others = round(requests * (1 - share) / share)
    base, worse = setting.base, setting.base + setting.more
    failed, old = _count(requests, (worse,)), _count(others, (base,))
    likely = np.outer(_binomial(failed, requests, worse), _binomial(old, others, base))
    both = np.add.outer(failed, old)
    power = 0.0
    for total in range(int(both.min()), int(both.max()) + 1):
        known = draw_failed(requests, others, total)
        tails = np.cumsum(known.masses[::-1])
        bound = known.first + len(tails) - int(np.searchsorted(tails, ALPHA, side="right"))
        power += float(likely[(both == total) & (failed[:, None] >= bound)].sum())
    return power


def _count(size: int, shares: tuple[float, ...]) -> NDArray[np.int64]:
    """The numbers of errors that are at all likely with one of these shares."""
    reach = [8 * sqrt(size * each * (1 - each)) + 8 for each in shares]
    least = min(size * each - by for each, by in zip(shares, reach, strict=True))
    most = max(size * each + by for each, by in zip(shares, reach, strict=True))
    return np.arange(max(0, int(least)), min(size, int(most)) + 1)


def _binomial(counts: NDArray[np.int64], size: int, share: float) -> Floats:
    if share in (0, 1):  # the logarithms below do not exist
        return np.where(counts == size * share, 1.0, 0.0)
    ways = [lgamma(size + 1) - lgamma(each + 1) - lgamma(size - each + 1) for each in counts]
    odds = counts * log(share) + (size - counts) * log1p(-share)
    found: Floats = np.exp(np.array(ways) + odds)
    return found


def _show_bounds(setting: CanarySetting, requests: int, share: float) -> str:
    if setting.name.startswith("lognormal") and setting.slower > 1:
        return f"{bound_power(setting, requests, share):7.1%} {'':>7}"
    if not setting.more:
        return f"{'':>15}"
    bound, fisher = (each(setting, requests, share) for each in (bound_power, power_of_fisher))
    return f"{bound:7.1%} {fisher:7.1%}"


def show(settings: list[CanarySetting], runs: int, requests: int, share: float) -> list[AlarmRates]:
    """Print a row for each setting."""
    print(
        f"{'':>22} {'Cavvy':>7} {'best':>7} {'Fisher':>7} {'fixed':>7} {'five looks':>11} "
        f"{'median':>8}"
    )
    found = []
    for setting in settings:
        rates = measure(setting, runs, requests, share)
        after = "" if rates.median == inf else f"{rates.median:.0f}"
        print(
            f"{setting.name:>22} {rates.ours:7.1%} {_show_bounds(setting, requests, share)} "
            f"{rates.fixed:7.1%} {rates.five:11.1%} {after:>8}",
            flush=True,
        )
        found.append(rates)
    return found


def show_all(title: str, runs: int, requests: int, share: float) -> None:
    print(f"\n{title}. Rolled back: 5 % more latency, no errors")
    show(latency_settings(SLOWER), runs, requests, share)
    print(f"\n{title}. Rolled back: 1 % more errors, lognormal 0.3")
    show(error_settings(MORE_ERRORS), runs, requests, share)
    print(f"\n{title}. Rolled back: larger effects")
    show(gross_settings(), max(100, runs // 5), requests, share)
    print(f"\n{title}. Rolled back although equal (false alarms)")
    settings = [*latency_settings(1.0), *error_settings(0.0), *common_settings()]
    equal = [each.ours for each in show(settings, runs, requests, share)]
    print(f"false alarms: {max(equal):.1%} at most, {np.mean(equal):.2%} on average (bar: 1 %)")


def main() -> None:
    runs = 100 if "--quick" in sys.argv[1:] else 1000
    for title, requests, share in (
        ("2,000 of the canary, weight 10 %", REQUESTS, 0.1),
        ("2,000 in all, weight 50 %", REQUESTS // 2, 0.5),
    ):
        show_all(f"{title}; {runs} runs", runs, requests, share)
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
