"""The service level that a service has reached over the last hour and the last day."""

from datetime import UTC, datetime, timedelta
from typing import Any

from cavvy.capabilities.serving.decide.service_figures import (
    LevelCounts,
    measure_level,
    record_level,
)
from cavvy.capabilities.serving.decide.traffic import ServiceTraffic
from cavvy.capabilities.serving.services_command import _show_level
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.capabilities.serving.wire import LevelShares, LevelView
from cavvy.task_files import parse_file

NOW = datetime(2026, 3, 1, 12, 2, tzinfo=UTC)
ZERO = ServiceTraffic(at_s=0.0)


def make_service(slo: str = "{p95: 2s, availability: 99.9%}") -> StoredService:
    (task,) = parse_file(f"run: serve\nservice: {{port: 8000, slo: {slo}}}\n").tasks
    return StoredService(project="p", name="s", id="s", task=task, created_at=NOW)


def tell(answered: int, at_s: float = 1.0, **more: Any) -> ServiceTraffic:
    more = {"arrivals": answered, "timed": answered, **more}
    return ServiceTraffic(at_s=at_s, answered=answered, **more)


def test_nothing_is_measured_without_requests_or_without_a_former_count() -> None:
    service = make_service()
    assert record_level(service, None, tell(1000), NOW) == service
    assert record_level(service, tell(7), tell(7, at_s=2.0), NOW) == service
    hour, day = measure_level(service, NOW)
    assert hour == day == LevelCounts()
    assert hour.availability is hour.in_time is None


def test_nothing_is_recorded_of_a_service_without_targets() -> None:
    service = make_service("{}")
    assert record_level(service, ZERO, tell(1000), NOW) == service


def test_lost_and_unserved_requests_count_against_availability() -> None:
    service = record_level(make_service(), ZERO, tell(97, lost=1, unserved=2, slow=97), NOW)
    hour, day = measure_level(service, NOW)
    assert hour == day == LevelCounts(answered=97, failed=3, timed=97, slow=97)
    assert (hour.availability, hour.in_time) == (0.97, 0.0)


def test_counts_of_the_same_minutes_are_added_up() -> None:
    first = tell(4, lost=1, unserved=3, slow=1)
    service = record_level(make_service(), ZERO, first, NOW)
    second = tell(10, at_s=2.0, lost=3, unserved=4, slow=3)
    service = record_level(service, first, second, NOW + timedelta(seconds=1))
    expected = LevelCounts(answered=10, failed=7, timed=10, slow=3)
    assert measure_level(service, NOW) == (expected, expected)


def test_answers_are_not_timed_without_a_target() -> None:
    service = record_level(make_service("{availability: 99%}"), ZERO, tell(5, slow=2), NOW)
    assert measure_level(service, NOW)[0] == LevelCounts(answered=5)


def test_counts_leave_the_hour_and_then_the_day() -> None:
    service = record_level(make_service(), ZERO, tell(4, slow=1), NOW)
    later = NOW + timedelta(minutes=30)
    service = record_level(service, tell(4, slow=1), tell(10, at_s=2.0, slow=1), later)
    assert [each.answered for each in measure_level(service, later)] == [10, 10]
    later = NOW + timedelta(minutes=70)
    assert [each.answered for each in measure_level(service, later)] == [6, 10]
    service = record_level(service, tell(10, at_s=2.0), tell(11, at_s=3.0), later)
    assert [each.answered for each in measure_level(service, later)] == [7, 11]
    assert [each.answered for each in measure_level(service, NOW + timedelta(days=2))] == [0, 0]


def test_a_restarted_gateway_counts_from_0() -> None:
    service = record_level(make_service(), tell(1000, at_s=50.0), tell(3, at_s=1.0), NOW)
    assert measure_level(service, NOW)[0].answered == 3


def test_what_is_stored_stays_small() -> None:
    service, answered = make_service(), 0
    for minute in range(3 * 24 * 60):
        before, answered = tell(answered, at_s=minute), answered + 1000
        after = tell(answered, at_s=minute + 1)
        service = record_level(service, before, after, NOW + timedelta(minutes=minute))
    assert len(service.level) < 4000


def test_the_level_is_shown() -> None:
    nothing = LevelShares(requests=0, availability=None, in_time=None)
    some = LevelShares(requests=2000, availability=0.9995, in_time=0.971)
    asked = LevelView(availability=0.999, p95_s=2.0, hour=some, day=nothing)
    assert _show_level(asked, nothing) == "not measured yet"
    assert _show_level(asked, some) == (
        "99.95% answered (wanted: 99.9%), 97.1% within 2 s (wanted: 95%); 2,000 requests"
    )


def test_counts_are_added_by_their_names() -> None:
    both = LevelCounts(answered=1, failed=2, timed=3, slow=4)
    assert both + both == LevelCounts(answered=2, failed=4, timed=6, slow=8)
