"""The rows of curves: each message of an agent becomes one, and many become one of the next level,
so each value is packed three times at most.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import starmap
from math import nan

from cavvy.capabilities.curves.packing import Columns, join, pack, unpack
from cavvy.domain.figures import StepSeries, StepValues
from cavvy.store.announcements import Happened
from cavvy.store.drivers import DatabaseSession

JOINED = 64  # pieces of a level that are joined
_LEVELS = 3
MOST_BYTES = 64 << 20  # of a rank; later values are not stored
_PUT = (
    "INSERT INTO curves (attempt_id, rank, number, level, document) VALUES (?, ?, ?, ?, ?) "
    "ON CONFLICT DO NOTHING"
)
_OF_RANK = "attempt_id = ? AND rank = ?"
_COUNT = f"SELECT COUNT(*) FROM curves WHERE {_OF_RANK} AND level = ?"
_LEVEL = f"SELECT number, document FROM curves WHERE {_OF_RANK} AND level = ? ORDER BY number"
_DELETE = f"DELETE FROM curves WHERE {_OF_RANK} AND level = ? AND number <= ?"
_SIZE = f"SELECT COALESCE(SUM(LENGTH(document)), 0) FROM curves WHERE {_OF_RANK}"


def add_steps(session: DatabaseSession, happened: Sequence[Happened]) -> None:
    """Store the values of steps in the open transaction."""
    for each in happened:
        if isinstance(each, StepValues):
            at = each.at.timestamp() * 1000
            columns = [_columns_of(series, at) for series in each.series]
            _add(session, each.attempt_id, each.rank, each.number, pack(columns))


def _columns_of(series: StepSeries, sent_at: float) -> Columns:
    steps, ages, *values = ([*column] for column in zip(*series.rows, strict=True))
    return Columns(
        tuple(series.names),
        [nan if each is None else each for each in steps],
        [float(round(sent_at - (each or 0.0))) for each in ages],
        [[nan if each is None else each for each in column] for column in values],
    )


def _add(session: DatabaseSession, attempt_id: str, rank: int, number: int, data: bytes) -> None:
    key = (attempt_id, rank)
    [[count]] = session.run(_COUNT, (*key, 0)).fetchall()
    if count >= JOINED:
        [[size]] = session.run(_SIZE, key).fetchall()
        if size > MOST_BYTES:
            return
        for level in range(_LEVELS):
            if not _join(session, key, level):
                break
    session.run(_PUT, (*key, number, 0, data))


def _join(session: DatabaseSession, key: tuple[str, int], level: int) -> bool:
    """Join the pieces of a level to one of the next. Return whether there were enough."""
    pieces = session.run(_LEVEL, (*key, level)).fetchall()
    if len(pieces) < JOINED:
        return False
    joined = pack(join(unpack(bytes(document)) for _, document in pieces))
    session.run(_DELETE, (*key, level, pieces[-1][0]))
    session.run(_PUT, (*key, pieces[0][0], level + 1, joined))
    return True


def read_ranks(
    attempt_ids: Collection[str],
) -> Callable[[DatabaseSession], Sequence[tuple[str, int]]]:
    """Return a read of the attempts and ranks that have curves, sorted."""
    marks = ", ".join("?" * len(attempt_ids))
    sql = f"SELECT DISTINCT attempt_id, rank FROM curves WHERE attempt_id IN ({marks})"

    def read(session: DatabaseSession) -> Sequence[tuple[str, int]]:
        rows = session.run(sql, [*attempt_ids]).fetchall() if attempt_ids else []
        return sorted(starmap(lambda attempt, rank: (str(attempt), int(rank)), rows))

    return read


def read_pieces(attempt_id: str, rank: int) -> Callable[[DatabaseSession], Sequence[bytes]]:
    """Return a read of the pieces of a rank, in the order in which they were reported."""
    sql = f"SELECT document FROM curves WHERE {_OF_RANK} ORDER BY number"

    def read(session: DatabaseSession) -> Sequence[bytes]:
        return [bytes(row[0]) for row in session.run(sql, (attempt_id, rank)).fetchall()]

    return read
