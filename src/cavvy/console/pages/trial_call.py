"""A request to a service from its page: a conversation with a language model, or any call."""

import re
import time
from collections.abc import Sequence
from datetime import datetime
from http.client import HTTPResponse

from msgspec import Struct
from msgspec.json import encode
from starlette.exceptions import HTTPException
from starlette.requests import Request

from cavvy.client import ApiClient
from cavvy.client.service_calls import CHAT_PATH, ServiceSilent, find_text, open_answer, say_problem
from cavvy.client.service_wire import ServedView, find_service
from cavvy.console.pages.page import Form, Page, form_of, named_in

_TIMEOUT_S = 120.0  # the gateway holds a request until the service has a replica
_LONGEST_ANSWER = 256 << 10  # bytes
_MOST_SAID = 40  # messages of a conversation
_METHODS = ("GET", "POST", "PUT", "DELETE")
_PRINTABLE = re.compile(r"[!-~]{0,4000}")  # other characters would change the request


class TrialAnswer(Struct, frozen=True, kw_only=True):
    """What the service answered; `problem` says why there is no answer."""

    status: int = 0
    text: str = ""
    problem: str = ""


def make(client: ApiClient, request: Request, now: datetime) -> Page:
    """The empty form. Raises ApiError `service-not-found`."""
    return _show(find_service(client, *named_in(request)), Form([]), [], None)


def send(client: ApiClient, request: Request, now: datetime) -> Page:
    """Send the message or the request of the form. Raises ApiError, HTTPException."""
    service, form = find_service(client, *named_in(request)), form_of(request)
    if not service.url:
        raise HTTPException(409, "The gateway of this service does not listen.")
    key = form.get("key", "").strip()
    if not _PRINTABLE.fullmatch(key):
        raise HTTPException(400, "The key of a service has only printable characters of ASCII.")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if "message" not in form:
        return _show(service, form, [], _call(service, form, headers))
    said = [*form.getlist("said")[-_MOST_SAID:], form["message"]]
    talk = [
        {"role": "user" if at % 2 == 0 else "assistant", "content": text}
        for at, text in enumerate(said)
    ]
    ask = encode({"model": form.get("model", ""), "messages": talk})
    headers["Content-Type"] = "application/json"
    answer = _ask(service, CHAT_PATH, "POST", ask, headers)
    if answer.problem or answer.status >= 400:
        return _show(service, form, said[:-1], answer)
    try:
        text = find_text(answer.text.encode(), "message")
    except (ValueError, AttributeError, TypeError):
        problem = "the program does not implement /v1/chat/completions of OpenAI's API"
        return _show(service, form, said[:-1], TrialAnswer(problem=problem))
    return _show(service, Form([("key", key)]), [*said, text], None)


def _call(service: ServedView, form: Form, headers: dict[str, str]) -> TrialAnswer:
    """Raises HTTPException."""
    method, path = form.get("method", "GET"), form.get("path") or "/"
    if method not in _METHODS or not path.startswith("/") or not _PRINTABLE.fullmatch(path):
        raise HTTPException(400, "Expected a method, and a path such as /v1/models?limit=3.")
    body = form.get("body", "").encode() or None
    if body is not None:
        headers["Content-Type"] = form.get("type") or "application/json"
    return _ask(service, path, method, body, headers)


def _ask(
    service: ServedView, path: str, method: str, body: bytes | None, headers: dict[str, str]
) -> TrialAnswer:
    try:
        with open_answer(service.url, path, method, body, headers, _TIMEOUT_S) as answer:
            data = _read(answer)
    except (ServiceSilent, ValueError) as error:
        return TrialAnswer(problem=str(error))
    text = say_problem(data) if answer.status >= 400 else data.decode(errors="replace")
    return TrialAnswer(status=answer.status, text=text)


def _read(answer: HTTPResponse) -> bytes:
    """Return what arrives within _TIMEOUT_S. A stream may have no end, or one byte at a time, and
    would keep a thread that others need for their pages.
    """
    data, until = b"", time.monotonic() + _TIMEOUT_S
    while time.monotonic() < until and (part := answer.read1(_LONGEST_ANSWER - len(data))):
        data += part
    return data


def _show(service: ServedView, form: Form, said: Sequence[str], answer: TrialAnswer | None) -> Page:
    return Page(
        f"Try {service.name}",
        "try.html",
        {
            "service": service,
            "chats": bool(service.models),
            "form": form,
            "said": list(enumerate(said)),
            "answer": answer,
            "methods": _METHODS,
        },
    )
