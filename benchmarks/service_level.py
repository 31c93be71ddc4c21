"""Compares a wait that follows from `slo.p95` with fixed waits as targets of the autoscaler.

    python benchmarks/service_level.py    # some minutes of CPU

The autoscaler aims at a wait, but `slo.p95` bounds the wait and the time of service together. The
rule that is tried here, which the autoscaler does not have (docs/adr/0092), sets before each
decision, for p = `slo.p95` and the mean time S of service,

    wait_s  = max(p / 10, p - S)
    on_time = 0.95 + the share of requests that take longer than p even without a wait

and counts a request as late if it took longer than p only because it waited. It is compared with
the default target and with the best of `WAITS` x `SHARES`, chosen on the trace itself: the fewest
replica-hours with at least as many requests within p.
"""

from collections.abc import Iterator

from autoscaling import TRACES, make_setting, read_trace

from cavvy.capabilities.serving.autoscaler.terms import ScalingTerms, ServiceObservation
from cavvy.capabilities.simulation.serving.requests import RequestTrace
from cavvy.capabilities.simulation.serving.run import AutoscalerController, run_service
from cavvy.capabilities.simulation.serving.service import SimulatedService
from cavvy.domain.values import Struct, replace

NAMES = ("azure-code", "azure-conv", "mooncake-conversation", "mooncake-synthetic")
GOALS = (1.05, 1.5, 3.0)  # p, in multiples of the percentile 97.5 of the times of service
WAITS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
SHARES = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999)
DEFAULT = (10.0, 0.95)
_KEEP = 0.999  # the share of long requests is of about the last thousand


class LevelRun(Struct, frozen=True):
    """A run: its replica-hours, and the latency of each request."""

    hours: float
    latencies_s: list[float]

    def within(self, p95_s: float) -> float:
        return sum(each <= p95_s for each in self.latencies_s) / len(self.latencies_s)


class RecordingController(AutoscalerController):
    """Keeps the service, whose requests are looked at after the run."""

    service: SimulatedService

    def _observe(self, service: SimulatedService) -> ServiceObservation:
        self.service = service
        return super()._observe(service)


class LevelController(RecordingController):
    """The rule that is tried."""

    def __init__(self, terms: ScalingTerms, p95_s: float) -> None:
        super().__init__(terms)
        self._p95_s = p95_s
        self._next = 0
        self._open: list[tuple[float, float, float]] = []  # end, wait and time of service
        self._ended = self._long = 0.0

    def _observe(self, service: SimulatedService) -> ServiceObservation:
        seen, p95_s = super()._observe(service), self._p95_s
        ended = list(self._list_ended(service))
        keep = _KEEP ** len(ended)
        long = sum(work_s > p95_s for _, work_s in ended)
        self._ended, self._long = keep * self._ended + len(ended), keep * self._long + long
        late = sum(work_s <= p95_s < wait_s + work_s for wait_s, work_s in ended)
        allowed = 0.05 - (self._long / self._ended if self._ended else 0.0)
        mean_s = self._state.load.service_s or self._terms.service_s
        self._terms = replace(
            self._terms,
            wait_s=max(p95_s / 10, p95_s - mean_s),
            on_time=1 - min(0.5, max(0.002, allowed)),
        )
        return replace(seen, late=late, started=len(ended))

    def _list_ended(self, service: SimulatedService) -> Iterator[tuple[float, float]]:
        """Yield the wait and the time of service of each request that has ended since."""
        trace, waits_s = service.trace, service.record.waits_s
        while self._next < len(waits_s) and (wait_s := waits_s[self._next]) is not None:
            work_s = trace.services_s[self._next]
            self._open.append((trace.arrivals_s[self._next] + wait_s + work_s, wait_s, work_s))
            self._next += 1
        for end_s, wait_s, work_s in self._open:
            if end_s <= service.now_s:
                yield wait_s, work_s
        self._open = [each for each in self._open if each[0] > service.now_s]


def run(name: str, trace: RequestTrace, controller: RecordingController, wait_s: float) -> LevelRun:
    setting = replace(make_setting(name), slo_wait_s=wait_s)
    hours = run_service("cavvy", trace, setting, controller).replica_hours
    waits_s = controller.service.record.waits_s
    times = zip(waits_s, trace.services_s, strict=True)
    return LevelRun(hours, [work_s + (0.0 if wait is None else wait) for wait, work_s in times])


def main() -> None:
    print("trace                  p95 s   rule: hours  within   default        best fixed")
    for name in NAMES:
        trace = read_trace(name)
        mean_s = trace.work_s / len(trace.services_s)
        terms = ScalingTerms(concurrency=TRACES[name].concurrency, service_s=mean_s)
        fixed = {}
        for wait_s in WAITS:
            for share in SHARES:
                own = replace(terms, wait_s=wait_s, on_time=share)
                fixed[wait_s, share] = run(name, trace, RecordingController(own), wait_s)
        long_s = sorted(trace.services_s)[int(0.975 * (len(trace.services_s) - 1))]
        for factor in GOALS:
            p95_s = factor * long_s
            found = run(name, trace, LevelController(terms, p95_s), DEFAULT[0])
            within, usual = found.within(p95_s), fixed[DEFAULT]
            enough = [each for each in fixed.values() if each.within(p95_s) >= within]
            best = min(enough, key=lambda each: each.hours, default=None)
            told = "none" if best is None else f"{best.hours:6.2f}  {best.within(p95_s):6.1%}"
            print(
                f"{name:22} {p95_s:5.1f}  {found.hours:12.2f}  {within:6.1%}"
                f"   {usual.hours:6.2f}  {usual.within(p95_s):6.1%}   {told}",
                flush=True,
            )


if __name__ == "__main__":
    main()
