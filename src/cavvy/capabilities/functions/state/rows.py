"""The rows of dicts and queues. Each request is one transaction."""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from itertools import accumulate
from typing import NamedTuple, TypeVar

from msgspec.json import decode, encode

from cavvy.capabilities.functions.state.wire import (
    DictAnswer,
    DictAsk,
    DictEntry,
    Kind,
    QueueAnswer,
    QueueAsk,
    QueueItem,
    StateView,
)
from cavvy.store.base import RowNotFound
from cavvy.store.documents import to_micros, to_time
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.rows import insert_into

MOST_OBJECTS = 1000  # dicts and queues of a project
MOST_BYTES = 1 << 30  # of all of them
MOST_ITEMS = 5000  # of a partition
MOST_ANSWER = 1 << 20  # bytes of the values of an answer that has more than one
_OVERHEAD = 64  # bytes that each entry counts besides its key and value
_KEPT = timedelta(minutes=10)  # for which a request may be sent again
_BRIEF = timedelta(days=1)  # after which what a program that was killed has left is removed
BRIEF_NAME = "ephemeral-"  # with which the names of these begin
_AT_ONCE = 1000  # partitions that a sweep looks at

_OF = "project = ? AND name = ?"
_OBJECT = "SELECT entries, bytes, number FROM state_objects WHERE project = ? AND kind = ? "
_OBJECT += "AND name = ?"
_TOUCH = "UPDATE state_objects SET changed_at = ? WHERE project = ? AND kind = ? AND name = ?"
_SAVE = "UPDATE state_objects SET entries = ?, bytes = ?, number = ? "
_SAVE += "WHERE project = ? AND kind = ? AND name = ?"
_COLUMNS = ("project", "kind", "name", "entries", "bytes", "number")
_NEW = insert_into(
    "state_objects",
    (*_COLUMNS, "user_name", "created_at", "changed_at"),
    "ON CONFLICT DO NOTHING",
)
_ENTRY = f"SELECT number, value FROM dict_entries WHERE {_OF} AND entry_key = ?"
_HAS = f"SELECT number, LENGTH(value) FROM dict_entries WHERE {_OF} AND entry_key = ?"
_ADD = insert_into("dict_entries", ("project", "name", "entry_key", "number", "value"))
_SET = f"UPDATE dict_entries SET value = ? WHERE {_OF} AND entry_key = ?"
_NEXT = "AND number > ? ORDER BY number LIMIT ?"
_ENTRIES = f"FROM dict_entries WHERE {_OF} {_NEXT}"
_ENTRY_SIZES = f"SELECT LENGTH(value) {_ENTRIES}"
_ITEMS = f"FROM queue_items WHERE {_OF} AND part = ? {_NEXT}"
_ITEM_SIZES = f"SELECT LENGTH(value) {_ITEMS}"
_PUT = insert_into("queue_items", ("project", "name", "part", "number", "value", "expires_at"))
_NEWEST = (
    f"SELECT expires_at FROM queue_items WHERE {_OF} AND part = ? ORDER BY number DESC LIMIT 1"
)
_SIZE = (
    f"SELECT COUNT(*), COALESCE(SUM(LENGTH(value)), 0) FROM queue_items WHERE {_OF} AND part = ?"
)
_ANSWERED = "SELECT answer FROM state_answers WHERE project = ? AND id = ?"
_FORGET = "DELETE FROM state_answers WHERE project = ? AND id = ?"
_KEEP = insert_into("state_answers", ("project", "id", "answer", "answered_at"))
_Answered = TypeVar("_Answered", DictAnswer, QueueAnswer)


class StateFull(Exception):
    """Raised if a project has no room for what a request adds."""


class _Totals(NamedTuple):
    """What is known of a dict or queue: its entries, their bytes, and the newest number."""

    entries: int
    bytes: int
    number: int


class StateCaller(NamedTuple):
    """Who asks, of which object, and when."""

    project: str
    name: str
    user: str
    now: datetime


