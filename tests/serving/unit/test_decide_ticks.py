"""Calls by cron lines: which times cause calls, and what the calls contain."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cavvy.capabilities.serving.cloud_events import EventAttributes, to_headers
from cavvy.capabilities.serving.decide.queued_calls import (
    call_at,
    find_last,
    find_next,
    make_anchor,
)
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.domain.services import CronTrigger
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import replace

NOW = datetime(2026, 1, 5, 12, 2, tzinfo=UTC)  # a Monday
SERVICE = StoredService(
    project="p", name="s", id="i", created_at=NOW, task=TaskSpec(name="s", run="x")
)
FIVE = CronTrigger(cron="*/5 * * * *", path="/x", body='{"a": 1}')


@pytest.mark.parametrize(
    ("cron", "since_min", "last"),
    [
        ("*/5 * * * *", 60, NOW.replace(minute=0)),
        ("*/5 * * * *", 2, None),  # 12:00 itself is not after 12:00
        ("2 12 * * *", 1, NOW),
        ("0 3 * * 6", 60 * 24 * 30, datetime(2026, 1, 3, 3, tzinfo=UTC)),
        ("0 3 30 2 *", 60 * 24 * 365, None),
    ],
)
def test_the_last_time_that_passed_is_found(
    cron: str, since_min: int, last: datetime | None
) -> None:
    trigger = CronTrigger(cron=cron)
    assert find_last(trigger, NOW - timedelta(minutes=since_min), NOW) == last


@settings(max_examples=30, deadline=None)
@given(
    cron=st.sampled_from(["*/20 * * * *", "*/7 3,4 * * *", "59 23 * * 0", "30 2 * * *"]),
    zone=st.sampled_from(["UTC", "Europe/Berlin", "Australia/Lord_Howe"]),
    start=st.datetimes(datetime(2026, 1, 1), datetime(2026, 12, 1)),
    minutes=st.integers(0, 300),
)
def test_the_last_time_is_the_one_that_counting_finds(
    cron: str, zone: str, start: datetime, minutes: int
) -> None:
    trigger, since = CronTrigger(cron=cron, time_zone=zone), start.replace(tzinfo=UTC)
    now, counted, upcoming = since + timedelta(minutes=minutes), None, find_next(trigger, since)
    while upcoming is not None and upcoming <= now:
        counted, upcoming = upcoming, find_next(trigger, upcoming)
    assert find_last(trigger, since, now) == counted


def test_the_id_of_a_call_follows_from_its_trigger_and_its_time() -> None:
    due = NOW.replace(minute=0)
    call = call_at(SERVICE, FIVE, due)
    others = [replace(FIVE, **{name: "* * * * 1"}) for name in ("cron", "path", "body")]
    calls = [call, call_at(SERVICE, FIVE, NOW), *(call_at(SERVICE, each, due) for each in others)]
    assert len({each.id for each in calls}) == 5
    assert call == call_at(replace(SERVICE, id="another", revision=9), FIVE, due)
    assert call.id != make_anchor(SERVICE, FIVE, NOW).id
    assert dict(call.headers) == {
        "ce-specversion": "1.0",
        "ce-id": call.id,
        "ce-source": "/projects/p/services/s",
        "ce-type": "dev.cavvy.cron.due",
        "ce-subject": "*/5%20*%20*%20*%20*",
        "ce-time": "2026-01-05T12:00:00Z",
        "content-type": "application/json",
    }
    assert call_at(SERVICE, CronTrigger(cron="* * * * *"), NOW).headers["content-type"] == (
        "text/plain; charset=utf-8"
    )


def test_header_values_are_encoded_as_the_specification_says() -> None:
    event = EventAttributes(
        id='a"%', source="/x", type="t", others={"said": "Euro \u20ac \U0001f600"}
    )
    headers = to_headers(event)
    assert headers["ce-said"] == "Euro%20%E2%82%AC%20%F0%9F%98%80"  # its own example, 3.1.3.2
    assert headers["ce-id"] == "a%22%25"
    assert "ce-time" not in headers
