"""Archived projects: `Store.archive`."""

from collections.abc import Collection
from datetime import datetime

from cavvy.domain.authorization import list_below
from cavvy.domain.jobs import JOB_ENDS, AttemptPhase
from cavvy.store.accounts import in_projects, list_projects
from cavvy.store.base import ProjectArchived, ProjectBusy
from cavvy.store.documents import to_micros
from cavvy.store.drivers import DatabaseSession, RunTransaction

_ENDS = ", ".join(f"'{each}'" for each in sorted(JOB_ENDS))
# queries for work that has not ended, by the words for the work
_BUSY = {
    "service": "SELECT name FROM services WHERE {own}",
    "job": f"SELECT name FROM jobs WHERE {{own}} AND phase NOT IN ({_ENDS}) AND removed IS NULL",
    "gang": f"SELECT gang FROM attempts WHERE {{own}} AND phase <> '{AttemptPhase.ENDED}'",
}
_MOST = 3  # maximum number of names in an error message


class SqlArchive:
    """The archive state of projects, which is stored in their rows. No job and no service can be
    stored in an archived project. A submission that arrives during the archiving is either stored
    before the project is archived, or raises ProjectArchived.
    """

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        self._read, self._write = read, write

    async def put(self, projects: Collection[str], at: datetime, *, busy: bool = False) -> None:
        """Archive created projects; projects that are already archived are not changed. Raises
        ProjectBusy if `busy` is not set and the projects have services, unfinished jobs or
        unfinished gangs.
        """
        await self._write(lambda session: _put(session, projects, at, busy=busy))

    async def check(self, project: str) -> None:
        # a read, because a write would be recorded in the audit log as a change
        """Raises ProjectArchived."""
        await self._read(lambda session: check_open(session, [project], lock=False))

    async def lift(self, project: str) -> None:
        """Restore an archived project, with the projects below it that were archived at the same
        time. Does nothing if the project is not archived. Raises ProjectArchived if the project's
        parent is archived.
        """
        await self._write(lambda session: _lift(session, project))


def check_open(session: DatabaseSession, projects: Collection[str], *, lock: bool = True) -> None:
    """Raise ProjectArchived if one of the projects is archived. If `lock` is set, other writers
    cannot archive or unarchive these projects until the transaction ends.
    """
    where, values = in_projects("name", projects)
    # this lock and the UPDATE that archives a project exclude each other
    ending = " FOR SHARE" if lock and not session.driver.is_sqlite else ""
    sql = f"SELECT name, archived_at FROM projects WHERE {where} ORDER BY name{ending}"
    for name, archived_at in session.run(sql, values).fetchall():
        if archived_at is not None:
            raise ProjectArchived(f"project {name} is archived, so nothing new starts in it")


def _put(session: DatabaseSession, projects: Collection[str], at: datetime, *, busy: bool) -> None:
    for name in sorted(projects):  # in the order in which `check_open` locks them
        sql = "UPDATE projects SET archived_at = ? WHERE name = ? AND archived_at IS NULL"
        session.run(sql, (to_micros(at), name))
    where, values = in_projects("project", projects)
    if busy:
        return
    for what, sql in _BUSY.items():
        found = session.run(f"{sql.format(own=where)} LIMIT {_MOST + 1}", values).fetchall()
        if found:
            named = ", ".join(name for (name,) in found[:_MOST])
            more = " and more" if len(found) > _MOST else ""
            raise ProjectBusy(f"{what} {named}{more} has not ended")


def _lift(session: DatabaseSession, project: str) -> None:
    known = {each.name: each for each in list_projects(session)}
    found = known.get(project)
    if found is None or found.archived_at is None:
        return
    if found.parent is not None and known[found.parent].archived_at is not None:
        raise ProjectArchived(f"project {found.parent}, above {project}, is archived")
    below = list_below(project, {each.name: each.parent for each in known.values()})
    where, values = in_projects("name", below)
    sql = f"UPDATE projects SET archived_at = NULL WHERE archived_at = ? AND {where}"
    session.run(sql, (to_micros(found.archived_at), *values))
