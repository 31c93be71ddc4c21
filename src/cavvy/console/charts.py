"""Computes the shapes of charts; templates draw them as SVG. Horizontal positions and widths are
percentages of the chart's width, vertical ones are pixels.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import floor, log, log10

from cavvy.client.wire import StretchView
from cavvy.console.spending import DailySpending
from cavvy.domain.units import Money, format_duration, format_usd

_ROW_PX = 22
PLOT_PX = 160
CURVE_PX = 1000  # the width of the box of curves, which is stretched to the width of the chart
_GROUPS = 6  # groups of points with a color of their own
_GAP = 0.25  # the share of a day's width that stays empty
_THINNEST = 0.15  # percent; thinner periods would not be seen
_LABELS = 8  # most labels below a chart
# distances in seconds between the marks of a time axis
_STEPS = (1, 5, 15, 60, 300, 900, 3600, 3 * 3600, 12 * 3600, 86400, 7 * 86400, 30 * 86400)


@dataclass(frozen=True)
class Bar:
    """A rectangle. `kind` selects its color, `label` is its tooltip."""

    x: float
    width: float
    y: float
    height: float
    kind: str
    label: str


@dataclass(frozen=True)
class Mark:
    """A label of an axis, at a position along it."""

    at: float
    label: str


@dataclass(frozen=True)
class Point:
    """A point of a plot of two positive numbers, and the row of a table that it leads to."""

    x: float
    y: float
    group: str
    label: str
    number: int


@dataclass(frozen=True)
class Dot:
    """A point as it is drawn. `kind` selects its color."""

    x: float
    y: float
    kind: str
    label: str
    number: int


@dataclass(frozen=True)
class Curve:
    """A line of a chart: the SVG path in a box that is CURVE_PX wide. `kind` selects its color."""

    path: str
    kind: str


@dataclass(frozen=True)
class Chart:
    """Bars, labels of the horizontal and the vertical axis, and the names of the kinds of bars.
    `columns` and `lines` are the same values as a table, for readers who cannot see the bars.
    """

    height: int
    bars: Sequence[Bar]
    marks: Sequence[Mark]
    levels: Sequence[Mark] = ()
    kinds: Sequence[tuple[str, str]] = ()  # the kind and its name
    rows: Sequence[str] = ()  # the names of the rows
    dots: Sequence[Dot] = ()
    curves: Sequence[Curve] = ()
    columns: Sequence[str] = ()
    lines: Sequence[Sequence[str]] = ()


def timeline(stretches: Sequence[StretchView]) -> Chart | None:
    """Return a row for each attempt, with its periods; the time before the first attempt has a row,
    too. Return None if the job has no periods.
    """
    if not stretches:
        return None
    begin = min(each.since for each in stretches)
    span = max((max(each.until for each in stretches) - begin).total_seconds(), 1e-3)
    rows = {
        attempt: row for row, attempt in enumerate(sorted({each.attempt for each in stretches}))
    }
    bars = []
    for each in stretches:
        lasted = (each.until - each.since).total_seconds()
        bars.append(
            Bar(
                x=_percent((each.since - begin).total_seconds() / span),
                width=max(_THINNEST, _percent(lasted / span)),
                y=rows[each.attempt] * _ROW_PX + 3,
                height=_ROW_PX - 6,
                kind=each.spell,
                label=f"{each.spell} {_length(lasted)}"
                + (f", attempt {each.attempt}" if each.attempt else ""),
            )
        )
    kinds = list(dict.fromkeys((each.spell, each.spell) for each in stretches))
    names = [f"attempt {attempt}" if attempt else "before" for attempt in rows]
    return Chart(
        len(rows) * _ROW_PX,
        bars,
        _time_marks(span),
        kinds=kinds,
        rows=names,
        columns=("Attempt", "Period", "Begins after", "Lasts"),
        lines=[_line_of(each, begin) for each in stretches],
    )


def stacked_days(spending: DailySpending) -> Chart | None:
    """Return a column for each day, with a part for each group. Negative sums are left out. Return
    None if nothing was spent.
    """
    count = len(spending.days)
    if not any(spending.totals):
        return None
    highest = _round_up(max(spending.totals))
    width = 100 / count
    bars = []
    for number, day in enumerate(spending.days):
        top = float(PLOT_PX)
        for position, (name, amounts) in enumerate(spending.series.items()):
            if amounts[number] <= 0:
                continue
            height = round(PLOT_PX * amounts[number] / highest, 2)
            if not height:
                continue
            top -= height
            label = f"{day:%d %b}: {name or 'all'} {_dollars(amounts[number])}"
            bars.append(
                Bar(
                    x=_percent((number + _GAP / 2) / count),
                    width=round(width * (1 - _GAP), 3),
                    y=round(top, 2),
                    height=height,
                    kind=f"series-{position}",
                    label=label,
                )
            )
    levels = [
        Mark(round(PLOT_PX * (1 - part), 2), _dollars(highest * part)) for part in (0, 0.5, 1)
    ]
    names = [(f"series-{position}", name) for position, name in enumerate(spending.series) if name]
    return Chart(
        PLOT_PX,
        bars,
        _day_marks(spending.days),
        levels,
        names,
        columns=("Day", *(name for _, name in names), "All"),
        lines=_lines(spending),
    )


def _time_marks(span: float) -> list[Mark]:
    """Return the marks of an axis that is `span` seconds long."""
    step = next((step for step in _STEPS if span / step <= _LABELS), _STEPS[-1])
    count = min(int(span / step), 4 * _LABELS)
    return [Mark(_percent(n * step / span), _length(n * step)) for n in range(count + 1)]


def _line_of(stretch: StretchView, begin: datetime) -> tuple[str, str, str, str]:
    """Return the values of a period. `begin` is the beginning of the chart."""
    return (
        str(stretch.attempt or "–"),
        stretch.spell,
        _length((stretch.since - begin).total_seconds()),
        _length((stretch.until - stretch.since).total_seconds()),
    )


def _day_marks(days: Sequence[datetime]) -> list[Mark]:
    """Return marks for the last day and every few days before it."""
    count = len(days)
    every = -(-count // _LABELS)
    return [
        Mark(_percent((number + 0.5) / count), f"{day:%d %b}")
        for number, day in enumerate(days)
        if (count - 1 - number) % every == 0
    ]


def _lines(spending: DailySpending) -> list[list[str]]:
    """Return the amounts of each day, the newest day first."""
    series = [amounts for name, amounts in spending.series.items() if name]
    return [
        [
            f"{day:%d %b}",
            *(format_usd(Money(amounts[number])) for amounts in series),
            format_usd(Money(spending.totals[number])),
        ]
        for number, day in reversed(list(enumerate(spending.days)))
    ]


def _percent(share: float) -> float:
    return round(100 * share, 3)


def _round_up(micros: int) -> float:
    """Return the next number of micro-dollars that is 1, 2 or 5 times a power of ten; at least a
    cent.
    """
    size = 10_000.0
    while True:
        for factor in (1, 2, 5):
            if micros <= size * factor:
                return size * factor
        size *= 10


def _dollars(micros: float) -> str:
    dollars = micros / 1e6
    if dollars >= 10 or dollars == 0:
        return f"${dollars:,.0f}"
    whole, _, decimals = f"{dollars:,.6f}".partition(".")
    return f"${whole}.{decimals.rstrip('0').ljust(2, '0')}"


def _length(seconds: float) -> str:
    return format_duration(timedelta(seconds=seconds))


def scatter(points: Sequence[Point]) -> Chart | None:
    """Return a plot with two logarithmic axes; the most frequent groups have colors of their own.
    Return None without points.
    """
    if not points:
        return None
    least, most = _span_of([each.x for each in points])
    low, high = _span_of([each.y for each in points])
    counted = Counter(each.group for each in points)
    names = [name for name, _ in counted.most_common(_GROUPS)]
    kinds = {name: f"series-{number}" for number, name in enumerate(names)}

    def across(x: float) -> float:
        return _percent(log(x / least) / log(most / least))

    def down(y: float) -> float:
        return round(PLOT_PX * (1 - log(y / low) / log(high / low)), 2)

    dots = [
        Dot(across(each.x), down(each.y), kinds.get(each.group, "rest"), each.label, each.number)
        for each in points
    ]
    return Chart(
        PLOT_PX,
        bars=(),
        marks=[Mark(across(each), _dollars(each * 1e6)) for each in _list_steps(least, most)],
        levels=[Mark(down(each), f"{each:,g}") for each in _list_steps(low, high)],
        kinds=[
            *((kind, name) for name, kind in kinds.items()),
            *([("rest", "others")] if len(counted) > _GROUPS else []),
        ],
        dots=dots,
    )


def _span_of(values: Sequence[float]) -> tuple[float, float]:
    """Return the bounds of a logarithmic axis, which are 1, 2 or 5 times a power of ten."""
    low, high = min(values), max(values)
    size = 10.0 ** floor(log10(low))
    least = max(size * factor for factor in (1, 2, 5) if size * factor <= low * 1.000001)
    size = 10.0 ** floor(log10(high))
    most = min(size * factor for factor in (1, 2, 5, 10) if size * factor >= high * 0.999999)
    return (least, most) if most > least else (least, least * 2)


def _list_steps(least: float, most: float) -> Sequence[float]:
    """Return the marks of a logarithmic axis: 1, 2 and 5, or only 1 of each power of ten if there
    would be many.
    """
    powers = range(floor(log10(least)), floor(log10(most)) + 1)
    every = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    inside = [each for each in every if least * 0.999 <= each <= most * 1.001]
    if len(inside) <= _LABELS:
        return inside
    return [each for each in inside if abs(log10(each) - round(log10(each))) < 1e-6]
