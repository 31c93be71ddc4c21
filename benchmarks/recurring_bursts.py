"""Measures the autoscaler on made-up days with bursts that come again, beside KEDA's rule.

    python benchmarks/recurring_bursts.py             # all days, about 6 minutes of CPU
    python benchmarks/recurring_bursts.py day jitter  # only these

Each day has six hours without a request, then a ramp to four times the requests of its beginning,
and a fall in the evening. Bursts come every `period_s` for `length_s`. Requests take 8 s on average
(exponential), a replica processes four at once, and a request is on time if it waits at most 10 s;
the aim is 95 %. KEDA's rule has its defaults and, as `best`, the target and stabilisation of its
grid with the fewest replica-hours among those that reach the aim, if one does.
"""

import sys
from bisect import bisect_right
from collections.abc import Iterator
from itertools import product
from random import Random
from typing import NamedTuple

from cavvy.capabilities.serving.autoscaler.terms import ScalingTerms
from cavvy.capabilities.simulation.serving.requests import RequestTrace
from cavvy.capabilities.simulation.serving.rules import KedaRule
from cavvy.capabilities.simulation.serving.run import (
    AutoscalerController,
    RuleController,
    ServingScore,
    run_service,
)
from cavvy.capabilities.simulation.serving.service import ServiceSetting

HOUR_S, SERVICE_S, SLOTS, AIM = 3600.0, 8.0, 4, 0.95
GRID = tuple(product((0.5, 0.7, 0.85, 1.0), (300, 900)))


class MadeUpDay(NamedTuple):
    """A day: requests per second in the middle of the ramp, the bursts, and the cold start."""

    base: float = 0.6
    period_s: float = 2400.0
    length_s: float = 240.0
    height: float = 4.0
    jitter_s: float = 0.0
    quiet: tuple[int, int] = (0, 6)
    cold_start_s: float = 60.0


DAYS = {
    "day": MadeUpDay(),
    "20 minutes": MadeUpDay(period_s=1200.0, length_s=120.0),
    "25 minutes": MadeUpDay(period_s=1500.0, length_s=180.0, quiet=(2, 8)),
    "60 minutes": MadeUpDay(period_s=3600.0, length_s=300.0, height=3.0),
    "eight times": MadeUpDay(base=0.4, height=8.0),
    "cold start of 180 s": MadeUpDay(period_s=1800.0, cold_start_s=180.0),
    "jitter": MadeUpDay(jitter_s=120.0),
    "no bursts": MadeUpDay(height=1.0),
}


def make_trace(name: str, day: MadeUpDay) -> RequestTrace:
    random, begins, at = Random(0), list[float](), day.period_s / 2
    while at < 24 * HOUR_S:
        begins.append(at + random.uniform(-day.jitter_s, day.jitter_s))
        at += day.period_s
    arrivals, now_s, most = list[float](), 0.0, day.base * 2 * day.height * 1.2
    while now_s < 24 * HOUR_S:
        now_s += random.expovariate(most)
        if random.random() < _find_rate(day, begins, now_s) / most:
            arrivals.append(now_s)
    return RequestTrace(
        name=name,
        arrivals_s=tuple(each - arrivals[0] for each in arrivals),
        services_s=tuple(random.expovariate(1 / SERVICE_S) for _ in arrivals),
    )


def _find_rate(day: MadeUpDay, begins: list[float], now_s: float) -> float:
    hour = now_s / HOUR_S
    if day.quiet[0] <= hour < day.quiet[1]:
        return 0.0
    rise, fall = 0.5 + 1.5 * min(1.0, max(0.0, (hour - 6) / 8)), 2.0 * (1 - (hour - 16) / 10)
    rate = day.base * (rise if hour < 16 else fall)
    last = bisect_right(begins, now_s) - 1
    return rate * day.height if last >= 0 and now_s - begins[last] < day.length_s else rate


def run_own(trace: RequestTrace, setting: ServiceSetting) -> ServingScore:
    terms = ScalingTerms(
        on_time=AIM,
        concurrency=SLOTS,
        service_s=SERVICE_S,
        cold_start_s=setting.cold_start_s,
    )
    return run_service("cavvy", trace, setting, AutoscalerController(terms))


def run_keda(trace: RequestTrace, setting: ServiceSetting) -> Iterator[ServingScore]:
    for target, down_s in GRID:
        rule = KedaRule(target=target, stabilisation_s=down_s)
        yield run_service("keda", trace, setting, RuleController(rule, SERVICE_S))


def main() -> None:
    wrong = [each for each in sys.argv[1:] if each not in DAYS]
    if wrong:
        sys.exit(f"there is no day {wrong[0]!r}; known: {', '.join(DAYS)}")
    for name in sys.argv[1:] or DAYS:
        trace = make_trace(name, DAYS[name])
        setting = ServiceSetting(concurrency=SLOTS, cold_start_s=DAYS[name].cold_start_s)
        own = run_own(trace, setting)
        print(f"{name}: cavvy {_show(own)}", end="", flush=True)
        usual = run_service("keda", trace, setting, RuleController(KedaRule(), SERVICE_S))
        print(f"; keda {_show(usual)}", end="", flush=True)
        enough = [each for each in run_keda(trace, setting) if each.on_time >= AIM]
        best = min(enough, key=lambda each: each.replica_hours, default=None)
        print(f"; best {_show(best) if best else 'does not reach the aim'}", flush=True)


def _show(score: ServingScore) -> str:
    return f"{100 * score.on_time:.1f} % on time, {score.replica_hours:.1f} replica-hours"


if __name__ == "__main__":
    main()
