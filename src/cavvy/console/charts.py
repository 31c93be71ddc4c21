"""Computes the shapes of charts; templates draw them as SVG. Horizontal positions and widths are
percentages of the chart's width, vertical ones are pixels.

Spending by day, read from the ledger.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import ceil, floor, log, log10

from cavvy.client import ApiClient
from cavvy.client.ledger_wire import LedgerSumView, sum_ledger
from cavvy.client.wire import StretchView
from cavvy.console.memory import KEPT_S, Memory
from cavvy.domain.units import Money, format_duration, format_measure, format_usd

_ROW_PX = 22
PLOT_PX = 160
CURVES_PX = 110  # the height of a plot of curves
CURVE_PX = 1000  # the width of the box of curves, which is stretched to the width of the chart
_GROUPS = 6  # groups of points with a color of their own
_GAP = 0.25  # the share of a day's width that stays empty
_THINNEST = 0.15  # percent; thinner periods would not be seen
_LABELS = 8  # most labels below a chart
# distances in seconds between the marks of a time axis
_STEPS = (1, 5, 15, 60, 300, 900, 3600, 3 * 3600, 12 * 3600, 86400, 7 * 86400, 30 * 86400)

_DAY = timedelta(days=1)
_SAME = 0.0002  # of the highest value: a smaller difference is shown as none
_SERIES = 6  # the groups with the largest sums; the others are added up
OTHERS = "others"
_TODAY_S = 10.0  # seconds for which today's sums are kept


@dataclass(frozen=True)
class DailySpending:
    """The spending of each day in micro-dollars. `series` has one amount for each of `days`, which
    are midnights in UTC; the last day has not ended. The largest group comes first.
    """

    days: Sequence[datetime]
    series: dict[str, Sequence[int]]

    @property
    def totals(self) -> list[int]:
        """The sum of each day."""
        return [sum(amounts) for amounts in zip(*self.series.values(), strict=True)]


def spending_by_day(
    client: ApiClient, memory: Memory, by: str, now: datetime, count: int
) -> DailySpending:
    """Return the spending of the last `count` days, which include today, for each value of the
    dimension `by`. The sums of past days may be a minute old, and today's a few seconds. Raises
    ApiError.
    """
    today = day_of(now)
    days = [today - each * _DAY for each in reversed(range(count))]
    amounts: dict[str, list[int]] = {}
    for number, day in enumerate(days):
        for row in _spending_of(
            client, memory, by, day, kept_s=KEPT_S if day < today else _TODAY_S
        ):
            name = row.groups[by] or f"no {by}"
            amounts.setdefault(name, [0] * count)[number] += row.amount_micros
    ordered = sorted(amounts, key=lambda name: (-sum(amounts[name]), name))
    shown = ordered
    if len(ordered) > _SERIES:  # a group may have the name of the others, too
        shown = [name for name in ordered[:_SERIES] if name != OTHERS]
    series: dict[str, Sequence[int]] = {name: amounts[name] for name in shown}
    if rest := [name for name in ordered if name not in series]:
        columns = zip(*(amounts[name] for name in rest), strict=True)
        series[OTHERS] = [sum(column) for column in columns]
    return DailySpending(days, series or {"": [0] * count})


def _spending_of(
    client: ApiClient, memory: Memory, by: str, day: datetime, *, kept_s: float
) -> Sequence[LedgerSumView]:
    return memory.recall(
        ("spending", by, day),
        lambda: sum_ledger(client, [by], since=day, until=day + _DAY),
        kept_s,
    )


def total_of(spending: DailySpending) -> int:
    return sum(spending.totals)


def day_of(moment: datetime) -> datetime:
    """Return the midnight in UTC at which the day began."""
    return moment.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


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
    """A label of an axis, at a position along it. `moment` is the time that the page's script shows
    in the browser's time zone instead, or "".
    """

    at: float
    label: str
    moment: str = ""


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
class ChartLine:
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
    curves: Sequence[ChartLine] = ()
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


@dataclass(frozen=True)
class Line:
    """Values at equal distances of `step_s` seconds, None where there are none. `low` and `high`
    bound a band around them. `start_s` is the time of the first value.
    """

    name: str
    start_s: float
    step_s: float
    values: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()

    @property
    def end_s(self) -> float:
        return self.start_s + self.step_s * max(1, len(self.values) - 1)


def curves(lines: Sequence[Line], figure: str, begin: datetime | None = None) -> Chart | None:
    """Return a plot of the figure with this name over time: a curve for each line, and a band if
    there is one line. Times are seconds after `begin`, or lengths without it. Return None without
    values.
    """
    shown = [each for each in lines if any(value is not None for value in each.values)]
    if not shown:
        return None
    alone = shown[0] if len(shown) == 1 and shown[0].low else None
    known = [value for each in shown for value in each.values if value is not None]
    if alone:
        known += [value for value in (*alone.low, *alone.high) if value is not None]
    low, high = _bounds_of(min(known), max(known), figure)
    first, last = min(each.start_s for each in shown), max(each.end_s for each in shown)

    def across(seconds: float) -> float:
        return round(CURVE_PX * (seconds - first) / (last - first), 1)

    def down(value: float) -> float:
        return round(CURVES_PX * (1 - (value - low) / (high - low)), 1)

    drawn = [
        ChartLine(_path_of(each, each.values, across, down), f"series-{number % _GROUPS}")
        for number, each in enumerate(shown)
    ]
    if alone:
        drawn.insert(0, ChartLine(_band_of(alone, across, down), "band"))
    return Chart(
        CURVES_PX,
        bars=(),
        marks=_moment_marks(first, last, begin),
        levels=[
            Mark(down(each), show_figure(figure, each)) for each in (low, (low + high) / 2, high)
        ],
        kinds=[(f"series-{number % _GROUPS}", each.name) for number, each in enumerate(shown)]
        if len(shown) > 1
        else (),
        curves=drawn,
        columns=("Line", "Lowest", "Mean", "Highest", "Last"),
        lines=[_summary_of(each, figure) for each in shown],
    )


def show_figure(figure: str, value: float) -> str:
    """Return a value with the unit that the figure's name states."""
    text = format_measure(f"x_{figure}" if figure in ("mib", "w", "percent") else figure, value)
    return text.removeprefix(format_measure(figure, "")).strip() or text


