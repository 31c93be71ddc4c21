"""Packs values of steps into few bytes, and unpacks them without loss.

Values that are reported together share their steps and times. Printed numbers have few decimals, so
a column is a list of whole numbers and a power of ten; other columns are 64-bit floats. Differences
are stored with 7 bits a byte, the small ones in one byte, and zlib compresses all of it.
"""

import json
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from math import nan
from sys import byteorder

from cavvy.domain.values import Struct

_MOST_DECIMALS = 12
_LARGEST = 1 << 53  # whole numbers below are exact as floats
_HEAD_BYTES = 4096  # that are unpacked first to read the names
_FLOATS, _MISSING = -1, -2  # instead of a number of decimals: floats; no value at all


class Columns(Struct):
    """Rows of values that a program reported together: the step of each row (NaN if it named none),
    the time in milliseconds since 1970, and a column for each name.
    """

    names: tuple[str, ...]
    steps: list[float]
    times: list[float]
    values: list[list[float]]


def pack(found: Sequence[Columns]) -> bytes:
    """Return columns as bytes."""
    heads, body = [], bytearray()
    for each in found:
        sizes = []
        for column in (each.steps, each.times, *each.values):
            decimals, data = _encode(column)
            sizes.append([decimals, len(data)])
            body += data
        heads.append([each.names, len(each.steps), sizes])
    head = json.dumps(heads, separators=(",", ":")).encode()
    return zlib.compress(len(head).to_bytes(4, "little") + head + body, 6)


def unpack(
    packed: bytes, wants: Callable[[str], bool] = bool, *, width: int | None = None
) -> list[Columns]:
    """Return the columns that were packed, of names that are wanted. With `width`, only of rows
    with so many values, of which the first one has a name that is wanted."""
    data = zlib.decompress(packed)
    at = 4 + int.from_bytes(data[:4], "little")
    found = []
    for own, count, sizes in json.loads(data[4:at]):
        if width is None:
            wanted = [*map(wants, own)]
        else:
            wanted = [len(own) == width and wants(own[0])] * len(own)
        columns = []
        for is_wanted, (decimals, size) in zip(
            (any(wanted), any(wanted), *wanted), sizes, strict=True
        ):
            if is_wanted:
                columns.append(_decode(decimals, data[at : at + size], count))
            at += size
        if columns:
            steps, times, *values = columns
            kept = (name for name, is_wanted in zip(own, wanted, strict=True) if is_wanted)
            found.append(Columns(tuple(kept), steps, times, values))
    return found


def read_names(packed: bytes) -> list[str]:
    """Return the names of the columns that were packed, without reading their values."""
    inflate = zlib.decompressobj()
    data = inflate.decompress(packed, _HEAD_BYTES)
    size = 4 + int.from_bytes(data[:4], "little")
    while len(data) < size and not inflate.eof:
        data += inflate.decompress(inflate.unconsumed_tail, size - len(data))
    return [name for own, _, _ in json.loads(data[4:size]) for name in own]


def join(pieces: Iterable[Sequence[Columns]]) -> list[Columns]:
    """Join pieces, in their order, to one."""
    joined: dict[tuple[str, ...], Columns] = {}
    for piece in pieces:
        for each in piece:
            known = joined.get(each.names)
            if known is None:
                joined[each.names] = Columns(
                    each.names, [*each.steps], [*each.times], [[*column] for column in each.values]
                )
                continue
            known.steps += each.steps
            known.times += each.times
            for column, more in zip(known.values, each.values, strict=True):
                column += more
    return [*joined.values()]


def _encode(column: Sequence[float]) -> tuple[int, bytes]:
    if all(each != each for each in column):
        return _MISSING, b""
    for decimals in range(_MOST_DECIMALS + 1):
        factor = 10.0**decimals
        whole = []
        for each in column:
            number = round(each * factor) if each == each and abs(each) < _LARGEST else _LARGEST
            if abs(number) >= _LARGEST or number / factor != each:
                break
            whole.append(number)
        else:
            return decimals, bytes(_pack_whole(whole))
    floats = array("d", column)
    if byteorder == "big":
        floats.byteswap()
    raw = floats.tobytes()
    return _FLOATS, b"".join(raw[at::8] for at in range(8))


def _decode(decimals: int, data: bytes, count: int) -> list[float]:
    if decimals == _MISSING:
        return [nan] * count
    if decimals == _FLOATS:
        raw = bytearray(8 * count)
        for at in range(8):
            raw[at::8] = data[at * count : (at + 1) * count]
        floats = array("d", bytes(raw))
        if byteorder == "big":
            floats.byteswap()
        return floats.tolist()
    factor = 10.0**decimals
    return [each / factor for each in _unpack_whole(data)]


def _pack_whole(numbers: Sequence[int]) -> bytearray:
    """Return differences of differences, or differences, whichever takes less."""
    first = [numbers[0], *(two - one for one, two in pairwise(numbers))]
    second = [first[0], *(two - one for one, two in pairwise(first))]
    use_second = sum(map(abs, second)) < sum(map(abs, first))
    packed = bytearray([use_second])
    for each in second if use_second else first:
        folded = each << 1 if each >= 0 else (-each << 1) - 1
        while folded > 127:
            packed.append(folded & 127 | 128)
            folded >>= 7
        packed.append(folded)
    return packed


def _unpack_whole(data: bytes) -> Iterator[int]:
    uses_second, value, difference, folded, shift = data[0], 0, 0, 0, 0
    for byte in data[1:]:
        folded |= (byte & 127) << shift
        if byte > 127:
            shift += 7
            continue
        each = -((folded + 1) >> 1) if folded & 1 else folded >> 1
        folded = shift = 0
        if uses_second:
            difference += each
            each = difference
        value += each
        yield value
