"""The figures of ranks over time: `Store.figures`.

Each minute arrives as a row. After MERGED minutes, the rows of a day are joined to one, so a rank
takes one row for each day and at most MERGED more. A block is stored with its first minute.

Packs figures of a rank into compressed bytes, and unpacks them.

A mean keeps a mantissa of 10 bits, so its error is below 0.05 %. The lowest and highest values keep
5 bits, so their error is below 1.6 %; one that has the same 5 bits as the mean is unpacked as the
mean, with an error below 3.2 %.
Few minutes, and numbers that only grow, keep 20 bits. Values are stored as differences, byte by
byte: first the lowest bytes of all minutes, then the next. Each figure is compressed apart, so that
one can be read without the others.
"""

import json
import sys
import zlib
from array import array
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import accumulate, pairwise
from operator import sub
from zlib import crc32

from cavvy.domain.figures import FIGURES_DAYS, FigureBlock, FigureColumns, join_blocks
from cavvy.store.documents import to_micros
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.meters import add_energy
from cavvy.store.rows import insert_into

MERGED = 120  # minutes; a join takes up to 0.2 s of the thread that writes
_MICROS = 60_000_000  # of a minute
_DAY_MINUTES = 24 * 60
_DAY = timedelta(days=1)
_COLUMNS = ("attempt_id", "rank", "since", "document")
# A node whose clock was set back must not replace a day by one minute.
_ADD = insert_into("figures", _COLUMNS, "ON CONFLICT DO NOTHING")
_PUT = insert_into(
    "figures",
    _COLUMNS,
    "ON CONFLICT (attempt_id, rank, since) DO UPDATE SET document = excluded.document",
)
_OF_RANK = "attempt_id = ? AND rank = ?"
_FORGET = (
    "DELETE FROM figures WHERE (attempt_id, rank, since) IN "
    "(SELECT attempt_id, rank, since FROM figures WHERE since < ? LIMIT ?)"
)

# A day of a rank. 31 days, and the minutes that are not joined yet, take less than 1 MB.
MOST_BYTES = 900_000 // 31
_LARGEST = 3e38  # of a 32-bit float, 3.4e38
_MANTISSA = 23  # bits of the mantissa of a 32-bit float
# Bits of the means and of the lowest and highest values; the second of a pair is 0 if these are
# not stored. The next pair is used if the figures of a day take more than MOST_BYTES.
_PRECISIONS = ((10, 5), (10, 3), (9, 3), (8, 3), (8, 2), (9, 0), (7, 0), (5, 0))
# Numbers that only grow, such as steps, whose small differences tell the speed.
_COUNTER = (20, 0)
_FEW, _EXACT = 60, (20, 10)  # minutes, whose precision need not be lowered
_HEAD_BYTES = 3000  # more than the names and minutes of a day take


class SqlFigures:
    """The rows of figures."""

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        self._read, self._write = read, write

    async def ranks(self, attempt_ids: Collection[str]) -> Sequence[tuple[str, int]]:
        """Return the attempts and ranks that have figures, sorted."""
        if not attempt_ids:
            return []
        marks = ", ".join("?" * len(attempt_ids))
        sql = f"SELECT DISTINCT attempt_id, rank FROM figures WHERE attempt_id IN ({marks})"
        rows = await self._read(lambda session: session.run(sql, [*attempt_ids]).fetchall())
        return sorted((str(row[0]), int(row[1])) for row in rows)

    async def list(
        self,
        attempt_id: str,
        rank: int,
        *,
        since: datetime,
        until: datetime,
        names: Collection[str] = (),
    ) -> Sequence[FigureBlock]:
        """Return the blocks of a rank that may contain minutes of this period, in order, with the
        figures of these names or with all.
        """
        sql = (
            f"SELECT document FROM figures WHERE {_OF_RANK} AND since > ? AND since < ? "
            "ORDER BY since"
        )
        values = (attempt_id, rank, to_micros(since - _DAY), to_micros(until))
        rows = await self._read(lambda session: session.run(sql, values).fetchall())
        return [unpack(attempt_id, rank, row[0], names) for row in rows]

    async def forget(self, now: datetime, limit: int) -> bool:
        """Remove at most `limit` blocks that are too old. Return whether any were removed."""
        values = (to_micros(now - timedelta(days=FIGURES_DAYS + 1)), limit)
        return await self._write(lambda session: session.run(_FORGET, values).rowcount > 0)


