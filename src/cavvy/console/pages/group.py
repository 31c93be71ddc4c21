"""Arrays and groups of jobs: their list; of each its members, what they have reported and wait for,
and its actions; and the graph of the jobs that a job waits for.

Places jobs that wait for each other: a column for each step, and an arrow from each job to those
that wait for it. Positions are pixels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any
from urllib.parse import urlencode

import msgspec
from starlette.requests import Request

from cavvy.client import ApiClient, ApiError
from cavvy.client.array_wire import (
    ArrayDetail,
    ArrayMemberView,
    list_arrays,
    read_array,
    remove_array,
    retry_array,
    stop_array,
)
from cavvy.client.metrics import figures
from cavvy.client.wire import JobDetail
from cavvy.console.memory import Memory
from cavvy.console.pages.page import (
    ENDED,
    Page,
    Sorting,
    act_on_chosen,
    list_projects,
    make_parts,
    memory_of,
    named_in,
    path_of,
    read_number,
    sort_rows,
)

_ON_PAGE = 100
_COLUMNS = 12  # of parameters and of metrics
_MOST_DRAWN = 40  # jobs of a graph, each of which is read once
_KEPT_S = 10.0  # seconds for which the phases of other jobs are kept
_ORDER = ("running", "starting", "stopping", "queued", "failed", "stopped", "done")

_BOX_PX, _ROW_PX = (176, 30), 40
_COLUMN_PX = 236
_LONGEST = 20  # characters of a name that fit into a box


@dataclass(frozen=True)
class GraphJob:
    """A job or an array, the path of its page or "", and what it waits for: IDs with conditions."""

    id: str
    name: str
    phase: str
    path: str = ""
    after: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class GraphBox:
    """A job as it is drawn. `label` is its name, which may be shortened."""

    job: GraphJob
    label: str
    x: int
    y: int


@dataclass(frozen=True)
class GraphArrow:
    """An SVG path, and the condition under which the later job starts."""

    path: str
    on: str


@dataclass(frozen=True)
class Graph:
    """Boxes of the size `box`, arrows, and for readers who cannot see them `waits`: each job with
    the names and conditions of the jobs that it waits for.
    """

    width: int
    height: int
    box: tuple[int, int]
    boxes: Sequence[GraphBox]
    arrows: Sequence[GraphArrow]
    waits: Sequence[tuple[str, str]]


def place(jobs: Mapping[str, GraphJob]) -> Graph | None:
    """Return the graph of the jobs, or None if none of them waits for another one."""
    edges = [
        (before, each.id, on)
        for each in jobs.values()
        for before, on in each.after
        if before in jobs
    ]
    if not edges:
        return None
    steps = _find_steps(jobs)
    rows: dict[int, int] = {}
    boxes = {}
    for each in jobs.values():
        step = steps[each.id]
        row = rows[step] = rows.get(step, -1) + 1
        short = each.name if len(each.name) <= _LONGEST else f"{each.name[: _LONGEST - 1]}…"
        boxes[each.id] = GraphBox(each, short, step * _COLUMN_PX + 2, row * _ROW_PX + 2)
    names = {before: jobs[before].name for before, _, _ in edges}
    waits = [
        (
            each.name,
            ", ".join(f"{names[before]} ({on})" for before, on in each.after if before in names),
        )
        for each in jobs.values()
        if any(before in names for before, _ in each.after)
    ]
    return Graph(
        width=(max(rows) + 1) * _COLUMN_PX - (_COLUMN_PX - _BOX_PX[0]) + 4,
        height=(max(rows.values()) + 1) * _ROW_PX,
        box=_BOX_PX,
        boxes=list(boxes.values()),
        arrows=[GraphArrow(_join(boxes[before], boxes[after]), on) for before, after, on in edges],
        waits=waits,
    )


def _find_steps(jobs: Mapping[str, GraphJob]) -> Mapping[str, int]:
    """Return the length of the longest chain of jobs before each job. Jobs never wait in a circle;
    if an answer of the server says so, the number of rounds is bounded.
    """
    steps = dict.fromkeys(jobs, 0)
    for _ in jobs:
        later = {
            each.id: max(
                (steps[before] + 1 for before, _ in each.after if before in jobs), default=0
            )
            for each in jobs.values()
        }
        if later == steps:
            break
        steps = {name: min(step, len(jobs) - 1) for name, step in later.items()}
    return steps


def _join(before: GraphBox, after: GraphBox) -> str:
    width, height = _BOX_PX
    x, y = before.x + width, before.y + height // 2
    to_x, to_y = after.x - 6, after.y + height // 2
    middle = (x + to_x) // 2
    return f"M{x} {y}C{middle} {y} {middle} {to_y} {to_x} {to_y}"


def make_list(client: ApiClient, request: Request, now: datetime) -> Page:
    """The newest arrays and groups, or those before another. Raises ApiError."""
    return _show_list(client, request, [])


def act(client: ApiClient, request: Request, now: datetime) -> Page | str:
    """Stop, remove or queue again the jobs of the chosen arrays and groups. What fails is told
    above the list. Raises HTTPException.
    """
    acts: Mapping[str, Callable[[str, str], object]] = {
        "stop": partial(stop_array, client),
        "remove": partial(remove_array, client),
        "retry": partial(retry_array, client),
    }
    if problems := act_on_chosen(client, request, acts, "group"):
        return _show_list(client, request, problems)
    return f"/groups?{request.url.query}"


def _show_list(client: ApiClient, request: Request, problems: Sequence[str]) -> Page:
    asked = request.query_params
    project, before = asked.get("project", "").strip(), asked.get("before", "")[:200]
    found = list_arrays(client, project or None, before or None)
    given = {"project": project} if project else {}
    return Page(
        "Arrays and groups",
        "groups.html",
        {
            "problems": problems,
            "groups": found.jobs,
            "projects": sorted({*list_projects(client, request), *given.values()}),
            "project": project,
            "before": before,
            "query": urlencode(given | ({"before": before} if before else {})),
            "newest": urlencode(given),
            "older": urlencode(given | {"before": found.cursor}) if found.cursor else "",
        },
    )


def make(client: ApiClient, request: Request, now: datetime) -> Page:
    """Raises ApiError `job-not-found`, HTTPException."""
    project, name = named_in(request)
    found = read_array(client, project, name)
    phase = request.query_params.get("phase", "")
    chosen = [each for each in found.jobs if phase in ("", each.phase)]
    params = list(dict.fromkeys(key for each in found.jobs for key in each.params))[:_COLUMNS]
    told = (key for each in found.jobs for key in figures(each.progress))
    metrics = list(dict.fromkeys(told))[:_COLUMNS]
    sorting = _sort(request, found, chosen, params, metrics)
    page = min(max(1, read_number(request, "page", 1)), max(1, -(-len(chosen) // _ON_PAGE)))
    begin = (page - 1) * _ON_PAGE
    return Page(
        found.array.name,
        "group.html",
        {
            "array": found.array,
            "kind": "group" if found.group else "array",
            "parallel": found.parallel,
            "counts": {each: n for each in _ORDER if (n := found.array.members.get(each, 0))},
            "total": len(found.jobs),
            "matching": len(chosen),
            "phase": phase,
            "members": sorting.rows[begin : begin + _ON_PAGE],
            "first": begin + 1,
            "page": page,
            "pages": max(1, -(-len(chosen) // _ON_PAGE)),
            "heads": sorting.heads,
            "query": sorting.query,
            "params": params,
            "metrics": metrics,
            "early": sum(each.early for each in found.jobs),
            "is_over": all(each.phase in ENDED for each in found.jobs),
            "is_repeatable": any(each.phase in ("failed", "stopped") for each in found.jobs),
            "graph": _graph_of_members(client, memory_of(request), found),
            "parts": make_parts(
                lambda each: each.group_parts, client, request, project, sorting.rows
            ),
        },
    )


def _sort(
    request: Request,
    found: ArrayDetail,
    rows: Sequence[ArrayMemberView],
    params: Sequence[str],
    metrics: Sequence[str],
) -> Sorting[ArrayMemberView]:
    keys: dict[str, Any] = {
        "Name": lambda each: (each.index, each.name),
        "Phase": lambda each: each.phase,
        **{name: partial(_value_of, "params", name) for name in params},
        **{name: partial(_value_of, "progress", name) for name in metrics},
        "Since": lambda each: each.since,
        "Cost": lambda each: each.spent_micros,
    }
    metric, _, way = found.best.rpartition(":")
    usual = (metric, "down" if way == "max" else "up") if metric in metrics else ("Name", "up")
    return sort_rows(request, rows, keys, usual)


def _value_of(part: str, name: str, member: ArrayMemberView) -> tuple[bool, float, str]:
    """Return what sorts members by a value: numbers, then texts; members without it are last."""
    value = getattr(member, part).get(name)
    if isinstance(value, int | float) and value == value:
        return (False, float(value), "")
    return (True, 0.0, "" if value is None else str(value))


def stop(client: ApiClient, request: Request, now: datetime) -> str:
    """Stop all jobs that have not ended. Raises ApiError."""
    stop_array(client, *named_in(request))
    return path_of("groups", *named_in(request))


def retry(client: ApiClient, request: Request, now: datetime) -> str:
    """Queue all failed and stopped jobs again. Raises ApiError."""
    retry_array(client, *named_in(request))
    return path_of("groups", *named_in(request))


def remove(client: ApiClient, request: Request, now: datetime) -> str:
    """Remove all jobs, which must have ended. Raises ApiError `job-not-ended`."""
    remove_array(client, *named_in(request))
    return "/jobs"


def group_of(job: JobDetail, task: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the name and the path of the group or the array of a job, or None."""
    if job.array_id is None:
        return None
    name = (task.get("group") or {}).get("name") or job.name.rpartition(".")[0] or job.array_id
    return name, path_of("groups", job.project, job.array_id)


