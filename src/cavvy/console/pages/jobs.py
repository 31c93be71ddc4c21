"""The list of jobs."""

from collections.abc import Sequence
from datetime import datetime
from urllib.parse import urlencode

from starlette.requests import Request

from cavvy.client import ApiClient
from cavvy.client.accounts import AccountClient
from cavvy.console.pages.page import ENDED, UNFINISHED, Page, try_part

_ON_PAGE = 50
# the choices above the list, and the phases that each shows
CHOICES: dict[str, Sequence[str]] = {
    "all": (),
    "unfinished": UNFINISHED,
    **{phase: (phase,) for phase in (*UNFINISHED, *ENDED)},
}


def make(client: ApiClient, request: Request, now: datetime) -> Page:
    """The jobs of one project or of all, in all phases or some, newest first."""
    asked = request.query_params
    project = asked.get("project") or None
    choice = asked.get("phase") or "all"
    phases = CHOICES.get(choice, ())
    page = client.jobs(project, phases=phases, cursor=asked.get("cursor") or None, limit=_ON_PAGE)
    projects = try_part(lambda: AccountClient(client).projects()).value or []
    names = sorted({each.name for each in projects} | {each.project for each in page.jobs})
    kept = {"project": project or "", "phase": choice}
    return Page(
        "Jobs",
        "jobs.html",
        {
            "jobs": page.jobs,
            "choices": list(CHOICES),
            "choice": choice,
            "project": project or "",
            "projects": names,
            "is_first": "cursor" not in asked,
            "first_page": "/jobs?" + urlencode(kept),
            "next_page": page.cursor and "/jobs?" + urlencode(kept | {"cursor": page.cursor}),
        },
    )
