"""The data of charts, which the script of a page asks for: of each curve as many points as a chart
shows, of the part of the axis that is zoomed to.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from math import inf, isfinite
from typing import Any, NamedTuple

from msgspec.json import encode
from starlette.exceptions import HTTPException
from starlette.requests import Request

from cavvy.capabilities.curves.machine import (
    PREFIX,
    Place,
    find_window,
    follow_steps,
    list_machine_names,
    make_machine_charts,
)
from cavvy.capabilities.curves.order import prominence
from cavvy.capabilities.curves.wire import (
    MOST_JOBS,
    WHOLE,
    Curve,
    Window,
    read_curve_names,
    read_curves,
    read_curves_of_jobs,
)
from cavvy.client import ApiClient
from cavvy.client.paths import job_path
from cavvy.client.wire import AttemptView, EventView, JobDetail
from cavvy.console.pages.job import read_newest_events
from cavvy.console.pages.page import UNFINISHED, memory_of, try_part

POINTS = 800  # of a curve; a chart has about so many pixels, and more on a dense screen
_POINTS_OF_MANY = 300  # if a chart has a line for each of several jobs
_MANY, _POINTS_OF_MOST = 20, 120  # of more jobs, so many
_MOST_CURVES = 64  # of an answer
_LEAST_OF_BAND = 2  # lines of an attempt, which are shown as a band
_BUCKETS = 300  # of a band
_LARGEST = 1e100  # of what a band shows: a mean of larger numbers may be none
_LONGEST_RANK = 10  # digits; Python reads no number of thousands
_KEPT_S = 1.5  # so that all viewers of a job are answered by one look into the database
_NAMES_KEPT_S = 4.0
_ENDED_KEPT_S = 15.0  # of a job that has ended, which changes only if it is queued again
_DIGITS = 6
_MARKED = ("checkpoint", "straggler")  # kinds of events
_MOST_MARKS = 60
_MOST_MARKED = 12  # runs of a comparison whose marks are shown
_MARKS_KEPT_S = 15.0  # of several runs


class CostClock(NamedTuple):
    """How much a job had cost at a time: the times in milliseconds at which its attempts began and
    ended, the dollars by then, and the dollars a millisecond from there.
    """

    times: Sequence[float]
    costs: Sequence[float]
    rates: Sequence[float]

    def cost_at(self, time_ms: float) -> float:
        at = max(0, bisect_right(self.times, time_ms) - 1)
        return self.costs[at] + max(0.0, time_ms - self.times[at]) * self.rates[at]

    def time_of(self, cost: float) -> float:
        at = max(0, bisect_right(self.costs, cost) - 1)
        rate = self.rates[at]
        return self.times[at] + ((cost - self.costs[at]) / rate if rate else 0.0)


class Axis(NamedTuple):
    """What the horizontal axis shows, and which part of it."""

    by: str  # step, time or cost
    begin_ms: float
    clock: CostClock
    window: tuple[float | None, float | None]

    def places(self, curve: Curve) -> list[float]:
        """Return where the points of a curve lie."""
        if self.by == "step":
            return [*curve.steps]
        return [self.place(at) for at in curve.times_ms]

    def place(self, time_ms: float) -> float:
        if self.by == "cost":
            return self.clock.cost_at(time_ms)
        return round((time_ms - self.begin_ms) / 1000, 3)

    def ask(self) -> Window:
        """Return the part in the words of the server: steps, or milliseconds since 1970."""
        if self.by == "step":
            return Window("step", *self.window)
        return Window(
            "time", *(None if each is None else self._time_of(each) for each in self.window)
        )

    def _time_of(self, place: float) -> float:
        if self.by == "cost":
            return self.clock.time_of(place)
        return self.begin_ms + place * 1000


def make_data(client: ApiClient, request: Request, now: datetime) -> bytes:
    """Return the data of charts of a job as JSON. Raises ApiError, HTTPException."""
    project, name = request.path_params["project"], request.path_params["name"]
    asked = request.query_params
    names, ranks = asked.getlist("curve")[:_MOST_CURVES], asked.getlist("rank")[:_MOST_CURVES]
    key = ("curve-data", project, name, asked.get("by"), asked.get("from"), asked.get("to"))

    def make() -> bytes:
        job = _find_job(client, request, project, name)
        axis = read_axis(request, job.attempts, now)
        numbers = [int(each) for each in ranks if each.isdecimal() and len(each) < _LONGEST_RANK]
        known = list_names(client, request, job)
        measured = [each for each in names if each.startswith(PREFIX) and each not in known]
        own = [each for each in names if each not in measured]
        asked_for = own or known[:1] if measured else own  # a curve shows when which step was
        found: Collection[Curve] = ()
        if asked_for:
            found = read_curves(
                client,
                project,
                job.id,
                names=asked_for,
                ranks=numbers,
                points=POINTS,
                window=axis.ask(),
            ).curves
        charts = charts_of([each for each in found if each.name in own], axis)
        if measured:
            place, window = _find_places(axis, found)
            charts += make_machine_charts(client, request, job, measured, place, window)
        events = list_events(client, request, job)
        names_of = [*known, *(each for each in list_machine_names(job) if each not in known)]
        return write_answer(names_of, charts, found, axis, job, events).encode()

    return memory_of(request).recall((*key, *names, *ranks), make, _KEPT_S)


def _find_places(axis: Axis, found: Collection[Curve]) -> tuple[Place, Window]:
    """Return what places times on the axis, and the part of the time that the axis shows."""
    if axis.by == "step":
        steps = _steps_by_time(found)
        return follow_steps(steps), find_window(steps, axis.window)
    return axis.place, axis.ask()


def write_answer(
    names: Sequence[str],
    charts: Sequence[Mapping[str, Any]],
    found: Collection[Curve],
    axis: Axis,
    job: JobDetail,
    events: Sequence[EventView],
) -> str:
    """Return what the script of a page draws, as JSON."""
    answer = {
        "names": names,
        "charts": charts,
        "marks": _marks_of(job, events, axis, found),
        "live": job.phase in UNFINISHED,
    }
    return encode(answer).decode()


def make_group_data(client: ApiClient, request: Request, now: datetime) -> bytes:
    """Return the data of charts of several jobs as JSON. Raises ApiError, HTTPException."""
    project, asked = request.path_params["project"], request.query_params
    names, jobs = asked.getlist("curve")[:_MOST_CURVES], asked.getlist("job")[:MOST_JOBS]
    live, is_marked = asked.get("live") == "true", asked.get("marks") == "true"
    return read_group_data(
        client, request, project, jobs, names=names, live=live, is_marked=is_marked
    ).encode()


def read_group_data(
    client: ApiClient,
    request: Request,
    project: str,
    jobs: Sequence[str],
    *,
    names: Sequence[str],
    live: bool,
    is_marked: bool = False,
) -> str:
    """Return what the script of a page of several jobs draws, as JSON, of the axis that the address
    names. Only with `is_marked`, it has the marks of the first jobs, which take two requests for
    each. Raises ApiError, HTTPException."""
    asked = request.query_params
    by = "time" if asked.get("by") in ("time", "cost") else "step"
    window = Window(by, _read_number(asked.get("from")), _read_number(asked.get("to")))
    if by == "time":  # of each job since its begin: the script cuts what it shows
        window = WHOLE
    points = _POINTS_OF_MANY if len(jobs) <= _MANY else _POINTS_OF_MOST
    key = ("curve-group", project, by, live, is_marked, *window, *names, "", *jobs)

    def make() -> str:
        found = read_curves_of_jobs(
            client, project, jobs, names=names, points=points, window=window
        ).curves
        axis = Axis(by, 0.0, CostClock([0.0], [0.0], [0.0]), (None, None))
        marks = None
        if is_marked:
            marks = _read_marks(client, request, project, jobs[:_MOST_MARKED], found, by)
        answer = {"names": [], "charts": charts_of(found, axis), "marks": marks, "live": live}
        return encode(answer).decode()

    return memory_of(request).recall(key, make, _KEPT_S)


def _read_marks(
    client: ApiClient,
    request: Request,
    project: str,
    jobs: Sequence[str],
    found: Collection[Curve],
    by: str,
) -> list[dict[str, Any]]:
    """Return the marks of several jobs, each with the name of its line. They may be some seconds
    old. Jobs that are gone have none."""
    memory, marks = memory_of(request), []

    def read(name: str) -> tuple[JobDetail, Sequence[EventView]]:
        job = client.ask(job_path(project, name), JobDetail)
        return job, read_newest_events(client, memory, project, job.id)

    for name in dict.fromkeys(jobs):
        key = ("curve-marks", project, name)
        told = try_part(partial(memory.recall, key, partial(read, name), _MARKS_KEPT_S)).value
        if told is not None:
            job, events = told
            own = [each for each in found if each.job == job.name]
            most = max(1, _MOST_MARKS // len(jobs))
            marks += [
                {**each, "line": job.name}
                for each in _marks_of(job, events, _AxisOfRun(by, own), own, most)
            ]
    return marks


class _AxisOfRun:
    """The axis of a run among others: the times of each of its attempts begin at zero."""

    def __init__(self, by: str, curves: Collection[Curve]) -> None:
        self.by = by
        self._begins = sorted(_begins_of(curves).values())

    def place(self, time_ms: float) -> float | None:
        """Return where a time lies, or None if it is before the first point."""
        at = bisect_right(self._begins, time_ms) - 1
        return None if at < 0 else (time_ms - self._begins[at]) / 1000


def list_events(client: ApiClient, request: Request, job: JobDetail) -> Sequence[EventView]:
    """Return the newest events of a job, some of which are marks of charts. Raises ApiError."""
    memory, key = memory_of(request), ("curve-events", job.id)
    kept_s = _KEPT_S if job.phase in UNFINISHED else _ENDED_KEPT_S
    read = partial(read_newest_events, client, memory, job.project, job.id)
    return memory.recall(key, read, kept_s)


def list_names(client: ApiClient, request: Request, job: JobDetail) -> Sequence[str]:
    """Return the names of a job's curves, the prominent ones first. Raises ApiError."""
    found = memory_of(request).recall(
        ("curve-names", job.id),
        lambda: read_curve_names(client, job.project, job.id).names,
        _NAMES_KEPT_S if job.phase in UNFINISHED else _ENDED_KEPT_S,
    )
    return sorted(found, key=prominence)


