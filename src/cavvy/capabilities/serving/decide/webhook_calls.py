"""Decides which calls a verified request to a webhook triggers.

A request that is not a CloudEvent causes one call, whose ID is derived from the delivery. Each
CloudEvent causes one call, whose ID is derived from the event's source and ID. All calls are sent
as events in binary mode, even if the event arrived in structured mode. Version 2.2.0 of the
CloudEvents SDK for Python assumes binary mode whenever a request has the headers of an event, even
if its Content-Type is that of structured mode.

Signatures of webhook calls, and the handshake of senders that ask for permission first.
"""

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import assert_never

from cavvy.capabilities.serving.cloud_events import (
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
from cavvy.capabilities.serving.queued_calls import IDS_KEPT, CallState, QueuedCall
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.domain.services import WebhookSignature, WebhookTrigger
from cavvy.domain.units import is_whole
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

# The handshake is defined in https://github.com/cloudevents/spec, `cloudevents/http-webhook.md`,
# part 4: the sender sends an OPTIONS request with its name and the number of requests per minute
# that it wants. The handshake gives no access, because every later request must be signed. The
# server gives the same answer for all webhooks, so the answer does not reveal which webhooks exist.
# `WebHook-Request-Callback` is ignored, because the server would otherwise call an address that a
# stranger has chosen.
ALLOWED_ORIGIN = "WebHook-Allowed-Origin"
ALLOWED_RATE = "WebHook-Allowed-Rate"
MOST_PER_MINUTE = 6000
_ORIGIN = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
_RATE = re.compile(r"0*[1-9][0-9]{0,9}")


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


def grant(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return the headers that grant the requested rate, but at most `MOST_PER_MINUTE`. Return no
    headers if the sender's name is missing or invalid, or if the sender requests a rate that is not
    a positive integer. The names in `headers` are in lower case.
    """
    origin = headers.get("webhook-request-origin", "")
    rate = headers.get("webhook-request-rate", str(MOST_PER_MINUTE))
    if not _ORIGIN.fullmatch(origin) or not _RATE.fullmatch(rate):
        return {}
    return {ALLOWED_ORIGIN: origin, ALLOWED_RATE: str(min(int(rate), MOST_PER_MINUTE))}


TOLERANCE = timedelta(minutes=5)  # maximum age of a timestamp, as all four senders recommend


_PREFIX = "whsec_"


LEAST = 8  # minimum bytes of a secret; shorter secrets can be guessed and are not accepted


class SignedDelivery(Struct, frozen=True, kw_only=True):
    """A request with a valid signature. Repetitions of a delivery have the same `id`."""

    id: str


def verify(
    kind: WebhookSignature, secret: str, headers: Mapping[str, str], body: bytes, now: datetime
) -> SignedDelivery | None:
    """Return the delivery that a signed request contains, or None if the request is not signed with
    the secret or if its timestamp is too old. The names in `headers` are in lower case.
    """
    match kind:
        case WebhookSignature.STANDARD:
            return _verify_standard(secret, headers, body, now)
        case WebhookSignature.GITHUB:
            shown = [headers.get("x-hub-signature-256", "").removeprefix("sha256=")]
            signed, name = body, _digest(body)
        case WebhookSignature.STRIPE:
            stamp, shown = _read_stripe(headers.get("stripe-signature", ""))
            if not _is_recent(stamp, now):
                return None
            signed, name = stamp.encode() + b"." + body, _read_id(body)
        case WebhookSignature.SLACK:
            stamp = headers.get("x-slack-request-timestamp", "")
            shown = [headers.get("x-slack-signature", "").removeprefix("v0=")]
            if not _is_recent(stamp, now):
                return None
            signed, name = b"v0:" + stamp.encode() + b":" + body, _digest(body)
        case _:
            assert_never(kind)
    made = hmac.digest(secret.encode(), signed, "sha256").hex()
    valid = is_usable(kind, secret) and _any_equal(made, shown)
    return SignedDelivery(id=name) if valid else None


def is_usable(kind: WebhookSignature, secret: str) -> bool:
    """Return whether a secret is long enough to sign requests."""
    key = _read_key(secret) if kind is WebhookSignature.STANDARD else secret.encode()
    return len(key) >= LEAST


def sign_standard(secret: str, delivery: str, at: datetime, body: bytes) -> Mapping[str, str]:
    """Return the headers that sign a request according to Standard Webhooks."""
    stamp = str(int(at.timestamp()))
    made = _sign(_read_key(secret), delivery, stamp, body)
    return {"webhook-id": delivery, "webhook-timestamp": stamp, "webhook-signature": f"v1,{made}"}


def _verify_standard(
    secret: str, headers: Mapping[str, str], body: bytes, now: datetime
) -> SignedDelivery | None:
    name, stamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    if not name or not _is_recent(stamp, now):
        return None
    made = _sign(_read_key(secret), name, stamp, body)
    parts = [each.partition(",") for each in headers.get("webhook-signature", "").split()]
    shown = [value for version, _, value in parts if version == "v1"]
    valid = is_usable(WebhookSignature.STANDARD, secret) and _any_equal(made, shown)
    return SignedDelivery(id=name) if valid else None


def _read_stripe(header: str) -> tuple[str, list[str]]:
    """Return the timestamp and the signatures of Stripe's header."""
    pairs = [each.partition("=") for each in header.split(",")]
    stamp = next((value for key, _, value in pairs if key.strip() == "t"), "")
    return stamp, [value for key, _, value in pairs if key.strip() == "v1"]


def _read_key(secret: str) -> bytes:
    try:
        return base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except ValueError:
        return secret.encode()  # a secret that is no base64 is used as it is


def _sign(key: bytes, name: str, stamp: str, body: bytes) -> str:
    signed = f"{name}.{stamp}.".encode("latin-1", "replace") + body
    return base64.b64encode(hmac.digest(key, signed, "sha256")).decode()


def _any_equal(made: str, shown: Sequence[str]) -> bool:
    return any([hmac.compare_digest(made.encode(), each.encode()) for each in shown[:16]])


def _is_recent(stamp: str, now: datetime) -> bool:
    if not (is_whole(stamp) and len(stamp) <= 12):
        return False
    return abs(now.timestamp() - int(stamp)) <= TOLERANCE.total_seconds()


def _read_id(body: bytes) -> str:
    try:
        event = json.loads(body)
    except (ValueError, RecursionError):
        return _digest(body)
    found = event.get("id") if isinstance(event, dict) else None
    return found if isinstance(found, str) and found else _digest(body)


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
