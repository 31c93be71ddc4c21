"""Arrays and groups of jobs: `Store.arrays`. The members of an array are rows of `jobs`, which
share one task. A group is stored like an array, but its jobs have tasks of their own and no index.

An array has no phase of its own: what it shows is counted from its members. Its row is deleted with
its last member.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime

from cavvy.domain.arrays import StoredArray, name_member
from cavvy.domain.events import Event
from cavvy.domain.jobs import JobRecord, StopCause
from cavvy.domain.values import Struct, field, replace
from cavvy.store.accounts import check_open, in_projects
from cavvy.store.base import (
    DependencyMissing,
    JobSummary,
    ProjectFilter,
    RowNotFound,
    StaleVersion,
)
from cavvy.store.dependencies import insert_dependencies, look_up
from cavvy.store.documents import (
    check_readable,
    decode_node,
    decode_origin,
    decode_rest,
    decode_tags,
    storable_event,
    storable_job,
    to_micros,
    to_time,
)
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.own_tables import list_named_tables
from cavvy.store.prepared import Row
from cavvy.store.rows import (
    EVENTS,
    JOB_COLUMNS,
    SUMMARIES,
    insert_into,
    job_values,
)

_AT_ONCE = 1000  # members in one statement
_COLUMNS = ("id", "project", "name", "parallel", "task", "origin", "snapshot")
_INSERT_GROUP = insert_into("job_arrays", (*_COLUMNS, "started"), "ON CONFLICT DO NOTHING")
_INSERT = insert_into("job_arrays", _COLUMNS, "ON CONFLICT DO NOTHING")
_INSERT_JOB = insert_into("jobs", JOB_COLUMNS, "ON CONFLICT DO NOTHING")
_NEXT_NUMBER = (
    "INSERT INTO names (project, name, last) VALUES (?, ?, 2)"
    " ON CONFLICT (project, name) DO UPDATE SET last = names.last + 1 RETURNING last"
)
_OWN = {"id": "m.id", "name": "m.name", "member": "m.member"}
# `rowcount` of Python's SQLite is right only for a statement that begins with INSERT.
_COPY = (
    f"INSERT INTO jobs ({', '.join(JOB_COLUMNS)}) WITH m(id, name, member) AS (VALUES {{}}) "
    f"SELECT {', '.join(_OWN.get(each, f'j.{each}') for each in JOB_COLUMNS)} "
    "FROM m CROSS JOIN jobs j WHERE j.id = ? ON CONFLICT DO NOTHING"
)
_COPY_EVENT = (
    f"INSERT INTO events ({', '.join(EVENTS.columns)}) "
    f"SELECT {', '.join('j.id' if each == 'job_id' else f'e.{each}' for each in EVENTS.columns)} "
    "FROM jobs j CROSS JOIN events e WHERE j.array_id = ? AND j.id <> ? AND e.job_id = ? "
    "ORDER BY j.id"
)
# The first member that is left stands for what all members have in common.
_LIST = (
    "SELECT a.id, a.project, a.name, a.parallel, j.phase, CAST(COUNT(*) AS BIGINT), MAX(j.since), "
    "CAST(SUM(j.spent) AS BIGINT), MIN(j.submitted_at), MIN(j.user_name), MIN(j.priority), "
    "MIN(j.tags), a.started FROM job_arrays a JOIN jobs j ON j.array_id = a.id WHERE {} "
    "GROUP BY a.id, j.phase ORDER BY a.id DESC"
)
_MEMBERS = f"{SUMMARIES.select} WHERE array_id = ? ORDER BY member, id"
_BESIDE = "SELECT id, member, rest FROM jobs WHERE array_id = ?"
_PROGRESS = (
    "SELECT j.id, n.document FROM jobs j JOIN attempts a ON a.job_id = j.id AND "
    "a.number = j.attempt JOIN nodes n ON n.attempt_id = a.id WHERE j.array_id = ? AND n.rank = 0"
)
_HOLDS = (
    "SELECT 1 FROM jobs j JOIN attempts a ON a.job_id = j.id "
    "WHERE j.array_id = ? AND a.phase <> 'ended' LIMIT 1"
)


class ArrayMember(Struct, frozen=True, kw_only=True):
    """A member of an array, with what its last attempt reported."""

    index: int
    job: JobSummary
    progress: dict[str, float | str]
    early: bool = False  # whether it was stopped early


class NewJob(Struct, frozen=True, kw_only=True):
    """A new job with its first event or, if it has `members`, an array of jobs, see
    `SqlArrays.submit`. If `group` is set, the job is the first of a new group of this name, whose
    ID is its `array_id`."""

    job: JobRecord
    event: Event
    members: Mapping[str, int] = field(default_factory=dict)
    parallel: int | None = None
    group: str = ""


class SqlArrays:
    """The rows of arrays."""

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        self._read, self._write = read, write

    async def submit(
        self, job: JobRecord, event: Event, members: Mapping[str, int], parallel: int | None
    ) -> StoredArray:
        """Insert an array with the ID `job.array_id`, and a copy of `job` for each of its members:
        `members` are their IDs and indices. The array gets the name of `job` or, if a job, a
        service or an array has that name, the first free one of NAME-2, NAME-3 and so on. Raises
        StaleVersion if the array exists already, ProjectArchived.
        """
        await self._write(lambda session: insert_array(session, job, event, members, parallel))
        return await self.find(job.project, str(job.array_id))

    async def find(self, project: str, name_or_id: str) -> StoredArray:
        """Return the array with this name or ID. Raises RowNotFound."""
        where = "a.project = ? AND (a.name = ? OR a.id = ?)"
        for found in await self._list(where, project, name_or_id, name_or_id):
            return found
        raise RowNotFound(f"project {project} has no array named {name_or_id}")

    async def get(self, array_id: str) -> StoredArray:
        """Raises RowNotFound."""
        for found in await self._list("a.id = ?", array_id):
            return found
        raise RowNotFound(f"no array {array_id}")

    async def jobs(self, array_id: str) -> Sequence[str]:
        """Return the IDs of the members, in the order of their submission."""
        sql = "SELECT id FROM jobs WHERE array_id = ? ORDER BY id"
        rows = await self._read(lambda session: session.run(sql, (array_id,)).fetchall())
        return [row[0] for row in rows]

    async def list_points(self, array_id: str) -> dict[str, int]:
        """Return the combination of values that a search has chosen for each job that has one."""
        sql = "SELECT id, rest FROM jobs WHERE array_id = ? AND attempt > 0"
        rows = await self._read(lambda session: session.run(sql, (array_id,)).fetchall())
        found = {job_id: decode_rest(rest).get("point") for job_id, rest in rows}
        return {job_id: point for job_id, point in found.items() if point is not None}

    async def start(self, group_id: str, now: datetime) -> None:
        """Record that the jobs of a group have started together."""
        await self._mark(group_id, to_micros(now), "started = 0")

    async def restart(self, group_id: str) -> None:
        """Record that the jobs of a group, which have all ended, will start together again."""
        await self._mark(group_id, 0, "started > 0")

    async def _mark(self, group_id: str, started: int | None, where: str) -> None:
        sql = f"UPDATE job_arrays SET started = ? WHERE id = ? AND {where}"
        await self._write(lambda session: session.run(sql, (started, group_id)).rowcount)

    async def list(
        self, projects: ProjectFilter = None, before: str | None = None, limit: int = 50
    ) -> Sequence[StoredArray]:
        """Return the newest arrays whose ID is less than `before`, newest first."""
        where, values = in_projects("project", projects)
        if before is not None:
            where, values = f"{where} AND id < ?", (*values, before)
        chosen = f"SELECT id FROM job_arrays WHERE {where} ORDER BY id DESC LIMIT ?"
        return await self._list(f"a.id IN (SELECT id FROM ({chosen}) AS p1)", *values, limit)

    async def find_of(self, job_ids: Collection[str]) -> Mapping[str, StoredArray]:
        """Return the arrays of those of these jobs that are members of one, by the jobs' IDs."""
        if not job_ids:
            return {}
        marks = ", ".join("?" * len(job_ids))
        sql = f"SELECT id, array_id FROM jobs WHERE id IN ({marks}) AND array_id IS NOT NULL"
        rows = await self._read(lambda session: session.run(sql, [*job_ids]).fetchall())
        wanted = {str(array_id) for _, array_id in rows}
        listed = await self._list(f"a.id IN ({', '.join('?' * len(wanted)) or 'NULL'})", *wanted)
        found = {each.id: each for each in listed}
        return {job_id: found[array_id] for job_id, array_id in rows if array_id in found}

    async def text(self, array_id: str) -> str:
        """Return the text of the array's task file. Raises RowNotFound."""
        sql = "SELECT origin FROM job_arrays WHERE id = ?"
        rows = await self._read(lambda session: session.run(sql, (array_id,)).fetchall())
        if not rows:
            raise RowNotFound(f"no array {array_id}")
        return decode_origin(rows[0][0]).task_text

    async def members(self, array_id: str) -> Sequence[ArrayMember]:
        """Return the members, in the order of their indices."""

        def read(session: DatabaseSession) -> Sequence[ArrayMember]:
            found = [SUMMARIES.make(row) for row in session.run(_MEMBERS, (array_id,)).fetchall()]
            beside = session.run(_BESIDE, (array_id,)).fetchall()
            stored: dict[str, int | None] = {job_id: index for job_id, index, _ in beside}
            indices = {
                job.id: place if (index := stored[job.id]) is None else index
                for place, job in enumerate(found)
            }
            early = {
                job_id
                for job_id, _, rest in beside
                if decode_rest(rest).get("stop_cause") == StopCause.EARLY
            }
            reported = {
                job_id: decode_node(document).progress
                for job_id, document in session.run(_PROGRESS, (array_id,)).fetchall()
            }
            return [
                ArrayMember(
                    index=indices[job.id],
                    job=job,
                    progress=reported.get(job.id, {}),
                    early=job.id in early,
                )
                for job in found
            ]

        return await self._read(read)

    async def holds_nodes(self, array_id: str) -> bool:
        """Return whether a member has nodes that are not released yet."""
        rows = await self._read(lambda session: session.run(_HOLDS, (array_id,)).fetchall())
        return bool(rows)

    async def _list(self, where: str, *values: object) -> Sequence[StoredArray]:
        rows = await self._read(lambda session: session.run(_LIST.format(where), values).fetchall())
        return [*_add_up(rows)]


