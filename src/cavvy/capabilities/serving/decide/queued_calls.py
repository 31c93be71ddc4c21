"""Decides what happens to queued calls: how many are sent at the same time, whether and when a
failed call is repeated, and which calls the objects of a bucket and cron lines trigger.

The ID of a call from a cron line is derived from the trigger and the time at which the call is due.
Therefore several servers that add the same call add it only once. If several due times were missed,
only the last due time causes a call, as for repeating jobs (`control/decide/schedule.py`).
"""

import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from cavvy.capabilities.serving.cloud_events import STRUCTURED, EventAttributes, to_headers, to_time
from cavvy.capabilities.serving.queued_calls import (
    BUCKET,
    MOST_BYTES,
    CallAnswer,
    CallState,
    QueuedCall,
    StoredObject,
)
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.domain.services import CronTrigger, EventTrigger, QueueTerms, ServiceSpec
from cavvy.domain.values import replace
from cavvy.planner.calendar import next_time, parse_cron

MOST_AT_ONCE = 256  # maximum number of queued calls of one service
_PER_REPLICA = 2  # factor of the number of calls that replicas can process at once
_LONGEST_PAUSE = timedelta(hours=1)
# statuses after which a call is repeated, in addition to all from 500 on
_PASSING = frozenset({408, 409, 425, 429})
# statuses that are not caused by the call: a budget is spent, or a rate limit was reached
_UNCOUNTED = frozenset({402, 429})
_EVENT_TYPE = "dev.cavvy.bucket.object.stored"


def count_at_once(spec: ServiceSpec) -> int:
    """Return how many calls may be in progress at the same time. By default, more calls are sent
    than all replicas can process at the same time, so that the autoscaler sees waiting calls. If
    `batch` is set, each concurrent request to a replica can carry a full batch of calls.
    """
    slots = spec.replicas.most * spec.concurrency
    if spec.batch is not None:
        slots *= spec.batch.most
    wanted = spec.queue.at_once or _PER_REPLICA * slots
    return max(1, min(wanted, MOST_AT_ONCE))


def find_timeout(spec: ServiceSpec) -> timedelta:
    """Return the time after which a call without an answer has failed."""
    timeouts = spec.timeouts
    return timeouts.queue + timeouts.response + timeouts.silence


def settle(call: QueuedCall, answer: CallAnswer, terms: QueueTerms, now: datetime) -> QueuedCall:
    """Return the call in its next state after an answer or a failure: done, dead, or waiting for
    its next try.
    """
    status = answer.status
    counted = status not in _UNCOUNTED
    call = replace(call, tries=call.tries + counted)
    if len(answer.body) > MOST_BYTES:
        problem = f"the answer has {len(answer.body):,} bytes; at most {MOST_BYTES:,} are stored"
        return _end(replace(call, problem=problem), CallState.DEAD, now, terms)
    told = replace(call, status=status, answer_headers=answer.headers)
    if status is not None and status < 400:
        return _end(replace(told, problem=""), CallState.DONE, now, terms)
    problem = answer.problem or f"the service answered with the status {status}"
    told = replace(told, problem=problem)
    repeats = not counted or status is None or status >= 500 or status in _PASSING
    if not repeats or (counted and told.tries >= terms.attempts):
        return _end(told, CallState.DEAD, now, terms)
    pause = min(terms.backoff * (1 << min(told.tries - counted, 20)), _LONGEST_PAUSE)
    asked = answer.headers.get("retry-after", "")
    if asked.isdecimal() and len(asked) < 6:
        pause = max(pause, min(timedelta(seconds=int(asked)), _LONGEST_PAUSE))
    return replace(told, due_at=now + pause)


def _end(call: QueuedCall, state: CallState, now: datetime, terms: QueueTerms) -> QueuedCall:
    return replace(call, state=state, ended_at=now, expires_at=now + terms.keep)


def revive(call: QueuedCall, now: datetime) -> QueuedCall:
    """Return the dead call, queued again with as many tries as a new call."""
    return replace(
        call, state=CallState.WAITING, due_at=now, tries=0, ended_at=None, expires_at=None
    )


def call_for_objects(
    service: StoredService, trigger: EventTrigger, objects: Sequence[StoredObject], now: datetime
) -> Sequence[QueuedCall]:
    """Return the calls that the objects of a bucket trigger. The ID of a call is derived from the
    bucket, the object's key and the object's version, so each version of an object triggers only
    one call. Folders cause no calls.
    """
    calls = []
    for each in objects:
        if each.key.endswith("/"):
            continue
        name = json.dumps([each.url, each.key, each.tag, trigger.path]).encode()
        calls.append(
            QueuedCall(
                project=service.project,
                service=service.name,
                id=hashlib.sha256(name).hexdigest()[:32],
                path=trigger.path,
                headers={"content-type": STRUCTURED},
                source=BUCKET,
                object=each,
                submitted_at=now,
                due_at=now,
            )
        )
    return calls


def make_object_event(call: QueuedCall, signed_url: str) -> bytes:
    """Return the body of a call that an object has triggered: a CloudEvent 1.0 in structured mode.
    The object can be read at `signed_url` for a limited time; the URL is "" if the object's store
    signs no URLs.
    """
    found = call.object
    assert found is not None
    event = {
        "specversion": "1.0",
        "id": call.id,
        "source": found.url,
        "type": _EVENT_TYPE,
        "subject": found.key,
        "time": to_time(found.changed_at or call.submitted_at),
        "datacontenttype": "application/json",
        "data": {"key": found.key, "size": found.size, "tag": found.tag, "url": signed_url},
    }
    return json.dumps(event).encode()


CRON = "cron"  # the source of calls that a cron line causes
_CRON_DUE = "dev.cavvy.cron.due"
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
        type=_CRON_DUE,
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
