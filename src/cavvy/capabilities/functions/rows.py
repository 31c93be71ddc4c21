"""The rows of deployed apps."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from cavvy.capabilities.functions.wire import NextJobAsk
from cavvy.domain.values import Struct
from cavvy.store.base import ProjectFilter, RowNotFound, is_visible
from cavvy.store.documents import to_micros, to_time
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.rows import RowCodec


class StoredPart(Struct, frozen=True, kw_only=True):
    """The job of some functions of an app; `document` is a `wire.AppPartAsk` as JSON. `account` is
    that of who deployed it, "" for the owner of the server, and None in rows of older servers.
    """

    project: str
    app: str
    part: int
    revision: str
    snapshot: str
    document: str
    job: str
    user: str
    updated_at: datetime
    account: str | None = None


_PARTS = RowCodec(
    StoredPart, "function_jobs", columns={"user": "user_name"}, key=("project", "app", "part")
)
_OF_APP = "project = ? AND app = ?"
_CLAIM = f"UPDATE function_jobs SET job = ? WHERE {_OF_APP} AND part = ? AND revision = ? "
_CLAIM += "AND (job = ? OR job = '')"
_JOB = f"SELECT job, revision FROM function_jobs WHERE {_OF_APP} AND part = ?"


class FunctionRows:
    """Reads and writes the rows."""

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        self._read, self._write = read, write

    async def parts(self, project: str, app: str | None = None) -> Sequence[StoredPart]:
        """Return the rows of an app or, without one, of all apps of a project."""
        where, values = (_OF_APP, (project, app)) if app else ("project = ?", (project,))
        sql = f"{_PARTS.select} WHERE {where} ORDER BY app, part"
        rows = await self._read(lambda session: session.run(sql, values).fetchall())
        return [_PARTS.make(row) for row in rows]

    async def list_all(self, projects: ProjectFilter) -> Sequence[StoredPart]:
        """Return the rows of all apps of these projects."""
        rows = await self._read(lambda session: session.run(_PARTS.select, ()).fetchall())
        found = [_PARTS.make(row) for row in rows if is_visible(str(row[0]), projects)]
        return sorted(found, key=lambda each: (each.project, each.app, each.part))

    async def revisions(self, project: str) -> dict[str, str]:
        """Return the revision of each app of a project."""
        sql = "SELECT DISTINCT app, revision FROM function_jobs WHERE project = ?"
        rows = await self._read(lambda session: session.run(sql, (project,)).fetchall())
        return {str(row[0]): str(row[1]) for row in rows}

    async def put(self, project: str, app: str, parts: Sequence[StoredPart]) -> list[str]:
        """Replace the rows of an app, and return the jobs of those before."""

        def put(session: DatabaseSession) -> list[str]:
            jobs = session.run(f"SELECT job FROM function_jobs WHERE {_OF_APP}", (project, app))
            replaced = [str(job) for (job,) in jobs.fetchall() if job]
            session.run(f"DELETE FROM function_jobs WHERE {_OF_APP}", (project, app))
            for each in parts:
                session.run(_PARTS.insert, _PARTS.values(each))
            return replaced

        return await self._write(put)

    async def delete(self, project: str, app: str) -> None:
        """Delete an app. Raises RowNotFound."""
        missing = RowNotFound(f"project {project} has no app {app}")
        sql = f"DELETE FROM function_jobs WHERE {_OF_APP}"
        await self._write(lambda session: session.change_or(missing, sql, (project, app)))

    async def claim(self, project: str, app: str, ask: NextJobAsk, job: str) -> str:
        """Set the ID of the next job unless another caller did so, and return the ID that is set,
        or "" if the app has another revision. Raises RowNotFound.
        """

        def claim(session: DatabaseSession) -> str:
            session.run(_CLAIM, (job, project, app, ask.part, ask.revision, ask.ended))
            row = session.run(_JOB, (project, app, ask.part)).fetchone()
            if row is None:
                raise RowNotFound(f"project {project} has no app {app}")
            return str(row[0]) if row[1] == ask.revision else ""

        return await self._write(claim)


class FunctionCallRow(Struct, frozen=True, kw_only=True):
    """A call that the control plane keeps. `head` says how its arguments (`body`) and its result
    are written, and `answer` is a `wire.CallEnd` as JSON, or "". `account` is None for the owner of
    the server. Calls are sent by their `precedence`, the lowest first, and then by their `turn`,
    which `CallRows.add` sets so that each `caller` has one of them in a round.
    """

    id: str
    project: str
    app: str
    function: str
    once_key: str | None
    state: str
    head: str
    body: bytes
    answer: str
    result: bytes
    account: str | None
    user: str
    consent: int
    created_at: datetime
    ended_at: datetime | None
    precedence: int = 0
    turn: int = 0
    caller: str = ""
    limit_keys: str = ""
    why: str = ""
    job: str = ""
    share_us: int = 0


WAITING, DONE, FAILED, CANCELLED = "waiting", "done", "failed", "cancelled"
_CALLS = RowCodec(FunctionCallRow, "function_calls", columns={"user": "user_name"}, key=("id",))
_PUT_CALL = f"{_CALLS.insert} ON CONFLICT DO NOTHING"
_BY_KEY = f"SELECT id FROM function_calls WHERE {_OF_APP} AND function = ? AND once_key = ?"
_WAITING = f"FROM function_calls WHERE {_OF_APP} AND state = 'waiting'"
_LEVEL = f"{_WAITING} AND function = ? AND precedence = ?"
_NEXT = f"SELECT id, LENGTH(body), limit_keys, precedence, turn {_WAITING} AND function = ?"
_END_CALL = (
    "UPDATE function_calls SET state = ?, answer = ?, result = ?, body = ?, ended_at = ?, job = ?, "
    "share_us = ?, why = '' WHERE id = ? AND state = 'waiting'"
)
_BRIEF = "SELECT id, function, state, answer, user_name, created_at, ended_at, why, job, share_us "
_BRIEF += "FROM function_calls"
_TELL = "UPDATE function_calls SET why = ? WHERE id = ? AND state = 'waiting'"
_SHARES = f"SELECT job, COUNT(*), SUM(share_us) FROM function_calls WHERE {_OF_APP} AND job <> '' "
_SHARES += "GROUP BY job ORDER BY job DESC LIMIT ?"
_AT_ONCE = 500  # values of a statement
_MOST_FUNCTIONS = 10_000  # that have calls which wait


class CallBrief(NamedTuple):
    """A call without its arguments and its result."""

    id: str
    function: str
    state: str
    answer: str
    user: str
    created_at: datetime
    ended_at: datetime | None
    why: str
    job: str
    share_us: int


class CallerOfCall(NamedTuple):
    """Who made a call, and when: the account, None for the owner of the server, the user, and
    whether the call agrees to what a job costs."""

    id: str
    account: str | None
    user: str
    consent: bool
    created_at: datetime


class EndedCall(NamedTuple):
    """How a call has ended: its state, a `wire.CallEnd` as JSON, the result, the job in which it
    ran, and its share of the job's time in microseconds."""

    id: str
    state: str
    answer: str
    result: bytes = b""
    job: str = ""
    share_us: int = 0


