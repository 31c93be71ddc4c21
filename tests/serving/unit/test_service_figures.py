"""The figures of a service, minute by minute."""

from datetime import UTC, datetime, timedelta
from typing import Any

from cavvy.capabilities.serving.decide.service_figures import (
    ServiceMinute,
    count_minute,
    make_block,
)
from cavvy.capabilities.serving.decide.traffic import ServiceTraffic
from cavvy.capabilities.serving.loads import TokenTimes, bucket_of
from cavvy.capabilities.serving.replicas import ReplicaState, ServiceReplica
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.domain.figures import FigureBlock
from cavvy.domain.values import replace
from cavvy.store.figures import MOST_BYTES, pack
from cavvy.task_files import parse_file

NOW = datetime(2026, 3, 1, 12, 2, tzinfo=UTC)
FIRST = int(NOW.timestamp()) // 60
ZERO = ServiceTraffic(at_s=0.0)
(TASK,) = parse_file("{run: serve, service: {port: 8000}}").tasks
SERVICE = StoredService(project="p", name="s", id="s", task=TASK, created_at=NOW)


def tell(at_s: float, arrivals: int = 0, **more: Any) -> ServiceTraffic:
    return ServiceTraffic(at_s=at_s, arrivals=arrivals, **more)


def look(
    *traffic: ServiceTraffic, service: StoredService = SERVICE, before: ServiceTraffic | None = ZERO
) -> ServiceMinute:
    """The minute after the service was looked at once a second."""
    minute = None
    for second, each in enumerate(traffic):
        minute = count_minute(minute, service, before, each, NOW + timedelta(seconds=second))
        before = each
    assert minute is not None
    return minute


def means(block: FigureBlock | None) -> dict[str, float]:
    assert block is not None
    return {name: each.mean[0] for name, each in block.columns.items()}


def replica(**fields: Any) -> ServiceReplica:
    usual = {"revision": 1, "market": "local", "ordered_at": NOW - timedelta(seconds=90)}
    return ServiceReplica(id="r", service="s", **usual | fields)


def test_a_minute_has_rates_the_latency_of_its_own_answers_levels_and_starts() -> None:
    ready = replica(state=ReplicaState.READY, ready_at=NOW - timedelta(seconds=30))
    service = replace(SERVICE, target=2, replicas=(ready, replica(state=ReplicaState.STARTING)))
    slow = bucket_of(9_000_000)
    before = tell(0.0, 1000, latency={slow: 1000})
    fast = {slow: 1000, bucket_of(1000): 20}
    minute = look(
        tell(10.0, 1010, backlog=4, latency=fast, per_s=1.0),
        tell(20.0, 1020, backlog=0, latency=fast, lost=1, unserved=3, per_s=2.0),
        service=service,
        before=before,
    )
    block = make_block(replace(minute, starts_s=(60.0,)))
    found = means(block)
    assert (found["requests_per_s"], found["failed_per_s"]) == (1.0, 0.2)
    assert found["latency_p95_s"] < 0.002, "the slow answers were in an earlier minute"
    assert (found["waiting"], found["replicas_ready"], found["replicas_wanted"]) == (2.0, 1, 2)
    assert found["cold_start_s"] == 60.0
    assert minute.starts_s == (60.0, 60.0), "not marked, as after a write that was refused"
    assert "tokens_per_s" not in found
    assert block is not None
    assert (block.attempt_id, block.rank, block.minutes) == ("s", 0, [FIRST])
    assert (block.columns["waiting"].low, block.columns["waiting"].high) == ([0], [4])
    assert block.columns["requests_per_s"].high == [2.0]
    marked = replace(service, replicas=(replace(ready, measured=True),))
    assert look(tell(1.0, 5), service=marked).starts_s == ()


def test_nothing_is_counted_twice_after_a_start_of_the_server_or_the_gateway() -> None:
    assert look(tell(5.0, 10_000, tokens=TokenTimes(completion=9.0)), before=None).counts == {
        "requests": 0,
        "failed": 0,
        "tokens": 0,
    }
    again = look(tell(9.0, 7), tell(0.5, 3, process="new"), tell(2.5, 5, process="new"))
    assert again.counts["requests"] == 7 + 3 + 2
    assert again.seconds == 9.0 + 2.0, "by the clock of the gateway"


def test_minutes_without_requests_and_replicas_are_left_out_but_for_the_first() -> None:
    busy = look(tell(1.0, 5))
    idle = count_minute(busy, SERVICE, ZERO, ZERO, NOW + timedelta(minutes=1))
    later = count_minute(idle, SERVICE, ZERO, ZERO, NOW + timedelta(minutes=2))
    assert [make_block(each) is None for each in (busy, idle, later)] == [False, False, True]
    assert means(make_block(idle))["requests_per_s"] == 0.0


def test_clocks_that_jump_and_services_of_the_same_name_begin_another_minute() -> None:
    first = look(tell(1.0, 5))
    for jump in (timedelta(days=-3), timedelta(days=400), timedelta(seconds=61)):
        other = count_minute(first, SERVICE, tell(1.0, 5), tell(2.0, 6), NOW + jump)
        assert (other.number, other.counts["requests"]) == (
            int((NOW + jump).timestamp()) // 60,
            1,
        )
    renamed = count_minute(first, replace(SERVICE, id="s2"), None, tell(2.0, 6), NOW)
    assert (renamed.service, renamed.counts["requests"]) == ("s2", 0)
    back = count_minute(first, SERVICE, tell(9.0, 50), tell(3.0, 8), NOW)
    assert means(make_block(back))["requests_per_s"] > 0, "counts that fall began again"


def test_a_day_takes_no_more_than_a_rank() -> None:
    minute = look(tell(60.0, 600, latency={bucket_of(5000): 9}, tokens=TokenTimes(completion=70.0)))
    block = make_block(replace(minute, starts_s=(1.5, 80.0)))
    assert block is not None
    assert len(pack(block)) < MOST_BYTES / 20
