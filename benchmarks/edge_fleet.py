"""How many devices meet a bad model before a rollout halts, and how often a good one halts.

    python benchmarks/edge_fleet.py [--devices 10000] [--runs 500]

The devices of each wave answer requests for a minute between two looks; the bad model fails 10 %
more of them. The rule of `control.decide.rollouts` is compared with a fixed threshold, which halts
if the share of failed requests to the new version exceeds that to the old one by 5 % after 100
requests: in waves that grow as those of the rule, and in waves whose devices all begin at once.
"""

import argparse
import random
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from math import ceil, log, log1p

from measure import table

from cavvy.capabilities.edge.nouns import (
    WAVES,
    DeviceReport,
    EdgeDevice,
    ModelReport,
    Rollout,
    RolloutPhase,
)
from cavvy.capabilities.edge.rollouts import count_wave, decide_rollout, order_devices
from cavvy.domain.service_updates import CanaryTrial, RevisionSums, UpdateEnd
from cavvy.domain.values import replace

_START = datetime(2026, 1, 1, tzinfo=UTC)
_PER_MINUTE = 6  # requests of a device
_SHARE = 0.02  # of the old version's requests that fail
# How many devices stand for those that each wave adds, since the rule reads totals: a device of a
# later wave has the requests of several.
_SEEN = (1, 100, 50, 100)
_COUNTED = 2000  # requests that are drawn one by one
_THRESHOLD, _LEAST = 0.05, 100
Rule = Callable[[Rollout, list[EdgeDevice], datetime], Rollout]


def make_sums(rng: random.Random, requests: int, share: float) -> RevisionSums:
    if requests > _COUNTED:  # the binomial distribution, by its normal approximation
        failed = round(rng.gauss(requests * share, (requests * share * (1 - share)) ** 0.5))
    else:
        failed, at = 0, _skip(rng, share)  # from one failure to the next
        while at <= requests:
            failed, at = failed + 1, at + _skip(rng, share)
    timed = requests - failed
    logs = timed * log(0.01) + rng.gauss(0, 0.3) * timed**0.5
    squares = timed * (log(0.01) ** 2 + 0.09)
    return RevisionSums(requests=requests, errors=failed, timed=timed, logs=logs, squares=squares)


def _skip(rng: random.Random, share: float) -> int:
    return 1 + int(log1p(-rng.random()) / log1p(-share))


def by_threshold(rollout: Rollout, devices: list[EdgeDevice], now: datetime) -> Rollout:
    """The fixed threshold, with the waves of the rule."""
    # the sequential test has no say
    ended = CanaryTrial(found=UpdateEnd.ENOUGH, new=RevisionSums(requests=1))
    decided = decide_rollout(replace(rollout, trial=ended), devices, now)
    old, new = decided.sums_old, decided.sums_new
    if new.requests >= _LEAST and old.requests:
        worse = new.errors / new.requests - old.errors / old.requests
        if worse > _THRESHOLD:
            return replace(decided, phase=RolloutPhase.HALTED)
    return decided


def at_once(rollout: Rollout, devices: list[EdgeDevice], now: datetime) -> Rollout:
    """The fixed threshold, with waves that do not grow."""
    return replace(by_threshold(rollout, devices, now), grown=0)


def represent(devices: int) -> tuple[list[float], tuple[float, ...]]:
    """Return for how many devices each one of the simulator stands, and the waves' shares of it."""
    weights: list[float] = []
    ends, before = [], 0
    for share, most in zip(WAVES, _SEEN, strict=True):
        more = max(1, ceil(share * devices)) - before
        seen = min(most, more)
        weights += [more / seen] * seen if seen else []
        ends.append(len(weights))
        before += more
    return weights, tuple((end - 0.5) / len(weights) for end in ends)


def run(rule: Rule, devices: int, share: float, seed: int) -> tuple[RolloutPhase, float]:
    """Return how the rollout ended, and how many devices had the new version by then."""
    rng = random.Random(seed)
    weights, waves = represent(devices)
    rollout = Rollout(
        project="p", name="m-1", model="m", to=2, waves=waves, wave_at=_START, created_at=_START
    )
    fleet = order_devices(
        rollout,
        [
            EdgeDevice(project="p", name=f"d{index}", site="s", key="", enrolled_at=_START)
            for index in range(len(weights))
        ],
    )
    totals = {each.name: {1: RevisionSums(), 2: RevisionSums()} for each in fleet}
    now, exposed = _START, 0.0
    for _ in range(600):
        now += timedelta(minutes=1)
        in_wave = count_wave(rollout, len(fleet))
        exposed = max(exposed, sum(weights[:in_wave]))
        told = []
        for place, (each, weight) in enumerate(zip(fleet, weights, strict=True)):
            version = 2 if place < in_wave else 1
            share_now = share if version == 2 else _SHARE
            totals[each.name][version] += make_sums(rng, round(_PER_MINUTE * weight), share_now)
            model = ModelReport(name="m", serving=version, sums=totals[each.name][version])
            told.append(replace(each, report=DeviceReport(at=now, models=(model,))))
        rollout = rule(rollout, told, now)
        if rollout.phase is not RolloutPhase.RUNNING:
            break
    return rollout.phase, exposed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=500)
    options = parser.parse_args()
    rows = []
    rules = {
        "sequential test": decide_rollout,
        "fixed threshold": by_threshold,
        "fixed threshold, waves at once": at_once,
    }
    for name, rule in rules.items():
        with ProcessPoolExecutor() as pool:
            bad, good = (
                list(pool.map(partial(run, rule, options.devices, share), range(options.runs)))
                for share in (_SHARE + 0.1, _SHARE)
            )
        exposed = [count for _, count in bad]
        missed = sum(phase is not RolloutPhase.HALTED for phase, _ in bad)
        halted = sum(phase is RolloutPhase.HALTED for phase, _ in good)
        rows.append(
            [
                name,
                f"{statistics.fmean(exposed):.1f}",
                f"{statistics.median(exposed):g}",
                f"{max(exposed):g}",
                f"{missed / options.runs:.1%}",
                f"{halted / options.runs:.1%}",
            ]
        )
    title = (
        f"{options.devices:,} devices, {options.runs} runs; a bad model fails 10 % more requests"
    )
    columns = ["rule", "mean exposed", "median", "most", "bad, not halted", "good, halted"]
    table(title, columns, rows)


if __name__ == "__main__":
    main()
