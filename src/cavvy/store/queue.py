"""The waiting jobs as rows without their tasks, and the use of the projects (`Store.queue`)."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import chain
from math import inf

from msgspec.json import Decoder

from cavvy.domain.offers import Offer
from cavvy.domain.shares import (
    EndedGang,
    HeldGang,
    HeldShare,
    ProjectUse,
    QueueRow,
    share_of,
)
from cavvy.domain.values import Struct
from cavvy.store.documents import to_micros, to_time
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.held import HeldReader, read_marks
from cavvy.store.prepared import Row

# While a job waits, it gains one point of priority each hour, so that no job waits for ever behind
# later jobs of higher priority. As all waiting jobs gain the same, the order of two jobs never
# changes.
AGEING = timedelta(hours=1)
READY = "phase = 'queued' AND stop_reason IS NULL AND (not_before IS NULL OR not_before <= ?)"
TURN = f"(submitted_at - priority * {AGEING // timedelta(microseconds=1)})"
_FREE = f"{READY} AND machine IS NULL AND pool IS NULL"
_COLUMNS = "id, project, user_name, size, array_id"
_PARALLEL = "(SELECT r.parallel FROM job_arrays r WHERE r.id = array_id)"
_ROW = f"{_COLUMNS}, {_PARALLEL}, {TURN} AS turn"
_SINGLES = (
    f"SELECT {_COLUMNS}, CAST(NULL AS BIGINT), turn FROM (SELECT {_COLUMNS}, {TURN} AS turn, "
    f"ROW_NUMBER() OVER (PARTITION BY project, user_name ORDER BY {TURN}, id) AS place "
    f"FROM jobs WHERE {_FREE} AND array_id IS NULL) AS p1 WHERE place <= ?"
)
_OF_PROJECT = (
    f"SELECT {_ROW} FROM jobs WHERE project = ? AND {_FREE} AND array_id IS NULL "
    f"ORDER BY {TURN}, id LIMIT ?"
)
_OF_USERS = _SINGLES.replace("AND array_id", "AND project = ? AND array_id")
# An array may have 10,000 members, so only its first ones are read, from an index in their order.
_OF_ARRAY = f"SELECT {_ROW} FROM jobs WHERE array_id = ? AND {_FREE} ORDER BY {TURN}, id LIMIT ?"


def _select_firsts(column: str, beside: str) -> str:
    """Return a query for the first job with each value of the column. It reads only these jobs: it
    finds each value in an index behind the value before."""
    waits = f"phase = 'queued' AND {beside} AND {column}"
    return (
        f"WITH RECURSIVE p1(line) AS (SELECT (SELECT {column} FROM jobs WHERE {waits} > '' "
        f"ORDER BY {column} LIMIT 1) UNION ALL SELECT (SELECT {column} FROM jobs WHERE "
        f"{waits} > p1.line ORDER BY {column} LIMIT 1) FROM p1 WHERE line IS NOT NULL), "
        "p2(first) AS MATERIALIZED (SELECT (SELECT id FROM jobs WHERE "
        f"{column} = line AND {_FREE} AND "
        f"{beside} ORDER BY {TURN}, id LIMIT 1) FROM p1 WHERE line IS NOT NULL) "
        f"SELECT {_ROW} FROM p2 JOIN jobs ON id = first"
    )


_BESIDE_ARRAYS = "machine IS NULL AND pool IS NULL AND array_id IS NULL"
_FIRST_OF_PROJECTS = _select_firsts("project", _BESIDE_ARRAYS)
_FIRST_OF_ARRAYS = _select_firsts("array_id", "array_id IS NOT NULL")
_ALL = f"SELECT {_COLUMNS}, {_PARALLEL} FROM jobs WHERE {_FREE} ORDER BY {TURN}, id"
_GANGS = (
    "SELECT a.project, j.user_name, j.size, a.phase, a.document FROM attempts a "
    "JOIN jobs j ON j.id = a.job_id WHERE a.phase <> 'ended' ORDER BY a.id"
)
_WAITING = (
    "SELECT project, CAST(COUNT(*) AS BIGINT) FROM jobs WHERE phase = 'queued' AND user_name = ? "
    "GROUP BY project"
)
# IDs of attempts sort by the time when their jobs were submitted
_ENDED = (
    "SELECT a.id, j.project, j.user_name, j.name, a.document FROM attempts a "
    "JOIN jobs j ON j.id = a.job_id WHERE a.phase = 'ended' ORDER BY a.id DESC LIMIT ?"
)
_USED = "SELECT project, gpu_hours, held, at FROM project_use"
_PUT = (
    "INSERT INTO project_use (project, gpu_hours, held, at) VALUES (?, ?, ?, ?) "
    "ON CONFLICT (project) DO UPDATE SET gpu_hours = excluded.gpu_hours, held = excluded.held, "
    "at = excluded.at"
)

# What says when jobs start, beside jobs and attempts
_MARKED = (
    "SELECT COUNT(*), MAX(at), SUM(held) FROM project_use",
    "SELECT project, document FROM project_policies ORDER BY project",
    "SELECT name, parent FROM projects ORDER BY name",
    "SELECT name, version FROM reservations ORDER BY name",
    "SELECT name, version FROM node_states ORDER BY name",
)
_MARK_OF_WAITING = (
    "SELECT COUNT(*), CAST(COALESCE(SUM({0}), 0) AS {1}), CAST(COALESCE(SUM(version), 0) AS {1}) "
    f"FROM jobs WHERE {READY}"
)
_LATER = "SELECT MIN(not_before) FROM jobs WHERE phase = 'queued' AND not_before > ?"


# A job with its place in the order of priority and age.
PlacedRow = tuple[tuple[int, str], QueueRow]


class _HeldOffer(Struct, frozen=True, kw_only=True):
    """The part of an attempt's document that says what its gang holds."""

    nodes: int
    offer: Offer


