"""The rows of curves: each message of an agent becomes one, and many become one of the next level,
so each value is packed a few times only.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import starmap
from math import nan

from cavvy.capabilities.curves.briefs import BriefTable, is_brief, read_brief_names, shorten
from cavvy.capabilities.curves.examples import add_examples
from cavvy.capabilities.curves.kept import KeptBriefs
from cavvy.capabilities.curves.keys import CurveKey, write_key
from cavvy.capabilities.curves.packing import Columns, join, pack, read_names, unpack
from cavvy.capabilities.curves.reduce import Piece
from cavvy.domain.figures import StepSeries, StepValues
from cavvy.store.announcements import Happened
from cavvy.store.drivers import DatabaseSession

JOINED = 64  # messages that are joined
_JOINED_LATER = 8  # pieces of each next level
FULL = 16_384  # rows of a piece that is not joined any more
_LEVELS = 5  # by which even pieces of 64 rows are full
_FINAL = 9  # the level of full pieces
MOST_BYTES = 64 << 20  # of a rank; later values are not stored
_HEAD_BYTES = 64 << 10  # of a piece, within which its names lie
MOST_PARAMS = 256  # settings of a rank; later names are not stored
_PUT = (
    "INSERT INTO curves (attempt_id, rank, number, level, rows_count, document, brief) "
    "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
)
_PUT_PARAM = (
    "INSERT INTO curve_params (attempt_id, rank, name, value) VALUES (?, ?, ?, ?) "
    "ON CONFLICT (attempt_id, rank, name) DO UPDATE SET value = excluded.value"
)
_OF_RANK = "attempt_id = ? AND rank = ?"
_PARAMS = f"SELECT name FROM curve_params WHERE {_OF_RANK}"
_COUNT = f"SELECT COUNT(*) FROM curves WHERE {_OF_RANK} AND level = ?"
_LEVEL = f"SELECT number, document FROM curves WHERE {_OF_RANK} AND level = ? ORDER BY number"
_DELETE = f"DELETE FROM curves WHERE {_OF_RANK} AND level = ? AND number <= ?"
_BRIEFS = (
    f"SELECT number, brief FROM curves WHERE {_OF_RANK} AND number BETWEEN ? AND ? "
    "AND brief IS NOT NULL"
)
_SIZE = f"SELECT COALESCE(SUM(LENGTH(document)), 0) FROM curves WHERE {_OF_RANK}"


def add_steps(session: DatabaseSession, happened: Sequence[Happened]) -> None:
    """Store the values of steps in the open transaction."""
    for each in happened:
        if isinstance(each, StepValues):
            at = each.at.timestamp() * 1000
            key = each.attempt_id, each.rank
            if columns := [_columns_of(series, at) for series in each.series]:
                _add(session, key, each.number, columns)
            if each.params:
                _add_params(session, key, each.params)
            if each.examples:
                add_examples(session, each)


def _add_params(session: DatabaseSession, key: tuple[str, int], params: Mapping[str, str]) -> None:
    names = {str(name) for (name,) in session.run(_PARAMS, key).fetchall()}
    for name, text in params.items():
        if name in names or len(names) < MOST_PARAMS:
            names.add(name)
            session.run(_PUT_PARAM, (*key, name, text))


def _columns_of(series: StepSeries, sent_at: float) -> Columns:
    steps, ages, *values = ([*column] for column in zip(*series.rows, strict=True))
    return Columns(
        tuple(
            write_key(CurveKey(name, series.process, is_odd=series.odd)) for name in series.names
        ),
        [nan if each is None else each for each in steps],
        [float(round(sent_at - (each or 0.0))) for each in ages],
        [[nan if each is None else each for each in column] for column in values],
    )


def _add(
    session: DatabaseSession, key: tuple[str, int], number: int, columns: Sequence[Columns]
) -> None:
    [[count]] = session.run(_COUNT, (*key, 0)).fetchall()
    if count >= JOINED:
        [[size]] = session.run(_SIZE, key).fetchall()
        if size > MOST_BYTES:
            return
        for level in range(_LEVELS):
            if not _join(session, key, level, _JOINED_LATER if level else JOINED):
                break
    _put(session, key, number, 0, columns)


def _join(session: DatabaseSession, key: tuple[str, int], level: int, least: int) -> bool:
    """Join the pieces of a level to one of the next. Return whether there were enough."""
    pieces = session.run(_LEVEL, (*key, level)).fetchall()
    if len(pieces) < least:
        return False
    joined = join(unpack(bytes(document)) for _, document in pieces)
    session.run(_DELETE, (*key, level, pieces[-1][0]))
    _put(session, key, pieces[0][0], level + 1, joined)
    return True


def _put(
    session: DatabaseSession,
    key: tuple[str, int],
    number: int,
    level: int,
    columns: Sequence[Columns],
) -> None:
    count = sum(len(each.steps) for each in columns)
    is_full = count >= FULL
    brief = shorten(columns) if is_full else None
    level = _FINAL if is_full else level
    session.run(_PUT, (*key, number, level, count, pack(columns), brief))


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


def read_pieces(
    attempt_id: str, rank: int, kept: KeptBriefs, *, briefly: bool = False
) -> Callable[[DatabaseSession], Sequence[Piece]]:
    """Return a read of the pieces of a rank, in the order in which they were reported. With
    `briefly`, of a piece that has a brief version, only this is read, unless it is still known.
    """
    whole = "CASE WHEN brief IS NULL THEN document END" if briefly else "document"
    sql = f"SELECT number, {whole}, brief IS NULL FROM curves WHERE {_OF_RANK} ORDER BY number"

    def read(session: DatabaseSession) -> Sequence[Piece]:
        rows = session.run(sql, (attempt_id, rank)).fetchall()
        has_brief = [int(number) for number, _, is_missing in rows if not is_missing]
        known = _read_briefs(session, (attempt_id, rank), has_brief, kept)
        return [Piece(int(row[0]), _bytes(row[1]), known.get(int(row[0]))) for row in rows]

    return read


def _read_briefs(
    session: DatabaseSession, key: tuple[str, int], numbers: Sequence[int], kept: KeptBriefs
) -> Mapping[int, BriefTable]:
    """Return the brief versions of some pieces, by their numbers in ascending order."""
    found = {each: kept.find((*key, each)) for each in numbers}
    missing = [number for number, brief in found.items() if brief is None]
    if missing:
        rows = session.run(_BRIEFS, (*key, missing[0], missing[-1])).fetchall()
        for number, document in rows:
            if number in found and found[number] is None:
                found[number] = kept.keep((*key, number), BriefTable(bytes(document)))
    return {number: brief for number, brief in found.items() if brief is not None}


def read_pieces_of_jobs(
    job_ids: Collection[str], *, briefly: bool = False
) -> Callable[[DatabaseSession], Mapping[str, Sequence[Piece]]]:
    """Return a read of the pieces of the first ranks of all attempts of jobs, by the jobs' IDs."""
    whole = "CASE WHEN c.brief IS NULL THEN c.document END" if briefly else "c.document"
    marks = ", ".join("?" * len(job_ids))
    sql = (
        f"SELECT a.job_id, c.number, {whole}, c.brief FROM attempts a JOIN curves c "
        f"ON c.attempt_id = a.id AND c.rank = 0 WHERE a.job_id IN ({marks}) "
        "ORDER BY a.number, c.number"
    )

    def read(session: DatabaseSession) -> Mapping[str, Sequence[Piece]]:
        found = defaultdict[str, list[Piece]](list)
        for job_id, number, document, brief in (
            session.run(sql, [*job_ids]).fetchall() if job_ids else ()
        ):
            table = None if brief is None else BriefTable(bytes(brief))
            found[str(job_id)].append(Piece(int(number), _bytes(document), table))
        return found

    return read


