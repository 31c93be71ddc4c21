"""The rows of what brokers count."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from time import monotonic
from typing import NamedTuple

from msgspec import structs
from msgspec.json import decode, encode

from cavvy.capabilities.functions.counts.wire import (
    BriefCall,
    CountsAsk,
    DirectCall,
    FunctionMinute,
)
from cavvy.capabilities.functions.rows import DONE, FAILED
from cavvy.domain.values import Struct
from cavvy.store.base import ProjectFilter, is_visible
from cavvy.store.documents import to_micros
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.rows import RowCodec

FRESH = timedelta(seconds=150)  # after which a job that tells nothing is gone
_GAUGES_KEPT = timedelta(hours=1)  # for which an app that a program runs is shown after its end
MINUTE, TEN_MINUTES, HOUR = 60, 600, 3600  # seconds of a row
_KEPT = {MINUTE: timedelta(days=1), TEN_MINUTES: timedelta(days=2), HOUR: timedelta(days=31)}
_MOST_RECENT = 60  # calls that are read one by one
_COUNTED_S = 15.0  # for which counts of calls that have ended are kept
AppKey = tuple[str, str]  # the project and the name


class GaugeRow(Struct, frozen=True, kw_only=True):
    """What runs in a job; `document` is a `CountsAsk` without minutes as JSON."""

    project: str
    app: str
    job: str
    document: str
    told_at: datetime


class CallTimes(NamedTuple):
    """How many calls ran and took so long: a bucket and its count, the next bucket, and so on."""

    ran: Sequence[int] = ()
    took: Sequence[int] = ()


class CountRow(Struct, frozen=True, kw_only=True):
    """The calls of a function in a job that have ended in `step` seconds since `begin_s`."""

    project: str
    app: str
    function: str
    step: int
    begin_s: int
    job: str
    done: int
    failed: int
    times: str
    calls: str


class StepCounts(NamedTuple):
    """A row as it is shown. `read_times` reads its times."""

    function: str
    begin_s: int
    done: int
    failed: int
    times: str


_GAUGES = RowCodec(GaugeRow, "function_gauges", key=("project", "app", "job"))
_KEY = ("project", "app", "function", "step", "begin_s", "job")
_COUNTS = RowCodec(CountRow, "function_counts", key=_KEY)
_ONE = f"{_COUNTS.select} WHERE {' AND '.join(f'{each} = ?' for each in _KEY)}"
_ENDED = "SELECT project, app, SUM(done), SUM(failed) FROM function_counts "
_ENDED += f"WHERE step = {MINUTE} AND begin_s >= ? GROUP BY project, app"
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
        self._kept: dict[object, tuple[float, Mapping[AppKey, AppCounts]]] = {}

    async def put(self, project: str, app: str, job: str, told: CountsAsk, now: datetime) -> None:
        """Store what a broker tells. Minutes replace those that were told before."""
        gauge = GaugeRow(
            project=project,
            app=app,
            job=job,
            document=encode(structs.replace(told, minutes=[])).decode(),
            told_at=now,
        )

        def put(session: DatabaseSession) -> None:
            session.run(_GAUGES.upsert, _GAUGES.values(gauge))
            for each in told.minutes:
                _put_minute(session, (project, app, each.function), job, each)

        await self._write(put)

    async def list_gauges(
        self, projects: ProjectFilter, now: datetime, app: str = ""
    ) -> Mapping[AppKey, Sequence[tuple[str, CountsAsk | None]]]:
        """Return of each app, or of those with this name, the jobs that told something in the last
        hour, and what those tell that still run."""
        sql = f"{_GAUGES.select} WHERE told_at >= ?{' AND app = ?' if app else ''} ORDER BY job"
        values = (to_micros(now - _GAUGES_KEPT), *([app] if app else []))
        rows = await self._read(lambda session: session.run(sql, values).fetchall())
        found: defaultdict[AppKey, list[tuple[str, CountsAsk | None]]] = defaultdict(list)
        for each in map(_GAUGES.make, rows):
            if is_visible(each.project, projects):
                runs = each.told_at >= now - FRESH
                told = decode(each.document, type=CountsAsk) if runs else None
                found[each.project, each.app].append((each.job, told))
        return found

    async def find_shared(self, jobs: Sequence[str]) -> Mapping[str, float]:
        """Return for how many seconds calls have run in these jobs, as far as they told it in the
        last hour."""
        found: dict[str, float] = {}
        if jobs:
            sql = f"{_GAUGES.select} WHERE job IN ({', '.join('?' * len(jobs))})"
            rows = await self._read(lambda session: session.run(sql, tuple(jobs)).fetchall())
            for each in map(_GAUGES.make, rows):
                found[each.job] = decode(each.document, type=CountsAsk).shared_s
        return found

    async def count(self, projects: ProjectFilter, since: datetime) -> Mapping[AppKey, AppCounts]:
        """Return the counts of each app: of the kept calls that wait, and of calls that have ended
        since a time, which may be some seconds old."""
        at = to_micros(since)

        def read_ended(session: DatabaseSession) -> list[tuple[AppKey, AppCounts]]:
            found = []
            for state in (DONE, FAILED):
                for row in session.run(_KEPT_ENDED, (state, at)).fetchall():
                    counted = (0, int(row[2]), 0) if state == DONE else (0, 0, int(row[2]))
                    found.append(((str(row[0]), str(row[1])), AppCounts(*counted)))
            for row in session.run(_ENDED, (int(since.timestamp()),)).fetchall():
                counts = AppCounts(0, int(row[2]), int(row[3]))
                found.append(((str(row[0]), str(row[1])), counts))
            return found

        ended = await self._recall("all", read_ended)
        waiting = await self._read(lambda session: session.run(_KEPT_WAITING, ()).fetchall())
        rows = [((str(row[0]), str(row[1])), AppCounts(int(row[2]), 0, 0)) for row in waiting]
        found = [*ended.items(), *rows]
        return _add_up(each for each in found if is_visible(each[0][0], projects))

    async def count_kept(
        self, project: str, app: str, hours: float, now: datetime
    ) -> Mapping[AppKey, AppCounts]:
        """Return the counts of the kept calls of each function, under the app and its name. They
        may be some seconds old."""
        values = (project, app, to_micros(now - timedelta(hours=hours)))
        at = {"waiting": 0, DONE: 1, FAILED: 2}

        def read(session: DatabaseSession) -> list[tuple[AppKey, AppCounts]]:
            made = []
            for function, state, count in session.run(_BY_FUNCTION, values).fetchall():
                counts = [0, 0, 0]
                counts[at[str(state)]] = int(count)
                made.append(((app, str(function)), AppCounts(*counts)))
            return made

        return await self._recall((project, app, hours), read)

    async def list_steps(
        self, project: str, app: str, step: int, since: datetime
    ) -> Sequence[StepCounts]:
        """Return the rows of this length of an app's functions since a time."""
        sql = f"SELECT function, begin_s, done, failed, times FROM function_counts WHERE {_OF_APP} "
        values = (project, app, step, int(since.timestamp()))
        rows = await self._read(
            lambda session: session.run(f"{sql} AND step = ? AND begin_s >= ?", values).fetchall()
        )
        return [
            StepCounts(str(row[0]), int(row[1]), int(row[2]), int(row[3]), str(row[4]))
            for row in rows
        ]

    async def list_recent(
        self, project: str, app: str, *, traces: bool
    ) -> Sequence[tuple[str, str, BriefCall]]:
        """Return the newest calls of an app that were told one by one, with the function and the
        job of each."""
        sql = (
            f"SELECT function, job, calls FROM function_counts WHERE {_OF_APP} AND step = {MINUTE} "
        )
        values = (project, app, _MOST_RECENT // 2)
        rows = await self._read(
            lambda session: session.run(f"{sql} ORDER BY begin_s DESC LIMIT ?", values).fetchall()
        )
        found: list[tuple[str, str, BriefCall]] = []
        for row in rows:
            if len(found) >= _MOST_RECENT:
                break
            listed: Sequence[BriefCall] = (
                decode(row[2], type=list[DirectCall])
                if traces
                else decode(row[2], type=list[BriefCall])
            )
            found += [(str(row[0]), str(row[1]), each) for each in listed]
        return found

    async def _recall(
        self,
        key: object,
        read: Callable[[DatabaseSession], list[tuple[AppKey, AppCounts]]],
    ) -> Mapping[AppKey, AppCounts]:
        """Return counts that were read in the last seconds, or read them."""
        now = monotonic()
        known = self._kept.get(key)
        if known is not None and now - known[0] < _COUNTED_S:
            return known[1]
        self._kept = {name: each for name, each in self._kept.items() if now - each[0] < _COUNTED_S}
        found = _add_up(await self._read(read))
        self._kept[key] = now, found
        return found

    async def sweep(self, now: datetime) -> None:
        """Delete what is old."""

        def sweep(session: DatabaseSession) -> None:
            for step, length in _KEPT.items():
                before = int((now - length).timestamp())
                sql = "DELETE FROM function_counts WHERE step = ? AND begin_s < ?"
                session.run(sql, (step, before))
            told = to_micros(now - _GAUGES_KEPT)
            session.run("DELETE FROM function_gauges WHERE told_at < ?", (told,))

        await self._write(sweep)

    async def delete(self, project: str, app: str) -> None:
        """Delete what is known of an app."""

        def delete(session: DatabaseSession) -> None:
            for table in ("function_gauges", "function_counts"):
                session.run(f"DELETE FROM {table} WHERE {_OF_APP}", (project, app))

        await self._write(delete)


def _add_up(found: Iterable[tuple[AppKey, AppCounts]]) -> Mapping[AppKey, AppCounts]:
    sums: dict[AppKey, AppCounts] = {}
    for key, counts in found:
        before = sums.get(key, AppCounts(0, 0, 0))
        sums[key] = AppCounts(*(a + b for a, b in zip(before, counts, strict=True)))
    return sums


def _put_minute(
    session: DatabaseSession, of: tuple[str, str, str], job: str, told: FunctionMinute
) -> None:
    """Store a minute, and add what has changed of it to the rows of longer times."""
    new = CallTimes(_flatten(told.ran), _flatten(told.took))
    row = session.run(_ONE, (*of, MINUTE, told.minute, job)).fetchone()
    old = _COUNTS.make(row) if row is not None else None
    before = read_times(old.times) if old else CallTimes()
    done, failed = (old.done, old.failed) if old else (0, 0)
    calls = encode(told.recent).decode()
    _put_row(session, of, (MINUTE, told.minute, job), (told.done, told.failed), new, calls)
    for step in (TEN_MINUTES, HOUR):
        key = (step, told.minute // step * step, job)
        row = session.run(_ONE, (*of, *key)).fetchone()
        sums = _COUNTS.make(row) if row is not None else None
        counted = (
            (sums.done if sums else 0) + told.done - done,
            (sums.failed if sums else 0) + told.failed - failed,
        )
        whole = read_times(sums.times) if sums else CallTimes()
        times = CallTimes(*(_move(*each) for each in zip(whole, before, new, strict=True)))
        _put_row(session, of, key, counted, times, "[]")


def _put_row(
    session: DatabaseSession,
    of: tuple[str, str, str],
    key: tuple[int, int, str],
    counted: tuple[int, int],
    times: CallTimes,
    calls: str,
) -> None:
    row = CountRow(
        project=of[0],
        app=of[1],
        function=of[2],
        step=key[0],
        begin_s=key[1],
        job=key[2],
        done=counted[0],
        failed=counted[1],
        times=encode(times).decode(),
        calls=calls,
    )
    session.run(_COUNTS.upsert, _COUNTS.values(row))


def _move(sums: Sequence[int], before: Sequence[int], now: Sequence[int]) -> Sequence[int]:
    """Return the counts of buckets in which a part has become another."""
    found = dict(zip(sums[::2], sums[1::2], strict=True))
    for sign, part in ((-1, before), (1, now)):
        for bucket, count in zip(part[::2], part[1::2], strict=True):
            found[bucket] = found.get(bucket, 0) + sign * count
    return [each for bucket, count in found.items() if count > 0 for each in (bucket, count)]


def _flatten(buckets: Mapping[str, int]) -> Sequence[int]:
    return [each for bucket, count in buckets.items() for each in (int(bucket), count)]


def read_times(text: str) -> CallTimes:
    """Return the times that a row has as JSON."""
    return CallTimes(*decode(text))