def is_array_name(session: DatabaseSession, job: JobRecord) -> bool:
    """Return whether an array has the name of the new job. Raises StaleVersion if one has its ID,
    so that an idempotency key cannot create both."""
    sql = "SELECT id FROM job_arrays WHERE id = ? OR (project = ? AND name = ?)"
    found = [each for (each,) in session.run(sql, (job.id, job.project, job.name)).fetchall()]
    if job.id in found:
        raise StaleVersion(f"array {job.id} exists already")
    return bool(found)


def remove_empty(session: DatabaseSession, array_id: str) -> None:
    """Delete the array if it has no members left."""
    session.run(
        "DELETE FROM job_arrays WHERE id = ? AND NOT EXISTS "
        "(SELECT 1 FROM jobs WHERE array_id = ?)",
        (array_id, array_id),
    )


def _add_up(rows: Sequence[Row]) -> Iterator[StoredArray]:
    """Yield one array for all rows with the same ID."""
    found: StoredArray | None = None
    for row in rows:
        array_id, project, name, parallel, phase, count, since, spent, *first = row
        each = StoredArray(
            id=array_id,
            project=project,
            name=name,
            parallel=parallel,
            counts={phase: count},
            since=to_time(since),
            spent_micros=spent,
            submitted_at=to_time(first[0]),
            user=first[1],
            priority=first[2],
            tags=decode_tags(first[3]),
            started=None if first[4] is None else first[4] > 0,
        )
        if found is not None and found.id != each.id:
            yield found
            found = None
        found = each if found is None else _merge(found, each)
    if found is not None:
        yield found