class StateRows:
    """Reads and writes dicts and queues."""

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        self._read, self._write = read, write

    async def use_dict(self, caller: StateCaller, ask: DictAsk) -> DictAnswer:
        """Answer a request to a dict. Raises StateFull."""
        if ask.op in ("get", "list", "len"):
            return await self._read(lambda session: _read_dict(session, caller, ask))
        change = {"put": _put_entries, "pop": _pop_entries, "clear": _clear_dict}[ask.op]
        return await self._write(
            lambda session: _once(
                session, caller, ask, DictAnswer, lambda: change(session, caller, ask)
            )
        )

    async def use_queue(self, caller: StateCaller, ask: QueueAsk) -> QueueAnswer:
        """Answer a request to a queue. Raises StateFull."""
        if ask.op in ("list", "len"):
            return await self._read(lambda session: _read_queue(session, caller, ask))
        # who waits for an item writes nothing
        if ask.op == "get" and await self._read(lambda session: _is_empty(session, caller, ask)):
            return QueueAnswer()
        change = {"put": _put_items, "get": _take_items, "clear": _clear_queue}[ask.op]
        return await self._write(
            lambda session: _once(
                session, caller, ask, QueueAnswer, lambda: change(session, caller, ask)
            )
        )

    async def list_objects(self, project: str, kind: Kind) -> list[StateView]:
        """Return the dicts or the queues of a project."""
        sql = "SELECT name, entries, bytes, user_name, created_at, changed_at FROM state_objects "
        sql += "WHERE project = ? AND kind = ? ORDER BY name"
        rows = await self._read(lambda session: session.run(sql, (project, kind)).fetchall())
        return [
            StateView(
                name=str(row[0]),
                kind=kind,
                entries=int(row[1]),
                bytes=int(row[2]),
                user=str(row[3]),
                created_at=to_time(row[4]),
                changed_at=to_time(row[5]),
            )
            for row in rows
        ]

    async def delete(self, project: str, kind: Kind, name: str) -> None:
        """Delete a dict or a queue. Raises RowNotFound."""
        await self._write(lambda session: _delete(session, project, kind, name))

    async def sweep(self, now: datetime) -> None:
        """Remove partitions that have expired, old answers, and what killed programs have left."""
        await self._write(lambda session: _sweep(session, now))


def _once(
    session: DatabaseSession,
    caller: StateCaller,
    ask: DictAsk | QueueAsk,
    kind: type[_Answered],
    change: Callable[[], _Answered],
) -> _Answered:
    """Return what a change answers, or what it was answered before. What changed nothing is not
    kept."""
    if ask.seen:
        session.run(_FORGET, (caller.project, ask.seen))
    if ask.id:
        row = session.run(_ANSWERED, (caller.project, ask.id)).fetchone()
        if row is not None:
            return decode(bytes(row[0]), type=kind)
    answer = change()
    if ask.id and answer != kind():
        values = (caller.project, ask.id, encode(answer), to_micros(caller.now))
        session.run(_KEEP, values)
    return answer


def _open(
    session: DatabaseSession, caller: StateCaller, kind: Kind, *, make: bool
) -> _Totals | None:
    """Lock an object, and return what is known of it; None if there is none. With `make`, it is
    made. Raises StateFull."""
    key = (caller.project, kind, caller.name)
    at = to_micros(caller.now)
    if session.run(_TOUCH, (at, *key)).rowcount == 0:
        if not make:
            return None
        sql = "SELECT COUNT(*) FROM state_objects WHERE project = ?"
        if _count(session, sql, (caller.project,)) >= MOST_OBJECTS:
            raise StateFull(f"project {caller.project} has {MOST_OBJECTS:,} dicts and queues")
        session.run(_NEW, (*key, 0, 0, 0, caller.user, at, at))
        session.run(_TOUCH, (at, *key))
    row = session.run(_OBJECT, key).fetchone()
    return None if row is None else _Totals(*map(int, row))


def _save(
    session: DatabaseSession, caller: StateCaller, kind: Kind, before: _Totals, now: _Totals
) -> None:
    """Store what is known of an object. Raises StateFull."""
    session.run(_SAVE, (*now, caller.project, kind, caller.name))
    if now.bytes <= before.bytes:
        return
    sql = "SELECT COALESCE(SUM(bytes), 0) FROM state_objects WHERE project = ?"
    if _count(session, sql, (caller.project,)) > MOST_BYTES:
        raise StateFull(
            f"the dicts and queues of project {caller.project} may have {MOST_BYTES:,} bytes"
        )


def _read_dict(session: DatabaseSession, caller: StateCaller, ask: DictAsk) -> DictAnswer:
    of = (caller.project, caller.name)
    if ask.op == "len":
        row = session.run(_OBJECT, (caller.project, "dict", caller.name)).fetchone()
        return DictAnswer(count=0 if row is None else int(row[0]))
    if ask.op == "list":
        value = "value" if ask.values else "''"
        most, more = ask.most, False
        if ask.values:
            most, more = _count_fitting(session, _ENTRY_SIZES, (*of, ask.after), ask.most)
        cursor = session.run(
            f"SELECT entry_key, number, {value} {_ENTRIES}", (*of, ask.after, most)
        )
        entries = [
            DictEntry(key=str(key), number=int(number), value=bytes(value) if ask.values else b"")
            for key, number, value in cursor.fetchall()
        ]
        return DictAnswer(entries=entries, more=more or len(entries) == ask.most)
    entries, more = _find_entries(session, of, ask)
    return DictAnswer(entries=entries, more=more)