class CallPlace(NamedTuple):
    """Where a call is in the order of its function."""

    precedence: int
    turn: int
    id: str


class WaitingCall(NamedTuple):
    """A call that waits: the bytes of its arguments, and the keys of its limits."""

    function: str
    place: CallPlace
    size: int
    limit_keys: str

    @property
    def id(self) -> str:
        return self.place.id


class CallRows:
    """Reads and writes calls."""

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        self._read, self._write = read, write

    async def add(self, calls: Sequence[FunctionCallRow]) -> list[tuple[str, bool]]:
        """Store calls, and return the ID of each, and whether it is new: a call with the key of
        another one is that one.
        """

        def add(session: DatabaseSession) -> list[tuple[str, bool]]:
            found = []
            for each in _take_turns(session, calls):
                made = session.run(_PUT_CALL, _CALLS.values(each)).rowcount > 0
                call_id = each.id
                if not made:
                    key = (each.project, each.app, each.function, each.once_key)
                    call_id = str(session.run(_BY_KEY, key).fetchone()[0])  # type: ignore[index]
                found.append((call_id, made))
            return found

        return await self._write(add)

    async def list_apps(self) -> Sequence[tuple[str, str]]:
        """Return the project and the name of each app with calls that wait."""
        sql = "SELECT DISTINCT project, app FROM function_calls WHERE state = 'waiting'"
        rows = await self._read(lambda session: session.run(sql).fetchall())
        return [(str(row[0]), str(row[1])) for row in rows]

    async def list_waiting(
        self, project: str, app: str, most: int, functions: Iterable[str] = ()
    ) -> Sequence[tuple[str, str]]:
        """Return the ID and the function of calls of an app that wait, the oldest of each function
        first: of these functions or, without them, of all."""
        found: list[tuple[str, str]] = []
        for function in functions or await self.list_functions(project, app):
            sql = f"SELECT id {_WAITING} AND function = ? ORDER BY id LIMIT ?"
            rows = await self._read(partial(_fetch, sql, (project, app, function, most)))
            found += [(str(row[0]), function) for row in rows]
        return found

    async def list_functions(self, project: str, app: str) -> list[str]:
        """Return the functions of an app that have calls which wait. Each is found by the index,
        however many calls it has."""
        sql = f"SELECT MIN(function) {_WAITING} AND function > ?"
        found: list[str] = []
        while len(found) < _MOST_FUNCTIONS:
            last = found[-1] if found else ""
            ((function,),) = await self._read(partial(_fetch, sql, (project, app, last)))
            if function is None:
                break
            found.append(str(function))
        return found

    async def list_next(
        self, project: str, app: str, function: str, after: CallPlace | None, most: int
    ) -> Sequence[WaitingCall]:
        """Return the calls of a function that wait, in the order in which they are sent, behind
        this place."""
        behind = "" if after is None else " AND (precedence, turn, id) > (?, ?, ?)"
        sql = f"{_NEXT}{behind} ORDER BY precedence, turn, id LIMIT ?"
        values = (project, app, function, *(after or ()), most)
        rows = await self._read(partial(_fetch, sql, values))
        return [
            WaitingCall(
                function=function,
                place=CallPlace(int(row[3]), int(row[4]), str(row[0])),
                size=int(row[1]),
                limit_keys=str(row[2]),
            )
            for row in rows
        ]

    async def list_callers(
        self, project: str, app: str, ids: Sequence[str]
    ) -> Sequence[CallerOfCall]:
        """Return who made these calls of an app, in the order of the calls."""
        found: list[CallerOfCall] = []
        for begin in range(0, len(ids), _AT_ONCE):
            some = ids[begin : begin + _AT_ONCE]
            columns = "id, account, user_name, consent, created_at"
            sql = f"SELECT {columns} FROM function_calls WHERE {_OF_APP} "
            sql += f"AND id IN ({', '.join('?' * len(some))}) ORDER BY id"
            rows = await self._read(partial(_fetch, sql, (project, app, *some)))
            found += [
                CallerOfCall(str(row[0]), row[1], str(row[2]), bool(row[3]), to_time(row[4]))
                for row in rows
            ]
        return found

    async def count(self, project: str, app: str) -> int:
        """Return how many calls of an app wait."""
        sql = f"SELECT COUNT(*) {_WAITING}"
        rows = await self._read(lambda session: session.run(sql, (project, app)).fetchall())
        return int(rows[0][0])

    async def count_bytes(self, project: str) -> int:
        """Return how many bytes the arguments and results of a project's calls have."""
        sql = "SELECT COALESCE(SUM(LENGTH(body) + LENGTH(result)), 0) FROM function_calls "
        rows = await self._read(partial(_fetch, f"{sql}WHERE project = ?", (project,)))
        return int(rows[0][0])

    async def get(self, project: str, app: str, ids: Sequence[str]) -> list[FunctionCallRow]:
        """Return the calls of an app with these IDs, as far as they exist."""
        found: list[FunctionCallRow] = []
        for begin in range(0, len(ids), _AT_ONCE):
            some = ids[begin : begin + _AT_ONCE]
            sql = f"{_CALLS.select} WHERE {_OF_APP} AND id IN ({', '.join('?' * len(some))})"
            values = (project, app, *some)
            rows = await self._read(partial(_fetch, sql, values))
            found += [_CALLS.make(row) for row in rows]
        return found

    async def list_states(
        self, project: str, app: str, ids: Sequence[str]
    ) -> Sequence[tuple[str, str, int]]:
        """Return the ID and the state of the calls of an app, as far as they exist, and how many
        bytes their results have."""
        found: list[tuple[str, str, int]] = []
        for begin in range(0, len(ids), _AT_ONCE):
            some = ids[begin : begin + _AT_ONCE]
            sql = f"SELECT id, state, LENGTH(result) FROM function_calls WHERE {_OF_APP} "
            sql += f"AND id IN ({', '.join('?' * len(some))})"
            rows = await self._read(partial(_fetch, sql, (project, app, *some)))
            found += [(str(row[0]), str(row[1]), int(row[2])) for row in rows]
        return found

    async def list_brief(self, project: str, app: str, most: int) -> Sequence[CallBrief]:
        """Return the newest calls of an app."""
        sql = f"{_BRIEF} WHERE {_OF_APP} ORDER BY id DESC LIMIT ?"
        rows = await self._read(partial(_fetch, sql, (project, app, most)))
        return [
            CallBrief(
                id=str(row[0]),
                function=str(row[1]),
                state=str(row[2]),
                answer=str(row[3]),
                user=str(row[4]),
                created_at=to_time(row[5]),
                ended_at=None if row[6] is None else to_time(row[6]),
                why=str(row[7]),
                job=str(row[8]),
                share_us=int(row[9]),
            )
            for row in rows
        ]

    async def tell(self, whys: Mapping[str, str]) -> None:
        """Store what calls wait for in their job."""

        def tell(session: DatabaseSession) -> None:
            for call, why in whys.items():
                session.run(_TELL, (why, call))

        await self._write(tell)

    async def list_whys(
        self, project: str, app: str, ids: Sequence[str]
    ) -> Sequence[tuple[str, str, str]]:
        """Return the ID and the function of a few calls, and what they wait for in their job."""
        if not ids:
            return []
        sql = f"SELECT id, function, why FROM function_calls WHERE {_OF_APP} "
        sql += f"AND id IN ({', '.join('?' * len(ids))}) ORDER BY id"
        rows = await self._read(partial(_fetch, sql, (project, app, *ids)))
        return [(str(row[0]), str(row[1]), str(row[2])) for row in rows]

    async def sum_shares(self, project: str, app: str, most: int) -> Sequence[tuple[str, int, int]]:
        """Return the newest jobs of an app's kept calls, each with how many these are and their
        shares of its time in microseconds."""
        rows = await self._read(partial(_fetch, _SHARES, (project, app, most)))
        return [(str(row[0]), int(row[1]), int(row[2])) for row in rows]

    async def end(self, ended: Sequence[EndedCall], now: datetime) -> None:
        """Store how calls have ended. The first result of a call counts."""
        at = to_micros(now)

        def end(session: DatabaseSession) -> None:
            for each in ended:
                told = (each.state, each.answer, each.result, b"", at)
                session.run(_END_CALL, (*told, each.job, each.share_us, each.id))

        await self._write(end)

    async def expire(self, before: datetime) -> None:
        """Delete the calls that ended before this time."""
        sql = "DELETE FROM function_calls WHERE state = ? AND ended_at < ?"

        def expire(session: DatabaseSession) -> None:
            for state in (DONE, FAILED, CANCELLED):
                session.run(sql, (state, to_micros(before)))

        await self._write(expire)

    async def delete(self, project: str, app: str) -> None:
        """Delete all calls of an app."""
        sql = f"DELETE FROM function_calls WHERE {_OF_APP}"
        await self._write(lambda session: session.run(sql, (project, app)))


def _take_turns(
    session: DatabaseSession, calls: Sequence[FunctionCallRow]
) -> Iterator[FunctionCallRow]:
    """Yield the calls with their turns: that behind the caller's newest one that waits, but no
    earlier than the first of all that wait."""
    known: dict[tuple[str, str, str, int, str], int] = {}
    for each in calls:
        level = (each.project, each.app, each.function, each.precedence)
        mine = (*level, each.caller)
        if mine not in known:
            own = session.run(f"SELECT MAX(turn) {_LEVEL} AND caller = ?", mine).fetchone()
            first = session.run(f"SELECT MIN(turn) {_LEVEL}", level).fetchone()
            assert own is not None
            assert first is not None
            known[mine] = max(-1 if own[0] is None else int(own[0]), int(first[0] or 0) - 1)
        known[mine] += 1
        yield replace(each, turn=known[mine])


def _fetch(sql: str, values: Sequence[object], session: DatabaseSession) -> Sequence[Any]:
    return session.run(sql, values).fetchall()