class _KnownMark(Struct, frozen=True):
    """The mark of the queue, which stays the same until the time `until` in microseconds while
    nothing at all is written."""

    written: object
    until: float
    mark: object


class _GangOffer(Struct, frozen=True):
    provider: str


class _GangTimes(Struct, frozen=True, kw_only=True):
    """The part of an attempt's document that is read for estimates."""

    created_at: datetime
    running_at: datetime | None = None
    ended_at: datetime | None = None
    offer: _GangOffer


_decode_times = Decoder(_GangTimes).decode
_decode_gang = Decoder(_HeldOffer).decode
_MOST = 1e12  # GPU-hours and GPUs; larger numbers are damage


class SqlQueue:
    """Reads the queue, and stores how much each project has used."""

    def __init__(
        self,
        read: RunTransaction,
        write: RunTransaction,
        held: HeldReader,
        read_brief: RunTransaction,
    ) -> None:
        self._read, self._read_brief = read, read_brief
        self._write = write
        self._held = held
        self._known: _KnownMark | None = None

    async def mark(self, now: datetime) -> object:
        """Return a value that differs from the last one if something was written since, by
        whichever server, on which the order of the waiting jobs depends or when they start, or if
        a job may start now that had to wait until a time. What nodes report, and the servers'
        leases, which are renewed each second, do not change it.
        """
        at = to_micros(now)

        def read(session: DatabaseSession) -> _KnownMark:
            known, written = self._known, _read_written(session)
            if known is not None and known.written == written and at < known.until:
                return known
            rows = [session.run(sql).fetchall() for sql in _MARKED]
            later = session.run(_LATER, (at,)).fetchall()[0][0]
            mark = (read_marks(session), _read_waiting(session, at), rows)
            return _KnownMark(written, inf if later is None else later, mark)

        self._known = found = await self._read_brief(read)
        return found.mark

    async def firsts(self, now: datetime) -> Sequence[PlacedRow]:
        """Return those jobs without a machine or pool that may start now which are the first of
        their array or, beside arrays, of their project.
        """
        at = to_micros(now)

        def read(session: DatabaseSession) -> list[Row]:
            found = session.run(_FIRST_OF_PROJECTS, (at,)).fetchall()
            return found + session.run(_FIRST_OF_ARRAYS, (at,)).fetchall()

        return _place(await self._read_brief(read))

    async def more(
        self,
        now: datetime,
        limit: int,
        *,
        arrays: Collection[str] = (),
        projects: Collection[str] = (),
        users_of: Collection[str] = (),
    ) -> Sequence[PlacedRow]:
        """Return more such jobs: at most `limit` jobs of each of these arrays, of each of these
        projects, and of each user in each project of `users_of`.
        """
        at = to_micros(now)

        def read(session: DatabaseSession) -> list[Row]:
            found = [
                session.run(sql, (name, at, limit)).fetchall()
                for sql, names in ((_OF_ARRAY, arrays), (_OF_PROJECT, projects))
                for name in names
            ]
            found += [session.run(_OF_USERS, (at, name, limit)).fetchall() for name in users_of]
            return [*chain.from_iterable(found)]

        return _place(await self._read_brief(read))

    async def heads(self, now: datetime, limit: int) -> Sequence[QueueRow]:
        """Return at most `limit` such jobs of each array, and of each user in each project beside
        arrays. They are sorted by priority and age."""
        at = to_micros(now)

        def read(session: DatabaseSession) -> list[Row]:
            arrays = [row[4] for row in session.run(_FIRST_OF_ARRAYS, (at,)).fetchall()]
            found = [session.run(_OF_ARRAY, (name, at, limit)).fetchall() for name in arrays]
            found.append(session.run(_SINGLES, (at, limit)).fetchall())
            return [*chain.from_iterable(found)]

        return sort_rows(_place(await self._read(read)))

    async def rows(self, now: datetime) -> Sequence[QueueRow]:
        """Return all jobs without a machine or pool that may start now, sorted as by `heads`."""
        return await self._rows(_ALL, to_micros(now))

    async def held(self) -> tuple[Sequence[HeldShare], Mapping[str, int]]:
        """Return what each user holds in each project now, and how many members of each array run
        now."""
        return await self._read(self._held.read_held)

    async def held_gangs(self) -> Sequence[HeldGang]:
        """Return what each gang holds now on its offer."""
        found = await self._read(lambda session: session.run(_GANGS).fetchall())
        gangs = []
        for project, user, size, phase, document in found:
            held = _decode_gang(document)
            share = share_of(held.offer, held.nodes, size)
            gangs.append(HeldGang(project, user, share, idle=phase == "kept"))
        return gangs

    async def count_waiting(self, user: str) -> Mapping[str, int]:
        """Return how many jobs of a user wait in each project."""
        found = await self._read(lambda session: session.run(_WAITING, (user,)).fetchall())
        return dict(found)

    async def ended_gangs(self, limit: int) -> Sequence[EndedGang]:
        """Return how long gangs that have ended held their nodes, those of the jobs that were
        submitted last first. Gangs whose work never ran are omitted."""
        found = await self._read(lambda session: session.run(_ENDED, (limit,)).fetchall())
        gangs = ((*names, _decode_times(document)) for *names, document in found)
        return [
            EndedGang(
                attempt_id=attempt_id,
                project=project,
                user=user,
                name=name,
                provider=times.offer.provider,
                held=times.ended_at - times.created_at,
                boot=times.running_at - times.created_at,
            )
            for attempt_id, project, user, name, times in gangs
            if times.ended_at is not None and times.running_at is not None
        ]

    async def used(self) -> Mapping[str, ProjectUse]:
        """Return the use of each project. Damaged rows are omitted, as the queue must go on."""
        found = await self._read_brief(lambda session: session.run(_USED).fetchall())
        uses = {project: _read_use(*row) for project, *row in found}
        return {project: use for project, use in uses.items() if use is not None}

    async def put_used(self, uses: Mapping[str, ProjectUse]) -> None:
        """Replace the use of these projects."""
        rows = [
            (name, each.gpu_hours, each.held, to_micros(each.at)) for name, each in uses.items()
        ]

        def write(session: DatabaseSession) -> None:
            for row in sorted(rows):
                session.run(_PUT, row)

        await self._write(write)

    async def _rows(self, sql: str, *values: object) -> Sequence[QueueRow]:
        found = await self._read(lambda session: session.run(sql, values).fetchall())
        return [QueueRow(*row) for row in found]


