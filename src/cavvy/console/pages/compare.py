"""How two runs differ."""

from datetime import datetime

from starlette.exceptions import HTTPException
from starlette.requests import Request

from cavvy.client import ApiClient
from cavvy.client.comparison import compare_jobs, find_replica, show_value
from cavvy.client.wire import JobDetail
from cavvy.console.pages.page import Page


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
        {"jobs": (first, second), "rows": rows},
    )


def _read_job(client: ApiClient, request: Request, name: str) -> JobDetail:
    project, slash, job = (request.query_params.get(name) or "").strip().partition("/")
    if not (slash and project and job):
        raise HTTPException(400, f"`{name}` must be a job such as default/train.")
    return client.job(project, job)
