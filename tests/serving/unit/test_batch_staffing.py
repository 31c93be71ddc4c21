"""How many replicas a service with batches needs: the formula, against a simulated queue."""

from collections import deque
from heapq import heappop, heappush
from math import ceil
from random import Random

import pytest

from cavvy.capabilities.serving.autoscaler.load import ServiceLoad, count_for_wait
from cavvy.capabilities.serving.autoscaler.terms import ScalingTerms
from cavvy.capabilities.serving.loads import BatchFit
from cavvy.domain.values import replace

FIT = BatchFit(slope_s=0.005, base_s=0.2, most=32)
TERMS = ScalingTerms(concurrency=1)


def make_load(rate: float, fit: BatchFit = FIT) -> ServiceLoad:
    """An even load; its time of service is the share in a full batch, as the gateway counts."""
    share_s = fit.slope_s + fit.base_s / fit.most
    return ServiceLoad(rate=rate, service_s=share_s, unevenness=1.0, burst=False)


def simulate(rate: float, slots: int, fit: BatchFit = FIT) -> tuple[list[float], float]:
    """The waits of requests, each until its batch starts, and the mean size of a batch."""
    random, waits, sizes = Random(1), [], []
    waiting: deque[float] = deque()
    ends: list[float] = []
    free, arrival_s = slots, random.expovariate(rate)
    while len(waits) < 20_000:
        if ends and ends[0] <= arrival_s:
            now = heappop(ends)
            free += 1
        else:
            now = arrival_s
            waiting.append(now)
            arrival_s += random.expovariate(rate)
        while waiting and free:
            size = min(int(fit.most), ceil(len(waiting) / free))
            waits += [now - waiting.popleft() for _ in range(size)]
            sizes.append(size)
            heappush(ends, now + fit.expect_s(size))
            free -= 1
    return waits[2000:], sum(sizes) / len(sizes)


@pytest.mark.parametrize(("slots", "size"), [(1, 4.0), (1, 16.0), (4, 8.0), (8, 16.0)])
def test_batches_have_the_size_of_the_steady_state(slots: int, size: float) -> None:
    rate = slots * size / FIT.expect_s(size)
    assert size == pytest.approx(rate * FIT.base_s / (slots - rate * FIT.slope_s))
    waits, mean_size = simulate(rate, slots)
    assert mean_size == pytest.approx(size, rel=0.03)
    if slots == 1:
        assert sum(waits) / len(waits) == pytest.approx(FIT.expect_s(size) / 2, rel=0.05)


def count_late(rate: float, wait_s: float, slots: int) -> float:
    """The share of requests that wait too long."""
    waits, _ = simulate(rate, slots)
    return sum(wait > wait_s for wait in waits) / len(waits)


@pytest.mark.parametrize(("rate", "wait_s"), [(30, 0.2), (60, 0.2), (120, 0.2), (300, 0.15)])
def test_the_smallest_number_of_replicas_that_is_in_time_is_found(
    rate: float, wait_s: float
) -> None:
    terms = replace(TERMS, wait_s=wait_s)
    count = count_for_wait(make_load(rate), terms, 0.05, FIT)
    assert count_late(rate, wait_s, count) <= 0.05 < count_late(rate, wait_s, count - 1)
    assert count_for_wait(make_load(rate), terms, 0.05) < count, "without the time of batches"


@pytest.mark.parametrize("rate", [30, 60, 120, 240])
def test_a_wait_of_less_than_half_a_batch_is_nearly_kept(rate: float) -> None:
    """Batches of several replicas tend to end together, so the formula is an approximation."""
    terms = replace(TERMS, wait_s=0.1)
    count = count_for_wait(make_load(rate), terms, 0.05, FIT)
    assert count_late(rate, 0.1, count) < 0.1
    assert count_late(rate, 0.1, count_for_wait(make_load(rate), terms, 0.05)) > 0.25


def test_a_wait_that_exceeds_a_full_batch_needs_no_further_replicas() -> None:
    for rate in range(10, 500, 10):
        terms = replace(TERMS, wait_s=FIT.expect_s(FIT.most))
        load = make_load(float(rate))
        assert count_for_wait(load, terms, 0.05, FIT) == count_for_wait(load, terms, 0.05)


def test_a_wait_that_no_replica_can_keep_ends_at_the_maximum_or_without_waiting() -> None:
    terms = replace(TERMS, wait_s=1e-6)
    count = count_for_wait(make_load(60), terms, 0.05, FIT)
    waits, size = simulate(60, count)
    assert size < 1.05, "each request has a replica of its own"
    assert sum(wait > 0 for wait in waits) / len(waits) <= 0.05
    assert count_for_wait(make_load(60), replace(terms, most=7), 0.05, FIT) == 8


def test_slots_that_batches_without_a_base_time_would_fill_are_too_few() -> None:
    """The measured time of a request may be shorter than its share in a batch."""
    load = replace(make_load(200), service_s=0.001)
    assert load.rate * FIT.slope_s == 1.0
    assert count_for_wait(load, replace(TERMS, most=7, wait_s=0.1), 0.05, FIT) > 1


def test_a_full_batch_in_the_steady_state_is_not_too_large() -> None:
    """One request a second, in batches of two, each of which takes two seconds."""
    fit = BatchFit(slope_s=0.5, base_s=1.0, most=2.0)
    load = ServiceLoad(rate=1.0, service_s=0.9, unevenness=1.0, burst=False)
    counts = [
        count_for_wait(load, replace(TERMS, wait_s=2.0), 0.95, replace(fit, most=most))
        for most in (2.0, 1.9)
    ]
    assert counts == [1, 2]
