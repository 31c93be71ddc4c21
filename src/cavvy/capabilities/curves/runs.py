"""The page that compares runs: their curves over each other, their settings and best values, and
which settings mattered.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from math import log10
from random import Random
from typing import NamedTuple
from urllib.parse import urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request

from cavvy.capabilities.curves.data import read_group_data
from cavvy.capabilities.curves.importance import rank_params, read_number
from cavvy.capabilities.curves.order import prominence
from cavvy.capabilities.curves.part import describe_runs
from cavvy.capabilities.curves.wire import (
    MOST_JOBS,
    Curve,
    read_curves_of_jobs,
    read_params_of_jobs,
)
from cavvy.client import ApiClient
from cavvy.client.reruns import compare_all, show_value
from cavvy.client.wire import JobListing
from cavvy.console.pages.page import UNFINISHED, Page, find_project, list_projects, memory_of
from cavvy.domain.units import format_number

_KEPT_S = 5.0
_SEED = 1  # so that a page shows the same intervals each time
_MOST_PARAMS = 40  # columns
_DRAWN = 2  # charts that are drawn first, before the page's script asks for more
_MOST_COMPARED = 12  # runs whose code, environment and machine are compared
_MOST_ROWS = 60
_COMPARED = ("task.", "origin.", "offer.")
_SHOWN_ABOVE = ("task.params", "task.name", "origin.overrides.params")
_MOST_AXES = 10
_WIDTH, _HEIGHT = 1000, 220  # of the picture of parallel coordinates
_BEST_PART = 0.25  # of the runs, which the picture shows in colour
_LOG_FROM = 100.0  # times by which values of an axis differ that is logarithmic


class _ComparedRun(NamedTuple):
    job: JobListing
    params: Mapping[str, str]
    curve: Curve | None  # of the chosen metric
    best: float | None


class _PictureAxis(NamedTuple):
    """An axis of the picture: where it stands in percent, its name, and its ends."""

    x: float
    name: str
    top: str
    bottom: str


def make(client: ApiClient, request: Request, now: datetime) -> Page:
    """The runs that the address names or describes. Raises ApiError."""
    asked = request.query_params
    project = asked.get("project") or find_project(client, request)
    filters = {name: (asked.get(name) or "").strip() for name in ("text", "tag")}
    jobs = _list_jobs(client, project, asked.getlist("job"), filters)
    values: dict[str, object] = {
        "project": project,
        "projects": list_projects(client, request),
        "filters": filters,
        "chosen": asked.getlist("job"),
        "count": len(jobs),
        "rows": [],
        "details": None,
        "details_link": "?" + urlencode([*asked.multi_items(), ("details", "1")]),
    }
    if jobs:
        values |= _compare_results(client, request, project, jobs)
    return Page("Runs", "cavvy.capabilities.curves:runs.html", values)


def _compare_results(
    client: ApiClient, request: Request, project: str, jobs: Sequence[JobListing]
) -> Mapping[str, object]:
    """Return what the page shows if it has runs. Raises ApiError."""
    asked, memory, ids = request.query_params, memory_of(request), [each.id for each in jobs]
    found = memory.recall(
        ("run-bests", project, *ids),
        lambda: read_curves_of_jobs(client, project, ids, points=2).curves,
        _KEPT_S,
    )
    settings = memory.recall(
        ("run-params", project, *ids), lambda: read_params_of_jobs(client, project, ids), _KEPT_S
    )
    metrics = sorted({each.name for each in found}, key=prominence)
    metric = asked.get("metric") or (metrics[0] if metrics else "")
    is_high = asked.get("best") == "high"
    runs = _make_runs(jobs, settings, [each for each in found if each.name == metric], is_high)
    details = None
    if asked.get("details") and len(runs) > 1:
        details = _compare(client, request, [each.job for each in runs[:_MOST_COMPARED]])
    live = any(each.phase in UNFINISHED for each in jobs)
    return {
        "rows": runs,
        "metrics": metrics,
        "metric": metric,
        "is_high": is_high,
        **_rank_settings(runs, metric, is_high=is_high),
        "number": lambda value: "–" if value is None else format_number(value),
        "at": f"/groups/{project}/-",
        "part": {
            **_describe_charts(jobs, [each.job.id for each in runs], metrics, is_live=live),
            "first": _read_first(client, request, project, ids, metrics[:_DRAWN], live=live),
        },
        "details": details,
    }


def _rank_settings(
    runs: Sequence[_ComparedRun], metric: str, *, is_high: bool
) -> Mapping[str, object]:
    """Return the parameters that differ, which of them mattered, and the picture of them."""
    params = _differing(runs)
    known = [(each.params, each.best) for each in runs if each.best is not None]
    shown = [({name: own.get(name, "") for name in params}, best) for own, best in known]
    axes, lines = picture_of(shown, metric, is_high=is_high)
    return {
        "params": params,
        "importances": rank_params(shown, Random(_SEED)),
        "axes": axes,
        "lines": lines,
        "size": (_WIDTH, _HEIGHT),
    }


def _describe_charts(
    jobs: Sequence[JobListing], order: Sequence[str], metrics: Sequence[str], *, is_live: bool
) -> Mapping[str, object]:
    """Return what the part with the charts is told. `order` are the IDs of the jobs, the best one
    first."""
    query = {"job": order, "live": "true" if is_live else "false"}
    return {
        "names": json.dumps(metrics),
        "query": urlencode(query, doseq=True),
        "is_live": is_live,
        "has_cost": False,
        "link": "",
        "runs": describe_runs([(each.name, each.project, each.id, each.phase) for each in jobs]),
        "charts": [],
        "more": 0,
        "by": "step",
        "is_log": False,
    }


def _compare(
    client: ApiClient, request: Request, jobs: Sequence[JobListing]
) -> tuple[Sequence[str], Sequence[tuple[str, Sequence[object]]]]:
    """Return the names of runs, and what differs beside parameters and results: the code, the
    environment, the machine and its price."""
    memory = memory_of(request)
    details = [
        memory.recall(
            ("run-detail", each.id, each.since), partial(client.job, each.project, each.id)
        )
        for each in jobs
    ]
    rows = [
        (name, ["–" if value is None else show_value(name, value) for value in values])
        for name, values in compare_all(details)
        if name.startswith(_COMPARED) and not name.startswith(_SHOWN_ABOVE)
    ]
    return [each.name for each in details], rows[:_MOST_ROWS]


def _read_first(
    client: ApiClient,
    request: Request,
    project: str,
    jobs: Sequence[str],
    names: Sequence[str],
    *,
    live: bool,
) -> str:
    """Return the data of the charts that are drawn first, or "" if the address is wrong."""
    try:
        return read_group_data(client, request, project, jobs, names=names, live=live)
    except HTTPException:
        return ""


def _list_jobs(
    client: ApiClient, project: str, chosen: Sequence[str], filters: Mapping[str, str]
) -> Sequence[JobListing]:
    """Return the jobs that are named, or the newest ones that match and have begun."""
    if chosen:
        names = [*dict.fromkeys(chosen)][:MOST_JOBS]
        matches = client.search_jobs(project=project, job=names, limit=MOST_JOBS).jobs
        order = {name: number for number, name in enumerate(names)}
        known = [each for each in matches if each.id in order or each.name in order]
        return sorted(known, key=lambda each: order.get(each.id, order.get(each.name, 0)))
    given = {name: text for name, text in filters.items() if text}
    found = client.search_jobs(project=project, limit=MOST_JOBS, **given)
    return [each for each in found.jobs if each.attempt]


def _make_runs(
    jobs: Sequence[JobListing],
    settings: Mapping[str, Mapping[str, str]],
    curves: Sequence[Curve],
    is_high: bool,
) -> Sequence[_ComparedRun]:
    """Return the runs, the best one first, those without a value last."""
    by_job = {each.job: each for each in curves}
    runs = []
    for job in jobs:
        curve = by_job.get(job.name)
        best = None if curve is None else (curve.high if is_high else curve.low)
        runs.append(_ComparedRun(job, settings.get(job.id, {}), curve, best))
    sign = -1 if is_high else 1
    return sorted(runs, key=lambda each: (each.best is None, sign * (each.best or 0.0)))


def _differing(runs: Sequence[_ComparedRun]) -> Sequence[str]:
    """Return the names of parameters that have several values among the runs."""
    names = sorted({name for each in runs for name in each.params})
    return [name for name in names if len({each.params.get(name) for each in runs}) > 1][
        :_MOST_PARAMS
    ]


def picture_of(
    runs: Sequence[tuple[Mapping[str, str], float]], metric: str, *, is_high: bool
) -> tuple[Sequence[_PictureAxis], Sequence[tuple[str, bool]]]:
    """Return the axes of parallel coordinates, and the line of each run with whether it is one of
    the best."""
    if len(runs) < 2:
        return [], []
    names = [*runs[0][0]][: _MOST_AXES - 1]
    columns = {name: [params[name] for params, _ in runs] for name in names}
    columns[metric] = [repr(result) for _, result in runs]
    axes, heights = [], []
    for number, (name, column) in enumerate(columns.items()):
        places, bottom, top = _place_column(column)
        axes.append(
            _PictureAxis(round(100 * number / max(1, len(columns) - 1), 2), name, top, bottom)
        )
        heights.append(places)
    order = sorted(range(len(runs)), key=lambda each: runs[each][1], reverse=is_high)
    best = set(order[: max(1, round(_BEST_PART * len(runs)))])
    lines = []
    for at in sorted(range(len(runs)), key=lambda each: each in best):
        points = [
            f"{_WIDTH * number / max(1, len(columns) - 1):g} {_HEIGHT * (1 - own[at]):g}"
            for number, own in enumerate(heights)
        ]
        lines.append(("M" + "L".join(points), at in best))
    return axes, lines


def _place_column(column: Sequence[str]) -> tuple[Sequence[float], str, str]:
    """Return where each value lies on an axis from 0 to 1, and the names of its ends."""
    numbers = [read_number(each) for each in column]
    known = [each for each in numbers if each is not None]
    if len(known) == len(column):
        low, high = min(known), max(known)
        is_log = low > 0 and high / low >= _LOG_FROM
        scaled = [log10(each) if is_log else each for each in known]
        first, last = min(scaled), max(scaled)
        places = [(each - first) / ((last - first) or 1) for each in scaled]
        return places, format_number(low), format_number(high)
    distinct = sorted(set(column))
    places = [distinct.index(each) / max(1, len(distinct) - 1) for each in column]
    return places, distinct[0] or "none", distinct[-1] or "none"