def charts_of(found: Collection[Curve], axis: Axis) -> list[dict[str, Any]]:
    """Return the lines of each name. Ranks and processes of an attempt are one line with a band."""
    by_name: defaultdict[str, list[Curve]] = defaultdict(list)
    for each in found:
        by_name[each.name].append(each)
    begins = _begins_of(each for each in found if each.job)
    return [
        {"name": name, "lines": _lines_of(by_name[name], axis, begins)}
        for name in sorted(by_name, key=prominence)
    ]


def _begins_of(curves: Iterable[Curve]) -> dict[tuple[str, int], float]:
    """Return when the first point of each attempt of each job was noted, in milliseconds."""
    begins: dict[tuple[str, int], float] = {}
    for each in curves:
        if each.times_ms:
            key = each.job, each.attempt
            begins[key] = min(each.times_ms[0], begins.get(key, inf))
    return begins


def _lines_of(
    curves: Sequence[Curve], axis: Axis, begins: Mapping[tuple[str, int], float]
) -> list[dict[str, Any]]:
    by_line: defaultdict[tuple[str, int], list[Curve]] = defaultdict(list)
    for each in curves:
        by_line[each.job, each.attempt].append(each)
    lines = []
    for (job, attempt), own in by_line.items():
        label = job or f"attempt {attempt}"
        begin = begins.get((job, attempt))
        if len(own) >= _LEAST_OF_BAND:
            lines.append(_band_of(f"{label}, mean of {len(own)} processes", own, axis, begin))
        else:
            lines.append(_line_of(label, own[0], axis, begin))
    return lines