def _merge(one: StoredArray, other: StoredArray) -> StoredArray:
    return replace(
        one,
        counts=one.counts | other.counts,
        since=max(one.since, other.since),
        spent_micros=one.spent_micros + other.spent_micros,
    )


def insert_group(session: DatabaseSession, job: JobRecord, name: str) -> None:
    """Insert the group of a new job, without the job. If the name is in use, the group gets the
    first free one of NAME-2, NAME-3 and so on. Raises StaleVersion."""
    texts, free = check_readable(job), name
    if session.run("SELECT 1 FROM job_arrays WHERE id = ?", (job.array_id,)).fetchone():
        raise StaleVersion(f"group {job.array_id} exists already")
    while _is_taken(session, job.project, free) or not (
        session.run(
            _INSERT_GROUP, (job.array_id, job.project, free, None, *texts, None, 0)
        ).rowcount
    ):
        number = session.run(_NEXT_NUMBER, (job.project, name)).fetchone()
        assert number is not None
        free = f"{name}-{number[0]}"


def check_group(session: DatabaseSession, job: JobRecord) -> None:
    """Raise DependencyMissing if the group of a new job does not exist."""
    sql = "SELECT 1 FROM job_arrays WHERE id = ?"
    if job.array_id is not None and not session.run(sql, (job.array_id,)).fetchone():
        name = job.task.group.name if job.task.group is not None else job.array_id
        raise DependencyMissing(f"group: project {job.project} has no group {name}")


