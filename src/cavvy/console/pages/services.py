"""The list of services, and one service: its replicas, traffic, service level and queue, and its
actions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from starlette.requests import Request

from cavvy.client import ApiClient
from cavvy.client.queue_wire import CallQueueView, list_calls, retry_calls
from cavvy.client.service_wire import (
    LevelShares,
    LevelView,
    ServedView,
    end_service,
    find_service,
    list_service_keys,
    list_services,
    read_service_figures,
)
from cavvy.console import charts
from cavvy.console.pages.page import (
    CURVE_POINTS,
    Page,
    Part,
    act_on_chosen,
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
    return Page("Services", "services.html", values)


def make_one(client: ApiClient, request: Request, now: datetime) -> Page:
    """Raises ApiError `service-not-found`."""
    project, name = named_in(request)
    found = find_service(client, project, name)
    keys = memory_of(request).recall(
        ("keys", project, name), lambda: try_part(lambda: list_service_keys(client, project, name))
    )
    return Page(
        found.name,
        "service.html",
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