def _line_of(label: str, curve: Curve, axis: Axis, begin: float | None) -> dict[str, Any]:
    xs: Sequence[float] = _places_of(curve, axis, begin)
    ys: Sequence[float | None] = curve.values  # nodes send seven digits
    if curve.gaps:
        points: list[tuple[float, float | None]] = [*zip(xs, ys, strict=True)]
        points += [(_place_gap(each, axis, begin), None) for each in curve.gaps]
        points.sort(key=lambda each: each[0])
        xs, ys = zip(*points, strict=True)
    if axis.by == "cost":
        xs = [*map(_short, xs)]
    return {"label": label, "x": xs, "y": ys, **_summary([curve])}


def _places_of(curve: Curve, axis: Axis, begin: float | None) -> list[float]:
    """Return where the points lie. `begin` is that of the attempt of one job among several, whose
    times begin together."""
    if begin is not None and axis.by != "step":
        return [(at - begin) / 1000 for at in curve.times_ms]
    return axis.places(curve)


def _place_gap(gap: Any, axis: Axis, begin: float | None) -> float:
    if axis.by == "step":
        return float(gap.step)
    return axis.place(gap.time_ms) if begin is None else (gap.time_ms - begin) / 1000


def _summary(curves: Sequence[Curve]) -> dict[str, Any]:
    lows = [each.low for each in curves if each.low is not None]
    highs = [each.high for each in curves if each.high is not None]
    lasts = [each.last for each in curves if each.last is not None]
    return {
        "count": sum(each.count for each in curves),
        "lowest": min(lows, default=None),
        "highest": max(highs, default=None),
        "last": sum(each / len(lasts) for each in lasts) if lasts else None,
        "gaps": sum(each.gap_count for each in curves),
    }


