"""The figures of ranks over time: `Store.figures`.

Each minute arrives as a row. After MERGED minutes, the rows of a day are joined to one, so a rank
takes one row for each day and at most MERGED more. A block is stored with its first minute.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from zlib import crc32

from cavvy.domain.figures import FIGURES_DAYS, FigureBlock, join_blocks
from cavvy.store.documents import to_micros
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.figure_codec import pack, unpack
from cavvy.store.rows import insert_into
from cavvy.store.token_uses import add_energy

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
