"""Shows curves on a job's page in the console."""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from math import ceil, floor, log10
from typing import NamedTuple
from urllib.parse import urlencode

from msgspec import structs
from starlette.exceptions import HTTPException
from starlette.requests import Request

from cavvy.capabilities.curves.briefs import thin
from cavvy.capabilities.curves.data import (
    POINTS,
    Axis,
    charts_of,
    list_events,
    list_names,
    make_clock,
    read_axis,
    write_answer,
)
from cavvy.capabilities.curves.machine import list_machine_names
from cavvy.capabilities.curves.order import prominence
from cavvy.capabilities.curves.wire import (
    MOST_JOBS,
    Curve,
    read_curve_names,
    read_curves,
    read_curves_of_jobs,
    say_gaps,
)
from cavvy.client import ApiClient
from cavvy.client.array_wire import ArrayMemberView
from cavvy.client.wire import JobDetail
from cavvy.console import charts
from cavvy.console.pages.page import UNFINISHED, PagePart, is_update, memory_of, path_of
from cavvy.domain.units import format_number

_POINTS = 200  # of a curve in a chart that the server draws
_MOST_LINES = 6  # of a chart, which have colours of their own
_MOST_CHARTS = 40
_DRAWN = 4  # charts that the server draws for browsers without scripts, and those drawn first
_LABELS = 6  # below a chart
_KEPT_S = 5.0  # of the curves of several jobs
_ASKED = 3  # of several jobs, whether they have curves at last


class _ChartChoice(NamedTuple):
    by: str  # "step" or "time"
    is_log: bool


def make(client: ApiClient, request: Request, job: JobDetail, now: datetime) -> PagePart | None:
    """Return the charts of what the job's program reported, or None if it reported nothing. Raises
    ApiError.
    """
    if not job.attempts:
        return None
    names = list_names(client, request, job)
    if is_update(request):  # the page's script has drawn the charts, and asks for their data itself
        return _part_of({}, _read_choice(request), names=names) if names else None
    asked, choice = request.query_params, _read_choice(request)
    ranks = [int(asked["rank"])] if asked.get("rank", "").isdecimal() else []
    axis = _find_axis(request, job, now)
    found = _read_first(client, job, names[:_DRAWN], ranks, axis) if names else ()
    by_name: defaultdict[str, list[Curve]] = defaultdict(list)
    for each in found:
        by_name[each.name].append(_shorten(each))
    live = job.phase in UNFINISHED
    events = list_events(client, request, job)
    more = [each for each in list_machine_names(job) if each not in names]
    first = write_answer([*names, *more], charts_of(found, axis), found, axis, job, events)
    query = _query(rank=ranks)
    return _part_of(by_name, choice, names=names, query=query, is_live=live, first=first, more=more)


def _read_first(
    client: ApiClient, job: JobDetail, names: Sequence[str], ranks: Sequence[int], axis: Axis
) -> Sequence[Curve]:
    """Return the curves of the charts that are drawn first."""
    return read_curves(
        client, job.project, job.id, names=names, ranks=ranks, points=POINTS, window=axis.ask()
    ).curves


def _find_axis(request: Request, job: JobDetail, now: datetime) -> Axis:
    """Return the axis that the address names, or the steps if it names none that there is."""
    try:
        return read_axis(request, job.attempts, now)
    except HTTPException:
        return Axis("step", 0.0, make_clock(job.attempts, now), (None, None))


def _shorten(curve: Curve) -> Curve:
    kept = thin(curve.values, _POINTS)
    columns = {
        name: [getattr(curve, name)[at] for at in kept] for name in ("steps", "times_ms", "values")
    }
    return structs.replace(curve, **columns)


