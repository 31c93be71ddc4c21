"""Writes the gateway's own responses in JSON.

The format is `{"error": {"code": ..., "message": ..., "type": ..., "param": null, "request_id":
...}}`, which clients of OpenAI's API understand. If the status is below 400, the body has the key
`call` instead of `error`. Errors of Anthropic's route `/v1/messages` have Anthropic's format:
`{"type": "error", "error": {"type": ..., "message": ..., "code": ...}, "request_id": ...}`.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum, auto

import msgspec

_TYPES = {
    401: "authentication_error",
    402: "insufficient_quota",
    403: "permission_error",
    429: "rate_limit_error",
}  # others: by the status
# source: Anthropic's page "Errors" of its API, read 2026-11
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}  # others: by the status
ANTHROPIC_PATH = b"/v1/messages"
_PHRASES = {
    202: "Accepted",
    400: "Bad Request",
    401: "Unauthorized",
    402: "Payment Required",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    413: "Content Too Large",
    417: "Expectation Failed",
    421: "Misdirected Request",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
    505: "HTTP Version Not Supported",
    507: "Insufficient Storage",
}


class AnswerCode(StrEnum):
    """The reason why the gateway answers a request itself."""

    BAD_REQUEST = "bad-request"
    NO_SERVICE = "no-such-service"
    NO_MODEL = "model_not_found"  # as OpenAI names it
    NO_OBJECT = "not_found"  # no such file or batch
    NO_KEY = "key-unknown"
    BUDGET = "budget-spent"
    RESIDENCY = "residency-unmet"
    OTHER_HOST = "host-unknown"
    OTHER_ORIGIN = "origin-refused"
    TOO_MANY = "rate-exceeded"
    QUEUE_FULL = "queue-full"
    TOO_LATE = "no-replica-in-time"
    TOO_LARGE = "body-too-large"
    SLOW = "request-too-slow"
    NO_ADAPTER = "adapter-not-loaded"
    LOST = "replica-lost"
    INVALID = "replica-answer-invalid"
    SILENT = "replica-silent"
    CONNECTIONS = "too-many-connections"
    STOPPING = "gateway-stopping"
    ACCEPTED = "accepted"
    NO_RESULT = "no-such-result"
    INTERRUPTED = "interrupted"
    NO_TOKENS = "tokens-uncounted"


class ErrorForm(Enum):
    """The API in whose form an event states an error."""

    OPENAI = auto()
    RESPONSES = auto()
    ANTHROPIC = auto()


@dataclass(frozen=True, slots=True)
class OwnAnswer:
    """A response in JSON."""

    status: int
    code: AnswerCode
    message: str
    retry_s: int | None = None
    location: str | None = None
    fields: bytes = b""  # further ones of the head, each with its CRLF


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """A response whose status line and fields are written already, except X-Request-Id."""

    fields: bytes
    body: bytes = b""


Answer = OwnAnswer | WrittenAnswer
ANSWERS = (OwnAnswer, WrittenAnswer)  # `isinstance` takes longer for a union


OVERSIZED = OwnAnswer(413, AnswerCode.TOO_LARGE, "the body is larger than permitted")
CUT = OwnAnswer(
    502, AnswerCode.LOST, "the replica ended before its answer was complete; repeat the request"
)
SILENT = OwnAnswer(504, AnswerCode.SILENT, "the replica took too long to answer")


def write_json(value: object) -> WrittenAnswer:
    """Return the response 200 with a value in JSON."""
    body = msgspec.json.encode(value)
    fields = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    return WrittenAnswer(fields % len(body), body)


def write_answer(
    answer: OwnAnswer,
    request_id: str,
    *,
    close: bool = False,
    without_body: bool = False,
    anthropic: bool = False,
) -> bytes:
    """Return the bytes of a response. `without_body` is set for responses to HEAD, and `anthropic`
    for those to requests of Anthropic's API.
    """
    status = answer.status
    if anthropic and status >= 400:
        body = _write_anthropic(status, answer.code, answer.message, request_id)
    else:
        body = write_body(status, answer.code, answer.message, request_id)
    head = [
        f"HTTP/1.1 {status} {_PHRASES[status]}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        f"X-Request-Id: {request_id}",
    ]
    if answer.retry_s is not None:
        head.append(f"Retry-After: {answer.retry_s}")
    if answer.location is not None:
        head.append(f"Location: {answer.location}")
    if status == 401:
        head.append('WWW-Authenticate: Bearer realm="cavvy"')
    if close:
        head.append("Connection: close")
    start = "\r\n".join([*head, ""]).encode() + answer.fields + b"\r\n"
    return start if without_body else start + body


def write_body(status: int, code: AnswerCode, message: str, request_id: str) -> bytes:
    fields: dict[str, str | None] = {
        "code": code.value,
        "message": message,
        "request_id": request_id,
    }
    if status >= 400:
        usual = "server_error" if status >= 500 else "invalid_request_error"
        fields |= {"type": _TYPES.get(status, usual), "param": None}
    return msgspec.json.encode({"error" if status >= 400 else "call": fields})


def write_error_event(answer: OwnAnswer, request_id: str, form: ErrorForm) -> bytes:
    """Return the event that ends a stream whose answer cannot be completed."""
    status, code, message = answer.status, answer.code, answer.message
    if form is ErrorForm.ANTHROPIC:
        body = _write_anthropic(status, code, message, request_id)
    else:
        body = write_body(status, code, message, request_id)
    if form is ErrorForm.RESPONSES:  # whose events name their type
        event = {"type": "error", "code": code.value, "message": message, "param": None}
        body = msgspec.json.encode({**event, **msgspec.json.decode(body)})
    return b"event: error\ndata: %b\n\n" % body


def _write_anthropic(status: int, code: AnswerCode, message: str, request_id: str) -> bytes:
    usual = "api_error" if status >= 500 else "invalid_request_error"
    error = {
        "type": _ANTHROPIC_TYPES.get(status, usual),
        "message": message,
        "code": code.value,
    }
    return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})
