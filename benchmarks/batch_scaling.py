"""Measures the autoscaler on services whose requests are joined into batches, in simulation.

    CAVVY_DATA=FOLDER python benchmarks/batch_scaling.py  # about half a minute of CPU

A batch of n requests takes A * n + B. A free replica takes the requests that wait, at most `most`,
divided evenly among the free replicas, as the gateway does. A request is on time if its batch
starts within the wait. Two rules are compared: *blind* counts the share of a request in a full
batch only, *batches* also counts the wait for running batches (`staffing.py`). Both aim at 95 %.
The last column has the fewest replica-hours with which the blind rule has at least the same share
of requests on time as the other one, if it may aim at any of `ASKED`.

The fit and the time of service are exact from the beginning; the gateway learns them.
"""

import sys
from collections.abc import Iterator
from heapq import heappop, heappush
from math import ceil
from random import Random

from autoscaling import ASKED, read_trace

from cavvy.capabilities.serving.autoscaler.terms import ScalingTerms, ServiceObservation
from cavvy.capabilities.serving.loads import BatchFit
from cavvy.capabilities.simulation.serving.requests import RequestTrace
from cavvy.capabilities.simulation.serving.run import AutoscalerController, on_demand_market
from cavvy.capabilities.simulation.serving.service import (
    ServiceSetting,
    SimulatedReplica,
    SimulatedService,
)
from cavvy.domain.values import Struct, replace

SLOW = BatchFit(slope_s=0.2, base_s=2.0, most=16)  # a full batch takes 5.2 s
FAST = BatchFit(slope_s=0.005, base_s=0.2, most=32)  # 0.36 s
CASES = {
    "azure-code": (SLOW, (1.0, 2.0, 4.0, 10.0)),
    "azure-conv": (SLOW, (1.0, 2.0, 4.0, 10.0)),
    "mooncake-conversation": (SLOW, (1.0, 2.0, 4.0, 10.0)),
    "mooncake-synthetic": (SLOW, (1.0, 2.0, 4.0, 10.0)),
    "even, 60/s": (FAST, (0.1, 0.2, 1.0)),
}
_SHARE = 0.95


class BatchedService(SimulatedService):
    """A service whose replicas take several waiting requests as one."""

    def __init__(self, trace: RequestTrace, setting: ServiceSetting, fit: BatchFit) -> None:
        super().__init__(trace, setting, [on_demand_market(setting)], holds=True)
        self.fit = fit
        self.batches = 0
        self._running: dict[int, tuple[int, float]] = {}  # by the first request: size and start

    def _dispatch(self) -> None:
        while self.queue and self._free:
            busy, _, replica = heappop(self._free)
            if not replica.draining and replica.busy == busy:
                free = 1 + sum(not each.draining for _, _, each in self._free)
                self._start_batch(min(int(self.fit.most), ceil(len(self.queue) / free)), replica)

    def _start_batch(self, size: int, replica: SimulatedReplica) -> None:
        first = self.queue[0]
        for _ in range(size):
            request = self.queue.popleft()
            wait_s = self.now_s - self.trace.arrivals_s[request]
            self.record.waits_s[request] = wait_s
            self.late += wait_s > self.setting.slo_wait_s
        self.started += size
        self.batches += 1
        self.in_flight += 1
        self._begun_s += self.now_s
        replica.busy += 1
        self._running[first] = size, self.now_s
        end_s = self.now_s + self.fit.expect_s(size)
        heappush(self._ends, (end_s, first, replica.number, replica))

    def _end(self) -> None:
        _, first, _, replica = heappop(self._ends)
        size, began_s = self._running.pop(first)
        replica.busy -= 1
        self.in_flight -= 1
        self._begun_s -= began_s
        self.completed += size
        # as the gateway counts it: the share in a full batch
        self.completed_s += size * find_share_s(self.fit)
        if not replica.draining:
            heappush(self._free, (replica.busy, replica.number, replica))
            self._dispatch()
        elif not replica.busy:
            self._stop(replica)


class BatchController(AutoscalerController):
    """The autoscaler, with or without the time of batches."""

    def __init__(self, terms: ScalingTerms, fit: BatchFit | None) -> None:
        super().__init__(terms)
        self._fit = fit

    def _observe(self, service: SimulatedService) -> ServiceObservation:
        return replace(super()._observe(service), batch=self._fit)


class RunPoint(Struct, frozen=True):
    on_time: float
    hours: float
    size: float  # the mean number of requests in a batch


def find_share_s(fit: BatchFit) -> float:
    """Return the share of a request in a full batch."""
    return fit.expect_s(fit.most) / fit.most


def run(trace: RequestTrace, fit: BatchFit, wait_s: float, asked: float, told: bool) -> RunPoint:
    setting = ServiceSetting(concurrency=1, slo_wait_s=wait_s)
    service = BatchedService(trace, setting, fit)
    service.start_warm(0, 1)
    terms = ScalingTerms(wait_s=wait_s, on_time=asked, least=1, service_s=find_share_s(fit))
    controller = BatchController(terms, fit if told else None)
    second = 0
    while not service.done:
        second += 1
        service.advance(second)
        controller.watch(service)
        if second % controller.interval_s == 0:
            service.order(controller.order(service))
    service.finish()
    waits = service.record.waits_s
    on_time = sum(each is not None and each <= wait_s for each in waits) / len(waits)
    return RunPoint(on_time, service.replica_s / 3600, len(waits) / service.batches)


def find_trace(name: str) -> RequestTrace:
    if not name.startswith("even"):
        return read_trace(name)
    random, at_s, arrivals = Random(1), 0.0, []
    while (at_s := at_s + random.expovariate(60.0)) < 1800:
        arrivals.append(at_s)
    return RequestTrace(name=name, arrivals_s=tuple(arrivals), services_s=(0.0,) * len(arrivals))


def measure(name: str) -> Iterator[str]:
    fit, waits = CASES[name]
    trace = find_trace(name)
    for wait_s in waits:
        blind = {asked: run(trace, fit, wait_s, asked, told=False) for asked in ASKED}
        own, old = run(trace, fit, wait_s, _SHARE, told=True), blind[_SHARE]
        equal = [each.hours for each in blind.values() if each.on_time >= own.on_time]
        yield (
            f"| {name} | {wait_s:g} | {old.hours:.2f}, {100 * old.on_time:.1f} % "
            f"| {own.hours:.2f}, {100 * own.on_time:.1f} % | {own.size:.1f} "
            f"| {f'{min(equal):.2f}' if equal else 'not reached'} |"
        )


def main() -> None:
    print(
        "| trace | wait, s | blind: replica-hours, on time | batches | mean size | blind, equal |"
    )
    print("|---|---|---|---|---|---|")
    for name in sys.argv[1:] or CASES:
        for row in measure(name):
            print(row, flush=True)


if __name__ == "__main__":
    main()
