"""Packs values of steps into few bytes, and unpacks them without loss.

Values that are reported together share their steps and times. Printed numbers have few decimals, so
a column is a list of whole numbers and a power of ten; other columns are 64-bit floats. All
differences have as many bytes as the largest one needs, or 7 bits a byte if few are large, and zlib
compresses them.
"""

import json
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import nan
from operator import sub
from sys import byteorder

from cavvy.domain.values import Struct

_MOST_DECIMALS = 12
_LARGEST = 1 << 53  # whole numbers below are exact as floats
_HEAD_BYTES = 4096  # that are unpacked first to read the names
_FLOATS, _MISSING = -1, -2  # instead of a number of decimals: floats; no value at all
_TYPES = {1: "b", 2: "h", 4: "i", 8: "q"}  # of arrays, by the bytes of a number


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
            form, data = encode(column)
            sizes.append([form, len(data)])
            body += data
        heads.append([each.names, len(each.steps), sizes])
    head = json.dumps(heads, separators=(",", ":")).encode()
    return zlib.compress(len(head).to_bytes(4, "little") + head + body, 6)


def unpack(packed: bytes, wants: Callable[[str], bool] = bool) -> list[Columns]:
    """Return the columns that were packed, of names that are wanted."""
    data = zlib.decompress(packed)
    at = 4 + int.from_bytes(data[:4], "little")
    found = []
    for own, count, sizes in json.loads(data[4:at]):
        wanted = [*map(wants, own)]
        columns = []
        for is_wanted, (form, size) in zip((any(wanted), any(wanted), *wanted), sizes, strict=True):
            if is_wanted:
                columns.append(decode(form, data[at : at + size], count))
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


def encode(column: Sequence[float]) -> tuple[object, bytes]:
    """Return the form of a column, which JSON can have, and its bytes. The form is _MISSING,
    _FLOATS, the number of decimals, or that with the bytes of a difference, whether differences of
    differences are stored, and what they begin with.
    """
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
            return _encode_whole(decimals, whole)
    floats = array("d", column)
    if byteorder == "big":
        floats.byteswap()
    return _FLOATS, _shuffle(floats.tobytes(), 8)


def _encode_whole(decimals: int, whole: Sequence[int]) -> tuple[object, bytes]:
    first = [*map(sub, whole[1:], whole)]
    second = [*map(sub, first[1:], first)]
    use_second = bool(second) and sum(map(abs, second)) < sum(map(abs, first))
    differences = second if use_second else first
    largest = max(map(abs, differences), default=0)
    width = next(each for each in _TYPES if largest < 1 << 8 * each - 1)
    small = sum(-64 <= each < 64 for each in differences)
    if width > 2 and len(differences) * width > 2 * (small + (len(differences) - small) * width):
        return decimals, bytes(_pack_whole(whole))
    packed = array(_TYPES[width], differences)
    if byteorder == "big":
        packed.byteswap()
    begins = [whole[0], *(first[:1] if use_second else ())]
    return [decimals, width, begins], _shuffle(packed.tobytes(), width)


def decode(form: object, data: bytes, count: int) -> list[float]:
    """Return the column that was encoded."""
    if form == _MISSING:
        return [nan] * count
    if form == _FLOATS:
        floats = array("d", _unshuffle(data, 8))
        if byteorder == "big":
            floats.byteswap()
        return floats.tolist()
    if isinstance(form, list):
        decimals, width, begins = form
        packed = array(_TYPES[width], _unshuffle(data, width))
        if byteorder == "big":
            packed.byteswap()
        whole: Iterable[int] = packed
        for begin in reversed(begins):
            whole = accumulate(whole, initial=begin)
    else:
        assert isinstance(form, int)
        decimals, whole = form, _unpack_whole(data)
    factor = 10.0**decimals
    return [*map(float, whole)] if decimals == 0 else [each / factor for each in whole]


def _shuffle(raw: bytes, width: int) -> bytes:
    """Return the first bytes of all numbers, then the second ones, which are more alike."""
    return raw if width == 1 else b"".join(raw[at::width] for at in range(width))


def _unshuffle(data: bytes, width: int) -> bytes:
    if width == 1:
        return data
    raw, count = bytearray(len(data)), len(data) // width
    for at in range(width):
        raw[at::width] = data[at * count : (at + 1) * count]
    return bytes(raw)


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