def insert_array(
    session: DatabaseSession,
    job: JobRecord,
    event: Event,
    members: Mapping[str, int],
    parallel: int | None,
) -> str:
    """Implement `SqlArrays.submit` in the open transaction. Return the name of the array."""
    check_open(session, [job.project])
    job = look_up(session, job)
    texts = check_readable(job)
    same = "SELECT 1 FROM job_arrays WHERE id = ? UNION ALL SELECT 1 FROM jobs WHERE id = ?"
    if session.run(same, (job.array_id, job.array_id)).fetchone():
        raise StaleVersion(f"a job or an array {job.array_id} exists already")
    name = job.name
    while not _insert_as(session, job, name, members, (parallel, *texts, job.origin.snapshot)):
        number = session.run(_NEXT_NUMBER, (job.project, job.name)).fetchone()
        assert number is not None
        name = f"{job.name}-{number[0]}"
    first = next(iter(members))
    session.run(EVENTS.insert, EVENTS.values(storable_event(replace(event, job_id=first))))
    session.run(_COPY_EVENT, (job.array_id, first, first))
    insert_dependencies(session, job, array=True)
    return name


def _is_taken(session: DatabaseSession, project: str, name: str) -> bool:
    """Return whether a job, or a row of a capability such as a service, has the name."""
    tables = ("jobs", *(table for _, table in list_named_tables()))
    sql = " UNION ALL ".join(
        f"SELECT 1 FROM {each} WHERE project = ? AND name = ?" for each in tables
    )
    return session.run(sql, (project, name) * len(tables)).fetchone() is not None


def _insert_as(
    session: DatabaseSession,
    job: JobRecord,
    name: str,
    members: Mapping[str, int],
    rest: tuple[object, ...],
) -> bool:
    """Insert the array and its members under this name; return False if a name is in use."""
    if _is_taken(session, job.project, name):
        return False
    if not session.run(_INSERT, (job.array_id, job.project, name, *rest)).rowcount:
        return False
    (first, index), *others = members.items()
    own = replace(job, id=first, name=name_member(name, index), member=index, version=0)
    inserted = session.run(_INSERT_JOB, job_values(storable_job(own), 1)).rowcount
    for start in range(0, len(others), _AT_ONCE):
        part = others[start : start + _AT_ONCE]
        marks = ", ".join(["(?, ?, ?)"] * len(part))
        values = [
            value for member, index in part for value in (member, name_member(name, index), index)
        ]
        inserted += session.run(_COPY.format(marks), (*values, first)).rowcount
    if inserted == len(members):
        return True
    # jobs of a service that has ended have the names of members
    session.run("DELETE FROM jobs WHERE array_id = ?", (job.array_id,))
    session.run("DELETE FROM job_arrays WHERE id = ?", (job.array_id,))
    return False
