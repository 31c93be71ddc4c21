"""The rows of what brokers count."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from msgspec import structs
from msgspec.json import decode, encode

from cavvy.capabilities.functions.counts.wire import CountsAsk, DirectCall, FunctionMinute
from cavvy.capabilities.functions.rows import DONE, FAILED
from cavvy.domain.values import Struct
from cavvy.store.base import ProjectFilter, is_visible
from cavvy.store.documents import to_micros
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.rows import RowCodec

FRESH = timedelta(seconds=150)  # after which a job that tells nothing is gone
KEPT = timedelta(days=7)
_GAUGES_KEPT = timedelta(hours=1)  # for which an app that a program runs is shown after its end
_MOST_RECENT = 40  # minutes whose calls are read one by one
AppKey = tuple[str, str]  # the project and the name


class GaugeRow(Struct, frozen=True, kw_only=True):
    """What runs in a job; `document` is a `CountsAsk` without minutes as JSON."""

    project: str
    app: str
    job: str
    document: str
    told_at: datetime


class MinuteRow(Struct, frozen=True, kw_only=True):
    """A minute of a function in a job; `document` is a `FunctionMinute` without its calls, and
    `calls` are these, as JSON."""

    project: str
    app: str
    function: str
    minute: int
    job: str
    done: int
    failed: int
    document: str
    calls: str


_GAUGES = RowCodec(GaugeRow, "function_gauges", key=("project", "app", "job"))
_MINUTES = RowCodec(
    MinuteRow, "function_minutes", key=("project", "app", "function", "minute", "job")
)
_ENDED = "SELECT project, app, SUM(done), SUM(failed) FROM function_minutes WHERE minute >= ? "
_ENDED += "GROUP BY project, app"
_KEPT_ENDED = "SELECT project, app, COUNT(*) FROM function_calls WHERE state = ? "
_KEPT_ENDED += "AND ended_at >= ? GROUP BY project, app"
_KEPT_WAITING = "SELECT project, app, COUNT(*) FROM function_calls WHERE state = 'waiting' "
_KEPT_WAITING += "GROUP BY project, app"
_OF_APP = "project = ? AND app = ?"
_BY_FUNCTION = f"SELECT function, state, COUNT(*) FROM function_calls WHERE {_OF_APP} AND "
_BY_FUNCTION += "(state = 'waiting' OR (state IN ('done', 'failed') AND ended_at >= ?)) "
_BY_FUNCTION += "GROUP BY function, state"


class AppCounts(NamedTuple):
    """The kept calls of an app that wait, and all calls that have ended."""

    waiting: int
    done: int
    failed: int


class CountRows:
    """Reads and writes the rows."""

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        self._read, self._write = read, write

    async def put(self, project: str, app: str, job: str, told: CountsAsk, now: datetime) -> None:
        """Store what a broker tells. Minutes replace those that were told before."""
        gauge = GaugeRow(
            project=project,
            app=app,
            job=job,
            document=encode(structs.replace(told, minutes=[])).decode(),
            told_at=now,
        )
        minutes = [
            MinuteRow(
                project=project,
                app=app,
                function=each.function,
                minute=each.minute,
                job=job,
                done=each.done,
                failed=each.failed,
                document=encode(structs.replace(each, recent=[])).decode(),
                calls=encode(each.recent).decode(),
            )
            for each in told.minutes
        ]

        def put(session: DatabaseSession) -> None:
            session.run(_GAUGES.upsert, _GAUGES.values(gauge))
            for each in minutes:
                session.run(_MINUTES.upsert, _MINUTES.values(each))

        await self._write(put)

    async def list_gauges(
        self, projects: ProjectFilter, now: datetime
    ) -> Mapping[AppKey, Sequence[tuple[str, CountsAsk | None]]]:
        """Return of each app the jobs that told something in the last hour, and what those tell
        that still run."""
        sql = f"{_GAUGES.select} WHERE told_at >= ? ORDER BY job"
        since = to_micros(now - _GAUGES_KEPT)
        rows = await self._read(lambda session: session.run(sql, (since,)).fetchall())
        found: defaultdict[AppKey, list[tuple[str, CountsAsk | None]]] = defaultdict(list)
        for each in map(_GAUGES.make, rows):
            if is_visible(each.project, projects):
                runs = each.told_at >= now - FRESH
                told = decode(each.document, type=CountsAsk) if runs else None
                found[each.project, each.app].append((each.job, told))
        return found

    async def count(self, projects: ProjectFilter, since: datetime) -> Mapping[AppKey, AppCounts]:
        """Return the counts of each app: of calls that have ended since a time."""
        at = to_micros(since)

        def read(session: DatabaseSession) -> list[tuple[AppKey, AppCounts]]:
            found = []
            for row in session.run(_KEPT_WAITING, ()).fetchall():
                found.append(((str(row[0]), str(row[1])), AppCounts(int(row[2]), 0, 0)))
            for state in (DONE, FAILED):
                for row in session.run(_KEPT_ENDED, (state, at)).fetchall():
                    counted = (0, int(row[2]), 0) if state == DONE else (0, 0, int(row[2]))
                    found.append(((str(row[0]), str(row[1])), AppCounts(*counted)))
            for row in session.run(_ENDED, (int(since.timestamp()),)).fetchall():
                counts = AppCounts(0, int(row[2]), int(row[3]))
                found.append(((str(row[0]), str(row[1])), counts))
            return found

        return _add_up(each for each in await self._read(read) if is_visible(each[0][0], projects))

    async def count_kept(
        self, project: str, app: str, since: datetime
    ) -> Mapping[AppKey, AppCounts]:
        """Return the counts of the kept calls of each function, under the app and its name."""
        values = (project, app, to_micros(since))
        rows = await self._read(lambda session: session.run(_BY_FUNCTION, values).fetchall())
        at = {"waiting": 0, DONE: 1, FAILED: 2}
        made = []
        for function, state, count in rows:
            counts = [0, 0, 0]
            counts[at[str(state)]] = int(count)
            made.append(((app, str(function)), AppCounts(*counts)))
        return _add_up(made)

    async def list_minutes(
        self, project: str, app: str, since: datetime
    ) -> Sequence[tuple[str, FunctionMinute]]:
        """Return the minutes of an app's functions since a time, with the job of each. Only the
        newest have their calls."""
        sql = f"{_MINUTES.select} WHERE {_OF_APP} AND minute >= ? ORDER BY minute DESC"
        values = (project, app, int(since.timestamp()))
        rows = await self._read(lambda session: session.run(sql, values).fetchall())
        found = []
        for number, each in enumerate(map(_MINUTES.make, rows)):
            minute = decode(each.document, type=FunctionMinute)
            if number < _MOST_RECENT:
                calls = decode(each.calls, type=list[DirectCall])
                minute = structs.replace(minute, recent=calls)
            found.append((each.job, minute))
        return found

    async def sweep(self, now: datetime) -> None:
        """Delete what is old."""

        def sweep(session: DatabaseSession) -> None:
            before = int((now - KEPT).timestamp())
            session.run("DELETE FROM function_minutes WHERE minute < ?", (before,))
            told = to_micros(now - _GAUGES_KEPT)
            session.run("DELETE FROM function_gauges WHERE told_at < ?", (told,))

        await self._write(sweep)

    async def delete(self, project: str, app: str) -> None:
        """Delete what is known of an app."""

        def delete(session: DatabaseSession) -> None:
            for table in ("function_gauges", "function_minutes"):
                session.run(f"DELETE FROM {table} WHERE {_OF_APP}", (project, app))

        await self._write(delete)


def _add_up(found: Iterable[tuple[AppKey, AppCounts]]) -> Mapping[AppKey, AppCounts]:
    sums: dict[AppKey, AppCounts] = {}
    for key, counts in found:
        before = sums.get(key, AppCounts(0, 0, 0))
        sums[key] = AppCounts(*(a + b for a, b in zip(before, counts, strict=True)))
    return sums
