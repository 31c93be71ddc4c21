"""CloudEvents 1.0: which requests are events, and the calls that they cause."""

import base64
import gzip
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from cavvy.capabilities.serving.cloud_events import (
    InvalidEvent,
    is_binary,
    parse_event,
    parse_headers,
    to_headers,
)
from cavvy.capabilities.serving.decide.webhook_calls import (
    WebhookCalls,
    calls_for_request,
    find_challenge,
)
from cavvy.capabilities.serving.queued_calls import CallState
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.domain.services import WebhookSignature, WebhookTrigger
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import replace

NOW = datetime(2026, 1, 5, 12, tzinfo=UTC)
SERVICE = StoredService(
    project="p", name="s", id="i", created_at=NOW, task=TaskSpec(name="s", run="x")
)
HOOK = WebhookTrigger(name="h", secret="S", path="/x")
# the examples of the JSON event format, section 3.2
EVENT: dict[str, Any] = {
    "specversion": "1.0",
    "type": "com.example.someevent",
    "source": "/mycontext",
    "id": "C234-1234-1234",
    "subject": None,
    "time": "2018-04-05T17:31:00Z",
    "comexampleextension1": "value",
    "comexampleothervalue": 5,
    "datacontenttype": "application/json",
    "data": {"appinfoA": "abc", "appinfoB": 123, "appinfoC": True},
}
HEADERS = {
    "ce-specversion": "1.0",
    "ce-type": "com.example.someevent",
    "ce-source": "/mycontext",
    "ce-id": "C234-1234-1234",
    "ce-time": "2018-04-05T17:31:00Z",
    "ce-comexampleextension1": "value",
    "ce-comexampleothervalue": "5",
}


def read(headers: dict[str, str], body: bytes, delivery: str = "d") -> WebhookCalls:
    return calls_for_request(SERVICE, HOOK, delivery, headers, body, NOW)


def structured(*events: object, batch: bool = False) -> WebhookCalls:
    kind = "application/cloudevents-batch+json" if batch else "Application/CloudEvents+json"
    body = json.dumps(list(events) if batch else events[0]).encode()
    return read({"content-type": f"{kind}; charset=UTF-8"}, body)


def test_an_event_is_the_same_in_both_modes() -> None:
    assert parse_event(EVENT) == parse_headers(HEADERS)
    assert to_headers(parse_event(EVENT)) == HEADERS
    [(one, body)] = structured(EVENT).calls
    [(two, data)] = read({**HEADERS, "content-type": "text/plain"}, b"data").calls
    assert one.id == two.id
    assert (one.path, json.loads(body), data) == ("/x", EVENT["data"], b"data")
    assert one.headers == {**HEADERS, "content-type": "application/json"}
    assert two.headers == {**HEADERS, "content-type": "text/plain"}


def test_a_compressed_body_keeps_its_coding() -> None:
    body, sent = gzip.compress(b"{}"), {"content-type": "text/plain", "content-encoding": "gzip"}
    for headers in ({}, HEADERS):
        [(call, stored)] = read({**headers, **sent}, body).calls
        assert (stored, call.headers["content-encoding"]) == (body, "gzip")
    [(call, _)] = structured(EVENT).calls
    assert "content-encoding" not in call.headers, "the data of an event is stored decoded"


@pytest.mark.parametrize(
    ("given", "kind", "data"),
    [  # as the examples of the JSON event format, section 3.2
        ({"data_base64": "AAE="}, "application/x-binary", b"\x00\x01"),
        ({"data": '<much wow="xml"/>'}, "application/xml", b'<much wow="xml"/>'),
        ({"data": "just a string"}, None, b'"just a string"'),
        ({"data": None}, None, b"null"),
        ({}, None, b""),
    ],
)
def test_data_is_what_binary_mode_has(given: Any, kind: str | None, data: bytes) -> None:
    event = {k: v for k, v in EVENT.items() if k != "data"} | {"datacontenttype": kind} | given
    [(call, body)] = structured(event).calls
    assert body == data
    expected = (kind or "application/json") if given else None
    assert call.headers.get("content-type") == expected
    for wrong in ({"data": 5, "datacontenttype": "text/plain"}, {"datacontenttype": "x\u20ac/y"}):
        with pytest.raises(InvalidEvent):
            structured({**EVENT, **wrong})