def _count_fitting(
    session: DatabaseSession, sizes: str, values: Sequence[object], most: int
) -> tuple[int, bool]:
    """Return how many of the next values an answer has room for, at least 1, and whether there are
    more. The statement reads their sizes only: all of them may not fit into memory."""
    found = session.run(sizes, (*values, most)).fetchall() if most > 1 else []
    upto = [*accumulate(int(size) for (size,) in found)]
    fitting = sum(size <= MOST_ANSWER for size in upto)
    return max(fitting, 1), fitting < len(found)


def _find_entries(
    session: DatabaseSession, of: tuple[str, str], ask: DictAsk
) -> tuple[list[DictEntry], bool]:
    """Return the entries of the keys, as far as an answer has room for them, and whether there are
    more."""
    entries: list[DictEntry] = []
    size = 0
    for key in ask.keys:
        row = session.run(_ENTRY if ask.values else _HAS, (*of, key)).fetchone()
        if row is None:
            continue
        data = bytes(row[1]) if ask.values else b""
        size += len(data)
        if entries and size > MOST_ANSWER:
            return entries, True
        entries.append(DictEntry(key=key, number=int(row[0]), value=data))
    return entries, False


def _put_entries(session: DatabaseSession, caller: StateCaller, ask: DictAsk) -> DictAnswer:
    before = _open(session, caller, "dict", make=True)
    assert before is not None
    entries, size, number = before
    of = (caller.project, caller.name)
    added = 0
    for key, value in zip(ask.keys, ask.data, strict=True):
        row = session.run(_HAS, (*of, key)).fetchone()
        if row is None:
            number += 1
            session.run(_ADD, (*of, key, number, value))
            entries, size, added = entries + 1, size + len(key) + len(value) + _OVERHEAD, added + 1
        elif not ask.if_new:
            session.run(_SET, (value, *of, key))
            size += len(value) - int(row[1])
    _save(session, caller, "dict", before, _Totals(entries, size, number))
    return DictAnswer(count=added)


def _pop_entries(session: DatabaseSession, caller: StateCaller, ask: DictAsk) -> DictAnswer:
    before = _open(session, caller, "dict", make=False)
    if before is None:
        return DictAnswer()
    entries, size, number = before
    of = (caller.project, caller.name)
    popped: list[DictEntry] = []
    answered, more = 0, False
    for key in dict.fromkeys(ask.keys):
        row = session.run(_ENTRY if ask.values else _HAS, (*of, key)).fetchone()
        if row is None:
            continue
        value = bytes(row[1]) if ask.values else b""
        length = len(value) if ask.values else int(row[1])
        answered += len(value)
        if popped and answered > MOST_ANSWER:
            more = True
            break
        session.run(f"DELETE FROM dict_entries WHERE {_OF} AND entry_key = ?", (*of, key))
        entries, size = entries - 1, size - len(key) - length - _OVERHEAD
        popped.append(DictEntry(key=key, number=int(row[0]), value=value))
    _save(session, caller, "dict", before, _Totals(entries, size, number))
    return DictAnswer(entries=popped, count=len(popped), more=more)


def _clear_dict(session: DatabaseSession, caller: StateCaller, ask: DictAsk) -> DictAnswer:
    before = _open(session, caller, "dict", make=False)
    if before is None:
        return DictAnswer()
    session.run(f"DELETE FROM dict_entries WHERE {_OF}", (caller.project, caller.name))
    _save(session, caller, "dict", before, _Totals(0, 0, before.number))
    return DictAnswer(count=before.entries)


def _read_queue(session: DatabaseSession, caller: StateCaller, ask: QueueAsk) -> QueueAnswer:
    if ask.op == "len" and ask.all:
        row = session.run(_OBJECT, (caller.project, "queue", caller.name)).fetchone()
        return QueueAnswer(count=0 if row is None else int(row[0]))
    part = (caller.project, caller.name, ask.part)
    if _has_expired(session, part, caller.now):
        return QueueAnswer()
    if ask.op == "len":
        return QueueAnswer(count=_count(session, _SIZE, part))
    return QueueAnswer(items=_find_items(session, part, ask))


def _find_items(
    session: DatabaseSession, part: tuple[str, str, str], ask: QueueAsk
) -> list[QueueItem]:
    """Return the oldest items of a partition that an answer has room for."""
    most, _ = _count_fitting(session, _ITEM_SIZES, (*part, ask.after), ask.most)
    rows = session.run(f"SELECT number, value {_ITEMS}", (*part, ask.after, most)).fetchall()
    return [QueueItem(number=int(number), value=bytes(value)) for number, value in rows]


