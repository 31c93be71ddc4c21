"""The waiting jobs as rows without their tasks, and the use of the projects (`Store.queue`)."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

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
from cavvy.store.drivers import DatabaseSession, Row, RunTransaction

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
# An array may have 10,000 members, so only its first ones are read, from an index in their order.
_NEXT_ARRAY = (
    "SELECT array_id FROM jobs WHERE phase = 'queued' AND array_id > ? ORDER BY array_id LIMIT 1"
)
_FIRST_OF_ARRAY = (
    f"SELECT {_ROW} FROM jobs WHERE array_id = ? AND {_FREE} ORDER BY {TURN}, id LIMIT ?"
)
_ALL = f"SELECT {_COLUMNS}, {_PARALLEL} FROM jobs WHERE {_FREE} ORDER BY {TURN}, id"
_KEPT = "CASE a.phase WHEN 'kept' THEN"
_HELD = (
    f"SELECT a.project, j.user_name, SUM({_KEPT} 0 ELSE j.size END), "
    # a job that waits for its next attempt does not run, though its last nodes are still held
    "COUNT(DISTINCT CASE WHEN a.phase <> 'kept' AND j.phase <> 'queued' THEN j.id END), "
    f"SUM({_KEPT} j.size ELSE 0 END) "
    "FROM attempts a JOIN jobs j ON j.id = a.job_id WHERE a.phase <> 'ended' "
    "GROUP BY a.project, j.user_name ORDER BY a.project, j.user_name"
)
_GANGS = (
    "SELECT a.project, j.user_name, j.size, a.phase, a.document FROM attempts a "
    "JOIN jobs j ON j.id = a.job_id WHERE a.phase <> 'ended' ORDER BY a.id"
)
_WAITING = (
    "SELECT project, CAST(COUNT(*) AS BIGINT) FROM jobs WHERE phase = 'queued' AND user_name = ? "
    "GROUP BY project"
)
_RUNNING = (
    "SELECT j.array_id, CAST(COUNT(DISTINCT j.id) AS BIGINT) FROM attempts a JOIN jobs j "
    "ON j.id = a.job_id WHERE a.phase NOT IN ('ended', 'kept') AND j.phase <> 'queued' "
    "AND j.array_id IS NOT NULL "
    "GROUP BY j.array_id"
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


class _HeldOffer(Struct, frozen=True, kw_only=True):
    """The part of an attempt's document that says what its gang holds."""

    nodes: int
    offer: Offer


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

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        self._read = read
        self._write = write

    async def heads(self, now: datetime, limit: int) -> Sequence[QueueRow]:
        """Return the jobs without a machine or pool that may start now, sorted by priority and age.
        At most `limit` jobs of each array, and of each user in each project beside arrays, are
        returned.
        """
        at = to_micros(now)

        def read(session: DatabaseSession) -> list[Row]:
            found = session.run(_SINGLES, (at, limit)).fetchall()
            last = ""
            while (row := session.run(_NEXT_ARRAY, (last,)).fetchone()) is not None:
                last = row[0]
                found += session.run(_FIRST_OF_ARRAY, (last, at, limit)).fetchall()
            return found

        found = sorted(await self._read(read), key=lambda row: (row[6], row[0]))
        return [QueueRow(*row[:6]) for row in found]

    async def rows(self, now: datetime) -> Sequence[QueueRow]:
        """Return all jobs without a machine or pool that may start now, sorted as by `heads`."""
        return await self._rows(_ALL, to_micros(now))

    async def held(self) -> Sequence[HeldShare]:
        """Return what each user holds in each project now."""
        found = await self._read(lambda session: session.run(_HELD).fetchall())
        return [HeldShare(*row) for row in found]

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

    async def running(self) -> Mapping[str, int]:
        """Return how many members of each array run now."""
        return dict(await self._read(lambda session: session.run(_RUNNING).fetchall()))

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
        found = await self._read(lambda session: session.run(_USED).fetchall())
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


def _read_use(hours: float, held: float, at: int) -> ProjectUse | None:
    """Return the use that a row describes, or None if the row has an impossible value."""
    try:
        use = ProjectUse(gpu_hours=float(hours), held=float(held), at=to_time(at))
    except (TypeError, ValueError, OverflowError):
        return None
    possible = 0 <= use.gpu_hours < _MOST and 0 <= use.held < _MOST  # a NaN is neither
    return use if possible else None