def test_values_of_headers_are_decoded() -> None:
    said = parse_headers({**HEADERS, "ce-subject": "Euro%20%E2%82%AC%20%F0%9F%98%80"}).subject
    assert said == "Euro \u20ac \U0001f600"
    quoted = parse_headers({**HEADERS, "ce-subject": '"a \\"b\\" c"'})
    assert quoted.subject == 'a "b" c'
    assert to_headers(quoted)["ce-subject"] == "a%20%22b%22%20c"
    with pytest.raises(InvalidEvent, match="UTF-8"):
        parse_headers({**HEADERS, "ce-subject": "%C0%A0"})  # the overlong form of a space
    with pytest.raises(InvalidEvent, match="datacontenttype"):
        parse_headers({**HEADERS, "ce-datacontenttype": "text/plain"})


@pytest.mark.parametrize(
    "change",
    [
        {"id": ""},
        {"id": None},
        {"source": "a b"},
        {"type": 5},
        {"specversion": "0.3"},
        {"specversion": "1.1"},
        {"Big": "x"},
        {"with_mark": "x"},
        {"subject": ""},
        {"subject": "a\r\nx: y"},
        {"subject": "\ud800"},
        {"time": "yesterday"},
        {"time": "2018-04-05"},
        {"time": "2018-13-05T17:31:00Z"},
        {"datacontenttype": ""},
        {"number": 1 << 31},
        {"number": 1.5},
        {"list": [1]},
        {"data_base64": "AA=="},
        {"long": "x" * 9000},
    ],
)
def test_what_is_not_an_event_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidEvent):
        structured({**EVENT, **change})
    with pytest.raises(InvalidEvent):
        structured(EVENT, {**EVENT, **change}, batch=True)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"1", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_event_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidEvent):
        read({"content-type": "application/cloudevents+json"}, body)
    with pytest.raises(InvalidEvent):
        read({"content-type": "application/cloudevents+avro"}, body)
    data = {name: value for name, value in EVENT.items() if name != "data"}
    with pytest.raises(InvalidEvent, match="base64"):
        parse_event({**data, "data_base64": "?"})
    assert parse_event({**data, "data_base64": base64.b64encode(body[:9]).decode()})


def test_each_event_of_a_batch_is_one_call() -> None:
    other = {**EVENT, "source": "/other"}
    made = structured(EVENT, other, EVENT, batch=True)
    assert [each.headers["ce-source"] for each, _ in made.calls] == [
        "/mycontext",
        "/other",
        "/mycontext",
    ]
    assert made.calls[0][0].id == structured(EVENT).calls[0][0].id == made.calls[2][0].id
    assert json.loads(made.calls[1][1]) == other["data"]
    assert structured(batch=True).calls == []
    with pytest.raises(InvalidEvent, match="at most"):
        structured(*[EVENT] * 1001, batch=True)


def test_other_requests_are_one_call_each_delivery() -> None:
    assert not is_binary({"ce-id": "1", "ce-type": "x"})
    headers = {
        "content-type": "application/json",
        "x-github-event": "push",
        "x-hub-signature-256": "sha256=00",
        "authorization": "Bearer x",
        "cookie": "x",
        "x-github-odd": "\xe9",
    }
    [(call, body)] = read(headers, b"{}").calls
    assert body == b"{}"
    passed = {k: v for k, v in call.headers.items() if not k.startswith("ce-")}
    assert passed == {"content-type": "application/json", "x-github-event": "push"}
    assert parse_headers(call.headers).source == "/projects/p/services/s/webhooks/h"
    assert call.id == read(headers, b"other").calls[0][0].id
    assert call.id != read(headers, b"{}", "e").calls[0][0].id
    # the headers are not signed: with others, the delivery is not a second one
    once = read({**headers, **HEADERS}, b"{}").once
    assert once is not None
    assert (once.id, once.state) == (call.id, CallState.FORGOTTEN)


@pytest.mark.parametrize(
    ("signature", "body", "answer"),
    [
        (WebhookSignature.SLACK, b'{"type": "url_verification", "challenge": "c"}', "c"),
        (WebhookSignature.SLACK, b'{"type": "url_verification", "challenge": 1}', None),
        (WebhookSignature.SLACK, b'{"type": "event_callback", "challenge": "c"}', None),
        (WebhookSignature.SLACK, b'["url_verification"]', None),
        (WebhookSignature.SLACK, b"{", None),
        (WebhookSignature.GITHUB, b'{"type": "url_verification", "challenge": "c"}', None),
    ],
)
def test_only_slacks_check_of_the_url_is_answered(
    signature: WebhookSignature, body: bytes, answer: str | None
) -> None:
    assert find_challenge(replace(HOOK, signature=signature), body) == answer