def graph_of(client: ApiClient, memory: Memory, job: JobDetail) -> Graph | None:
    """Return the job with all jobs that it waits for, directly or not; None if there are none."""
    own = GraphJob(job.id, job.name, job.phase, after=_after_of(job))
    return place(_add_earlier(client, memory, job.project, {job.id: own}))


def _graph_of_members(client: ApiClient, memory: Memory, found: ArrayDetail) -> Graph | None:
    """Return the graph of a group's members and the jobs that they wait for. An array, whose
    members wait for the same jobs, is one box.
    """
    array, jobs = found.array, {}
    for each in found.jobs[: _MOST_DRAWN if found.group else 1]:
        after = memory.recall(
            ("after", array.project, each.id),
            partial(_read_after, client, array.project, each.id),
        )
        path = path_of("jobs", array.project, each.id)
        drawn = GraphJob(each.id, each.name, each.phase, path, after)
        if not found.group:
            drawn = GraphJob(array.id, array.name, array.phase, after=after)
        jobs[drawn.id] = drawn
    return place(_add_earlier(client, memory, array.project, jobs))


def _add_earlier(
    client: ApiClient, memory: Memory, project: str, jobs: Mapping[str, GraphJob]
) -> Mapping[str, GraphJob]:
    known = dict(jobs)
    wanted = [before for each in jobs.values() for before, _ in each.after]
    while wanted and len(known) < _MOST_DRAWN:
        if (name := wanted.pop(0)) in known:
            continue
        read = partial(_read_earlier, client, project, name)
        known[name] = memory.recall(("earlier", project, name), read, _KEPT_S)
        wanted += [before for before, _ in known[name].after]
    return known


def _read_earlier(client: ApiClient, project: str, name: str) -> GraphJob:
    """Return an earlier job or array by its ID. One that was removed has no page."""
    try:
        job = client.job(project, name)
    except ApiError as error:
        if error.status not in (403, 404):
            raise
    else:
        return GraphJob(name, job.name, job.phase, path_of("jobs", project, name), _after_of(job))
    try:
        array = read_array(client, project, name).array
    except ApiError as error:
        if error.status not in (403, 404):
            raise
        return GraphJob(name, name, "removed")
    return GraphJob(name, array.name, array.phase, path_of("groups", project, name))


def _read_after(client: ApiClient, project: str, name: str) -> Sequence[tuple[str, str]]:
    return _after_of(client.job(project, name))


def _after_of(job: JobDetail) -> Sequence[tuple[str, str]]:
    """Return the IDs of the jobs that the job waits for, with the conditions."""
    after = msgspec.json.decode(job.task).get("after") or ()
    return [(each.get("id") or each["job"], each.get("on", "success")) for each in after]
