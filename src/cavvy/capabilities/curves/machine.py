"""Puts what a job's nodes measured, such as the use of their GPUs, on the axis of its curves."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from functools import partial
from math import inf
from typing import Any

from starlette.requests import Request

from cavvy.capabilities.curves.wire import Window
from cavvy.client import ApiClient
from cavvy.client.wire import JobDetail, JobFigures, SeriesView
from cavvy.console.pages.job import MEASURED
from cavvy.console.pages.page import UNFINISHED, memory_of, try_part

PREFIX = "machine/"  # before the name of a figure, which a program may report as well
_POINTS = 400  # of a figure, which nodes measure once a minute
_MARGIN_MS = 120_000
_KEPT_S, _ENDED_KEPT_S = 15.0, 60.0
# The place on the axis of a time in milliseconds since 1970, or None for one that has none.
Place = Callable[[float], float | None]


def list_machine_names(job: JobDetail) -> Sequence[str]:
    """Return the names of the charts of what the job's nodes measure."""
    nodes = (node for each in job.attempts for node in each.nodes)
    return sorted({PREFIX + name for node in nodes for name in node.telemetry if name in MEASURED})


def make_machine_charts(
    client: ApiClient,
    request: Request,
    job: JobDetail,
    names: Collection[str],
    place: Place,
    window: Window,
) -> list[dict[str, Any]]:
    """Return the charts of these names, as those of curves: a line for each attempt, with a band if
    it has several ranks. Only the time of the window is read."""
    found = _read(client, request, job, window)
    if found is None:
        return []
    by_name: defaultdict[str, list[SeriesView]] = defaultdict(list)
    for each in found.series:
        by_name[PREFIX + each.name].append(each)
    first, step_ms = found.start.timestamp() * 1000, found.step_s * 1000
    return [
        {"name": name, "lines": _draw(by_name[name], lambda at: place(first + at * step_ms))}
        for name in sorted(names)
        if name in by_name
    ]


def _read(
    client: ApiClient,
    request: Request,
    job: JobDetail,
    window: Window,
) -> JobFigures | None:
    """Return what the nodes measured, which may be some seconds old, or None if it cannot be
    read."""
    first = min((each.created_at for each in job.attempts), default=None)
    since, until = _find_time(window.begin) or first, _find_time(window.end)
    read = partial(
        client.figures,
        job.project,
        job.id,
        names=sorted(MEASURED),
        since=since,
        until=until,
        points=_POINTS,
    )
    kept_s = _KEPT_S if job.phase in UNFINISHED else _ENDED_KEPT_S
    key = ("machine-figures", job.id, since, until)
    return memory_of(request).recall(key, lambda: try_part(read), kept_s).value


def _find_time(time_ms: float | None) -> datetime | None:
    """Return a time in whole minutes, so that a small move of a window is read once."""
    try:
        return None if time_ms is None else datetime.fromtimestamp(time_ms // 60_000 * 60, UTC)
    except (ValueError, OverflowError, OSError):  # far outside of all years
        return None


def _draw(series: Sequence[SeriesView], place: Place) -> list[dict[str, Any]]:
    attempts: defaultdict[int, list[SeriesView]] = defaultdict(list)
    for each in series:
        attempts[each.attempt].append(each)
    lines = []
    for attempt, own in sorted(attempts.items()):
        points = []
        for at in range(len(own[0].mean)):
            means = [each.mean[at] for each in own]
            known = [each for each in means if each is not None]
            x = place(at + 0.5) if known else None  # of the middle of a minute
            if x is not None:
                lows = [each.low[at] for each in own]
                highs = [each.high[at] for each in own]
                low = min(each for each in lows if each is not None)
                high = max(each for each in highs if each is not None)
                points.append((x, sum(known) / len(known), low, high))
        if points:
            points.sort()
            lines.append(_make_line(f"attempt {attempt}", len(own), points))
    return lines


def _make_line(
    label: str, ranks: int, points: Sequence[tuple[float, float, float, float]]
) -> dict[str, Any]:
    xs, means, lows, highs = ([float(f"{each[at]:.7g}") for each in points] for at in range(4))
    return {
        "label": label if ranks == 1 else f"{label}, mean of {ranks} ranks",
        **{"x": xs, "y": means, "low": lows, "high": highs, "count": len(points)},
        **{"lowest": min(lows), "highest": max(highs), "last": means[-1], "gaps": 0},
    }


def follow_steps(steps: Sequence[tuple[float, float]]) -> Place:
    """Return what places times by the step that a program was at, from the times and steps of a
    curve; None before its first point and after its last one."""
    times = [at for at, _ in steps]

    def place(time_ms: float) -> float | None:
        after = bisect_right(times, time_ms)
        if not 0 < after < len(times):
            return steps[-1][1] if times and after and time_ms - times[-1] < 60_000 else None
        (begin, first), (end, last) = steps[after - 1], steps[after]
        if last < first:  # another attempt has begun again
            return first
        return first + (last - first) * (time_ms - begin) / ((end - begin) or 1)

    return place


def find_window(
    steps: Sequence[tuple[float, float]], window: tuple[float | None, float | None]
) -> Window:
    """Return the time in which a program was at the steps of a window, and some minutes more."""
    if window == (None, None) or not steps:
        return Window("time")
    low, high = (-inf if window[0] is None else window[0]), window[1]
    inside = [at for at, step in steps if low <= step <= (inf if high is None else high)]
    times = inside or [steps[0][0], steps[-1][0]]
    return Window("time", min(times) - _MARGIN_MS, max(times) + _MARGIN_MS)
