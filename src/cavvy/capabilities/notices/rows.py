"""The rows of notices that wait to be sent, and of their targets.

A notice is stored in the transaction that stores its event, and is deleted after the receiver has
accepted it. So a server that is killed loses none, but may send a notice twice.
"""

from collections.abc import Sequence
from datetime import datetime

from cavvy.capabilities.notices.notice import KINDS, Notice, NoticeEvent, NoticeTarget
from cavvy.domain.events import Announcement, Event
from cavvy.domain.figures import StepValues
from cavvy.store.announcements import Happened
from cavvy.store.base import RowNotFound
from cavvy.store.documents import to_micros
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.rows import RowCodec

_CAUSES = {cause: event for event, kind in KINDS.items() for cause in kind.causes}
_MOST_TEXT = 1000  # characters of an event's text, which can quote a node
_TARGETS = RowCodec(
    NoticeTarget, "notice_targets", columns={"user": "user_name"}, key=("project", "name")
)
_NOTICES = RowCodec(Notice, "notices", columns={"user": "user_name"}, assigned="id")
_INTO = (
    "INSERT INTO notices (project, target, event, job_id, job, user_name, text, at, due_at, tries) "
)
_OF_JOB = (
    f"{_INTO}SELECT t.project, t.name, ?, j.id, j.name, j.user_name, ?, ?, ?, 0 "
    "FROM notice_targets t JOIN jobs j ON j.project = t.project "
    "WHERE j.id = ? AND t.events LIKE ? AND t.user_name IN ('', j.user_name)"
)
_OF_PEOPLE = (
    f"{_INTO}SELECT project, name, ?, '', '', ?, ?, ?, ?, 0 FROM notice_targets "
    "WHERE events LIKE ? AND ((project = ? AND user_name IN ('', ?)) "
    "OR (? = '' AND user_name <> '' AND user_name = ?))"
)
_OWN = "project = ? AND target = ?"
_DUE = "SELECT DISTINCT project, target FROM notices WHERE due_at <= ?"
_ANY = "SELECT 1 FROM notice_targets LIMIT 1"
_PROBLEM = "UPDATE notice_targets SET problem = ? WHERE project = ? AND name = ? AND problem <> ?"


def find_cause(event: Event) -> NoticeEvent | None:
    """Return the notice that an event of a job causes, or None."""
    return _CAUSES.get((event.kind, None)) or _CAUSES.get((event.kind, event.fact))


def add_notices(session: DatabaseSession, happened: Sequence[Happened]) -> None:
    """Store the notices about what happened in the open transaction. Those of an announcement go to
    the targets of its project or, if it concerns a user in all projects, to those of the user.
    Budgets of the whole installation have only their own webhook, except those of a user, a tag or
    a service: see `SqlBudgets.claim_alert`.
    """
    for each in happened:
        if isinstance(each, StepValues):
            continue
        at, text = to_micros(each.at), each.text[:_MOST_TEXT]
        if isinstance(each, Announcement):
            of = (each.project, each.user, each.project, each.user)
            session.run(_OF_PEOPLE, (each.event, each.user, text, at, at, _like(each.event), *of))
        elif (cause := find_cause(each)) is not None:
            session.run_later(_OF_JOB, (str(cause), text, at, at, each.job_id, _like(cause)))


def _like(event: str) -> str:
    return f'%"{event}"%'  # `events` is a JSON list of names


class SqlNotices:
    """The rows of notices and of their targets."""

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        self._read, self._write = read, write

    async def targets(self, project: str | None = None) -> Sequence[NoticeTarget]:
        """Return the targets of a project or, without one, of all projects, sorted by name."""
        where, values = ("WHERE project = ?", (project,)) if project is not None else ("", ())
        sql = f"{_TARGETS.select} {where} ORDER BY project, name"
        rows = await self._read(lambda session: session.run(sql, values).fetchall())
        return [_TARGETS.make(row) for row in rows]

    async def list_sealed(self) -> Sequence[NoticeTarget]:
        """Return the targets of all projects, whose addresses are encrypted."""
        return await self.targets()

    async def target(self, project: str, name: str) -> NoticeTarget:
        """Return a target. Raises RowNotFound."""
        sql = f"{_TARGETS.select} WHERE project = ? AND name = ?"
        row = await self._read(lambda session: session.run(sql, (project, name)).fetchone())
        if row is None:
            raise RowNotFound(f"project {project} has no target {name} of notices")
        return _TARGETS.make(row)

    async def put(self, target: NoticeTarget) -> None:
        """Insert or replace a target. Its waiting notices go to the new address."""
        values = _TARGETS.values(target)
        await self._write(lambda session: session.run(_TARGETS.upsert, values))

    async def reseal(self, target: NoticeTarget, sealed: bytes) -> bool:
        """Like `Store.reseal_secret`."""
        values = (sealed, target.project, target.name, target.sealed)
        return await self._write(lambda session: session.run(_TARGETS.reseal, values).rowcount) > 0

    async def delete(self, project: str, name: str) -> None:
        """Delete a target and its waiting notices. Raises RowNotFound."""
        missing = RowNotFound(f"project {project} has no target {name} of notices")
        values = (project, name)

        def delete(session: DatabaseSession) -> None:
            session.run(f"DELETE FROM notices WHERE {_OWN}", values)
            session.change_or(missing, _TARGETS.delete, values)

        await self._write(delete)

    async def any_target(self) -> bool:
        return await self._read(lambda session: session.run(_ANY).fetchone()) is not None

    async def due_targets(self, now: datetime) -> Sequence[tuple[str, str]]:
        """Return the project and name of each target with a notice that is due."""
        values = (to_micros(now),)
        rows = await self._read(lambda session: session.run(_DUE, values).fetchall())
        return [(row[0], row[1]) for row in rows]

    async def waiting(self, target: NoticeTarget, limit: int) -> Sequence[Notice]:
        """Return at most `limit` waiting notices of a target, the oldest first."""
        sql, values = (
            f"{_NOTICES.select} WHERE {_OWN} ORDER BY id LIMIT ?",
            (target.project, target.name, limit),
        )
        rows = await self._read(lambda session: session.run(sql, values).fetchall())
        return [_NOTICES.make(row) for row in rows]

    async def remove(self, target: NoticeTarget, notices: Sequence[Notice], problem: str) -> None:
        """Delete notices that were sent or given up, and set the target's problem."""
        ids = [each.id for each in notices]
        marks = ", ".join("?" * len(ids))

        def remove(session: DatabaseSession) -> None:
            session.run(f"DELETE FROM notices WHERE id IN ({marks})", ids)
            _set_problem(session, target, problem)

        await self._write(remove)

    async def postpone(
        self, target: NoticeTarget, notices: Sequence[Notice], due_at: datetime, problem: str
    ) -> None:
        """Count a failed try of notices, and set when they are due again."""
        ids = [each.id for each in notices]
        marks = ", ".join("?" * len(ids))
        sql = f"UPDATE notices SET due_at = ?, tries = tries + 1 WHERE id IN ({marks})"

        def postpone(session: DatabaseSession) -> None:
            session.run(sql, (to_micros(due_at), *ids))
            _set_problem(session, target, problem)

        await self._write(postpone)


def _set_problem(session: DatabaseSession, target: NoticeTarget, problem: str) -> None:
    session.run(_PROBLEM, (problem, target.project, target.name, problem))
