"""The rows of the audit log, and the code that appends a request's record to the transaction of its
first write.

The API sets the context variable PENDING to the audit entry of the request. The store checks
PENDING at each write, and appends the record in the same transaction, so that no change is stored
without its record.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Protocol, TypeVar

from cavvy.domain.audit import (
    EMPTY,
    AuditCut,
    AuditEntry,
    AuditOutcome,
    ChainHead,
    SealedRecord,
    seal,
)
from cavvy.store.accounts import in_projects
from cavvy.store.base import ProjectFilter
from cavvy.store.documents import to_micros
from cavvy.store.drivers import DatabaseSession
from cavvy.store.rows import RowCodec, insert_into, insert_many

_T = TypeVar("_T")
RECORDS = RowCodec(SealedRecord, "audit_log")
_HEAD = "SELECT number, hash FROM audit_log ORDER BY number DESC LIMIT 1"
_LAST_CUT = "SELECT COALESCE(MAX(number), 0) FROM audit_cuts"
_OLDEST = "SELECT number, hash, at FROM audit_log WHERE number > ? ORDER BY number LIMIT ?"


class PendingEntry(Protocol):
    """The audit entry of a request that can change stored data."""

    def claim(self) -> AuditEntry | None:
        """Return the entry, or None if a write has claimed it or the request needs no entry."""
        ...

    def give_back(self) -> None:
        """Make the entry available again after a failed write, so that another write can claim
        it."""
        ...


PENDING: ContextVar[PendingEntry | None] = ContextVar("PENDING", default=None)


def append(session: DatabaseSession, entry: AuditEntry) -> ChainHead:
    """Append a record, in the open transaction, and return the chain's new end."""
    return append_all(session, [entry])


def append_all(session: DatabaseSession, entries: Sequence[AuditEntry]) -> ChainHead:
    """Append records, in the open transaction, and return the chain's new end."""
    if not entries:
        return EMPTY
    if not session.driver.is_sqlite:
        # Other writers wait until this transaction ends, so that none follows the same record.
        # SQLite has only one writer at a time.
        session.run("LOCK TABLE audit_log IN SHARE ROW EXCLUSIVE MODE")
    row = session.run(_HEAD).fetchone()
    head = EMPTY if row is None else ChainHead(*row)
    sealed = []
    for entry in entries:
        sealed.append(seal(entry, head))
        head = ChainHead(sealed[-1].number, sealed[-1].hash)
    insert_many(session, "audit_log", RECORDS.columns, [RECORDS.values(each) for each in sealed])
    return head


def recorded(
    work: Callable[[DatabaseSession], _T], entry: AuditEntry
) -> Callable[[DatabaseSession], _T]:
    """Return a function that runs `work` and then appends `entry` to the audit log. `entry` is
    appended last because the append locks the log, and other transactions then wait for this lock.
    """

    def both(session: DatabaseSession) -> _T:
        result = work(session)
        append(session, entry)
        return result

    return both


def read_records(
    session: DatabaseSession,
    projects: ProjectFilter,
    *,
    account: str | None,
    outcome: AuditOutcome | None,
    since: datetime | None,
    after: int,
    limit: int,
    newest: bool,
) -> Sequence[SealedRecord]:
    """Return at most `limit` records whose number is larger than `after`, sorted by number: the
    oldest records or, if `newest` is set, the newest records.
    """
    where, values = in_projects("project", projects)
    # an interrupted removal may have left some of the removed records
    [[cut]] = session.run(_LAST_CUT).fetchall()
    conditions, given = [where, "number > ?"], [*values, max(after, cut)]
    for column, value in (("account = ?", account), ("outcome = ?", outcome and str(outcome))):
        if value is not None:
            conditions.append(column)
            given.append(value)
    if since is not None:
        conditions.append("at >= ?")
        given.append(to_micros(since))
    order = "DESC" if newest else "ASC"
    sql = f"{RECORDS.select} WHERE {' AND '.join(conditions)} ORDER BY number {order} LIMIT ?"
    rows = [RECORDS.make(row) for row in session.run(sql, (*given, limit)).fetchall()]
    return rows[::-1] if newest else rows


def find_cut(session: DatabaseSession, before: datetime, limit: int) -> ChainHead | None:
    """Return the last of at most `limit` records that can be removed because they and all records
    before them are older than `before`, or None. The newest record is never removed.
    """
    [[cut]] = session.run(_LAST_CUT).fetchall()
    found: ChainHead | None = None
    rows = session.run(_OLDEST, (cut, limit + 1)).fetchall()
    for number, digest, at in rows[:-1]:
        if at >= to_micros(before):
            break
        found = ChainHead(number, digest)
    return found


def cut_log(session: DatabaseSession, cut: AuditCut) -> None:
    """Remove the records up to `cut.head`, and add the record that says so, in the open
    transaction. The database permits the removal only of records that `audit_cuts` contains.
    """
    columns = ("number", "hash", "cut_at")
    values = (cut.head.number, cut.head.hash, to_micros(cut.at))
    session.run(insert_into("audit_cuts", columns, "ON CONFLICT DO NOTHING"), values)
    append(session, cut.make_entry())
    session.run("DELETE FROM audit_log WHERE number <= ?", (cut.head.number,))
