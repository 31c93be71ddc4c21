"""Makes curves of the stored values, with as many points as are asked for."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from cavvy.capabilities.curves.briefs import (
    LONG,
    SHORT,
    Brief,
    BriefTable,
    Points,
    is_sorted,
    pick,
    points_by_name,
    thin,
)
from cavvy.capabilities.curves.keys import ODD_NAMES, CurveKey, read_key, write_key
from cavvy.capabilities.curves.packing import Columns, unpack
from cavvy.capabilities.curves.wire import WHOLE, Curve, Gap, Window

_GAPS = 100  # of a curve in an answer
BRIEF_UP_TO = 2 * LONG  # values of a curve for which brief versions are read
_LEAST_PART = 1e-9  # of a piece that a window reaches


class Piece(NamedTuple):
    """A stored piece of the curves of a rank: the whole, its brief version, or both."""

    number: int
    whole: bytes | None
    brief: BriefTable | None


def find_whole(
    pieces: Sequence[Piece], names: Collection[str], window: Window, most: int
) -> Sequence[int]:
    """Return the numbers of the few pieces that a window needs as a whole, since their brief
    versions have less than half as many values in it as are asked for. Of a wide window, there are
    none.
    """
    if not window.is_part:
        return []
    parts = {
        each.number: max((_part_of(own, window) for own in _choose(each.brief, names)), default=0)
        for each in pieces
        if each.brief is not None
    }
    found = [number for number, part in parts.items() if part > 0]
    return found if sum(parts.values()) * LONG < most / 2 else []


def _part_of(brief: Brief, window: Window) -> float:
    """Return which part of a curve of a piece lies in the window, about; 0 if nothing does."""
    first, last = brief.times if window.by == "time" else brief.steps
    if first != first or last != last:
        return 1.0  # values are counted, and it is not known here from where
    low, high = min(first, last), max(first, last)
    begin = low if window.begin is None else max(low, window.begin)
    end = high if window.end is None else min(high, window.end)
    if begin > end:
        return 0.0
    return max((end - begin) / (high - low), _LEAST_PART) if high > low else 1.0


def _reaches(brief: Brief, window: Window) -> bool:
    """Return whether a curve of a piece has values in the window."""
    return not window.is_part or _part_of(brief, window) > 0


def _wanted(names: Collection[str]) -> Callable[[str], bool]:
    return lambda key: not names or read_key(key).name in names


def _choose(table: BriefTable, names: Collection[str]) -> Sequence[Brief]:
    wants = _wanted(names)
    return [each for key, each in table.briefs.items() if wants(key)]


class _Found:
    """The points of a curve that were found in its pieces, and how many it has in all of them."""

    def __init__(self) -> None:
        self._columns: tuple[list[float], ...] = ([], [], [], [])
        self.count = 0

    @property
    def points(self) -> Points:
        return Points(*self._columns)

    def add(self, points: Points, count: int, window: Window) -> None:
        """Add the points of a piece, which has `count`, as far as they lie in the window."""
        first, self.count = self.count, self.count + count
        if first:
            points = points._replace(numbers=[*map(float(first).__add__, points.numbers)])
        if window.is_part:
            points = _cut(points, window)
        for column, more in zip(self._columns, points, strict=True):
            column += more


def _cut(points: Points, window: Window) -> Points:
    """Return the points in the window. Where the program named no step, its number counts."""
    places = points.times
    if window.by == "step" and all(map(float.__eq__, points.steps, points.steps)):
        places = points.steps
    elif window.by == "step":
        places = [
            number if step != step else step
            for number, step in zip(points.numbers, points.steps, strict=True)
        ]
    if is_sorted(places):
        begin = 0 if window.begin is None else bisect_left(places, window.begin)
        end = len(places) if window.end is None else bisect_right(places, window.end)
        return Points(*(column[begin:end] for column in points))
    return pick(
        points,
        [
            at
            for at, place in enumerate(places)
            if (window.begin is None or place >= window.begin)
            and (window.end is None or place <= window.end)
        ],
    )


def _is_counted(columns: Columns) -> bool:
    return not all(map(float.__eq__, columns.steps, columns.steps))


def _cut_columns(columns: Columns, window: Window) -> Columns:
    """Leave out rows before the first and behind the last one in the window."""
    places = columns.times if window.by == "time" else columns.steps
    begin, end = 0, len(places)
    if is_sorted(places):
        begin = 0 if window.begin is None else bisect_left(places, window.begin)
        end = end if window.end is None else bisect_right(places, window.end)
    return Columns(
        columns.names,
        columns.steps[begin:end],
        columns.times[begin:end],
        [each[begin:end] for each in columns.values],
    )


def make_curves(
    pieces: Sequence[Piece],
    attempt: int,
    rank: int,
    names: Collection[str],
    most: int,
    window: Window = WHOLE,
) -> Sequence[Curve]:
    """Return the curve of each name, or of these names, in the order of the names."""
    wants = _wanted(names)
    found = defaultdict[str, _Found](_Found)
    briefs = {each.number: _choose(each.brief, names) for each in pieces if each.brief is not None}
    inside = sum(any(_reaches(each, window) for each in own) for own in briefs.values())
    is_short = inside * SHORT >= most / 2
    for piece in pieces:
        known = briefs.get(piece.number)
        is_needed = known is None or any(_reaches(each, window) for each in known)
        briefly = piece.whole is None or (most <= BRIEF_UP_TO and not window.is_part)
        if known is not None and (briefly or not is_needed):
            for each in known:
                own = found[each.name]
                if _reaches(each, window):
                    own.add(each.read(is_short=is_short), each.total, window)
                else:
                    own.count += each.total
            continue
        columns = unpack(piece.whole or b"", wants)
        if known is not None and window.is_part and not any(map(_is_counted, columns)):
            cut = points_by_name([_cut_columns(each, window) for each in columns])
            for each in known:
                found[each.name].add(cut.get(each.name, _NONE), each.total, window)
            continue
        for name, points in points_by_name(columns).items():
            found[name].add(points, len(points.values), window)
    keys = {read_key(each)._replace(is_odd=False) for each in found}
    return [_curve_of(key, found, attempt, rank, most) for key in sorted(keys)]


_NONE = Points([], [], [], [])


def _curve_of(
    key: CurveKey, found: Mapping[str, _Found], attempt: int, rank: int, most: int
) -> Curve:
    own = found.get(write_key(key)) or _Found()
    odd = found.get(write_key(key._replace(is_odd=True))) or _Found()
    values = own.points.values
    kept = pick(own.points, thin(values, most))
    steps = [
        number if step != step else step
        for number, step in zip(kept.numbers, kept.steps, strict=True)
    ]
    times = [*map(int, kept.times)]
    gaps = pick(odd.points, thin([0.0] * len(odd.points.values), _GAPS))
    return Curve(
        name=key.name,
        attempt=attempt,
        rank=rank,
        process=key.process,
        count=own.count,
        steps=steps,
        times_ms=times,
        values=[*kept.values],
        low=min(values, default=None),
        high=max(values, default=None),
        last=values[-1] if values else None,
        gaps=[
            _gap_of(at, step, kind, times, steps)
            for at, step, kind in zip(gaps.times, gaps.steps, gaps.values, strict=True)
        ],
        gap_count=odd.count,
    )


def _gap_of(
    at: float, step: float, kind: float, times: Sequence[int], steps: Sequence[float]
) -> Gap:
    if step != step:  # the program named none: it lies behind the value before
        before = bisect_right(times, at) - 1
        step = steps[before] if before >= 0 else 0.0
    return Gap(step=step, time_ms=int(at), value=ODD_NAMES.get(kind, "nan"))
