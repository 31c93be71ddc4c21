"""What a page consists of, and functions that several pages share."""

import getpass
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode

from starlette.datastructures import ImmutableMultiDict
from starlette.exceptions import HTTPException
from starlette.requests import Request

from cavvy.client import ApiClient, ApiError
from cavvy.client.account_wire import AccountClient
from cavvy.client.service_wire import NamedService, list_named_services
from cavvy.client.wire import JobListing
from cavvy.console.memory import Memory
from cavvy.domain.units import is_whole
from cavvy.frame.capability import Capability
from cavvy.frame.discover import load_all

_T = TypeVar("_T")
UNFINISHED = ("queued", "starting", "running", "stopping")
ENDED = ("done", "failed", "stopped")
PERIODS = {"hour": 1.0, "12 hours": 12.0, "day": 24.0, "week": 168.0, "month": 720.0}  # hours
USUAL_PROJECT = "default"  # the project that commands use by default
USUAL_PERIOD = "12 hours"
CURVE_POINTS = 200
_CHARTS_S = 8  # seconds of each minute in which updates of a page have the charts
_ACTIONS_S = 60.0  # seconds for the actions on all chosen rows
_REPLICA_NAME = re.compile(r"\.\d+$")  # NAME.NUMBER, where NAME is the service's name


class Form(ImmutableMultiDict[str, str]):
    """The fields of a form; a field may have several values."""


@dataclass(frozen=True)
class Page:
    """A template, and the values that it shows."""

    title: str
    template: str
    values: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200


@dataclass(frozen=True)
class Part(Generic[_T]):
    """A part of a page. `value` is None if the user may not see it; `refusal` says why."""

    value: _T | None
    refusal: str = ""


def try_part(fetch: Callable[[], _T]) -> Part[_T]:
    """Fetch a part of a page. If the server refuses it, the rest of the page is shown. Raises
    ApiError if the server does not answer, or if the user is no longer signed in.
    """
    try:
        return Part(fetch())
    except ApiError as error:
        if error.status not in (403, 404):
            raise
        return Part(None, error.message)


@dataclass(frozen=True)
class PagePart:
    """A part of a page that a capability makes: its template (PACKAGE:FILE), which finds `values`
    as `part`, and the names of the figures that it shows, which the page then leaves out.
    """

    template: str
    values: Mapping[str, Any]
    shows: Collection[str] = ()


def make_parts(pick: Callable[[Capability], Iterable[str]], *page: object) -> Sequence[PagePart]:
    """Return the parts that the functions at the places of capabilities make of what a page shows.
    One that the server refuses is left out.
    """
    made = (try_part(partial(make, *page)).value for _, make in load_all(pick))
    return [each for each in made if each is not None]


@dataclass(frozen=True)
class Sorting(Generic[_T]):
    """Sorted rows; for each column that sorts, the link that sorts by it and how it does now; and
    the query of the page, with its filters and its order.
    """

    rows: Sequence[_T]
    heads: Mapping[str, tuple[str, str]]
    query: str


def sort_rows(
    request: Request,
    rows: Iterable[_T],
    keys: Mapping[str, Callable[[_T], Any]],
    usual: tuple[str, str],
    prefix: str = "",
) -> Sorting[_T]:
    """Sort rows by the column that the query names, or by the `usual` column and way. `prefix`
    begins the names in the query if a page has several such lists. Raises HTTPException.
    """
    asked = dict(request.query_params)
    column, way = f"{prefix}sort", f"{prefix}way"
    sort, turned = asked.get(column) or usual[0], asked.get(way) or usual[1]
    if sort not in keys or turned not in ("up", "down"):
        raise HTTPException(
            400, f"`{column}` must be one of {', '.join(keys)}; `{way}` up or down."
        )
    kept = {name: text for name, text in asked.items() if name != "page"}
    heads = {}
    for name in keys:
        to, state = turn(name, sort, turned, "up")
        heads[name] = (f"{request.url.path}?" + urlencode({**kept, column: name, way: to}), state)
    ordered = sorted(rows, key=keys[sort], reverse=turned == "down")
    return Sorting(ordered, heads, urlencode(asked))


def turn(name: str, sort: str, way: str, usual: str) -> tuple[str, str]:
    """Return the way in which a column sorts when its head is chosen, and how it sorts now."""
    if name != sort:
        return usual, ""
    return ("down", "ascending") if way == "up" else ("up", "descending")


