"""The rows of deployed apps."""

from collections.abc import Sequence
from datetime import datetime

from cavvy.capabilities.functions.wire import NextJobAsk
from cavvy.domain.values import Struct
from cavvy.store.base import RowNotFound
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.rows import RowCodec


class StoredPart(Struct, frozen=True, kw_only=True):
    """The job of some functions of an app; `document` is a `wire.AppPartAsk` as JSON."""

    project: str
    app: str
    part: int
    revision: str
    snapshot: str
    document: str
    job: str
    user: str
    updated_at: datetime


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

    async def revisions(self, project: str) -> dict[str, str]:
        """Return the revision of each app of a project."""
        sql = "SELECT DISTINCT app, revision FROM function_jobs WHERE project = ?"
        rows = await self._read(lambda session: session.run(sql, (project,)).fetchall())
        return {str(row[0]): str(row[1]) for row in rows}

    async def put(self, project: str, app: str, parts: Sequence[StoredPart]) -> None:
        """Replace the rows of an app."""

        def put(session: DatabaseSession) -> None:
            session.run(f"DELETE FROM function_jobs WHERE {_OF_APP}", (project, app))
            for each in parts:
                session.run(_PARTS.insert, _PARTS.values(each))

        await self._write(put)

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
