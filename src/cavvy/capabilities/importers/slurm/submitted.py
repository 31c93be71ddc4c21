"""The rows of jobs that programs of jobs have submitted."""

import zlib
from collections.abc import Sequence
from datetime import datetime, timedelta

from cavvy.domain.values import Struct
from cavvy.store.documents import to_micros
from cavvy.store.drivers import DatabaseSession

_KEPT = timedelta(days=90)
_BY_ASK = "SELECT job_id FROM submitted_jobs WHERE parent = ? AND ask = ?"
_ROOT = "SELECT root FROM submitted_jobs WHERE job_id = ?"
_COUNT = "SELECT COUNT(*) FROM submitted_jobs WHERE root = ?"
_PUT = (
    "INSERT INTO submitted_jobs (project, parent, ask, root, job_id, at) VALUES (?, ?, ?, ?, ?, ?)"
)
_OLD = "DELETE FROM submitted_jobs WHERE project = ? AND at < ?"
_REMOVE = "DELETE FROM submitted_jobs WHERE parent = ? AND ask = ?"
_LIST = "SELECT job_id, root FROM submitted_jobs WHERE root = ?"


class TooMany(Exception):
    """The jobs of this chain have submitted as many jobs as they may."""


class SubmissionRow(Struct, frozen=True, kw_only=True):
    """A submission by a program of the job `parent`, or of a member of the array `array`."""

    project: str
    parent: str
    array: str | None
    ask: str
    job_id: str
    at: datetime


def number_of(job_id: str) -> int:
    """Return the number of a job or an array for Slurm, which `node_tools` computes, too."""
    return zlib.crc32(job_id.encode()) % 90_000_000 + 10_000_000


def find_root(session: DatabaseSession, job_id: str, array: str | None) -> str:
    """Return the first job of the chain to which a job belongs."""
    for each in (job_id, array):
        row = session.run(_ROOT, (each,)).fetchone() if each else None
        if row is not None:
            return str(row[0])
    return array or job_id


def put(session: DatabaseSession, new: SubmissionRow, most: int) -> str:
    """Store a submission before its job, and return the ID of the job: that of an earlier try, or
    the new one. Raises TooMany.
    """
    row = session.run(_BY_ASK, (new.parent, new.ask)).fetchone()
    if row is not None:
        return str(row[0])
    root = find_root(session, new.parent, new.array)
    [[count]] = session.run(_COUNT, (root,)).fetchall()
    if count >= most:
        raise TooMany
    session.run(_OLD, (new.project, to_micros(new.at - _KEPT)))
    values = (new.project, new.parent, new.ask, root, new.job_id, to_micros(new.at))
    session.run(_PUT, values)
    return new.job_id


def remove(session: DatabaseSession, parent: str, ask: str) -> None:
    """Forget a submission that was refused."""
    session.run(_REMOVE, (parent, ask))


def list_chain(session: DatabaseSession, job_id: str, array: str | None) -> Sequence[str]:
    """Return the IDs of the jobs and arrays of a job's chain, with the first one."""
    root = find_root(session, job_id, array)
    return [root, *(str(row[0]) for row in session.run(_LIST, (root,)).fetchall())]