def make_of_group(
    client: ApiClient, request: Request, project: str, members: Sequence[ArrayMemberView]
) -> PagePart | None:
    """Return the charts of the programs of several jobs, a line for each job, or None if they
    reported nothing. They may be a few seconds old. Raises ApiError.
    """
    choice = _read_choice(request)
    jobs = tuple(each.id for each in members[:MOST_JOBS] if each.attempt)
    if not jobs:
        return None
    if is_update(request):  # see `make`
        return _part_of({}, choice, names=_find_names(client, request, project, jobs[:_ASKED]))
    found = memory_of(request).recall(
        ("curves", project, jobs), lambda: read_curves_of_jobs(client, project, jobs), _KEPT_S
    )
    by_name: defaultdict[str, list[Curve]] = defaultdict(list)
    order = {each.name: number for number, each in enumerate(members)}
    for curve in sorted(found.curves, key=lambda each: order.get(each.job, len(order))):
        params = members[order[curve.job]].params if curve.job in order else {}
        told = ", ".join(f"{name} {value}" for name, value in params.items())
        label = f"{curve.job} ({told})" if told else curve.job
        by_name[curve.name].append(structs.replace(curve, job=label))
    live = any(each.phase in UNFINISHED for each in members)
    query = _query(job=jobs, live=["true" if live else "false"])
    link = f"/runs?{_query(project=[project], job=jobs)}"
    runs = describe_runs([(each.name, project, each.id, each.phase) for each in members])
    return _part_of(by_name, choice, query=query, is_live=live, link=link, runs=runs)


def _find_names(
    client: ApiClient, request: Request, project: str, jobs: Sequence[str]
) -> Sequence[str]:
    """Return the names of the curves of the first of these jobs that has some."""
    memory = memory_of(request)
    for each in jobs:
        read = partial(read_curve_names, client, project, each)
        if names := memory.recall(("curve-names-of-group", each), read, _KEPT_S).names:
            return names
    return ()


def describe_runs(jobs: Sequence[tuple[str, str, str, str]]) -> str:
    """Return the path of the page of each run, and whether it can be stopped, as JSON. Of a job,
    its name, project, ID and phase are given."""
    found = {
        name: {"path": path_of("jobs", project, job_id), "live": phase in UNFINISHED}
        for name, project, job_id, phase in jobs
    }
    return json.dumps(found)


def _read_choice(request: Request) -> _ChartChoice:
    asked = request.query_params
    return _ChartChoice(
        "time" if asked.get("by") == "time" else "step", asked.get("scale") == "log"
    )


def _query(**asked: Sequence[object]) -> str:
    return urlencode(asked, doseq=True)


def _part_of(
    by_name: Mapping[str, Sequence[Curve]],
    choice: _ChartChoice,
    *,
    names: Sequence[str] = (),
    query: str = "",
    is_live: bool = True,
    link: str = "",
    first: str = "",
    runs: str = "",
    more: Sequence[str] = (),
) -> PagePart | None:
    """Return the part with charts of some names; the page's script draws those of all, and `more`
    of the job's machines."""
    known = sorted({*by_name, *names}, key=prominence)
    if not known:
        return None
    drawn = [(name, chart_of(by_name[name], choice)) for name in known if name in by_name]
    values = {
        "charts": drawn[:_MOST_CHARTS],
        "by": choice.by,
        "is_log": choice.is_log,
        "more": len(known) - len(drawn[:_MOST_CHARTS]),
        "names": json.dumps([*known, *more]),
        "query": query,
        "is_live": is_live,
        "has_cost": not link,
        "link": link,
        "first": first,
        "runs": runs,
    }
    return PagePart("cavvy.capabilities.curves:part.html", values, frozenset(known))


