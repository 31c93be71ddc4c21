"""Counts the jobs that have ended, of which there may be a million. They are counted once in parts
of a few thousand, in the order of their IDs. Later, only the parts are counted again in which this
server has changed a job, and the newest jobs.
"""

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping

from cavvy.domain.jobs import JOB_ENDS, JobPhase
from cavvy.domain.values import Struct
from cavvy.store.drivers import DatabaseSession, RunTransaction

PART = 4096  # jobs of a part
_BOUND = (
    "SELECT MAX(id), COUNT(*) FROM (SELECT id FROM jobs WHERE id > ? ORDER BY id LIMIT ?) AS p1"
)
_ENDS = sorted(JOB_ENDS)
_COUNT = (
    "SELECT project, phase, CAST(COUNT(*) AS BIGINT) FROM jobs WHERE id > ? AND id <= ? AND "
    f"removed IS NULL AND phase IN ({', '.join('?' * len(_ENDS))}) GROUP BY project, phase"
)

Counts = Mapping[tuple[str, JobPhase], int]  # by project and phase


class _Read(Struct, frozen=True):
    """What was counted: parts again, new parts behind them, and the jobs behind these."""

    again: Mapping[int, Counts]
    new: Mapping[str, Counts]  # by the last ID of the part
    rest: Counts


class EndedJobs:
    """The numbers of ended jobs. What other servers change is only seen after `start_over`."""

    def __init__(self, read: RunTransaction) -> None:
        self._read = read
        self._bounds: list[str] = []  # the last ID of each part
        self._parts: list[Counts] = []
        self._total: Counter[tuple[str, JobPhase]] = Counter()  # of all parts
        self._changed: set[int] = set()  # the parts to count again
        self._whole = False  # whether all are to be counted again
        self._counting = asyncio.Lock()
        self._noted: set[str] = set()  # while jobs are counted: their parts may be new

    def note(self, job_ids: Iterable[str]) -> None:
        """Count the parts of these jobs again, which were written."""
        ids = [*job_ids]
        if self._counting.locked():
            self._noted.update(ids)
        self._mark(ids)

    def _mark(self, job_ids: Iterable[str]) -> None:
        places = {bisect_left(self._bounds, each) for each in job_ids}
        self._changed |= {each for each in places if each < len(self._bounds)}

    def start_over(self) -> None:
        """Count all jobs again the next time."""
        self._whole = True

    async def count(self) -> Counts:
        """Return the number of ended jobs of each project and phase that has any."""
        async with self._counting:
            if self._whole:
                self._whole = False
                self._bounds, self._parts = [], []
                self._total, self._changed = Counter(), set()
            changed, self._changed = sorted(self._changed), set()
            spans = [("", *self._bounds)[at : at + 2] for at in changed]
            last = self._bounds[-1] if self._bounds else ""
            try:
                found = await self._read(
                    lambda session: _read(session, dict(zip(changed, spans, strict=True)), last)
                )
            except BaseException:
                self._changed |= {*changed}
                raise
            counts = self._add(found)
            noted, self._noted = self._noted, set()
            self._mark(noted)
            return counts

    def _add(self, found: _Read) -> Counts:
        for at, counts in found.again.items():
            self._total.subtract(self._parts[at])
            self._total.update(counts)
            self._parts[at] = counts
        for bound, counts in found.new.items():
            self._total.update(counts)
            self._bounds.append(bound)
            self._parts.append(counts)
        return +(self._total + Counter(found.rest))


def _read(session: DatabaseSession, again: Mapping[int, tuple[str, ...]], last: str) -> _Read:
    counted = {at: _count(session, *span) for at, span in again.items()}
    new: dict[str, Counts] = {}
    while True:
        bound, jobs = session.run(_BOUND, (last, PART)).fetchall()[0]
        if jobs < PART:
            return _Read(counted, new, _count(session, last, bound) if jobs else {})
        new[bound] = _count(session, last, bound)
        last = bound


def _count(session: DatabaseSession, after: str, last: str) -> Counts:
    rows = session.run(_COUNT, (after, last, *_ENDS)).fetchall()
    return {(project, JobPhase(phase)): jobs for project, phase, jobs in rows}
