"""Draws charts and diagrams as SVG. A picture follows the reader's choice of light or dark, needs
no program and no other file, and names itself for readers who cannot see it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal
from xml.sax.saxutils import escape

from cavvy.domain.values import Struct

_COLOURS = 9
Scale = Literal["powers", "from-zero", "range"]
_STYLE = """<style>
svg{--ink:#1f2328;--paper:#ffffff;--line:#8c959f;--soft:#f0f3f6;
--c0:#0969da;--c1:#1a7f37;--c2:#bc4c00;--c3:#8250df;--c4:#cf222e;--c5:#7d6608;
--c6:#0e7c86;--c7:#bf3989;--c8:#57606a}
@media(prefers-color-scheme:dark){svg{--ink:#e6edf3;--paper:#0d1117;--line:#7d8590;--soft:#21262d;
--c0:#58a6ff;--c1:#3fb950;--c2:#f0883e;--c3:#bc8cff;--c4:#ff7b72;--c5:#d4b106;
--c6:#39c5cf;--c7:#ff8ad8;--c8:#9198a1}}
.paper{fill:var(--paper)}.soft{fill:var(--soft)}.axis{stroke:var(--line);fill:none}
.box{fill:var(--soft);stroke:var(--line)}.link{stroke:var(--line);fill:none;stroke-width:1.5}
.tip{fill:var(--line)}svg text{font:12px system-ui,sans-serif;fill:var(--ink)}
svg text.title{font-weight:600;font-size:14px}svg text.small{font-size:10px}
.c0{fill:var(--c0)}.c1{fill:var(--c1)}.c2{fill:var(--c2)}.c3{fill:var(--c3)}.c4{fill:var(--c4)}
.c5{fill:var(--c5)}.c6{fill:var(--c6)}.c7{fill:var(--c7)}.c8{fill:var(--c8)}
.l0{stroke:var(--c0)}.l1{stroke:var(--c1)}.l2{stroke:var(--c2)}
.l3{stroke:var(--c3)}.l4{stroke:var(--c4)}.l5{stroke:var(--c5)}
.l6{stroke:var(--c6)}.l7{stroke:var(--c7)}.l8{stroke:var(--c8)}
.l0,.l1,.l2,.l3,.l4,.l5,.l6,.l7,.l8{fill:none;stroke-width:2}
</style>"""
WIDTH = 760
_CELL = 20  # characters of a line in a cell of a matrix
_ANCHORS = ("start", "end")


class ChartPoint(Struct, frozen=True):
    """A point of a chart. `note` is shown when the reader points at it."""

    x: float
    y: float
    label: str
    group: str
    note: str = ""


class Box(Struct, frozen=True):
    """A box of a diagram, at a column and a row. `lines` are below its title."""

    name: str
    column: float
    row: float
    title: str
    lines: tuple[str, ...] = ()
    colour: int | None = None


class Drawing:
    """The parts of one picture. Positions are in pixels, from the upper left corner."""

    def __init__(self, title: str, height: int, width: int = WIDTH) -> None:
        self._title, self._height, self._width = title, height, width
        self._parts: list[str] = []
        self.text(16, 24, title, "title")

    def add(self, tag: str, note: str = "", **values: object) -> None:
        inner = f"<title>{escape(note)}</title>" if note else ""
        named = "".join(
            f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
            for key, value in values.items()
        )
        self._parts.append(f"<{tag}{named}>{inner}</{tag}>")

    def text(
        self,
        x: float,
        y: float,
        text: str,
        kind: str = "",
        anchor: str = "start",
        turn: int = 0,
        note: str = "",
    ) -> None:
        turned = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
        named = f' class="{kind}"' if kind else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}{turned}>'
            f"{escape(text)}{f'<title>{escape(note)}</title>' if note else ''}</text>"
        )

    def finish(self) -> str:
        size = f'viewBox="0 0 {self._width} {self._height}" width="{self._width}"'
        named = _attribute(self._title)
        back = f'<rect class="paper" width="{self._width}" height="{self._height}"></rect>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{named}">'
        return f"{head}{_STYLE}{back}{''.join(self._parts)}</svg>\n"


def _attribute(value: object) -> str:
    text = f"{value:.1f}" if isinstance(value, float) else str(value)
    return escape(text, {'"': "&quot;"})


def draw_points(
    title: str,
    points: Sequence[ChartPoint],
    x_title: str,
    y_title: str,
    *,
    scales: tuple["Scale", "Scale"] = ("powers", "powers"),
    lines: bool = False,
) -> str:
    """Draw points, or one line for each group. An axis of `powers` is logarithmic and leaves
    out values of 0 or less; one `from-zero` begins at 0, and a `range` at the lowest value.
    """
    kept = [
        each
        for each in points
        if math.isfinite(each.x)
        and math.isfinite(each.y)
        and (each.x > 0 or scales[0] != "powers")
        and (each.y > 0 or scales[1] != "powers")
    ]
    drawing = Drawing(title, 460)
    if not kept:
        drawing.text(16, 60, "There is nothing to draw.")
        return drawing.finish()
    across = _Axis([each.x for each in kept], scales[0], 70, WIDTH - 170)
    up = _Axis([each.y for each in kept], scales[1], 400, 50)
    _draw_axes(drawing, across, up, x_title, y_title)
    groups = list(dict.fromkeys(each.group for each in kept))
    taken: list[tuple[float, float, float]] | None = None if lines else []
    for number, group in enumerate(groups):
        own = [each for each in kept if each.group == group]
        _draw_group(drawing, own, across, up, number % _COLOURS, taken)
    _draw_legend(drawing, groups)
    return drawing.finish()


def _draw_group(
    drawing: Drawing,
    own: Sequence[ChartPoint],
    across: "_Axis",
    up: "_Axis",
    colour: int,
    taken: list[tuple[float, float, float]] | None,
) -> None:
    """Draw a line if `taken` is None, otherwise points. `taken` are the labels so far; a label that
    would cover another one is left out."""
    if taken is None:
        path = " ".join(f"{across.at(each.x):.1f},{up.at(each.y):.1f}" for each in own)
        drawing.add("polyline", own[0].group, class_=f"l{colour}", points=path)
        return
    for each in own:
        x, y = across.at(each.x), up.at(each.y)
        note = each.note or f"{each.label}: {each.x:g}, {each.y:g}"
        drawing.add("circle", note, class_=f"c{colour}", cx=x, cy=y, r=4)
        wide = 6.0 * len(each.label)  # of a small text, about
        left = x + 6 + wide > WIDTH - 155  # the legend is there
        begin = x - 12 - wide if left else x
        if not any(abs(y - b) < 10 and begin < a + c and a < begin + wide for a, b, c in taken):
            taken.append((begin, y, wide))
            drawing.text(x - 6 if left else x + 6, y + 4, each.label, "small", _ANCHORS[left])


class _Axis:
    """Maps values to pixels between `begin` and `end`."""

    def __init__(self, values: Sequence[float], scale: "Scale", begin: float, end: float) -> None:
        self._scale, self._begin, self._end = scale, begin, end
        self._low: float
        self._high: float
        low, high = min(values), max(values)
        if scale == "powers":
            self._low, self._high = math.floor(math.log10(low)), math.ceil(math.log10(high))
        elif scale == "range":
            self._low, self._high = math.floor(low), math.ceil(high)
        else:
            self._low, self._high = min(0, low), _round_up(high)
        if self._low == self._high:
            self._high = self._low + 1

    def at(self, value: float) -> float:
        place = math.log10(value) if self._scale == "powers" else value
        return self._begin + (self._end - self._begin) * (place - self._low) / (
            self._high - self._low
        )

    @property
    def ticks(self) -> list[float]:
        if self._scale == "powers":
            return [10.0**power for power in range(int(self._low), int(self._high) + 1)]
        if self._scale == "range":
            step = max(1, round((self._high - self._low) / 8))
            return [float(each) for each in range(int(self._low), int(self._high) + 1, step)]
        return [self._low + (self._high - self._low) * part / 4 for part in range(5)]


def _round_up(value: float) -> float:
    """Return a round number of at least the value."""
    if value <= 0:
        return 1.0 if value == 0 else 0.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(
        step * power
        for step in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
        if step * power >= value * 0.999
    )


def _draw_axes(drawing: Drawing, across: _Axis, up: _Axis, x_title: str, y_title: str) -> None:
    drawing.add("path", class_="axis", d=f"M70 50V400H{WIDTH - 170}")
    for tick in across.ticks:
        drawing.text(across.at(tick), 416, _short(tick), "small", "middle")
    for tick in up.ticks:
        drawing.text(64, up.at(tick) + 4, _short(tick), "small", "end")
    drawing.text((WIDTH - 100) / 2, 440, x_title, anchor="middle")
    drawing.text(18, 225, y_title, anchor="middle", turn=-90)


def _short(value: float) -> str:
    for bound, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= bound:
            return f"{value / (1e3 if unit == 'k' else bound):,.4g}{unit}"
    return f"{value:g}"


def _draw_legend(drawing: Drawing, groups: Sequence[str]) -> None:
    for number, group in enumerate(groups[:20]):
        y = 60 + 18 * number
        drawing.add(
            "rect", class_=f"c{number % _COLOURS}", x=WIDTH - 150, y=y - 9, width=10, height=10
        )
        drawing.text(WIDTH - 134, y, group, "small")


def draw_bars(
    title: str, rows: Sequence[tuple[str, Mapping[str, float]]], unit: str, left: int = 200
) -> str:
    """Draw a horizontal bar for each row, with a part for each kind. Negative parts are left
    out.
    """
    kinds = list(dict.fromkeys(kind for _, parts in rows for kind in parts))
    most = max((sum(max(0, v) for v in parts.values()) for _, parts in rows), default=0) or 1
    drawing = Drawing(title, 70 + 24 * len(rows) + 18 * len(kinds))
    room = WIDTH - left - 110
    for number, (name, parts) in enumerate(rows):
        x, y = float(left), 44 + 24 * number
        drawing.text(left - 8, y + 13, name, anchor="end")
        for kind, value in parts.items():
            width = room * max(0.0, value) / most
            note = f"{name}, {kind}: {value:,.2f} {unit}"
            colour = f"c{kinds.index(kind) % _COLOURS}"
            drawing.add("rect", note, class_=colour, x=x, y=y, width=width, height=18)
            x += width
        drawing.text(x + 6, y + 13, f"{_short(round(sum(parts.values()), 2))} {unit}", "small")
    for number, kind in enumerate(kinds if len(kinds) > 1 else ()):
        y = 62 + 24 * len(rows) + 18 * number
        drawing.add("rect", class_=f"c{number % _COLOURS}", x=left, y=y - 9, width=10, height=10)
        drawing.text(left + 16, y, kind, "small")
    return drawing.finish()


def draw_tornado(
    title: str, rows: Sequence[tuple[str, float, float]], base: float, unit: str
) -> str:
    """Draw, for each row, the results with the low and the high value, around the base."""
    drawing = Drawing(title, 80 + 24 * len(rows))
    low = min([base, *(min(one, other) for _, one, other in rows)])
    high = max([base, *(max(one, other) for _, one, other in rows)])
    span = (high - low) or 1.0
    room, left = WIDTH - 330, 210

    def at(value: float) -> float:
        return left + room * (value - low) / span

    for number, (name, one, other) in enumerate(rows):
        y = 44 + 24 * number
        drawing.text(left - 8, y + 13, name, anchor="end")
        for value, colour in ((one, "c0"), (other, "c2")):
            x, width = min(at(base), at(value)), abs(at(value) - at(base))
            note = f"{name}: {value:,.0f} {unit}"
            drawing.add("rect", note, class_=colour, x=x, y=y, width=width, height=18)
        drawing.text(at(max(one, other)) + 6, y + 13, f"{_short(abs(other - one))} {unit}", "small")
    bottom = 44 + 24 * len(rows)
    drawing.add("path", class_="axis", d=f"M{at(base):.1f} 40V{bottom}")
    drawing.text(at(base), bottom + 16, f"{_short(base)} {unit}", "small", "middle")
    return drawing.finish()


def draw_matrix(
    title: str,
    columns: Sequence[str],
    rows: Mapping[str, Mapping[str, Sequence[tuple[str, str]]]],
    notes: Sequence[str] = (),
) -> str:
    """Draw a cell for each row and column. A cell has lines of text, each with what is shown when
    the reader points at it. `notes` are below the matrix."""
    left, wide, line = 90, 112, 13
    tall = {
        name: 12 + line * max((len(each) for each in cells.values()), default=1)
        for name, cells in rows.items()
    }
    height = 64 + sum(tall.values()) + (14 * len(notes) + 12 if notes else 0)
    drawing = Drawing(title, height, max(WIDTH, left + wide * len(columns) + 16))
    for number, name in enumerate(columns):
        drawing.text(left + wide * number + 4, 48, name)
    top = 56
    for name, cells in rows.items():
        drawing.add("path", class_="axis", d=f"M16 {top}H{left + wide * len(columns)}")
        drawing.text(16, top + 17, name)
        for number, column in enumerate(columns):
            x = left + wide * number + 4
            for at, (text, note) in enumerate(cells.get(column, ())):
                short = text if len(text) <= _CELL else f"{text[: _CELL - 1]}…"
                drawing.text(x, top + 16 + line * at, short, "small", note=note)
        top += tall[name]
    for number, note in enumerate(notes):
        drawing.text(16, top + 18 + 14 * number, note, "small")
    return drawing.finish()


def draw_boxes(
    title: str, boxes: Sequence[Box], links: Iterable[tuple[str, str, str]], width: int = WIDTH
) -> str:
    """Draw boxes in columns and rows, and arrows with texts between them."""
    wide, step = 170, (width - 40) / (max(each.column for each in boxes) + 1)
    lines = max(len(each.lines) for each in boxes)
    tall = 34 + 14 * lines
    gap = tall + 40
    rows = max(each.row for each in boxes) + 1
    drawing = Drawing(title, int(50 + gap * rows), width)
    wide = min(wide, int(step - 24))
    places = {
        each.name: (20 + step * each.column + (step - wide) / 2, 46 + gap * each.row)
        for each in boxes
    }
    for one, other, text in links:
        _draw_link(drawing, places[one], places[other], (wide, tall), text)
    for each in boxes:
        x, y = places[each.name]
        drawing.add("rect", class_="box", x=x, y=y, width=wide, height=tall, rx=6)
        if each.colour is not None:
            drawing.add("rect", class_=f"c{each.colour % _COLOURS}", x=x, y=y, width=5, height=tall)
        drawing.text(x + wide / 2, y + 20, each.title, anchor="middle")
        for number, line in enumerate(each.lines):
            drawing.text(x + wide / 2, y + 36 + 14 * number, line, "small", "middle")
    return drawing.finish()


def _draw_link(
    drawing: Drawing,
    one: tuple[float, float],
    other: tuple[float, float],
    size: tuple[int, int],
    text: str,
) -> None:
    """Draw an arrow from the side or the bottom of a box to the side or the top of another."""
    wide, tall = size
    if abs(one[1] - other[1]) < 1:
        right = other[0] > one[0]
        begin = one[0] + (wide if right else 0), one[1] + tall / 2
        end = other[0] + (0 if right else wide), other[1] + tall / 2
    else:
        down = other[1] > one[1]
        begin = one[0] + wide / 2, one[1] + (tall if down else 0)
        end = other[0] + wide / 2, other[1] + (0 if down else tall)
    drawing.add(
        "path", class_="link", d=f"M{begin[0]:.1f} {begin[1]:.1f}L{end[0]:.1f} {end[1]:.1f}"
    )
    turn = math.atan2(end[1] - begin[1], end[0] - begin[0])
    tip = [
        (end[0] - 8 * math.cos(turn + side), end[1] - 8 * math.sin(turn + side))
        for side in (-0.4, 0.4)
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in [end, *tip])
    drawing.add("polygon", class_="tip", points=path)
    if text:
        middle = (begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2
        drawing.text(middle[0] + 4, middle[1] - 4, text, "small", "middle")