def chart_of(found: Sequence[Curve], choice: _ChartChoice) -> charts.Chart:
    """Return a chart with a line for each rank of each attempt, or for each job. The first have
    colours of their own, and lie above the others.
    """
    begin = min((at for each in found for at in each.times_ms[:1]), default=0)
    several = len({each.rank for each in found}) > 1
    lines = [
        # the times of several jobs begin together
        (
            _name_of(each, several),
            _points_of(each, each.times_ms[0] if each.job and each.times_ms else begin, choice),
        )
        for each in found
    ]
    known = [(name, points) for name, points in lines if points]
    xs = [x for _, points in known for x, _ in points] or [0.0]
    ys = [y for _, points in known for _, y in points] or [0.0]
    left, right = min(xs), max(xs)
    low, high = _bounds(min(ys), max(ys))
    drawn = [
        charts.ChartLine(
            "".join(
                f"{'L' if number else 'M'}{_place(x, left, right, charts.CURVE_PX):g} "
                f"{charts.CURVES_PX - _place(y, low, high, charts.CURVES_PX):g}"
                for number, (x, y) in enumerate(points)
            )
            + "h0.1",
            _kind_of(number),
        )
        for number, (_, points) in reversed([*enumerate(known)])
    ]
    show_y: Callable[[float], str] = (lambda y: f"{10**y:.3g}") if choice.is_log else format_number
    return charts.Chart(
        charts.CURVES_PX,
        bars=(),
        marks=[
            charts.Mark(round(100 * _place(x, left, right, 1), 3), _show_x(x, choice))
            for x in _ticks(left, right)
        ],
        levels=[
            charts.Mark(charts.CURVES_PX * (1 - part), show_y(low + part * (high - low)))
            for part in (0, 0.5, 1)
        ],
        kinds=_kinds_of([name for name, _ in known]),
        curves=drawn,
        columns=("Line", "Values", "Lowest", "Highest", "Last", "Gaps"),
        lines=[
            (name, str(each.count), *map(_show, (each.low, each.high, each.last)), say_gaps(each))
            for (name, _), each in zip(lines, found, strict=True)
        ],
    )


def _kind_of(number: int) -> str:
    return f"series-{number}" if number < _MOST_LINES else "rest"


def _kinds_of(names: Sequence[str]) -> Sequence[tuple[str, str]]:
    kinds = [(_kind_of(number), name) for number, name in enumerate(names[:_MOST_LINES])]
    if len(names) > _MOST_LINES:
        kinds.append(("rest", f"{len(names) - _MOST_LINES} others"))
    return kinds if len(names) > 1 else ()


def _name_of(curve: Curve, several: bool) -> str:
    if curve.job:
        return curve.job
    process = f", process {curve.process}" if curve.process else ""
    return f"attempt {curve.attempt}" + (f", rank {curve.rank}" if several else "") + process


def _show(value: float | None) -> str:
    return "" if value is None else format_number(value)


def _points_of(curve: Curve, begin: int, choice: _ChartChoice) -> Sequence[tuple[float, float]]:
    xs = curve.steps if choice.by == "step" else [(at - begin) / 1000 for at in curve.times_ms]
    pairs = zip(xs, curve.values, strict=True)
    if choice.is_log:
        return [(x, log10(y)) for x, y in pairs if y > 0]
    return [*pairs]


def _place(value: float, low: float, high: float, size: float) -> float:
    return round(size * (value - low) / ((high - low) or 1), 2)


def _bounds(low: float, high: float) -> tuple[float, float]:
    if low == high:
        return low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    return low, high


def _ticks(low: float, high: float) -> Sequence[float]:
    """Return at most _LABELS + 1 round numbers between two bounds."""
    if low == high:
        return [low]
    size = 10.0 ** floor(log10((high - low) / _LABELS))
    step = next(size * each for each in (1, 2, 5, 10) if (high - low) / (size * each) <= _LABELS)
    first = ceil(low / step - 1e-9)
    return [number * step for number in range(first, floor(high / step + 1e-9) + 1)]


def _show_x(value: float, choice: _ChartChoice) -> str:
    if choice.by == "step":
        return format_number(value)
    if value < 120:
        return f"{value:g} s"
    return f"{value / 60:g} min" if value < 7200 else f"{value / 3600:.3g} h"
