"""Counts jobs by phase, how they wait, and how their attempts start and end, for the server's
metrics. The counts of waits and attempts are of the changes that this server has written since it
started.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from math import inf

from cavvy.domain.jobs import JOB_ENDS, Attempt, AttemptPhase, JobPhase, JobRecord
from cavvy.store.base import AtomicWrite
from cavvy.store.sql import ProjectJobs, Store

# upper bounds in seconds: from a warm machine to a day in a queue
_BOUNDS_S = (1, 5, 15, 30, 60, 120, 300, 600, 1800, 3600, 6 * 3600, 24 * 3600, inf)
_KNOWN_MAX = 20_000  # attempts whose last phase is remembered
# While other servers may change jobs, how long the count of ended jobs is used again, for each of
# them: to count one takes about 1 us.
FRESH = timedelta(microseconds=100)
# The same while there is no other server, if the answer to a write was lost.
_FRESH_ALONE = timedelta(hours=1)
_LIVE = frozenset(JobPhase) - JOB_ENDS
_STARTED = frozenset({AttemptPhase.RUNNING, AttemptPhase.ENDING, AttemptPhase.KEPT})


class JobCounts:
    """Counts the jobs of all projects by phase. Those that have ended may be a million. Without
    other servers, only parts of them are counted again in which jobs have changed, and with other
    servers, all of them, but only so often that a small part of a core suffices."""

    def __init__(self, store: Store, is_alone: Callable[[], bool] = lambda: True) -> None:
        self._store, self._is_alone = store, is_alone
        self._total = 0
        self._alone = True  # at the last count
        self._at = datetime.min.replace(tzinfo=UTC)

    async def count(self, now: datetime) -> Sequence[ProjectJobs]:
        """Return the number of jobs of each project and phase that has any, sorted. While there are
        several servers, the numbers of many ended jobs may be a moment old."""
        before, self._alone = self._alone, self._is_alone()
        fresh = _FRESH_ALONE if self._alone else self._total * FRESH
        # what another server has changed is not known also after it has ended
        if now - self._at >= fresh or before != self._alone:
            self._store.ended_jobs.start_over()
            self._at = now
        ended = await self._store.ended_jobs.count()
        self._total = sum(ended.values())
        found = [ProjectJobs(*place, jobs, None) for place, jobs in ended.items()]
        return sorted([*found, *await self._store.count_by_project(_LIVE)])


class Durations:
    """The number of durations up to each bound in seconds, and their sum."""

    def __init__(self) -> None:
        self.counts: dict[float, int] = dict.fromkeys(_BOUNDS_S, 0)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[_BOUNDS_S[bisect_left(_BOUNDS_S, seconds)]] += 1
        self.total_s += seconds


class AttemptCounts:
    """`since` is when the server started: changes of phases before this time do not count.

    `waits` are by project, `starts` by project and provider, `ends` by project, provider and
    outcome.
    """

    def __init__(self, since: datetime) -> None:
        self._since = since
        self._phases: dict[str, AttemptPhase] = {}  # by attempt, the longest unchanged one first
        self.waits: dict[str, Durations] = {}
        self.starts: dict[tuple[str, str], Durations] = {}
        self.ends: Counter[tuple[str, str, str]] = Counter()

    def note(self, changes: AtomicWrite) -> None:
        """Count the changes of attempts, which have been written."""
        if changes.attempts:
            jobs = {job.id: job for job in changes.jobs}
            for attempt in changes.attempts:
                self._note(attempt, jobs)

    def _note(self, attempt: Attempt, jobs: Mapping[str, JobRecord]) -> None:
        before, phase = self._phases.pop(attempt.id, None), attempt.phase
        self._phases[attempt.id] = phase
        if len(self._phases) > _KNOWN_MAX:
            del self._phases[next(iter(self._phases))]
        if before is phase or attempt.since < self._since:
            return
        place = attempt.project, attempt.offer.provider
        if before is None and attempt.number == 1 and (job := jobs.get(attempt.job_id)):
            waits = self.waits.setdefault(attempt.project, Durations())
            waits.add(max(0.0, (attempt.created_at - _find_begin(job)).total_seconds()))
        if phase in _STARTED and before not in _STARTED and attempt.running_at is not None:
            took = attempt.running_at - attempt.created_at
            self.starts.setdefault(place, Durations()).add(max(0.0, took.total_seconds()))
        if phase is AttemptPhase.ENDED:
            self.ends[*place, attempt.outcome or "none"] += 1


def _find_begin(job: JobRecord) -> datetime:
    """Return when the job could start for the first time."""
    times: Iterable[datetime | None] = (job.submitted_at, job.held_until, job.not_before)
    return max(each for each in times if each is not None)
