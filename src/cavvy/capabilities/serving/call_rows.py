"""The rows of the calls in the queues of services.

Each call is stored in one row from its submission until it ends. The result is written only once: a
write that ends a call succeeds only if the call's row still has the version that was read.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

import msgspec

from cavvy.capabilities.serving.queued_calls import BUCKET, IDS_KEPT, CallState, QueuedCall
from cavvy.domain.values import replace
from cavvy.store.base import RowNotFound, StaleVersion
from cavvy.store.documents import encode, to_micros
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.rows import insert_into, update_of
from cavvy.store.sql import Store

_decode = msgspec.json.Decoder(QueuedCall).decode
_KEY = ("project", "service", "call_id")
_OWN = "project = ? AND service = ?"
_CHANGED = ("state", "due_at", "expires_at", "document", "version")
_INSERT = insert_into(
    "queued_calls", (*_CHANGED, "request", "source", *_KEY), "ON CONFLICT DO NOTHING"
)
_UPDATE = update_of("queued_calls", (*_CHANGED, "answer"), (*_KEY, "version"))
_GET = f"SELECT document, state FROM queued_calls WHERE {_OWN} AND call_id = ?"
_BODIES = f"SELECT request, answer FROM queued_calls WHERE {_OWN} AND call_id = ?"
_DUE = (
    f"SELECT document FROM queued_calls WHERE {_OWN} AND state = 'waiting' "
    "ORDER BY due_at, call_id LIMIT ?"
)
_WAITING = (
    "SELECT COUNT(*) FROM (SELECT 1 AS one FROM queued_calls "
    f"WHERE {_OWN} AND state = 'waiting' LIMIT ?) AS first"
)
_FORGET = (
    "UPDATE queued_calls SET state = 'forgotten', request = NULL, answer = NULL, expires_at = "
    f"CASE WHEN source = '{BUCKET}' THEN NULL ELSE CAST(? AS BIGINT) END, version = version + 1 "
    "WHERE source <> '' AND state <> 'forgotten' AND "
)


def calls_of(store: Store) -> "SqlQueuedCalls":
    """Return the calls of a store."""
    return SqlQueuedCalls(*store.database)


class SqlQueuedCalls:
    """The rows of queued calls."""

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        self._read = read
        self._write = write

    async def add(
        self, calls: Sequence[tuple[QueuedCall, bytes]], once: QueuedCall | None = None
    ) -> Sequence[str]:
        """Store each call whose ID is new in its service, with the body of its request. Return the
        IDs of the stored calls. If `once` is not None, the method stores this row together with the
        calls. If the row `once` exists already, the method stores nothing at all.
        """

        def add(session: DatabaseSession) -> Sequence[str]:
            if once is not None and not _add(session, [(once, b"")]):
                return []
            return _add(session, calls)

        return await self._write(add)

    async def get(self, project: str, service: str, call_id: str) -> QueuedCall:
        """Return a call. If only the call's ID is stored, the call's state is FORGOTTEN. Raises
        RowNotFound."""
        values = (project, service, call_id)
        row = await self._read(lambda session: session.run(_GET, values).fetchone())
        if row is None:
            raise RowNotFound(f"the queue of service {service} has no call {call_id}")
        return replace(_decode(row[0]), state=CallState(row[1]))

    async def bodies(self, call: QueuedCall) -> tuple[bytes, bytes]:
        """Return the bodies of a call's request and of its result."""
        values = (call.project, call.service, call.id)
        row = await self._read(lambda session: session.run(_BODIES, values).fetchone())
        return (b"", b"") if row is None else (bytes(row[0] or b""), bytes(row[1] or b""))

    async def due(
        self, project: str, service: str, limit: int, skip: Collection[str] = ()
    ) -> Sequence[QueuedCall]:
        """Return at most `limit` calls without a result, earliest due time first, except the calls
        in `skip`."""
        values = (project, service, limit + len(skip))
        rows = await self._read(lambda session: session.run(_DUE, values).fetchall())
        calls = [_decode(row[0]) for row in rows]
        return [each for each in calls if each.id not in skip][:limit]

    async def put(self, call: QueuedCall, answer: bytes = b"") -> QueuedCall:
        """Replace a call and its result. Raises StaleVersion."""
        stored = replace(call, version=call.version + 1)
        values = (*_columns(stored), answer or None, *_key(call), call.version)
        stale = StaleVersion(f"call {call.id} is not at version {call.version}")
        await self._write(lambda session: session.change_or(stale, _UPDATE, values))
        return stored

    async def list(
        self,
        project: str,
        service: str,
        state: CallState | None = None,
        *,
        after: str = "",
        limit: int = 100,
    ) -> Sequence[QueuedCall]:
        """Return the calls, sorted by ID; if `state` is given, only the calls in this state. IDs
        that the server creates sort in the order of submission.
        """
        which = "state = ?" if state else "state <> ?"
        sql = f"SELECT document FROM queued_calls WHERE {_OWN} AND {which} AND call_id > ? "
        sql += "ORDER BY call_id LIMIT ?"
        values = (project, service, state or CallState.FORGOTTEN, after, limit)
        rows = await self._read(lambda session: session.run(sql, values).fetchall())
        return [_decode(row[0]) for row in rows]

    async def count(self, project: str, service: str) -> Mapping[CallState, int]:
        """Return the number of calls in each state."""
        sql = f"SELECT state, COUNT(*) FROM queued_calls WHERE {_OWN} GROUP BY state"
        values = (project, service)
        rows = await self._read(lambda session: session.run(sql, values).fetchall())
        return {CallState(state): number for state, number in rows}

    async def has_waiting(self, project: str, service: str, count: int) -> bool:
        """Return whether at least `count` calls wait."""
        values = (project, service, count)
        row = await self._read(lambda session: session.run(_WAITING, values).fetchone())
        return row is not None and int(row[0]) >= count

    async def purge(self, project: str, service: str, state: CallState, now: datetime) -> int:
        """Delete the calls in one state, and return their number. The rows of triggers' calls are
        kept in the state `forgotten`, so that their IDs stay known.
        """
        which, values = f"{_OWN} AND state = ?", (project, service, state)
        return await self._write(lambda session: _remove(session, which, values, now))

    async def expire(self, now: datetime) -> None:
        """Delete the results and the IDs whose time has expired."""
        values = (to_micros(now),)
        ids = "DELETE FROM queued_calls WHERE expires_at <= ? AND state = 'forgotten'"

        def remove(session: DatabaseSession) -> None:
            _remove(session, "expires_at <= ?", values, now)
            session.run(ids, values)

        await self._write(remove)


def _add(session: DatabaseSession, calls: Sequence[tuple[QueuedCall, bytes]]) -> Sequence[str]:
    added = []
    for call, body in calls:
        stored = replace(call, version=1)
        values = (*_columns(stored), body or None, stored.source, *_key(stored))
        if session.run(_INSERT, values).rowcount:
            added.append(stored.id)
    return added


def _remove(session: DatabaseSession, which: str, values: Sequence[object], now: datetime) -> int:
    forgotten = session.run(_FORGET + which, (to_micros(now + IDS_KEPT), *values)).rowcount
    sql = f"DELETE FROM queued_calls WHERE {which} AND state <> 'forgotten'"
    return forgotten + session.run(sql, values).rowcount


def _key(call: QueuedCall) -> tuple[str, str, str]:
    return (call.project, call.service, call.id)


def _columns(call: QueuedCall) -> tuple[object, ...]:
    """Return the values of the columns in `_CHANGED`."""
    expires = None if call.expires_at is None else to_micros(call.expires_at)
    return (str(call.state), to_micros(call.due_at), expires, encode(call), call.version)
