"""The brief version of a full piece: of each name, what its curve spans, and two short versions of
it, so that a chart of a long run reads little. Each version is compressed by itself, so a chart of
some names leaves the others alone.
"""

import json
import zlib
from array import array
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from math import nan
from operator import itemgetter
from sys import byteorder
from typing import Any, NamedTuple

from cavvy.capabilities.curves.packing import Columns, decode, encode

LONG = 512  # values of each curve in the longer version
SHORT = 64  # in the shorter one, which is read if a curve has many pieces
_MARK = b"\x02"  # the first byte; pieces, which zlib compresses, begin otherwise
_HEAD = 5  # bytes before the head: the mark, and the head's length
_POINT_BYTES, _OBJECT_BYTES = 32, 700  # of a point of four numbers; of what holds those of a curve
_LENGTH = 2  # bytes of the length of a longer version's head


class Points(NamedTuple):
    """Points of a curve in the order of their times: of each its number among all of the curve, its
    time, its step (NaN if the program named none), and its value."""

    numbers: Sequence[float]
    times: Sequence[float]
    steps: Sequence[float]
    values: Sequence[float]


class Brief:
    """What a brief version tells of a name: how many values there are, the first and the last time
    and step, and both versions of the curve.
    """

    __slots__ = ("_long", "_points", "_short", "name", "steps", "times", "total")

    def __init__(
        self,
        name: str,
        total: int,
        times: tuple[float, float],
        steps: tuple[float, float],
        versions: tuple[memoryview, memoryview],
    ) -> None:
        self.name, self.total, self.times, self.steps = name, total, times, steps
        self._short, self._long = versions
        self._points: Points | None = None  # of the shorter version, once it was read

    def read(self, *, is_short: bool) -> Points:
        """Return the points of the shorter or the longer version."""
        if not is_short:
            return _decode(zlib.decompress(self._long))
        if self._points is None:
            self._points = _from_bytes(zlib.decompress(self._short))
        return self._points


class BriefTable:
    """The brief version of a piece, by the names of its curves. `size` is how many bytes it takes
    about, once all shorter versions were read.
    """

    def __init__(self, packed: bytes) -> None:
        self.briefs: dict[str, Brief] = {}
        at = _HEAD + int.from_bytes(packed[1:_HEAD], "little")
        for name, count, times, spans, short, long in _read_head(packed):
            first, last = (nan if each is None else each for each in spans)
            data = memoryview(packed)[at : at + short + long]
            versions = data[:short], data[short:]
            self.briefs[name] = Brief(name, count, tuple(times), (first, last), versions)
            at += short + long
        self.size = len(packed) + len(self.briefs) * (SHORT * _POINT_BYTES + _OBJECT_BYTES)


def shorten(columns: Sequence[Columns]) -> bytes:
    """Return the brief version of a piece: of each curve the lowest and highest values of its
    stretches, in two lengths.
    """
    heads, body = [], bytearray()
    for name, points in points_by_name(columns).items():
        short = zlib.compress(_to_bytes(pick(points, thin(points.values, SHORT))), 6)
        long = zlib.compress(_encode(pick(points, thin(points.values, LONG))), 6)
        spans = [None if each != each else each for each in (points.steps[0], points.steps[-1])]
        times = [points.times[0], points.times[-1]]
        heads.append([name, len(points.values), times, spans, len(short), len(long)])
        body += short + long
    head = zlib.compress(json.dumps(heads, separators=(",", ":")).encode(), 6)
    return _MARK + len(head).to_bytes(_HEAD - 1, "little") + head + bytes(body)


def _to_bytes(points: Points) -> bytes:
    """Return few points as floats, which are read fast."""
    floats = array("d", [value for column in points for value in column])
    if byteorder == "big":
        floats.byteswap()
    return floats.tobytes()


def _from_bytes(data: bytes) -> Points:
    floats = array("d", data)
    if byteorder == "big":
        floats.byteswap()
    count = len(floats) // len(Points._fields)
    times, steps, values = (floats[at * count : (at + 1) * count] for at in (1, 2, 3))
    return Points(floats[:count], times, steps, values)


def _encode(points: Points) -> bytes:
    """Return many points as small as the columns of a piece."""
    forms, data = [], b""
    for column in points:
        form, own = encode(column)
        forms.append([form, len(own)])
        data += own
    head = json.dumps([len(points.values), forms]).encode()
    return len(head).to_bytes(_LENGTH, "little") + head + data


def _decode(data: bytes) -> Points:
    at = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    count, forms = json.loads(data[_LENGTH:at])
    columns = []
    for form, length in forms:
        columns.append(decode(form, data[at : at + length], count))
        at += length
    return Points(*columns)


def is_brief(packed: bytes) -> bool:
    """Return whether this is a brief version, and no piece."""
    return packed.startswith(_MARK)


def read_brief_names(packed: bytes) -> Sequence[str]:
    """Return the names; the begin of a brief version is enough."""
    return [name for name, *_ in _read_head(packed)]


def _read_head(packed: bytes) -> list[Any]:
    size = int.from_bytes(packed[1:_HEAD], "little")
    found: list[Any] = json.loads(zlib.decompress(packed[_HEAD : _HEAD + size]))
    return found


def points_by_name(columns: Sequence[Columns]) -> Mapping[str, Points]:
    """Return the values of each name, by time; where times are equal, as they were reported."""
    parts = defaultdict[str, list[Points]](list)
    for each in columns:
        for name, values in zip(each.names, each.values, strict=True):
            parts[name].append(_without_gaps(each.times, each.steps, values))
    return {name: found for name, own in parts.items() if (found := _join(own)).values}


def _without_gaps(
    times: Sequence[float], steps: Sequence[float], values: Sequence[float]
) -> Points:
    if all(map(float.__eq__, values, values)):
        return Points([], times, steps, values)
    kept = [at for at, value in enumerate(values) if value == value]
    return Points([], *([column[at] for at in kept] for column in (times, steps, values)))


def _join(parts: Sequence[Points]) -> Points:
    """Join points, sort them by time if they are not, and number them."""
    [(_, times, steps, values), *more] = parts
    if more:
        times, steps, values = (
            [value for each in parts for value in each[at]] for at in range(1, 4)
        )
    if not is_sorted(times):
        rows = sorted(zip(times, steps, values, strict=True), key=itemgetter(0))
        times, steps, values = ([*column] for column in zip(*rows, strict=True))
    return Points([*map(float, range(len(values)))], times, steps, values)


def is_sorted(numbers: Sequence[float]) -> bool:
    return all(map(float.__le__, numbers, numbers[1:]))


def pick(points: Points, kept: Collection[int]) -> Points:
    """Return some of the points, by their positions."""
    if isinstance(kept, range) and len(kept) == len(points.values):
        return points
    return Points(*([column[at] for at in kept] for column in points))


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
        own = values[begin:end]
        kept.add(begin + own.index(min(own)))
        kept.add(begin + own.index(max(own)))
    return sorted(kept)
