"""How many devices meet a bad model before a rollout halts, and how often a good one halts.

    python benchmarks/edge_fleet.py [--devices 10000] [--runs 500]

The devices of each wave answer requests for a minute between two looks; the bad model fails 10 %
more of them. The rule of `control.decide.rollouts` is compared with a fixed threshold in the same
waves, which halts if the share of failed requests to the new version exceeds that to the old one by
5 % after 100 requests.
"""

import argparse
import random
import statistics
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from math import log

from measure import table

from cavvy.control.decide.rollouts import count_wave, decide_rollout, order_devices
from cavvy.domain.edge import DeviceReport, EdgeDevice, ModelReport, Rollout, RolloutPhase
from cavvy.domain.service_updates import RevisionSums
from cavvy.domain.values import replace

_START = datetime(2026, 1, 1, tzinfo=UTC)
_PER_MINUTE = 6  # requests of a device
_SHARE = 0.02  # of the old version's requests that fail
_SEEN = 200  # devices whose sums stand for all, since the rule reads only the totals
_COUNTED = 2000  # requests that are drawn one by one
_THRESHOLD, _LEAST = 0.05, 100
Rule = Callable[[Rollout, list[EdgeDevice], datetime], Rollout]


def make_sums(rng: random.Random, requests: int, share: float) -> RevisionSums:
    if requests > _COUNTED:  # the binomial distribution, by its normal approximation
        failed = round(rng.gauss(requests * share, (requests * share * (1 - share)) ** 0.5))
    else:
        failed = sum(rng.random() < share for _ in range(requests))
    timed = requests - failed
    logs = timed * log(0.01) + rng.gauss(0, 0.3) * timed**0.5
    squares = timed * (log(0.01) ** 2 + 0.09)
    return RevisionSums(requests=requests, errors=failed, timed=timed, logs=logs, squares=squares)


def by_threshold(rollout: Rollout, devices: list[EdgeDevice], now: datetime) -> Rollout:
    """The fixed threshold, with the waves of the rule."""
    decided = decide_rollout(replace(rollout, alpha=1e-300), devices, now)
    old, new = decided.sums_old, decided.sums_new
    if new.requests >= _LEAST and old.requests:
        worse = new.errors / new.requests - old.errors / old.requests
        if worse > _THRESHOLD:
            return replace(decided, phase=RolloutPhase.HALTED)
    return decided


def run(rule: Rule, devices: int, share: float, seed: int) -> tuple[RolloutPhase, int]:
    """Return how the rollout ended, and how many devices had the new version by then."""
    rng = random.Random(seed)
    seen = min(devices, _SEEN)
    scale = devices / seen
    rollout = Rollout(project="p", name="m-1", model="m", to=2, wave_at=_START, created_at=_START)
    fleet = [
        EdgeDevice(project="p", name=f"d{index}", site="s", key="", enrolled_at=_START)
        for index in range(seen)
    ]
    totals = {each.name: {1: RevisionSums(), 2: RevisionSums()} for each in fleet}
    now, exposed = _START, 0
    for _ in range(600):
        now += timedelta(minutes=1)
        exposed = max(exposed, count_wave(rollout, devices))
        in_wave = count_wave(rollout, seen)
        fresh = {each.name for each in order_devices(rollout, fleet)[:in_wave]}
        parts = exposed / max(1, in_wave)
        told = []
        for each in fleet:
            version = 2 if each.name in fresh else 1
            requests = max(1, round(_PER_MINUTE * (parts if version == 2 else scale)))
            totals[each.name][version] += make_sums(
                rng, requests, share if version == 2 else _SHARE
            )
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
    for name, rule in (("sequential test", decide_rollout), ("fixed threshold", by_threshold)):
        bad = [run(rule, options.devices, _SHARE + 0.1, seed) for seed in range(options.runs)]
        good = [run(rule, options.devices, _SHARE, seed) for seed in range(options.runs)]
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
