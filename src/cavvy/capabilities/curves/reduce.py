"""Makes curves of the stored values, with as many points as are asked for."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import nan
from operator import itemgetter
from typing import NamedTuple

from cavvy.capabilities.curves.keys import ODD_NAMES, CurveKey, read_key, write_key
from cavvy.capabilities.curves.packing import Columns, unpack
from cavvy.capabilities.curves.wire import WHOLE, Curve, Gap, Window

BRIEF = 512  # values of each curve in the brief version of a piece
SHORTEST = 32  # in the shortest one, which is read if a curve has many pieces
_GAPS = 100  # of a curve in an answer
BRIEF_UP_TO = 1000  # values of a curve for which brief versions are read
_MOST_WHOLE = 4  # pieces that are read as a whole for a window
Point = tuple[float, float, float]  # the time, the step and the value


def shorten(columns: Sequence[Columns]) -> list[Columns]:
    """Return the brief versions of a piece: the lowest and highest values of each curve's
    stretches, and beside each value its position among all. The shortest version has a third
    column without values, by which it is told from the other one.
    """
    found = []
    for name, points in _points_by_name(columns).items():
        for most, more in ((BRIEF, []), (SHORTEST, [nan])):
            kept = thin([value for _, _, value in points], most)
            times, steps, values = zip(*(points[each] for each in kept), strict=True)
            rest = [
                [*values],
                [float(each) for each in kept],
                *([each] * len(kept) for each in more),
            ]
            found.append(Columns((name, "", *([""] * len(more))), [*steps], [*times], rest))
    return found


class Piece(NamedTuple):
    """A stored piece of the curves of a rank: the whole, its brief version, or both."""

    number: int
    whole: bytes | None
    brief: bytes | None


def find_whole(pieces: Sequence[Piece], names: Collection[str], window: Window) -> Sequence[int]:
    """Return the numbers of the few pieces that a window needs as a whole, since their brief
    versions have too few values in it. Of a wide window, there are none.
    """
    if not window.is_part:
        return []
    wants = _wanted(names)
    found = [each.number for each in pieces if _reaches(each, wants, window)]
    return found if len(found) <= _MOST_WHOLE else []


def _reaches(piece: Piece, wants: Callable[[str], bool], window: Window) -> bool:
    """Return whether a piece with a brief version has values in the window."""
    if piece.brief is None:
        return False
    if not window.is_part:
        return True
    for _, numbered in _read_brief(piece.brief, wants, is_short=True):
        (first, begin), (last, end) = numbered[0], numbered[-1]
        if window.by == "step" and begin[1] != begin[1]:
            return True  # values are counted, and it is not known here from where
        if _overlaps(_place(first, begin, window.by), _place(last, end, window.by), window):
            return True
    return False


def _cut(columns: Sequence[Columns], window: Window) -> Sequence[Columns]:
    """Leave out rows beside the window, unless their places are not known without counting."""
    found = []
    for each in columns:
        places = each.times if window.by == "time" else each.steps
        if any(place != place for place in places):
            found.append(each)
            continue
        kept = [at for at, place in enumerate(places) if _lies_in(place, window)]
        found.append(
            Columns(
                each.names,
                [each.steps[at] for at in kept],
                [each.times[at] for at in kept],
                [[own[at] for at in kept] for own in each.values],
            )
        )
    return found


def _lies_in(place: float, window: Window) -> bool:
    return _overlaps(place, place, window)


def _overlaps(first: float, last: float, window: Window) -> bool:
    low, high = min(first, last), max(first, last)
    return (window.begin is None or high >= window.begin) and (
        window.end is None or low <= window.end
    )


def _place(number: int, point: Point, by: str) -> float:
    at, step, _ = point
    if by == "time":
        return at
    return float(number) if step != step else step


def _wanted(names: Collection[str]) -> Callable[[str], bool]:
    return lambda key: not names or read_key(key).name in names


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
    found = defaultdict[str, list[tuple[int, Point]]](list)
    counts = defaultdict[str, int](int)
    inside = {each.number for each in pieces if _reaches(each, wants, window)}
    is_short = len(inside) * SHORTEST >= most
    for piece in pieces:
        is_beside = piece.brief is not None and piece.number not in inside
        briefly = piece.whole is None or (most <= BRIEF_UP_TO and not window.is_part)
        if piece.brief is not None and (briefly or is_beside):
            for name, numbered in _read_brief(piece.brief, wants, is_short=is_short or is_beside):
                if not is_beside:
                    found[name] += [(counts[name] + number, point) for number, point in numbered]
                counts[name] += numbered[-1][0] + 1  # the last value is always there
            continue
        columns = unpack(piece.whole or b"", wants)
        if piece.brief is not None and window.is_part:
            cut = _points_by_name(_cut(columns, window))
            for name, numbered in _read_brief(piece.brief, wants, is_short=True):
                found[name] += [
                    (counts[name] + number, point) for number, point in enumerate(cut.get(name, ()))
                ]
                counts[name] += numbered[-1][0] + 1
            continue
        for name, points in _points_by_name(columns).items():
            found[name] += [(counts[name] + number, point) for number, point in enumerate(points)]
            counts[name] += len(points)
    keys = {read_key(each)._replace(is_odd=False) for each in found}
    if window.is_part:
        for name, numbered in found.items():
            found[name] = [
                (number, point)
                for number, point in numbered
                if _lies_in(_place(number, point, window.by), window)
            ]
    return [_curve_of(key, found, counts, attempt, rank, most) for key in sorted(keys)]


def _curve_of(
    key: CurveKey,
    found: Mapping[str, Sequence[tuple[int, Point]]],
    counts: Mapping[str, int],
    attempt: int,
    rank: int,
    most: int,
) -> Curve:
    numbered, odd_key = found.get(write_key(key), ()), write_key(key._replace(is_odd=True))
    values = [point[2] for _, point in numbered]
    kept = [numbered[each] for each in thin(values, most)]
    steps = [float(number) if step != step else step for number, (_, step, _) in kept]
    times = [int(at) for _, (at, _, _) in kept]
    odd = [point for _, point in found.get(odd_key, ())]
    return Curve(
        name=key.name,
        attempt=attempt,
        rank=rank,
        process=key.process,
        count=counts.get(write_key(key), 0),
        steps=steps,
        times_ms=times,
        values=[value for _, (_, _, value) in kept],
        low=min(values, default=None),
        high=max(values, default=None),
        last=values[-1] if values else None,
        gaps=[_gap_of(odd[each], times, steps) for each in thin([0.0] * len(odd), _GAPS)],
        gap_count=counts.get(odd_key, 0),
    )


def _gap_of(point: Point, times: Sequence[int], steps: Sequence[float]) -> Gap:
    at, step, kind = point
    if step != step:  # the program named none: it lies behind the value before
        before = bisect_right(times, at) - 1
        step = steps[before] if before >= 0 else 0.0
    return Gap(step=step, time_ms=int(at), value=ODD_NAMES.get(kind, "nan"))


def _points_by_name(columns: Sequence[Columns]) -> Mapping[str, list[Point]]:
    """Return the values of each name, by time; where times are equal, as they were reported."""
    found = defaultdict[str, list[Point]](list)
    for each in columns:
        for name, values in zip(each.names, each.values, strict=True):
            told = zip(each.times, each.steps, values, strict=True)
            found[name] += [point for point in told if point[2] == point[2]]
    return {name: sorted(points, key=itemgetter(0)) for name, points in found.items() if points}


def _read_brief(
    brief: bytes, wants: Callable[[str], bool], *, is_short: bool
) -> Iterator[tuple[str, list[tuple[int, Point]]]]:
    for each in unpack(brief, wants, width=3 if is_short else 2):
        points = zip(each.times, each.steps, each.values[0], strict=True)
        yield each.names[0], [*zip(map(int, each.values[1]), points, strict=True)]


def thin(values: Sequence[float], most: int) -> Sequence[int]:
    """Return the positions of at most about `most` values: the first, the last, and the lowest
    and highest of each of equal stretches, so that no peak is lost.
    """
    count = len(values)
    if count <= most:
        return range(count)
    stretches = max(1, (most - 2) // 2)
    kept = {0, count - 1}
    for number in range(stretches):
        begin, end = number * count // stretches, (number + 1) * count // stretches
        kept.add(min(range(begin, end), key=values.__getitem__))
        kept.add(max(range(begin, end), key=values.__getitem__))
    return sorted(kept)