def act_on_chosen(
    client: ApiClient,
    request: Request,
    acts: Mapping[str, Callable[[str, str], object]],
    field: str,
) -> list[str]:
    """Apply the action that the form names to each chosen row, PROJECT/NAME. Return what failed.
    Raises HTTPException, and ApiError if the user is no longer signed in.
    """
    form = form_of(request)
    chosen, action = form.getlist(field), form.get("do", "")
    if action not in acts:
        raise HTTPException(400, f"`do` must be one of {', '.join(acts)}, not {action!r}.")
    problems = [] if chosen else [f"no {field} was chosen: mark some in the first column"]
    client.until = time.monotonic() + _ACTIONS_S
    for each in chosen:
        project, _, name = each.partition("/")
        try:
            acts[action](project, name)
        except ApiError as error:
            if error.status == 401:
                raise
            problems.append(error.message)
    return problems


def form_of(request: Request) -> Form:
    """Return the fields of the form that requests a change."""
    form = request.state.form
    assert isinstance(form, Form)
    return form


def path_of(kind: str, project: str, name: str) -> str:
    """Return the path of the page of a job, a service or a machine."""
    return f"/{kind}/{quote(project, safe='')}/{quote(name, safe='')}"


def named_in(request: Request) -> tuple[str, str]:
    """Return the project and the name in the path of a page."""
    return request.path_params["project"], request.path_params["name"]


def user_of(request: Request) -> str:
    """Return the user of the machine; of a console for several users, the server knows the user."""
    if request.state.shared:
        return ""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def read_number(request: Request, name: str, usual: int) -> int:
    """Return a whole number of the query. Raises HTTPException."""
    text = request.query_params.get(name, "")
    if not text:
        return usual
    if not (is_whole(text) and len(text) < 16):
        raise HTTPException(400, f"`{name}` must be a whole number, not {text!r}.")
    return int(text)


def list_projects(client: ApiClient, request: Request) -> list[str]:
    """Return the names of the projects, the archived ones last. They may be a minute old."""

    def fetch() -> list[str]:
        found = try_part(lambda: AccountClient(client).projects()).value or []
        return [each.name for each in sorted(found, key=lambda each: each.archived_at is not None)]

    return memory_of(request).recall("projects", fetch)


def find_project(client: ApiClient, request: Request) -> str:
    """Return the project of a page that names none: the usual one, or the first of the user's if it
    is not among them."""
    names = list_projects(client, request)
    return USUAL_PROJECT if USUAL_PROJECT in names or not names else names[0]


def memory_of(request: Request) -> Memory:
    """Return the memory of the user who requests the page."""
    memory = request.state.memory
    assert isinstance(memory, Memory)
    return memory


def is_update(request: Request) -> bool:
    """Return whether the page's script requests the page, which then needs only its live parts.
    Browsers that send no such header get the whole page.
    """
    return request.headers.get("sec-fetch-dest") == "empty"


def has_charts(request: Request, now: datetime) -> bool:
    """Return whether the page has charts over time. They change once a minute, so most updates of
    the page leave them out.
    """
    return not is_update(request) or now.second < _CHARTS_S


def hours_of(request: Request) -> float:
    """Return the length of the chosen period of charts."""
    return PERIODS.get(request.query_params.get("period", ""), PERIODS[USUAL_PERIOD])


def period_choice(request: Request) -> Mapping[str, Any]:
    """Return what a page with charts shows above them, and whether it is an update."""
    return {
        "periods": list(PERIODS),
        "period": request.query_params.get("period") or USUAL_PERIOD,
        "is_update": is_update(request),
    }


def read_figures(
    request: Request,
    now: datetime,
    begin: datetime,
    end: datetime,
    key: tuple[object, ...],
    read: Callable[[datetime], _T],
) -> _T | None:
    """Return the figures that `read` finds since the begin of the chosen period before `end`, which
    are kept for a minute under `key`. None if the page needs no charts now, or without permission.
    """
    if not has_charts(request, now):
        return None
    hours = hours_of(request)
    since = max(end - timedelta(hours=hours), begin)
    minute = now.replace(second=0, microsecond=0)
    found = memory_of(request).recall(
        ("figures", *key, hours, minute), lambda: try_part(lambda: read(since))
    )
    return found.value


def services_by_replica(
    client: ApiClient, request: Request, jobs: Iterable[JobListing]
) -> dict[str, NamedService]:
    """Return the services by the IDs of their replicas' jobs. They may be a minute old, and are
    requested only if the name of a job looks like a replica's.
    """
    if not any(_REPLICA_NAME.search(each.name) for each in jobs):
        return {}
    found = list_services(client, request)
    return {replica.job: service for service in found for replica in service.replicas}


def list_services(client: ApiClient, request: Request) -> Sequence[NamedService]:
    """Return the services, which may be a minute old; none if they cannot be read."""

    def fetch() -> Sequence[NamedService]:
        return try_part(lambda: list_named_services(client)).value or []

    return memory_of(request).recall("services", fetch)
