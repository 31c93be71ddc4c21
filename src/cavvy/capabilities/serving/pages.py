"""The list of services, and one service: its replicas, traffic, service level and queue, its
actions, and a request to it: a conversation with a language model, or any call.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from http.client import HTTPResponse
from typing import Any

from msgspec import Struct
from msgspec.json import encode
from starlette.exceptions import HTTPException
from starlette.requests import Request

from cavvy.capabilities.serving.answers import (
    CHAT_PATH,
    ServiceSilent,
    find_text,
    open_answer,
    say_problem,
)
from cavvy.capabilities.serving.call_wire import CallQueueView, list_calls, retry_calls
from cavvy.capabilities.serving.wire import (
    LevelShares,
    LevelView,
    ServedView,
    find_service,
    list_service_keys,
    list_services,
    read_service_figures,
)
from cavvy.client import ApiClient
from cavvy.client.service_wire import end_service
from cavvy.console import charts
from cavvy.console.pages.page import (
    CURVE_POINTS,
    Form,
    Page,
    Part,
    act_on_chosen,
    form_of,
    memory_of,
    named_in,
    path_of,
    period_choice,
    read_figures,
    sort_rows,
    try_part,
)
from cavvy.console.render import show_span

# the charts, with the figures that they show and the names of the lines
_CHARTS: Mapping[str, Mapping[str, str]] = {
    "Requests per second": {"requests_per_s": "all", "failed_per_s": "failed"},
    "Latency in seconds": {"latency_p50_s": "p50", "latency_p95_s": "p95"},
    "Requests at a time": {"in_flight": "in flight", "waiting": "waiting"},
    "Replicas": {"replicas_ready": "ready", "replicas_wanted": "wanted"},
    "Seconds until a new replica was ready": {"cold_start_s": "cold start"},
    "Tokens per second": {"tokens_per_s": "written"},
}
_CALLS = 50  # dead calls on the page
_IN_TIME = 0.95  # the share of answers that must come within `p95`


@dataclass(frozen=True)
class LevelCell:
    """A measured share, and whether it reaches the required share: met, missed or "" if nothing was
    measured.
    """

    share: float | None
    requests: int
    verdict: str


@dataclass(frozen=True)
class LevelRow:
    """One part of a service level, in the last hour and in the last day."""

    name: str
    required: float
    hour: LevelCell
    day: LevelCell

    @property
    def is_missed(self) -> bool:
        return "missed" in (self.hour.verdict, self.day.verdict)


# what sorts the list by its columns
_KEYS: Mapping[str, Callable[[ServedView], Any]] = {
    "Name": lambda each: (each.project, each.name),
    "State": lambda each: each.state,
    "Project": lambda each: each.project,
    "Replicas": lambda each: (each.ready, each.target),
    "Requests/s": lambda each: each.traffic.per_s if each.traffic else -1.0,
    "p95": lambda each: (each.traffic.p95_s if each.traffic else None) or 0.0,
    "Waiting": lambda each: each.traffic.waiting if each.traffic else -1,
    "Cost": lambda each: each.spent_micros,
}


def make(client: ApiClient, request: Request, now: datetime) -> Page:
    """All services. Raises ApiError, HTTPException."""
    return _show(client, request, [])


def act(client: ApiClient, request: Request, now: datetime) -> Page | str:
    """End the chosen services, or send their dead calls again. Raises HTTPException."""
    acts: Mapping[str, Callable[[str, str], object]] = {
        "end": lambda project, name: end_service(client, project, name),
        "retry": lambda project, name: retry_calls(client, project, name, None),
    }
    problems = act_on_chosen(client, request, acts, "service")
    return _show(client, request, problems) if problems else f"/services?{request.url.query}"


def _show(client: ApiClient, request: Request, problems: Sequence[str]) -> Page:
    found = list_services(client)
    sorting = sort_rows(request, found, _KEYS, ("Name", "up"))
    missed = {
        (each.project, each.name)
        for each in found
        if any(row.is_missed for row in list_levels(each.slo))
    }
    values = {"problems": problems, "services": sorting.rows, "missed": missed}
    values |= {"heads": sorting.heads, "query": sorting.query}
    return Page("Services", "cavvy.capabilities.serving:services.html", values)


def make_one(client: ApiClient, request: Request, now: datetime) -> Page:
    """Raises ApiError `service-not-found`."""
    project, name = named_in(request)
    found = find_service(client, project, name)
    keys = memory_of(request).recall(
        ("keys", project, name), lambda: try_part(lambda: list_service_keys(client, project, name))
    )
    return Page(
        found.name,
        "cavvy.capabilities.serving:service.html",
        {
            "service": found,
            "levels": list_levels(found.slo),
            "dead": _dead_calls(client, found),
            "keys": keys,
            "figures": _draw_figures(client, request, found, now),
            **period_choice(request),
        },
    )


def _draw_figures(
    client: ApiClient, request: Request, service: ServedView, now: datetime
) -> Sequence[tuple[str, charts.Chart]]:
    """Return charts of the chosen period before now."""
    where = (service.project, service.name)
    read = partial(read_service_figures, client, *where, points=CURVE_POINTS)
    found = read_figures(
        request, now, service.created_at, now, where, lambda since: read(since=since)
    )
    if found is None:
        return ()
    series = {each.name: each for each in found.series}
    drawn = []
    for title, names in _CHARTS.items():
        lines = [
            charts.Line(name, 0, found.step_s, each.mean, each.low, each.high)
            for figure, name in names.items()
            if (each := series.get(figure)) is not None
        ]
        if chart := charts.curves(lines, next(iter(names)), found.start):
            drawn.append((title, chart))
    return drawn


def end(client: ApiClient, request: Request, now: datetime) -> str:
    """End the service, which may be gone at once. Raises ApiError."""
    end_service(client, *named_in(request))
    return "/services"


def retry(client: ApiClient, request: Request, now: datetime) -> str:
    """Send all dead calls of the service again. Raises ApiError."""
    retry_calls(client, *named_in(request), None)
    return path_of("services", *named_in(request))


def retry_one(client: ApiClient, request: Request, now: datetime) -> str:
    """Send one dead call of the service again. Raises ApiError."""
    retry_calls(client, *named_in(request), request.path_params["call"])
    return path_of("services", *named_in(request))


def list_levels(slo: LevelView | None) -> Sequence[LevelRow]:
    """Return the required shares of a service level, compared with the measured shares."""
    rows: list[LevelRow] = []
    if slo is not None and slo.availability is not None:
        cells = (_cell(each, each.availability, slo.availability) for each in (slo.hour, slo.day))
        rows.append(LevelRow("Requests answered", slo.availability, *cells))
    if slo is not None and slo.p95_s is not None:
        cells = (_cell(each, each.in_time, _IN_TIME) for each in (slo.hour, slo.day))
        rows.append(LevelRow(f"Answers within {show_span(slo.p95_s)}", _IN_TIME, *cells))
    return rows


def _cell(shares: LevelShares, share: float | None, required: float) -> LevelCell:
    verdict = "" if share is None else "met" if share >= required else "missed"
    return LevelCell(share, shares.requests, verdict)


def _dead_calls(client: ApiClient, service: ServedView) -> Part[CallQueueView]:
    if service.queue is None or not service.queue.dead:
        return Part(None)
    return try_part(
        lambda: list_calls(client, service.project, service.name, state="dead", limit=_CALLS)
    )


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


def make_trial(client: ApiClient, request: Request, now: datetime) -> Page:
    """The empty form. Raises ApiError `service-not-found`."""
    return _show_trial(find_service(client, *named_in(request)), Form([]), [], None)


def send_trial(client: ApiClient, request: Request, now: datetime) -> Page:
    """Send the message or the request of the form. Raises ApiError, HTTPException."""
    service, form = find_service(client, *named_in(request)), form_of(request)
    if not service.url:
        raise HTTPException(409, "The gateway of this service does not listen.")
    key = form.get("key", "").strip()
    if not _PRINTABLE.fullmatch(key):
        raise HTTPException(400, "The key of a service has only printable characters of ASCII.")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if "message" not in form:
        return _show_trial(service, form, [], _call(service, form, headers))
    said = [*form.getlist("said")[-_MOST_SAID:], form["message"]]
    talk = [
        {"role": "user" if at % 2 == 0 else "assistant", "content": text}
        for at, text in enumerate(said)
    ]
    ask = encode({"model": form.get("model", ""), "messages": talk})
    headers["Content-Type"] = "application/json"
    answer = _ask(service, CHAT_PATH, "POST", ask, headers)
    if answer.problem or answer.status >= 400:
        return _show_trial(service, form, said[:-1], answer)
    try:
        text = find_text(answer.text.encode(), "message")
    except (ValueError, AttributeError, TypeError):
        problem = "the program does not implement /v1/chat/completions of OpenAI's API"
        return _show_trial(service, form, said[:-1], TrialAnswer(problem=problem))
    return _show_trial(service, Form([("key", key)]), [*said, text], None)


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


def _show_trial(
    service: ServedView, form: Form, said: Sequence[str], answer: TrialAnswer | None
) -> Page:
    return Page(
        f"Try {service.name}",
        "cavvy.capabilities.serving:try.html",
        {
            "service": service,
            "chats": bool(service.models),
            "form": form,
            "said": list(enumerate(said)),
            "answer": answer,
            "methods": _METHODS,
        },
    )