def _band_of(
    label: str, curves: Sequence[Curve], axis: Axis, begin: float | None
) -> dict[str, Any]:
    """Return the mean, the lowest and the highest value of several lines along the axis."""
    points = [
        (x, y)
        for each in curves
        for x, y in zip(_places_of(each, axis, begin), each.values, strict=True)
        if abs(x) <= _LARGEST and abs(y) <= _LARGEST
    ]
    low = min((x for x, _ in points), default=0.0)
    high = max((x for x, _ in points), default=0.0)
    size = (high - low) / _BUCKETS or 1.0
    buckets: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for x, y in points:
        buckets[int((x - low) / size)].append((x, y))
    rows = [
        (
            min(x for x, _ in own),
            sum(y for _, y in own) / len(own),
            min(y for _, y in own),
            max(y for _, y in own),
        )
        for _, own in sorted(buckets.items())
    ]
    xs, means, lows, highs = ([_short(each[at]) for each in rows] for at in range(4))
    return {"label": label, "x": xs, "y": means, "low": lows, "high": highs, **_summary(curves)}


def _short(value: float) -> float | int:
    """Return a number with the digits that a chart shows."""
    short = float(f"{value:.{_DIGITS + 3}g}" if abs(value) >= 1e5 else f"{value:.{_DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _find_job(client: ApiClient, request: Request, project: str, name: str) -> JobDetail:
    memory, key = memory_of(request), ("curve-job", project, name)
    job = memory.find(key)
    if not isinstance(job, JobDetail):
        job = client.ask(job_path(project, name), JobDetail)
        memory.keep(key, job, _KEPT_S if job.phase in UNFINISHED else _ENDED_KEPT_S)
    return job


def read_axis(request: Request, attempts: Sequence[AttemptView], now: datetime) -> Axis:
    """Return the axis that an address names. Raises HTTPException."""
    asked = request.query_params
    by = asked.get("by", "step")
    if by not in ("step", "time", "cost"):
        raise HTTPException(400, "`by` must be step, time or cost.")
    window = (_read_number(asked.get("from")), _read_number(asked.get("to")))
    begin = min((_begin_of(each) for each in attempts), default=now).timestamp() * 1000
    return Axis(by, begin, make_clock(attempts, now), window)


def _read_number(text: str | None) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value):
        raise HTTPException(400, "`from` and `to` must be numbers.")
    return value


def _begin_of(attempt: AttemptView) -> datetime:
    return attempt.running_at or attempt.launched_at or attempt.created_at


def make_clock(attempts: Sequence[AttemptView], now: datetime) -> CostClock:
    """Return what a job had cost at each time, from the prices of its attempts' nodes. Attempts at
    the same time, such as standbys, are added."""
    changes: list[tuple[float, float]] = []
    for each in attempts:
        rate = each.rate_micros_per_hour / 1e6 / 3_600_000 * max(1, len(each.nodes))
        begin = (each.launched_at or each.created_at).timestamp() * 1000
        changes += [(begin, rate), ((each.ended_at or now).timestamp() * 1000, -rate)]
    changes.sort()
    times, costs, rates = [0.0], [0.0], [0.0]
    for at, change in changes:
        costs.append(costs[-1] + (at - times[-1]) * rates[-1])
        times.append(at)
        rates.append(max(0.0, rates[-1] + change))
    return CostClock(times, costs, rates)


def _marks_of(
    job: JobDetail,
    events: Sequence[EventView],
    axis: Axis | _AxisOfRun,
    found: Collection[Curve],
    most: int = _MOST_MARKS,
) -> list[dict[str, Any]]:
    """Return where attempts ended, checkpoints were saved and stragglers were found, of the last
    two at most as many as `most`."""
    told = sorted((each.at, each.kind) for each in events if each.kind in _MARKED)
    moments = [
        (each.ended_at, f"attempt {each.number} {each.outcome or 'ended'}")
        for each in job.attempts
        if each.ended_at and each.outcome != "succeeded"
    ]
    moments += told[-most:]
    if not any(kind == "checkpoint" for _, kind in told):  # its event may be too old
        moments += [(at, "checkpoint") for each in job.attempts if (at := each.checkpoint_at)]
    steps = _steps_by_time(found) if axis.by == "step" else ()
    marks = []
    for at, text in moments:
        assert at is not None
        time_ms = at.timestamp() * 1000
        if axis.by != "step":
            if (place := axis.place(time_ms)) is not None:
                marks.append({"x": _short(place), "text": text})
        elif steps and steps[0][0] <= time_ms:
            before = bisect_right(steps, (time_ms, float("inf"))) - 1
            marks.append({"x": _short(steps[before][1]), "text": text})
    return marks


def _steps_by_time(found: Collection[Curve]) -> Sequence[tuple[float, float]]:
    """Return the times and steps of the curve with the most points, in all attempts."""
    longest = max(found, key=lambda each: len(each.steps), default=None)
    if longest is None:
        return ()
    place = longest.name, longest.rank, longest.process
    own = [each for each in found if (each.name, each.rank, each.process) == place]
    pairs = [zip(map(float, each.times_ms), each.steps, strict=True) for each in own]
    return sorted(pair for each in pairs for pair in each)