def _bounds_of(low: float, high: float, figure: str) -> tuple[float, float]:
    """Return the ends of a vertical axis: from 0 unless all values are far from it, and differ by
    more than a rounding of averages, such as those of a number of replicas."""
    if figure.endswith("_percent") and low >= 0:
        return 0.0, max(100.0, high)
    if low >= 0 and (low < high / 2 or high - low <= _SAME * high):
        return 0.0, high or 1.0
    margin = (high - low) * 0.05 or abs(high) or 1.0
    return low - margin, high + margin


def _path_of(
    line: Line,
    values: Sequence[float | None],
    across: Callable[[float], float],
    down: Callable[[float], float],
) -> str:
    parts, is_drawn = [], False
    for number, value in enumerate(values):
        if value is None:
            is_drawn = False
            continue
        x, y = across(line.start_s + number * line.step_s), down(value)
        length = "h0.1"
        if not is_drawn and all(each is None for each in values[number + 1 : number + 2]):
            # a value alone is seen as a line as long as its time
            step = across(line.start_s + line.step_s) - across(line.start_s)
            length = f"h{max(0.1, min(CURVE_PX - x, step)):g}"
        parts.append(f"{'L' if is_drawn else 'M'}{x:g} {y:g}" + ("" if is_drawn else length))
        is_drawn = True
    return "".join(parts)


def _band_of(line: Line, across: Callable[[float], float], down: Callable[[float], float]) -> str:
    """Return the area between the lowest and the highest values, without gaps."""
    points = [
        (across(line.start_s + number * line.step_s), down(low), down(high))
        for number, (low, high) in enumerate(zip(line.low, line.high, strict=True))
        if low is not None and high is not None
    ]
    there = "L".join(f"{x:g} {high:g}" for x, _, high in points)
    back = "L".join(f"{x:g} {low:g}" for x, low, _ in reversed(points))
    return f"M{there}L{back}Z"


def _moment_marks(first: float, last: float, begin: datetime | None) -> list[Mark]:
    """Return marks at whole hours or minutes, or lengths without a begin."""
    span = last - first
    step = next((step for step in _STEPS if span / step <= _LABELS), _STEPS[-1])
    since = begin.timestamp() if begin else 0.0
    number = ceil((since + first) / step)
    marks: list[Mark] = []
    while (at := number * step - since) <= last and len(marks) < 4 * _LABELS:
        label = _length(at)
        moment = ""
        if begin is not None:
            when = (begin + timedelta(seconds=at)).astimezone(UTC)
            label = (
                f"{when:%d %b}" if step >= 86400 else f"{when:{'%H:%M' if step >= 60 else '%T'}}"
            )
            moment = when.isoformat(timespec="seconds") if step < 86400 else ""
        marks.append(Mark(_percent((at - first) / span), label, moment))
        number += 1
    return marks


def _summary_of(line: Line, figure: str) -> tuple[str, ...]:
    known = [each for each in line.values if each is not None]
    low = min((each for each in line.low if each is not None), default=min(known))
    high = max((each for each in line.high if each is not None), default=max(known))
    numbers = (low, sum(known) / len(known), high, known[-1])
    return (line.name, *(show_figure(figure, each) for each in numbers))
