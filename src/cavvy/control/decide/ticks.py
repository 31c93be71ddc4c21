"""Decides when a service is called, according to the service's cron lines.

A call's ID is derived from the trigger and the time at which the call is due. Therefore several
servers that add the same call add it only once. If several due times were missed, only the last due
time causes a call, as for repeating jobs (`control/decide/schedule.py`).
"""

import hashlib
import json
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from cavvy.domain.cloud_events import EventAttributes, to_headers, to_time
from cavvy.domain.queued_calls import CallState, QueuedCall
from cavvy.domain.services import CronTrigger
from cavvy.domain.stored_services import StoredService
from cavvy.planner.calendar import next_time, parse_cron

CRON = "cron"  # the source of calls that a cron line causes
_EVENT_TYPE = "dev.cavvy.cron.due"
_MINUTE = timedelta(minutes=1)


def find_next(trigger: CronTrigger, after: datetime) -> datetime | None:
    """Return the trigger's first time after `after`, or None if no day matches its cron line."""
    return next_time(parse_cron(trigger.cron), ZoneInfo(trigger.time_zone), after)


def find_last(trigger: CronTrigger, since: datetime, now: datetime) -> datetime | None:
    """Return the trigger's last time in the period after `since` and up to `now`, or None if there
    is no such time.
    """
    found, end = find_next(trigger, since), now
    if found is None or found > now:
        return None
    # bisection: `found` is a time of the line, and the line has no time between `end` and `now`
    while end - found >= _MINUTE:
        middle = found + (end - found) / 2
        later = find_next(trigger, middle)
        if later is not None and later <= end:
            found = later
        else:
            end = middle
    return found


def make_anchor(service: StoredService, trigger: CronTrigger, now: datetime) -> QueuedCall:
    """Return a row that causes no call, and only records when the trigger was first seen."""
    return QueuedCall(
        project=service.project,
        service=service.name,
        id=f"cron-{_name(trigger)}",
        state=CallState.FORGOTTEN,
        source=CRON,
        submitted_at=now,
        due_at=now,
    )


def call_at(service: StoredService, trigger: CronTrigger, due: datetime) -> QueuedCall:
    """Return the call that a trigger causes at the time `due`."""
    at = due.astimezone(UTC)
    call_id = f"cron-{_name(trigger)}-{at:%Y%m%dT%H%M%SZ}"
    attributes = EventAttributes(
        id=call_id,
        source=f"/projects/{service.project}/services/{service.name}",
        type=_EVENT_TYPE,
        subject=trigger.cron,
        time=to_time(at),
    )
    return QueuedCall(
        project=service.project,
        service=service.name,
        id=call_id,
        path=trigger.path,
        headers={**to_headers(attributes), "content-type": _content_type(trigger.body)},
        source=CRON,
        submitted_at=due,
        due_at=due,
    )


def _name(trigger: CronTrigger) -> str:
    parts = [trigger.cron, trigger.time_zone, trigger.path, trigger.body]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _content_type(body: str) -> str:
    try:
        json.loads(body)
    except ValueError:
        return "text/plain; charset=utf-8"
    return "application/json"
