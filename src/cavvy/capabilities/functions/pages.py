"""Apps with their functions, calls, endpoints and schedules; one app; and a call that is kept."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request

from cavvy.capabilities.functions.counts.wire import (
    AppFigures,
    AppSummary,
    FunctionFigures,
    list_summaries,
    read_figures,
)
from cavvy.capabilities.functions.signatures import say_arguments, say_kind
from cavvy.capabilities.functions.wire import (
    CallResult,
    CallsReadAsk,
    CallSummary,
    DeployedApp,
    cancel_call,
    list_calls,
    read_app,
    read_calls,
)
from cavvy.client import ApiClient, ApiError
from cavvy.client.ledger_wire import sum_ledger
from cavvy.client.service_wire import NamedService, list_named_services
from cavvy.client.wire import JobListing
from cavvy.console import charts
from cavvy.console.charts import day_of
from cavvy.console.pages.page import (
    Page,
    has_charts,
    hours_of,
    memory_of,
    named_in,
    path_of,
    period_choice,
    sort_rows,
    try_part,
)

_APP, _SCHEDULE = "cavvy-app", "cavvy-schedule"  # tags of jobs and services
_PACKAGE = "cavvy.capabilities.functions"
_FEW_S, _OFTEN_S = 30.0, 10.0  # for which costs, and services and schedules, are kept
_MOST_APPS = 200  # on the page
_MOST_CALLS = 60
_LOG_BYTES = 500_000  # of the end of the log of a job
_MOST_LINES = 500
_STATES = ("waiting", "done", "failed", "cancelled")


class AppRow(NamedTuple):
    """An app of the list, with what others know of it."""

    app: AppSummary
    endpoints: Sequence[NamedService]
    schedules: Sequence[JobListing]
    cost_micros: int | None


class FunctionRow(NamedTuple):
    """A function of an app. `figures` is None if it was not called."""

    name: str
    signature: str
    figures: FunctionFigures | None
    endpoint: str  # where it is called by HTTP


class CallRow(NamedTuple):
    """A call of the list: one that the server keeps has an ID. `told` is the last line of the
    error, or what the call waits for."""

    id: str
    function: str
    state: str
    at: datetime
    ran_s: float | None
    took_s: float | None
    who: str
    job: str
    told: str
    trace: str
    cost_micros: int | None


_KEYS: Mapping[str, Callable[[AppRow], Any]] = {
    "Name": lambda row: (row.app.name, row.app.project),
    "Project": lambda row: (row.app.project, row.app.name),
    "Workers": lambda row: row.app.workers,
    "Waiting": lambda row: row.app.waiting,
    "Running": lambda row: row.app.running,
    "Done": lambda row: row.app.done,
    "Failed": lambda row: row.app.failed,
    "Cost today": lambda row: row.cost_micros or 0,
}


def make(client: ApiClient, request: Request, now: datetime) -> Page:
    """The apps that match the search, by name. Raises ApiError, HTTPException."""
    text = request.query_params.get("text", "").strip()
    found = list_summaries(client)
    services, schedules = _list_services(client, request), _list_schedules(client, request)
    costs = _read_costs(client, request, now)
    rows = [
        AppRow(
            each,
            services.get((each.project, each.name), ()),
            schedules.get((each.project, each.name), ()),
            None if costs is None else costs.get((each.project, each.name), 0),
        )
        for each in _with_web(found, services)
    ]
    matching = [each for each in rows if _matches(each.app, text)]
    sorting = sort_rows(request, matching, _KEYS, ("Name", "up"))
    values = {
        "apps": sorting.rows[:_MOST_APPS],
        "matching": len(matching),
        "total": len(rows),
        "text": text,
        "heads": sorting.heads,
    }
    return Page("Apps", f"{_PACKAGE}:apps.html", values)


def make_one(client: ApiClient, request: Request, now: datetime) -> Page:
    """An app. Raises ApiError `app-not-found`, HTTPException."""
    project, name = named_in(request)
    services = _list_services(client, request).get((project, name), ())
    app = _find_app(client, project, name)
    traces = request.query_params.get("traces") == "1"
    figures = _read_figures(client, request, traces=traces)
    if app is None and figures is None and not services:
        raise HTTPException(404, f"Project {project} has no app {name}.")
    asked = {each: request.query_params.get(each, "") for each in ("function", "state")}
    most = None if any(asked.values()) else _MOST_CALLS
    kept = list_calls(client, project, name, traces=False, limit=most) if app else []
    calls = [each for each in _list_rows(kept, figures) if _is_asked(each, asked)]
    costs = _read_costs(client, request, now)
    values = {
        "project": project,
        "app": app,
        "name": name,
        "figures": figures,
        "functions": _list_functions(app, figures, project),
        "services": services,
        "schedules": _list_schedules(client, request).get((project, name), ()),
        "cost_micros": None if costs is None else costs.get((project, name), 0),
        "calls": calls[:_MOST_CALLS],
        "asked": asked,
        "traces": traces,
        "states": _STATES,
        "drawn": _draw(figures) if figures and has_charts(request, now) else (),
        **period_choice(request),
    }
    return Page(name, f"{_PACKAGE}:app.html", values)


def make_call(client: ApiClient, request: Request, now: datetime) -> Page:
    """A call that the server keeps, with what it has printed. Raises ApiError, HTTPException."""
    project, name = named_in(request)
    call_id = request.path_params["call"]
    listed = next((x for x in list_calls(client, project, name) if x.id == call_id), None)
    if listed is None:
        raise HTTPException(
            404, f"{name} has no call {call_id} among its newest, or it is older than seven days."
        )
    values = {
        "project": project,
        "name": name,
        "call": listed,
        "result": _read_result(client, project, name, listed),
        "lines": _read_lines(client, project, name, listed),
    }
    return Page(f"{listed.function} of {name}", f"{_PACKAGE}:app_call.html", values)


def cancel(client: ApiClient, request: Request, now: datetime) -> str:
    """Cancel a call. Raises ApiError."""
    project, name = named_in(request)
    cancel_call(client, project, name, request.path_params["call"])
    return path_of("apps", project, name)


def _matches(app: AppSummary, text: str) -> bool:
    return any(
        text.lower() in each.lower() for each in (app.name, app.project, app.user, *app.functions)
    )


def _with_web(
    apps: Sequence[AppSummary], services: Mapping[tuple[str, str], Sequence[NamedService]]
) -> Sequence[AppSummary]:
    """Return the apps, and those that have only web endpoints."""
    known = {(each.project, each.name) for each in apps}
    only = [
        AppSummary(
            project=project,
            name=name,
            revision="",
            user="",
            deployed_at=None,
            functions=[],
            jobs=[],
            workers=0,
            waiting=0,
            running=0,
            done=0,
            failed=0,
        )
        for (project, name), found in services.items()
        if (project, name) not in known
    ]
    return [*apps, *only]


def _list_services(
    client: ApiClient, request: Request
) -> Mapping[tuple[str, str], Sequence[NamedService]]:
    """Return the services of apps, by project and app. They may be a few seconds old."""

    def fetch() -> Mapping[tuple[str, str], Sequence[NamedService]]:
        found: dict[tuple[str, str], list[NamedService]] = {}
        for each in try_part(lambda: list_named_services(client)).value or []:
            if app := each.tags.get(_APP):
                found.setdefault((each.project, app), []).append(each)
        return found

    return memory_of(request).recall("services of apps", fetch, _OFTEN_S)


def _list_schedules(
    client: ApiClient, request: Request
) -> Mapping[tuple[str, str], Sequence[JobListing]]:
    """Return the jobs that repeat, by project and app. They may be a few seconds old."""

    def fetch() -> Mapping[tuple[str, str], Sequence[JobListing]]:
        found: dict[tuple[str, str], list[JobListing]] = {}
        listed = client.search_jobs(tag=_SCHEDULE, phase="queued", limit=200).jobs
        for each in listed:
            if each.held and (app := each.tags.get(_SCHEDULE)):
                found.setdefault((each.project, app), []).append(each)
        return found

    return memory_of(request).recall("schedules of apps", fetch, _OFTEN_S)


def _read_costs(
    client: ApiClient, request: Request, now: datetime
) -> Mapping[tuple[str, str], int] | None:
    """Return what each app has cost since the day began in UTC, by project and app; None if the
    user may not see it. It may be half a minute old."""

    def fetch() -> Mapping[tuple[str, str], int] | None:
        dimensions = ["project", f"tag:{_APP}"]
        rows = try_part(lambda: sum_ledger(client, dimensions, since=day_of(now))).value
        if rows is None:
            return None
        return {
            (str(row.groups["project"]), str(row.groups[f"tag:{_APP}"])): row.amount_micros
            for row in rows
        }

    return memory_of(request).recall("costs of apps", fetch, _FEW_S)


def _find_app(client: ApiClient, project: str, name: str) -> DeployedApp | None:
    try:
        return read_app(client, project, name)
    except ApiError as error:
        if error.code != "app-not-found":
            raise
        return None


def _read_figures(client: ApiClient, request: Request, *, traces: bool) -> AppFigures | None:
    try:
        return read_figures(client, *named_in(request), hours_of(request), traces=traces)
    except ApiError as error:
        if error.code != "app-not-found":
            raise
        return None


def _list_functions(
    app: DeployedApp | None, figures: AppFigures | None, project: str
) -> Sequence[FunctionRow]:
    measured = {each.name: each for each in figures.functions} if figures else {}
    rows = []
    for part in app.parts if app else ():
        for each in part.functions:
            arguments = json.loads(bytes(each.arguments)) if each.arguments else {}
            result = json.loads(bytes(each.result)) if each.result else {}
            said = f"({say_arguments(arguments)}) → {say_kind(result)}"
            at = "" if each.generator or app is None else app.name
            at = at and f"POST /v1/projects/{project}/apps/{at}/functions/{each.name}"
            rows.append(FunctionRow(each.name, said, measured.pop(each.name, None), at))
    return [*rows, *(FunctionRow(name, "", each, "") for name, each in measured.items())]


def _list_rows(kept: Sequence[CallSummary], figures: AppFigures | None) -> Sequence[CallRow]:
    """Return the calls that the server keeps, and the others that are known, the newest first."""
    rows = [
        CallRow(
            id=each.id,
            function=each.function,
            state=each.state,
            at=each.created_at,
            ran_s=each.end.ran_s,
            took_s=(each.ended_at - each.created_at).total_seconds() if each.ended_at else None,
            who=each.user,
            job=each.job,
            told=_last_line(each.end.type or each.end.kind, each.end.text) or each.why,
            trace="",
            cost_micros=each.cost_micros,
        )
        for each in kept
    ]
    rows += [
        CallRow(
            id="",
            function=each.function,
            state=each.state,
            at=each.ended_at - timedelta(seconds=min(each.took_s, 1e9)),
            ran_s=each.ran_s,
            took_s=each.took_s,
            who="",
            job=each.job,
            told=_last_line(each.type, each.text),
            trace=each.trace.strip(),
            cost_micros=None,
        )
        for each in (figures.recent if figures else ())
    ]
    return sorted(rows, key=lambda each: each.at, reverse=True)


def _last_line(kind: str, text: str) -> str:
    lines = text.strip().splitlines()
    last = lines[-1] if lines else ""
    return f"{kind}: {last}" if kind and last else kind or last


def _is_asked(row: CallRow, asked: Mapping[str, str]) -> bool:
    return asked["function"] in ("", row.function) and asked["state"] in ("", row.state)


def _draw(figures: AppFigures) -> Sequence[tuple[str, charts.Chart]]:
    """Return two charts of each function that was called: how long calls ran, and how long callers
    waited for the result."""
    drawn = []
    for each in figures.functions:
        for title, half, most in (
            ("running", each.ran_p50, each.ran_p99),
            ("from call to result", each.took_p50, each.took_p99),
        ):
            is_short = max((value for value in most if value is not None), default=0.0) < 1
            unit, factor = ("milliseconds", 1000) if is_short else ("seconds", 1)
            lines = [
                charts.Line(
                    name,
                    0.0,
                    figures.step_s,
                    # the minute that goes on is seen as a line, too
                    [*(None if value is None else value * factor for value in values), None],
                )
                for name, values in (("P50", half), ("P99", most))
            ]
            if chart := charts.curves(lines, unit, figures.begin):
                drawn.append((f"{each.name}: {title}, in {unit}", chart))
    return drawn


def _read_result(client: ApiClient, project: str, app: str, call: CallSummary) -> str:
    """Return the result of a call if it is JSON, or ""."""
    if call.state != "done":
        return ""
    ended = try_part(lambda: read_calls(client, project, app, CallsReadAsk(ids=[call.id]))).value
    found: CallResult | None = ended.ended[0] if ended and ended.ended else None
    if found is None or not found.json:
        return ""
    return found.result.decode(errors="replace")[:20_000]


def _read_lines(client: ApiClient, project: str, app: str, call: CallSummary) -> Sequence[str]:
    """Return what a call has printed in its job, or in the newest jobs of its app if that is not
    known."""
    from cavvy.cli.view.job_output import EscapeFilter

    jobs = [call.job] if call.job else [each.job for each in read_app(client, project, app).parts]
    found: list[str] = []
    for job in filter(None, jobs):
        log = try_part(partial(client.log, project, job, tail_bytes=_LOG_BYTES)).value
        text = EscapeFilter().take(log.data if log else b"", final=True).decode(errors="replace")
        for line in text.splitlines():
            head, bar, told = line.partition(" | ")
            if bar and head.partition(" ")[2] == call.id:
                found.append(told)
    return found[-_MOST_LINES:]
