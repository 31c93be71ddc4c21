"""The jobs that wait until other jobs have ended (`Store.dependencies`)."""

from collections.abc import Mapping, Sequence
from itertools import product

from cavvy.domain.jobs import FAR, JOB_ENDS, JobPhase, JobRecord
from cavvy.domain.tasks import JobDependency
from cavvy.domain.values import replace
from cavvy.store.base import DependencyMissing
from cavvy.store.documents import to_micros
from cavvy.store.drivers import DatabaseSession, RunTransaction

_INSERT = "INSERT INTO job_dependencies (after_id, job_id) VALUES (?, ?) ON CONFLICT DO NOTHING"
_INSERT_ALL = (
    "INSERT INTO job_dependencies (after_id, job_id) SELECT ?, id FROM jobs WHERE array_id = ?"
)
_LIVE = ", ".join(f"'{phase}'" for phase in JobPhase if phase not in JOB_ENDS)
_AFTER = (
    "SELECT DISTINCT d.job_id FROM job_dependencies d JOIN jobs j ON j.id = d.job_id "
    "WHERE d.after_id IN ({}) AND j.attempt = 0 AND j.removed IS NULL AND {} ORDER BY d.job_id"
)
_TWO = "?, ?"  # a job and its array
_ARRAY = "SELECT ? UNION SELECT id FROM jobs WHERE array_id = ?"
_IS_WAITING = f"j.phase = 'queued' AND j.not_before = {to_micros(FAR)}"
_WAITING = _AFTER.format(_TWO, _IS_WAITING)
_WAITING_FOR_ARRAY = _AFTER.format(_ARRAY, _IS_WAITING)
_ANY = "SELECT id FROM jobs WHERE id IN ({0}) UNION SELECT array_id FROM jobs WHERE id IN ({0})"
_WAITING_FOR_ANY = _AFTER.format(_ANY, _IS_WAITING)
_AT_ONCE = 1000  # jobs in one statement
_CONCERNED = _AFTER.format(_TWO, f"(j.phase = 'stopped' OR {_IS_WAITING})")
_UNFINISHED = f"SELECT 1 FROM jobs WHERE array_id = ? AND phase IN ({_LIVE}) LIMIT 1"
_PHASES = (
    "SELECT id, phase FROM jobs WHERE id IN ({0}) UNION ALL "
    "SELECT DISTINCT array_id, phase FROM jobs WHERE array_id IN ({0})"
)
# An array has the first of these phases that one of its jobs has.
_RANKED = (
    *(phase for phase in JobPhase if phase not in JOB_ENDS),
    JobPhase.FAILED,
    JobPhase.STOPPED,
)


class SqlDependencies:
    """Reads which jobs wait for which other jobs."""

    def __init__(self, read: RunTransaction) -> None:
        self._read = read

    async def phases(self, after: Sequence[JobDependency]) -> Mapping[str, JobPhase]:
        """Return the phases of these jobs by ID, without those that no longer exist. An array of
        jobs is done when all of its jobs are done, and has otherwise failed if one of them has
        failed, once all of them have ended.
        """
        ids = [each.id for each in after]
        sql = _PHASES.format(", ".join("?" * len(ids)))
        rows = await self._read(lambda session: session.run(sql, (*ids, *ids)).fetchall())
        found: dict[str, set[JobPhase]] = {}
        for job_id, phase in rows:
            found.setdefault(job_id, set()).add(JobPhase(phase))
        return {
            job_id: next((each for each in _RANKED if each in phases), JobPhase.DONE)
            for job_id, phases in found.items()
        }

    async def waiting(self, job: JobRecord) -> Sequence[str]:
        """Return the IDs of the jobs that wait for this job or for its array."""
        return await self._ids(_WAITING, job.id, job.array_id or job.id)

    async def waiting_for_array(self, array_id: str) -> Sequence[str]:
        """Return the IDs of the jobs that wait for this array or for one of its jobs."""
        return await self._ids(_WAITING_FOR_ARRAY, array_id, array_id)

    async def waiting_for_any(self, jobs: Sequence[str]) -> Sequence[str]:
        """Return the IDs of the jobs that wait for one of these jobs or for its array."""
        found = set[str]()
        for start in range(0, len(jobs), _AT_ONCE):
            part = jobs[start : start + _AT_ONCE]
            marks = ", ".join("?" * len(part))
            found |= {*await self._ids(_WAITING_FOR_ANY.format(marks), *part, *part)}
        return sorted(found)

    async def concerned(self, job: JobRecord) -> Sequence[str]:
        """Return the IDs of the jobs for which it matters that this job has ended or was retried:
        those that wait for it, and those that did not start because of it. If other jobs of its
        array have not ended, nothing has changed for jobs after the array.
        """

        def read(session: DatabaseSession) -> Sequence[str]:
            array = job.array_id
            if array is not None and job.phase in JOB_ENDS:
                array = None if session.run(_UNFINISHED, (array,)).fetchone() else array
            return [row[0] for row in session.run(_CONCERNED, (job.id, array or job.id)).fetchall()]

        return await self._read(read)

    async def _ids(self, sql: str, *values: object) -> Sequence[str]:
        found = await self._read(lambda session: session.run(sql, values).fetchall())
        return [job_id for (job_id,) in found]


def look_up(session: DatabaseSession, job: JobRecord) -> JobRecord:
    """Return the new job with the IDs of the jobs that it waits for. Raises DependencyMissing."""
    after = tuple(_find(session, job.project, each) for each in job.after)
    return job if after == job.after else replace(job, after=after)


def insert_dependencies(session: DatabaseSession, job: JobRecord, *, array: bool = False) -> None:
    """Store which jobs the new job, or each new job of its array, waits for."""
    sql, key = (_INSERT_ALL, job.array_id) if array else (_INSERT, job.id)
    for after_id in sorted({each.id for each in job.after}):
        session.run(sql, (after_id, key))


def holds(session: DatabaseSession, job_id: str) -> bool:
    """Return whether a job waits for this job."""
    return session.run(_WAITING, (job_id, job_id)).fetchone() is not None


def delete_dependencies(session: DatabaseSession, job_id: str) -> None:
    session.run("DELETE FROM job_dependencies WHERE job_id = ? OR after_id = ?", (job_id, job_id))


def _find(session: DatabaseSession, project: str, wanted: JobDependency) -> JobDependency:
    given = wanted.id or wanted.job
    for table, column in product(("jobs", "job_arrays"), ("name", "id")):
        kept = " AND removed IS NULL" if table == "jobs" else ""
        sql = f"SELECT id, name FROM {table} WHERE project = ? AND {column} = ?{kept}"
        row = session.run(sql, (project, given)).fetchone()
        if row is not None:
            return replace(wanted, id=row[0], job=row[1])
    raise DependencyMissing(f"after: project {project} has no job {wanted.job}")