def _read_written(session: DatabaseSession) -> object:
    """Return a value that differs from the last one if anything was written since."""
    if session.driver.is_sqlite:
        # the number counts what others than the session write, which only a file with WAL ensures
        if not session.driver.reads_at_once:
            return object()
        return session, session.run("PRAGMA data_version").fetchall()[0][0]
    return session.run("SELECT CAST(pg_current_snapshot() AS TEXT)").fetchall()[0][0]


def _read_waiting(session: DatabaseSession, at: int) -> Row:
    """Return a value that differs from the last one if other jobs wait now that may start at the
    time `at` in microseconds, or others of their versions; see `held.read_marks`."""
    sqlite, postgresql = ("rowid", "BIGINT"), ("hashtextextended(id, 0)", "NUMERIC")
    sql = _MARK_OF_WAITING.format(*(sqlite if session.driver.is_sqlite else postgresql))
    return session.run(sql, (at,)).fetchall()[0]


def sort_rows(found: Iterable[PlacedRow]) -> Sequence[QueueRow]:
    """Return the rows by their places."""
    return [row for _, row in sorted(found, key=lambda each: each[0])]


def _place(found: Iterable[Row]) -> Sequence[PlacedRow]:
    return [((row[6], row[0]), QueueRow(*row[:6])) for row in found]


def _read_use(hours: float, held: float, at: int) -> ProjectUse | None:
    """Return the use that a row describes, or None if the row has an impossible value."""
    try:
        use = ProjectUse(gpu_hours=float(hours), held=float(held), at=to_time(at))
    except (TypeError, ValueError, OverflowError):
        return None
    possible = 0 <= use.gpu_hours < _MOST and 0 <= use.held < _MOST  # a NaN is neither
    return use if possible else None
