"""The list of jobs: filtered, sorted, and with actions on several jobs at once; how two runs
differ; the queue by project, the pools of machines, and the jobs that repeat.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import partial
from urllib.parse import urlencode

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request

from cavvy.client import ApiClient
from cavvy.client.array_wire import remove_array, retry_array, stop_array
from cavvy.client.pool_wire import list_pools
from cavvy.client.queue_wire import read_shares
from cavvy.client.reruns import compare_jobs, find_replica, show_value
from cavvy.client.service_wire import end_service
from cavvy.client.wire import JobDetail, JobListing, JobMatches
from cavvy.console import charts
from cavvy.console.memory import Memory
from cavvy.console.pages.page import (
    CURVE_POINTS,
    ENDED,
    UNFINISHED,
    Page,
    act_on_chosen,
    form_of,
    list_projects,
    list_services,
    memory_of,
    services_by_replica,
    try_part,
    turn,
)
from cavvy.domain.units import is_whole
from cavvy.frame.discover import find_capabilities

_ON_PAGE = 50
_SORTS = ("submitted", "name", "project", "user", "phase", "duration", "cost")
_SORTS_OF_ARRAYS = ("submitted", "project", "user")  # in which an array or a service is one row
_TEXTS = ("project", "user", "text", "provider", "gpu", "tag")  # the filters that are texts
_DAYS = ("since", "until")  # the filters that are days in UTC; both days are included
# the choices above the list, and the phases that each shows
_CHOICES: dict[str, Sequence[str]] = {
    "all": (),
    "unfinished": UNFINISHED,
    **{phase: (phase,) for phase in (*UNFINISHED, *ENDED)},
}


def make(client: ApiClient, request: Request, now: datetime) -> Page:
    """The jobs that match the filters. Raises ApiError, HTTPException."""
    return _show(client, request, [])


def act(client: ApiClient, request: Request, now: datetime) -> Page | str:
    """Stop, remove, queue again or compare the chosen jobs. What fails is told above the list.
    Raises HTTPException.
    """
    form = form_of(request)
    chosen, action = form.getlist("job"), form.get("do", "")
    arrays, services = form.getlist("array"), form.getlist("service")
    every = [*chosen, *arrays, *services]
    acts: Mapping[str, Callable[[str, str], object]] = {
        "stop": client.stop,
        "remove": client.remove,
        "retry": client.retry,
    }
    if action == "compare" and (arrays or services):
        problem = "the page of an array compares its jobs: open it"
        if services:
            problem = "a service cannot be compared: its page shows its replicas"
        return _show(client, request, [problem], every)
    if action == "compare" and len(chosen) == 2:
        return "/compare?" + urlencode({"a": chosen[0], "b": chosen[1]})
    if action == "compare" and len(chosen) > 2:
        if path := _find_comparison(chosen):
            return path
        problem = "more than two jobs are compared within one project"
        return _show(client, request, [problem], chosen)
    if action == "compare":
        problem = "mark the jobs to compare in the first column, at least two"
        return _show(client, request, [problem], chosen)
    acts_on_arrays: Mapping[str, Callable[[str, str], object]] = {
        "stop": partial(stop_array, client),
        "remove": partial(remove_array, client),
        "retry": partial(retry_array, client),
    }
    acts_on_services = {"stop": partial(end_service, client)}
    if services and action in acts and action not in acts_on_services:
        problem = "a service can only be stopped here: its page has the rest"
        return _show(client, request, [problem], every)
    problems = act_on_chosen(client, request, acts, "job") if chosen or not every else []
    problems += act_on_chosen(client, request, acts_on_arrays, "array") if arrays else []
    problems += act_on_chosen(client, request, acts_on_services, "service") if services else []
    if problems:
        return _show(client, request, problems, every)
    return f"/jobs?{request.url.query}"


def _find_comparison(chosen: Sequence[str]) -> str:
    """Return the page that compares several jobs of a project, or ""."""
    pairs = [each.partition("/") for each in chosen]
    pages = (page for each in find_capabilities().capabilities for page in each.pages)
    path = next((page.path for page in pages if page.compares), "")
    if not path or len({project for project, _, _ in pairs}) > 1:
        return ""
    return f"{path}?" + urlencode([("project", pairs[0][0]), *(("job", job) for *_, job in pairs)])


def _show(
    client: ApiClient, request: Request, problems: Sequence[str], chosen: Sequence[str] = ()
) -> Page:
    given = _read_filters(request.query_params)
    sort, way = _read_order(request.query_params)
    page = _read_page(request.query_params.get("page", ""))
    sorting = {} if (sort, way) == ("submitted", "down") else {"sort": sort, "way": way}
    found = _search(client, given, sort, way, page)
    pages = max(1, -(-found.total // _ON_PAGE))

    def link(**more: object) -> str:
        return "/jobs?" + urlencode({**given, **sorting, **more})

    usual = {name: "up" if name in ("name", "project", "user") else "down" for name in _SORTS}
    heads = {name: turn(name, sort, way, usual[name]) for name in _SORTS}
    return Page(
        "Jobs",
        "jobs.html",
        {
            "problems": problems,
            "chosen": chosen,
            "jobs": found.jobs,
            "total": found.total,
            "services": services_by_replica(client, request, found.jobs),
            "current": _list_current(client, request, found.jobs),
            "choices": list(_CHOICES),
            "choice": given.get("phase", "all"),
            "given": {**dict.fromkeys((*_TEXTS, *_DAYS), ""), **given},
            "is_filtered": bool(given),
            "sorting": sorting,
            "projects": sorted(
                {*list_projects(client, request), *(each.project for each in found.jobs)}
            ),
            "users": sorted({each.user for each in found.jobs if each.user}),
            "query": urlencode({**given, **sorting, **({"page": page} if page > 1 else {})}),
            "heads": {
                name: ("/jobs?" + urlencode({**given, "sort": name, "way": way}), state)
                for name, (way, state) in heads.items()
            },
            "first": (page - 1) * _ON_PAGE + 1,
            "newer": link(page=page - 1) if page > 1 else None,
            "older": link(page=page + 1) if page < pages else None,
        },
    )


def _read_filters(asked: Mapping[str, str]) -> dict[str, str]:
    """Return the filters that the address sets, in the order of the page."""
    given = {name: text for name in _TEXTS if (text := (asked.get(name) or "").strip())}
    given |= {name: asked[name] for name in _DAYS if asked.get(name)}
    phase = asked.get("phase") or "all"
    return given if phase == "all" else {**given, "phase": phase}


def _read_order(asked: Mapping[str, str]) -> tuple[str, str]:
    """Return by what the list is sorted, and which way. Raises HTTPException."""
    sort, way = asked.get("sort") or "submitted", asked.get("way") or "down"
    if sort not in _SORTS or way not in ("up", "down"):
        raise HTTPException(400, f"`sort` must be one of {', '.join(_SORTS)}; `way` up or down.")
    return sort, way


def _search(
    client: ApiClient, given: Mapping[str, str], sort: str, way: str, page: int
) -> JobMatches:
    """Return the jobs of a page of the list. Raises ApiError, HTTPException."""
    wanted = {name: given.get(name) for name in _TEXTS}
    return client.search_jobs(
        **wanted,
        phase=_CHOICES.get(given.get("phase", "all"), ()),
        since=_read_day(given, "since", timedelta(0)),
        until=_read_day(given, "until", timedelta(days=1)),
        sort=sort,
        ascending=way == "up",
        offset=(page - 1) * _ON_PAGE,
        limit=_ON_PAGE,
        # the order by name, time or cost, and a search by name, are those of each job or replica
        arrays=(sort in _SORTS_OF_ARRAYS and "text" not in given) or None,
    )


def _list_current(
    client: ApiClient, request: Request, jobs: Sequence[JobListing]
) -> Collection[str]:
    """Return PROJECT/NAME of the services that there are, if the list has any. Those that have
    ended have no page."""
    if not any(each.service for each in jobs):
        return ()
    return {f"{each.project}/{each.name}" for each in list_services(client, request)}


def _read_page(text: str) -> int:
    """Raises HTTPException."""
    if not text:
        return 1
    if not (is_whole(text) and int(text[:8]) >= 1 and len(text) < 6):
        raise HTTPException(400, f"`page` must be a number from 1 to 99999, not {text!r}.")
    return int(text)


def _read_day(given: Mapping[str, str], name: str, later: timedelta) -> str | None:
    """Return the begin of a day in UTC, or the given time later. Raises HTTPException."""
    if name not in given:
        return None
    try:
        day = date.fromisoformat(given[name])
        return (datetime(day.year, day.month, day.day, tzinfo=UTC) + later).isoformat()
    except (ValueError, OverflowError):
        raise HTTPException(
            400, f"`{name}` must be a day such as 2026-01-31, not {given[name]!r}."
        ) from None


_MOST = 500  # waiting jobs among which those that repeat are found


class ScheduleRow(msgspec.Struct, frozen=True, kw_only=True):
    """A job that repeats, and when its next run starts."""

    job: JobDetail
    cron: str
    time_zone: str


def make_queue(client: ApiClient, request: Request, now: datetime) -> Page:
    memory = memory_of(request)
    return Page(
        "Queue",
        "queue.html",
        {
            "shares": try_part(lambda: read_shares(client)),
            "pools": try_part(lambda: list_pools(client)).value or [],
            "schedules": memory.recall("schedules", lambda: _list_schedules(client, memory), 10.0),
        },
    )


def _list_schedules(client: ApiClient, memory: Memory) -> Sequence[ScheduleRow]:
    """Return the jobs that repeat, the next one first. Their tasks, which do not change, may have
    been read before.
    """
    found: list[ScheduleRow] = []
    for row in client.jobs(phases=("queued",), limit=_MOST).jobs:
        if not row.held:
            continue
        read = partial(client.job, row.project, row.id)
        job = memory.recall(("held", row.id, row.since), read)
        schedule = msgspec.json.decode(job.task).get("schedule") or {}
        if cron := schedule.get("cron"):
            zone = schedule.get("time_zone", "UTC")
            found.append(ScheduleRow(job=job, cron=cron, time_zone=zone))
    return sorted(found, key=lambda each: (each.job.not_before is None, str(each.job.not_before)))


_LONGEST = timedelta(days=30)  # of the compared figures


def make_comparison(client: ApiClient, request: Request, now: datetime) -> Page:
    """The jobs `a` and `b`, each PROJECT/NAME or PROJECT/ID. Raises ApiError `job-not-found`,
    HTTPException.
    """
    first, second = (_read_job(client, request, each) for each in ("a", "b"))
    if replica := find_replica(first, second):
        raise HTTPException(409, f"The jobs cannot be compared: {replica} is a replica.")
    rows = [
        (name, *("–" if each is None else show_value(name, each) for each in values))
        for name, *values in compare_jobs(first, second)
    ]
    return Page(
        f"{first.name} and {second.name}",
        "compare.html",
        {"jobs": (first, second), "rows": rows, "figures": _chart(client, first, second, now)},
    )


def _chart(
    client: ApiClient, first: JobDetail, second: JobDetail, now: datetime
) -> Sequence[tuple[str, charts.Chart]]:
    """Return a chart of each figure of the first ranks, by the time since the submission."""
    lines: dict[str, list[charts.Line]] = {}
    for job in (first, second):
        if not job.attempts:
            continue
        since = max(job.submitted_at, (job.ended_at or now) - _LONGEST)
        read = partial(
            client.figures, job.project, job.id, ranks=[0], since=since, points=CURVE_POINTS
        )
        if (found := try_part(read).value) is None:
            continue
        after = (found.start - job.submitted_at).total_seconds()
        for each in found.series:
            name = f"{job.name}, attempt {each.attempt}" if job.attempt > 1 else job.name
            line = charts.Line(name, after, found.step_s, each.mean)
            lines.setdefault(each.name, []).append(line)
    drawn = ((name, charts.curves(each, name)) for name, each in sorted(lines.items()))
    return [(name, chart) for name, chart in drawn if chart is not None]


def _read_job(client: ApiClient, request: Request, name: str) -> JobDetail:
    project, slash, job = (request.query_params.get(name) or "").strip().partition("/")
    if not (slash and project and job):
        raise HTTPException(400, f"`{name}` must be a job such as default/train.")
    return client.job(project, job)
