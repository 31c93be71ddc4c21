"""Shows curves on a job's page in the console."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime
from math import ceil, floor, log10
from typing import NamedTuple

from starlette.requests import Request

from cavvy.capabilities.curves.order import prominence
from cavvy.capabilities.curves.wire import Curve, read_curves
from cavvy.client import ApiClient
from cavvy.client.wire import JobDetail
from cavvy.console import charts
from cavvy.console.pages.job import JobPart
from cavvy.console.pages.page import ENDED, is_update

_POINTS = 600  # of a curve; a chart is about so many pixels wide
_MOST_LINES = 6  # of a chart, which have colours of their own
_MOST_CHARTS = 40
_LABELS = 6  # below a chart
_ENDINGS = ((1e9, "G"), (1e6, "M"), (1e4, "k"))


class _ChartChoice(NamedTuple):
    by: str  # "step" or "time"
    is_log: bool


def make(client: ApiClient, request: Request, job: JobDetail, now: datetime) -> JobPart | None:
    """Return the charts of what the job's program reported, or None if it reported nothing. Raises
    ApiError.
    """
    if not job.attempts or (is_update(request) and job.phase in ENDED):
        return None
    asked = request.query_params
    choice = _ChartChoice(
        "time" if asked.get("by") == "time" else "step", asked.get("scale") == "log"
    )
    ranks = [int(asked["rank"])] if asked.get("rank", "").isdecimal() else []
    found = read_curves(client, job.project, job.id, ranks=ranks, points=_POINTS).curves
    by_name: defaultdict[str, list[Curve]] = defaultdict(list)
    for each in found:
        by_name[each.name].append(each)
    names = sorted(by_name, key=prominence)
    drawn = [(name, chart_of(by_name[name], choice)) for name in names[:_MOST_CHARTS]]
    if not drawn:
        return None
    more = len(names) - len(drawn)
    values = {"charts": drawn, "by": choice.by, "is_log": choice.is_log, "more": more}
    return JobPart("cavvy.capabilities.curves:part.html", values, frozenset(by_name))


def chart_of(found: Sequence[Curve], choice: _ChartChoice) -> charts.Chart:
    """Return a chart with a line for each rank of each attempt."""
    begin = min(each.times_ms[0] for each in found)
    several = len({each.rank for each in found}) > 1
    lines = [(_name_of(each, several=several), _points_of(each, begin, choice)) for each in found]
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
            f"series-{number % _MOST_LINES}",
        )
        for number, (_, points) in enumerate(known)
    ]
    show_y: Callable[[float], str] = (lambda y: f"{10**y:.3g}") if choice.is_log else _show
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
        kinds=[(f"series-{number % _MOST_LINES}", name) for number, (name, _) in enumerate(known)]
        if len(known) > 1
        else (),
        curves=drawn,
        columns=("Line", "Values", "Lowest", "Highest", "Last"),
        lines=[
            (name, str(each.count), *map(_show, (each.low, each.high, each.last)))
            for (name, _), each in zip(lines, found, strict=True)
        ],
    )


def _name_of(curve: Curve, *, several: bool) -> str:
    return f"attempt {curve.attempt}" + (f", rank {curve.rank}" if several else "")


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
        return _show(value)
    if value < 120:
        return f"{value:g} s"
    return f"{value / 60:g} min" if value < 7200 else f"{value / 3600:.3g} h"


def _show(value: float) -> str:
    for size, ending in _ENDINGS:
        if abs(value) >= size:
            return f"{value / size:.3g}{ending}"
    return f"{value:.0f}" if value == round(value) else f"{value:.4g}"
