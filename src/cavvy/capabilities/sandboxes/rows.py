"""The rows of sandboxes."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from msgspec.json import decode, encode

from cavvy.capabilities.sandboxes.wire import SandboxReport
from cavvy.domain.values import Struct
from cavvy.store.base import ProjectFilter, is_visible
from cavvy.store.documents import to_micros
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.rows import RowCodec

_KEPT = timedelta(days=1)  # after its time is over
_MOST = 5000  # that are read at once, the newest


class SandboxRow(Struct, frozen=True, kw_only=True):
    """A sandbox; `document` is a `SandboxReport` as JSON."""

    project: str
    job: str
    name: str
    document: str
    until_at: datetime


class StoredSandbox(NamedTuple):
    """A sandbox, its project, and the job of its host."""

    project: str
    job: str
    report: SandboxReport


_ROWS = RowCodec(SandboxRow, "sandboxes", key=("project", "job", "name"))


class SandboxRows:
    """Reads and writes the rows."""

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        self._read, self._write = read, write

    async def put(
        self, project: str, job: str, reports: Sequence[SandboxReport], now: datetime
    ) -> None:
        """Store what a host tells, and delete what is old."""

        def put(session: DatabaseSession) -> None:
            session.run("DELETE FROM sandboxes WHERE until_at < ?", (to_micros(now - _KEPT),))
            for each in reports:
                row = SandboxRow(
                    project=project,
                    job=job,
                    name=each.name,
                    document=encode(each).decode(),
                    # one that has ended is kept for a day from then on
                    until_at=datetime.fromtimestamp(each.ended_s or each.until_s, UTC),
                )
                session.run(_ROWS.upsert, _ROWS.values(row))

        await self._write(put)

    async def list_all(self, projects: ProjectFilter, now: datetime) -> Sequence[StoredSandbox]:
        """Return the sandboxes of these projects, the newest first."""
        sql = f"{_ROWS.select} WHERE until_at >= ? ORDER BY until_at DESC LIMIT {_MOST}"
        since = to_micros(now - _KEPT)
        rows = await self._read(lambda session: session.run(sql, (since,)).fetchall())
        found = [
            StoredSandbox(str(row[0]), str(row[1]), decode(row[3], type=SandboxReport))
            for row in rows
            if is_visible(str(row[0]), projects)
        ]
        return sorted(found, key=lambda each: each.report.began_s, reverse=True)
