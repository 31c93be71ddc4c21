"""Stores simultaneous submissions in one transaction (PostgreSQL). While one transaction runs,
further submissions gather for the next transaction. The submissions of one transaction share about
a dozen statements, and take the locks on names and on the audit log only once.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from cavvy.domain.audit import AuditEntry
from cavvy.domain.events import Event
from cavvy.domain.jobs import JobRecord
from cavvy.domain.values import Struct, replace
from cavvy.store.accounts import check_open
from cavvy.store.arrays import NewJob
from cavvy.store.audit import PENDING, append_all
from cavvy.store.base import StaleVersion
from cavvy.store.documents import check_readable, storable_event, storable_job
from cavvy.store.drivers import DatabaseSession
from cavvy.store.rows import EVENTS, JOB_COLUMNS, insert_many, job_values
from cavvy.store.writes import DOCUMENT_COLUMNS, insert_all, insert_job

_MOST = 64  # maximum submissions in one transaction
_NUMBERS = (
    "INSERT INTO names (project, name, last) VALUES (?, ?, ?) ON CONFLICT (project, name)"
    " DO UPDATE SET last = names.last + ? RETURNING last"
)

Answer = JobRecord | Exception


class Submission(Struct, frozen=True, kw_only=True):
    """A new job, its first event, and the audit record of its request, if one exists."""

    job: JobRecord
    event: Event
    entry: AuditEntry | None = None


Write = Callable[[Callable[[DatabaseSession], Sequence[Answer]]], Awaitable[Sequence[Answer]]]


class SubmissionGroup:
    """Gathers submissions in groups; `write` runs a function in a transaction."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._waiting: list[tuple[Submission, asyncio.Future[JobRecord]]] = []
        self._running: asyncio.Task[None] | None = None

    async def submit(self, job: JobRecord, event: Event) -> JobRecord:
        """Store a new job, together with the record of the request, and return it as stored. Raises
        StaleVersion, StoreError.
        """
        pending = PENDING.get()
        entry = None if pending is None else pending.claim()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[JobRecord] = loop.create_future()
        self._waiting.append((Submission(job=job, event=event, entry=entry), future))
        if self._running is None or self._running.done():
            self._running = loop.create_task(self._run())
        try:
            return await future
        except Exception:
            if pending is not None and entry is not None:
                pending.give_back()
            raise

    async def _run(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
            submissions = [submission for submission, _ in group]
            answers = await self._store(submissions)
            for (_, future), answer in zip(group, answers, strict=True):
                if future.done():  # the request was cancelled meanwhile
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    async def _store(self, submissions: Sequence[Submission]) -> Sequence[Answer]:
        try:
            return await self._write(lambda session: insert_jobs(session, submissions))
        except Exception as error:  # noqa: BLE001 - each caller gets its error
            if len(submissions) == 1:
                return [error]
        # one of the submissions cannot be stored, so store each by itself
        return [answer for each in submissions for answer in await self._store([each])]


def insert_together(session: DatabaseSession, jobs: Sequence[NewJob]) -> Sequence[str]:
    """Insert jobs and arrays in the open transaction, and return their names. PostgreSQL gets many
    jobs with each statement. Raises StaleVersion, ProjectArchived, DependencyMissing.
    """
    apart = any(new.group or new.members or new.job.after or new.job.array_id for new in jobs)
    if session.driver.is_sqlite or apart:
        return insert_all(session, jobs)
    names = list[str]()
    for start in range(0, len(jobs), _MOST):
        part = jobs[start : start + _MOST]
        submissions = [Submission(job=new.job, event=new.event) for new in part]
        for answer in insert_jobs(session, submissions):
            if isinstance(answer, Exception):
                raise answer
            names.append(answer.name)
    return names


def insert_jobs(session: DatabaseSession, submissions: Sequence[Submission]) -> Sequence[Answer]:
    """Insert new jobs in the open transaction, as `insert_job` does for one job. A submission whose
    job exists already gets the result StaleVersion.
    """
    if len(submissions) == 1:
        stored = insert_job(session, submissions[0].job, submissions[0].event)
        append_all(session, [each.entry for each in submissions if each.entry is not None])
        return [stored]
    inserted = _insert_under_free_names(session, [each.job for each in submissions])
    made = [each for each in submissions if each.job.id in inserted]
    if len(made) > len(inserted):
        raise StaleVersion("a job was submitted twice at the same time")
    if made:
        _insert_rest(session, made, [inserted[each.job.id] for each in made])
    return [
        inserted.get(each.job.id) or StaleVersion(f"job {each.job.id} exists already")
        for each in submissions
    ]


def _insert_under_free_names(
    session: DatabaseSession, jobs: Sequence[JobRecord]
) -> dict[str, JobRecord]:
    """Insert the jobs that do not exist yet. Return the inserted jobs as stored, keyed by ID."""
    new = {job.id: storable_job(replace(job, version=0)) for job in jobs}
    inserted = _insert(session, list(new.values()))
    while left := [job_id for job_id in new if job_id not in inserted]:
        known = session.run("SELECT id FROM jobs WHERE id = ANY(?)", (left,)).fetchall()
        for (job_id,) in known:
            del new[job_id]
        inserted |= _insert(session, _rename(session, [new[each] for each in left if each in new]))
    return inserted


def _insert_rest(
    session: DatabaseSession, made: Sequence[Submission], jobs: Sequence[JobRecord]
) -> None:
    """Insert the documents, events and audit entries of new jobs."""
    rows = [(*check_readable(job), job.origin.snapshot, job.id) for job in jobs]
    insert_many(session, "documents", DOCUMENT_COLUMNS, rows)
    # The jobs are not visible yet, so no other transaction writes their events.
    events = [EVENTS.values(storable_event(each.event)) for each in made]
    insert_many(session, "events", EVENTS.columns, events)
    append_all(session, [each.entry for each in made if each.entry is not None])


def _insert(session: DatabaseSession, jobs: Sequence[JobRecord]) -> dict[str, JobRecord]:
    """Insert the jobs whose IDs and names are free. Return the inserted jobs, keyed by ID. Raises
    ProjectArchived.
    """
    if not jobs:
        return {}
    check_open(session, {job.project for job in jobs})
    # the order is the same in all transactions
    by_name = sorted(jobs, key=lambda job: (job.project, job.name, job.id))
    sql = "SELECT project, name FROM job_arrays WHERE name = ANY(?)"
    arrays = set(session.run(sql, ([job.name for job in by_name],)).fetchall())
    by_name = [job for job in by_name if (job.project, job.name) not in arrays]
    if not by_name:
        return {}
    rows = [job_values(job, 1) for job in by_name]
    then = "ON CONFLICT DO NOTHING RETURNING id"
    done = {job_id for (job_id,) in insert_many(session, "jobs", JOB_COLUMNS, rows, then)}
    return {job.id: job for job in jobs if job.id in done}


def _rename(session: DatabaseSession, jobs: Sequence[JobRecord]) -> Sequence[JobRecord]:
    """Append the next numbers to the names of the jobs."""
    wanted = Counter((job.project, job.name) for job in jobs)
    following = {}
    for (project, name), count in sorted(wanted.items()):
        values = (project, name, 1 + count, count)
        row = session.run(_NUMBERS, values).fetchone()
        assert row is not None
        following[project, name] = row[0] - count
    renamed = []
    for job in jobs:
        following[job.project, job.name] += 1
        renamed.append(replace(job, name=f"{job.name}-{following[job.project, job.name]}"))
    return renamed
