"""How two runs differ."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial

from starlette.exceptions import HTTPException
from starlette.requests import Request

from cavvy.client import ApiClient
from cavvy.client.reruns import compare_jobs, find_replica, show_value
from cavvy.client.wire import JobDetail
from cavvy.console import charts
from cavvy.console.pages.page import CURVE_POINTS, Page, try_part

_LONGEST = timedelta(days=30)  # of the compared figures


def make(client: ApiClient, request: Request, now: datetime) -> Page:
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