def write_figures(session: DatabaseSession, blocks: Sequence[FigureBlock]) -> None:
    """Store blocks of one minute each, in the open transaction. Join the rows of their ranks from
    time to time.
    """
    for block in blocks:
        if session.run(_ADD, _values(block)).rowcount > 0:
            add_energy(session, block)
        # not at the same time for all ranks
        offset = crc32(f"{block.attempt_id} {block.rank}".encode())
        if (block.minutes[0] + offset) % MERGED == 0:
            _merge(session, block)


def _merge(session: DatabaseSession, newest: FigureBlock) -> None:
    """Join the rows of the newest block's day, and of the day before, to one row for each day."""
    rank = (newest.attempt_id, newest.rank)
    since = (newest.minutes[0] // _DAY_MINUTES - 1) * _DAY_MINUTES * _MICROS
    sql = f"SELECT since, document FROM figures WHERE {_OF_RANK} AND since >= ? ORDER BY since"
    days = defaultdict[int, dict[int, bytes]](dict)
    for began, document in session.run(sql, (*rank, since)).fetchall():
        days[began // (_DAY_MINUTES * _MICROS)][began] = document
    for rows in days.values():
        if len(rows) > 1:
            _, *others = rows
            for began in others:
                session.run(f"DELETE FROM figures WHERE {_OF_RANK} AND since = ?", (*rank, began))
            joined = join_blocks([unpack(*rank, each) for each in rows.values()])
            session.run(_PUT, _values(joined))


def _values(block: FigureBlock) -> Sequence[object]:
    return (block.attempt_id, block.rank, block.minutes[0] * _MICROS, pack(block))


def pack(block: FigureBlock) -> bytes:
    """Return the minutes and figures of a block of at most one day as at most MOST_BYTES. If even
    the lowest precision takes more, the figures that take most are left out.
    """
    few = len(block.minutes) < _FEW
    for precision in (_EXACT, *_PRECISIONS) if few else _PRECISIONS:
        bits = {
            name: _COUNTER if is_counter(each.mean) else precision
            for name, each in block.columns.items()
        }
        parts = _pack_columns(block, bits)
        if sum(map(len, parts.values())) <= MOST_BYTES - _HEAD_BYTES:
            break
    while sum(map(len, parts.values())) > MOST_BYTES - _HEAD_BYTES:
        del parts[max(parts, key=lambda name: len(parts[name]))]
    minutes = _compress([[block.minutes[0], *_differences(block.minutes)]])
    head = {
        "bits": [bits[name] for name in parts],
        "names": [*parts],
        "sizes": [len(minutes), *map(len, parts.values())],
    }
    text = zlib.compress(json.dumps(head, separators=(",", ":")).encode(), 9)
    return len(text).to_bytes(4, "little") + text + minutes + b"".join(parts.values())


def is_counter(values: Sequence[float]) -> bool:
    """Return whether many values only grow."""
    known = [each for each in values if each == each]
    grows = all(one <= two for one, two in pairwise(known))
    return len(known) >= _FEW and grows and known[0] < known[-1]


def _pack_columns(
    block: FigureBlock, precisions: Mapping[str, tuple[int, int]]
) -> dict[str, bytes]:
    parts = {}
    for name, each in block.columns.items():
        bits, spread_bits = precisions[name]
        means = _encode(each.mean, bits)
        planes = [_fold([means[0], *_differences(means)])]
        if spread_bits:
            coarse = _coarsen(means, bits - spread_bits)
            for values in (each.low, each.high):
                ends = _encode(values, spread_bits)
                planes.append(_fold(map(sub, ends, coarse)))
        parts[name] = _compress(planes)
    return parts


def unpack(attempt_id: str, rank: int, packed: bytes, names: Collection[str] = ()) -> FigureBlock:
    """Return the block that was packed, with the figures of these names or with all."""
    end = 4 + int.from_bytes(packed[:4], "little")
    head = json.loads(zlib.decompress(packed[4:end]))
    parts, at = [], end
    for size in head["sizes"]:
        parts.append(packed[at : at + size])
        at += size
    minutes = [*accumulate(_expand(parts[0], 1)[0])]
    columns = {
        name: _decode_columns(part, *bits)
        for name, bits, part in zip(head["names"], head["bits"], parts[1:], strict=True)
        if not names or name in names
    }
    return FigureBlock(attempt_id=attempt_id, rank=rank, minutes=minutes, columns=columns)


def _decode_columns(part: bytes, bits: int, spread_bits: int) -> FigureColumns:
    planes = [_unfold(each) for each in _expand(part, 3 if spread_bits else 1)]
    codes = [*accumulate(planes[0])]
    mean = _decode(codes, bits)
    if not spread_bits:
        return FigureColumns(low=mean, mean=mean, high=mean)
    coarse = _coarsen(codes, bits - spread_bits)
    low, high = (
        _decode([code + more for code, more in zip(coarse, plane, strict=True)], spread_bits)
        for plane in planes[1:]
    )
    return FigureColumns(
        low=[
            min(one, two) if more else two
            for one, two, more in zip(low, mean, planes[1], strict=True)
        ],
        mean=mean,
        high=[
            max(one, two) if more else two
            for one, two, more in zip(high, mean, planes[2], strict=True)
        ],
    )


def _encode(values: Iterable[float], bits: int) -> list[int]:
    """Return the first bits of each value as a 32-bit float, rounded."""
    drop = _MANTISSA - bits
    half = 1 << (drop - 1)
    known = [max(-_LARGEST, min(_LARGEST, each)) if each == each else each for each in values]
    floats = array("f", known)
    return [(each + half) >> drop for each in array("I", floats.tobytes())]


def _decode(codes: Iterable[int], bits: int) -> Sequence[float]:
    drop = _MANTISSA - bits
    return array("f", array("I", [each << drop for each in codes]).tobytes())


def _coarsen(codes: Iterable[int], drop: int) -> list[int]:
    half = 1 << (drop - 1)
    return [(each + half) >> drop for each in codes]


def _differences(values: Sequence[int]) -> list[int]:
    return [two - one for one, two in pairwise(values)]


def _fold(values: Iterable[int]) -> list[int]:
    """Make small non-negative numbers of small numbers: 0, -1, 1, -2 become 0, 1, 2, 3."""
    return [each << 1 if each >= 0 else (-each << 1) - 1 for each in values]


def _unfold(values: Iterable[int]) -> list[int]:
    return [each >> 1 if not each & 1 else -((each + 1) >> 1) for each in values]


def _compress(planes: Iterable[Sequence[int]]) -> bytes:
    data = []
    for plane in planes:
        raw = _little(array("I", plane)).tobytes()
        data += [raw[at::4] for at in range(4)]
    # Bytes of noise repeat nothing but runs; short blocks fit the statistics of each plane.
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, 4, zlib.Z_RLE)
    return packer.compress(b"".join(data)) + packer.flush()


def _expand(part: bytes, count: int) -> list[Sequence[int]]:
    data = zlib.decompress(part)
    length = len(data) // (4 * count)
    planes: list[Sequence[int]] = []
    for plane in range(count):
        raw = bytearray(4 * length)
        for at in range(4):
            begin = (4 * plane + at) * length
            raw[at::4] = data[begin : begin + length]
        planes.append(_little(array("I", bytes(raw))))
    return planes


def _little(numbers: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