def read_whole(
    attempt_id: str, rank: int, numbers: Collection[int]
) -> Callable[[DatabaseSession], Mapping[int, bytes]]:
    """Return a read of some pieces by their numbers."""
    marks = ", ".join("?" * len(numbers))
    sql = f"SELECT number, document FROM curves WHERE {_OF_RANK} AND number IN ({marks})"

    def read(session: DatabaseSession) -> Mapping[int, bytes]:
        rows = session.run(sql, (attempt_id, rank, *numbers)).fetchall() if numbers else []
        return {int(number): bytes(document) for number, document in rows}

    return read


def read_keys(
    attempt_ids: Collection[str], most_ranks: int, kept: KeptBriefs
) -> Callable[[DatabaseSession], Collection[str]]:
    """Return a read of the names of the columns of the first ranks. The begin of a piece has them;
    of pieces whose brief versions are still known, nothing is read."""
    marks = ", ".join("?" * len(attempt_ids))
    where = f"attempt_id IN ({marks}) AND rank < ?"
    numbers = f"SELECT attempt_id, rank, number FROM curves WHERE {where} AND brief IS NOT NULL"
    begin = f"SUBSTR(COALESCE(brief, document), 1, {_HEAD_BYTES})"
    heads = f"SELECT {begin} FROM curves WHERE {where}"

    def read(session: DatabaseSession) -> Collection[str]:
        found: set[str] = set()
        asked = (*attempt_ids, most_ranks)
        if not attempt_ids:
            return found
        is_known = True
        for attempt_id, rank, number in session.run(numbers, asked).fetchall():
            known = kept.find((str(attempt_id), int(rank), int(number)))
            is_known = is_known and known is not None
            found.update(known.briefs if known else ())
        sql = f"{heads} AND brief IS NULL" if is_known else heads
        for (document,) in session.run(sql, asked).fetchall():
            head = bytes(document)
            found.update(read_brief_names(head) if is_brief(head) else read_names(head))
        return found

    return read


def read_params(
    job_ids: Collection[str],
) -> Callable[[DatabaseSession], Mapping[str, Mapping[str, str]]]:
    """Return a read of the settings that the programs of jobs reported, by the jobs' IDs, of the
    first ranks; a later attempt counts more."""
    marks = ", ".join("?" * len(job_ids))
    sql = (
        "SELECT a.job_id, p.name, p.value FROM attempts a JOIN curve_params p "
        f"ON p.attempt_id = a.id WHERE a.job_id IN ({marks}) ORDER BY a.number, p.rank DESC"
    )

    def read(session: DatabaseSession) -> Mapping[str, Mapping[str, str]]:
        found = defaultdict[str, dict[str, str]](dict)
        for job_id, name, value in session.run(sql, [*job_ids]).fetchall() if job_ids else ():
            found[str(job_id)][str(name)] = str(value)
        return found

    return read


def _bytes(value: object) -> bytes | None:
    return None if value is None else bytes(value)  # type: ignore[call-overload]
