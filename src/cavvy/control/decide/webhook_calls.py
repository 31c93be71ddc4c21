"""Decides which calls a verified request to a webhook triggers.

A request that is not a CloudEvent causes one call, whose ID is derived from the delivery. Each
CloudEvent causes one call, whose ID is derived from the event's source and ID. All calls are sent
as events in binary mode, even if the event arrived in structured mode. Version 2.2.0 of the
CloudEvents SDK for Python assumes binary mode whenever a request has the headers of an event, even
if its Content-Type is that of structured mode.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime

from cavvy.domain.cloud_events import (
    BATCH,
    STRUCTURED,
    EventAttributes,
    InvalidEvent,
    is_binary,
    parse_event,
    parse_headers,
    read_data,
    to_headers,
    to_time,
)
from cavvy.domain.queued_calls import IDS_KEPT, CallState, QueuedCall
from cavvy.domain.services import WebhookSignature, WebhookTrigger
from cavvy.domain.stored_services import StoredService
from cavvy.domain.values import Struct, replace

WEBHOOK = "webhook"  # the source of calls that requests to webhooks cause
_EVENT_TYPE = "dev.cavvy.webhook.delivered"
_MOST_EVENTS = 1000  # maximum number of events in a batch
# headers that are passed to the service, in addition to those of a CloudEvent
_PASSED = (
    *("content-type", "content-encoding"),
    *("webhook-id", "webhook-timestamp", "x-slack-retry-num"),
)
_PASSED_PREFIX = "x-github-"
_LONGEST = 4096  # maximum characters of a header that is passed to the service


class WebhookCalls(Struct, frozen=True, kw_only=True):
    """The calls that a webhook request adds to the queue. If `once` is not None, it is a row that
    is added together with the calls. If the queue already contains this row, no call is added.
    """

    calls: Sequence[tuple[QueuedCall, bytes]]
    once: QueuedCall | None = None


def calls_for_request(
    service: StoredService,
    trigger: WebhookTrigger,
    delivery: str,
    headers: Mapping[str, str],
    body: bytes,
    now: datetime,
) -> WebhookCalls:
    """Return the calls that a request causes. Header names in `headers` are in lower case. Raises
    InvalidEvent.
    """
    base = QueuedCall(
        project=service.project,
        service=service.name,
        id=_name(trigger, "delivery", delivery),
        path=trigger.path,
        source=WEBHOOK,
        submitted_at=now,
        due_at=now,
    )
    passed = _list_passed(headers)
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    # No signature covers the headers, in which an event's ID may be. Without `once`, a recorded
    # delivery could be sent again with other headers and would cause another call.
    once = replace(base, state=CallState.FORGOTTEN, expires_at=now + IDS_KEPT)
    if kind.startswith("application/cloudevents"):
        calls = [_call_in_binary_mode(base, trigger, each) for each in _read_events(kind, body)]
        return WebhookCalls(calls=calls, once=once)
    if is_binary(headers):
        event = parse_headers(headers)
        return WebhookCalls(calls=[(_call(base, trigger, event, passed), body)], once=once)
    made = EventAttributes(
        id=base.id,
        source=f"/projects/{service.project}/services/{service.name}/webhooks/{trigger.name}",
        type=_EVENT_TYPE,
        time=to_time(now),
    )
    return WebhookCalls(calls=[(replace(base, headers={**passed, **to_headers(made)}), body)])


def _list_passed(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return the request's headers that are passed to the service."""
    return {
        name: value
        for name, value in headers.items()
        if (name in _PASSED or name.startswith(_PASSED_PREFIX)) and _fits(value)
    }


def find_challenge(trigger: WebhookTrigger, body: bytes) -> str | None:
    """Return the text with which to answer a sender that only checks the webhook's URL, or None for
    any other request. Slack documents its URL check at
    https://docs.slack.dev/reference/events/url_verification.
    """
    if trigger.signature is not WebhookSignature.SLACK:
        return None
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("type") != "url_verification":
        return None
    challenge = found.get("challenge")
    return challenge if isinstance(challenge, str) else None


def _read_events(kind: str, body: bytes) -> Sequence[object]:
    """Return the events of a structured or batched request, as JSON."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidEvent(f"the body is not JSON: {error}") from error
    if kind == STRUCTURED:
        return [found]
    if kind != BATCH:
        raise InvalidEvent(f"{kind} is not supported; send {STRUCTURED} or {BATCH}")
    if not isinstance(found, list) or len(found) > _MOST_EVENTS:
        raise InvalidEvent(f"a batch is a list of at most {_MOST_EVENTS} events")
    return found


def _call_in_binary_mode(
    base: QueuedCall, trigger: WebhookTrigger, value: object
) -> tuple[QueuedCall, bytes]:
    event = parse_event(value)
    assert isinstance(value, dict)
    kind, data = read_data(value)
    return _call(base, trigger, event, {"content-type": kind} if kind else {}), data


def _call(
    base: QueuedCall, trigger: WebhookTrigger, event: EventAttributes, passed: Mapping[str, str]
) -> QueuedCall:
    name = _name(trigger, "event", event.source, event.id)
    return replace(base, id=name, headers={**passed, **to_headers(event)})


def _name(trigger: WebhookTrigger, *parts: str) -> str:
    text = json.dumps([trigger.name, *parts])
    return f"hook-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _fits(value: str) -> bool:
    return len(value) <= _LONGEST and value.isascii() and value.isprintable()
