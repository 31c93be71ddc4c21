"""The list of jobs."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlencode

from starlette.requests import Request

from cavvy.client import ApiClient
from cavvy.client.account_wire import AccountClient
from cavvy.client.wire import JobListing
from cavvy.console.pages.page import (
    ENDED,
    UNFINISHED,
    Page,
    memory_of,
    services_by_replica,
    try_part,
)

_ON_PAGE = 50
_AT_ONCE = 500  # jobs that one request of a search reads; the server's maximum
_MOST_SEARCHED = 2000  # jobs that a page of a search reads at most
# the choices above the list, and the phases that each shows
_CHOICES: dict[str, Sequence[str]] = {
    "all": (),
    "unfinished": UNFINISHED,
    **{phase: (phase,) for phase in (*UNFINISHED, *ENDED)},
}


@dataclass(frozen=True)
class _Filter:
    """The jobs to list. The server selects by project and phase, and the console by the others."""

    project: str
    phase: str
    user: str
    text: str

    def selects(self, job: JobListing) -> bool:
        if self.user and job.user != self.user:
            return False
        wanted = self.text.casefold()
        texts = (job.name, job.id, *(f"{name}={value}" for name, value in job.tags.items()))
        return any(wanted in each.casefold() for each in texts)


@dataclass(frozen=True)
class _Found:
    """Jobs, and the cursor of the jobs after them. `searched` is the number of jobs that were read
    if the console selected them, else 0.
    """

    jobs: Sequence[JobListing]
    cursor: str | None
    searched: int = 0


def make(client: ApiClient, request: Request, now: datetime) -> Page:
    """The jobs that match a filter, newest first."""
    asked = request.query_params
    wanted = _Filter(
        project=asked.get("project") or "",
        phase=asked.get("phase") or "all",
        user=(asked.get("user") or "").strip(),
        text=(asked.get("text") or "").strip(),
    )
    found = _find(client, wanted, asked.get("cursor") or None)
    kept = {name: value for name, value in vars(wanted).items() if value}
    return Page(
        "Jobs",
        "jobs.html",
        {
            "jobs": found.jobs,
            "services": services_by_replica(client, request, found.jobs),
            "choices": list(_CHOICES),
            "choice": wanted.phase,
            "project": wanted.project,
            "projects": sorted(
                {*_projects(client, request), *(each.project for each in found.jobs)}
            ),
            "user": wanted.user,
            "users": sorted({each.user for each in found.jobs if each.user}),
            "text": wanted.text,
            "searched": found.searched,
            "is_filtered": kept != {"phase": "all"},
            "is_first": "cursor" not in asked,
            "first_page": "/jobs?" + urlencode(kept),
            "next_page": found.cursor and "/jobs?" + urlencode(kept | {"cursor": found.cursor}),
        },
    )


def _find(client: ApiClient, wanted: _Filter, cursor: str | None) -> _Found:
    project, phases = wanted.project or None, _CHOICES.get(wanted.phase, ())
    if not wanted.user and not wanted.text:
        page = client.jobs(project, phases=phases, cursor=cursor, limit=_ON_PAGE)
        return _Found(page.jobs, page.cursor)
    jobs: list[JobListing] = []
    searched = 0
    while searched < _MOST_SEARCHED and len(jobs) < _ON_PAGE:
        page = client.jobs(project, phases=phases, cursor=cursor, limit=_AT_ONCE)
        jobs += filter(wanted.selects, page.jobs)
        searched += len(page.jobs)
        cursor = page.cursor
        if cursor is None:
            break
    return _Found(jobs, cursor, searched)


def _projects(client: ApiClient, request: Request) -> list[str]:
    """Return the names of the projects, which may be a minute old."""

    def fetch() -> list[str]:
        found = try_part(lambda: AccountClient(client).projects()).value or []
        return [each.name for each in found]

    return memory_of(request).recall("projects", fetch)
