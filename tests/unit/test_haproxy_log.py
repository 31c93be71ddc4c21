"""What is computed from HAProxy's log and statistics."""

from math import exp

import pytest

from cavvy.api.serving.haproxy_plane import DirectCount, add_latency, add_load
from cavvy.control.decide.traffic import ServiceTraffic
from cavvy.gateway.haproxy.configuration import SAMPLED
from cavvy.gateway.haproxy.request_log import (
    LoggedRequest,
    RequestTimes,
    estimate_busy_s,
    read_line,
)
from cavvy.gateway.haproxy.runtime import HaproxyLoad


def test_lines_of_replicas_are_read_and_others_are_not() -> None:
    assert read_line(b"svc-a a-1.7 499 2500\n") == LoggedRequest("svc-a", "a-1", 1, 2500)
    assert read_line(b"svc-a a-1.7 500 -3\n") == LoggedRequest("svc-a", "a-1", SAMPLED, 0)
    others = (b"svc-a hold 1 9", b"hold <NOSRV> 1 9", b"svc-a a-1.7 - -", b"", b"\xff", b"a b c")
    assert [read_line(each) for each in others] == [None] * len(others)


def test_a_sampled_line_stands_for_its_weight() -> None:
    times = RequestTimes()
    times.add(LoggedRequest("svc-a", "r", 16, 1000))
    times.add(LoggedRequest("svc-a", "r", 1, 18_000))
    assert sum(times.latency.values()) == 17
    assert times.take_means() == {"r": 34_000 / 17 / 1e6}
    assert times.take_means() == {}
    found = add_latency(ServiceTraffic(at_s=0, p50_s=9), {4: 1}, times.latency)
    assert found.p50_s is not None
    assert found.p99_s is not None
    assert found.p50_s < 0.002 < 0.018 <= found.p99_s
    assert add_latency(ServiceTraffic(at_s=0, p50_s=9), {}, {}).p50_s == 9


@pytest.mark.parametrize(
    ("begun", "mean_s", "before", "now", "busy_s"),
    [
        (0, 0.1, 0, 0, 0.0),
        (1, 0.1, 0, 0, 2 * (1 - exp(-0.05))),
        (1000, 0.1, 50, 50, 2.0),
        (1, 60.0, 0, 1, 1.0),
        (0, 0.1, 1, 1, 2.0),  # a request that takes longer than the period
    ],
)
def test_a_replica_is_busy_for_at_most_the_period(
    begun: int, mean_s: float, before: int, now: int, busy_s: float
) -> None:
    assert estimate_busy_s(2.0, begun, mean_s, before, now) == pytest.approx(busy_s, rel=1e-9)
    assert estimate_busy_s(0.0, begun, mean_s, before, now) == 0


def test_counts_go_on_with_another_process_and_a_replica_that_is_added_again() -> None:
    def load(arrivals: int, begun: dict[str, int]) -> HaproxyLoad:
        return HaproxyLoad(arrivals=arrivals, begun=begun, replicas=dict.fromkeys(begun, 0))

    counted = add_load(DirectCount(at_s=10), load(5, {"a": 5}), {"a": 0.1}, 11)
    assert counted.work["a"].requests == 5
    assert counted.work["a"].work_us == round((1 - exp(-0.5)) * 1e6)
    counted = add_load(counted, load(7, {"a": 2, "b": 0}), {}, 12)
    assert (counted.work["a"].requests, counted.arrivals) == (7, 7)
    assert "b" not in counted.work
    counted = add_load(counted, load(1, {"a": 1}), {}, 13)  # another process
    assert (counted.work["a"].requests, counted.arrivals) == (8, 8)