def _put_items(session: DatabaseSession, caller: StateCaller, ask: QueueAsk) -> QueueAnswer:
    before = _open(session, caller, "queue", make=True)
    assert before is not None
    part = (caller.project, caller.name, ask.part)
    entries, size, number = _drop_expired(session, part, before, caller.now)
    if _count(session, _SIZE, part) + len(ask.data) > MOST_ITEMS:
        _save(session, caller, "queue", before, _Totals(entries, size, number))
        return QueueAnswer(full=True)
    expires_at = to_micros(caller.now + timedelta(seconds=ask.ttl_s))
    for value in ask.data:
        number += 1
        session.run(_PUT, (*part, number, value, expires_at))
        entries, size = entries + 1, size + len(value) + _OVERHEAD
    _save(session, caller, "queue", before, _Totals(entries, size, number))
    return QueueAnswer(count=len(ask.data))


def _is_empty(session: DatabaseSession, caller: StateCaller, ask: QueueAsk) -> bool:
    """Return whether a `get` takes nothing, and was answered nothing before."""
    if session.run(_NEWEST, (caller.project, caller.name, ask.part)).fetchone() is not None:
        return False
    return session.run(_ANSWERED, (caller.project, ask.id)).fetchone() is None


def _take_items(session: DatabaseSession, caller: StateCaller, ask: QueueAsk) -> QueueAnswer:
    before = _open(session, caller, "queue", make=False)
    if before is None:
        return QueueAnswer()
    part = (caller.project, caller.name, ask.part)
    entries, size, number = _drop_expired(session, part, before, caller.now)
    items = _find_items(session, part, ask)
    for each in items:
        sql = f"DELETE FROM queue_items WHERE {_OF} AND part = ? AND number = ?"
        session.run(sql, (*part, each.number))
        entries, size = entries - 1, size - len(each.value) - _OVERHEAD
    _save(session, caller, "queue", before, _Totals(entries, size, number))
    return QueueAnswer(items=items, count=len(items))


def _clear_queue(session: DatabaseSession, caller: StateCaller, ask: QueueAsk) -> QueueAnswer:
    before = _open(session, caller, "queue", make=False)
    if before is None:
        return QueueAnswer()
    now = _Totals(0, 0, before.number)
    if ask.all:
        session.run(f"DELETE FROM queue_items WHERE {_OF}", (caller.project, caller.name))
    else:
        now = _drop(session, (caller.project, caller.name, ask.part), before)
    _save(session, caller, "queue", before, now)
    return QueueAnswer(count=before.entries - now.entries)


def _has_expired(session: DatabaseSession, part: tuple[str, str, str], now: datetime) -> bool:
    row = session.run(_NEWEST, part).fetchone()
    return row is not None and int(row[0]) < to_micros(now)


def _drop_expired(
    session: DatabaseSession, part: tuple[str, str, str], known: _Totals, now: datetime
) -> _Totals:
    return _drop(session, part, known) if _has_expired(session, part, now) else known


def _drop(session: DatabaseSession, part: tuple[str, str, str], known: _Totals) -> _Totals:
    """Delete the items of a partition, and return what is then known of the queue."""
    row = session.run(_SIZE, part).fetchone()
    assert row is not None
    session.run(f"DELETE FROM queue_items WHERE {_OF} AND part = ?", part)
    items, size = int(row[0]), int(row[1])
    return _Totals(known.entries - items, known.bytes - size - items * _OVERHEAD, known.number)


def _delete(session: DatabaseSession, project: str, kind: Kind, name: str) -> None:
    """Raises RowNotFound."""
    sql = "DELETE FROM state_objects WHERE project = ? AND kind = ? AND name = ?"
    missing = RowNotFound(f"project {project} has no {kind} {name}")
    session.change_or(missing, sql, (project, kind, name))
    table = "dict_entries" if kind == "dict" else "queue_items"
    session.run(f"DELETE FROM {table} WHERE {_OF}", (project, name))


def _sweep(session: DatabaseSession, now: datetime) -> None:
    at = to_micros(now)
    session.run("DELETE FROM state_answers WHERE answered_at < ?", (to_micros(now - _KEPT),))
    sql = "SELECT DISTINCT project, name, part FROM queue_items WHERE expires_at < ? LIMIT ?"
    for row in session.run(sql, (at, _AT_ONCE)).fetchall():
        part = (str(row[0]), str(row[1]), str(row[2]))
        caller = StateCaller(part[0], part[1], "", now)
        if _has_expired(session, part, now) and (
            before := _open(session, caller, "queue", make=False)
        ):
            _save(session, caller, "queue", before, _drop(session, part, before))
    sql = "SELECT project, kind, name FROM state_objects WHERE name LIKE ? AND changed_at < ?"
    left = session.run(sql, (f"{BRIEF_NAME}%", to_micros(now - _BRIEF))).fetchall()
    for project, kind, name in left:
        _delete(session, str(project), "dict" if kind == "dict" else "queue", str(name))


def _count(session: DatabaseSession, sql: str, values: Sequence[object]) -> int:
    row = session.run(sql, values).fetchone()
    return 0 if row is None else int(row[0])
