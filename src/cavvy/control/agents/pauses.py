"""How long figures of a node may wait before its agent sends them, by what a late report would
lose. All else that agents report, such as a notice or the end of the work, never waits.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

from cavvy.domain.jobs import JobRecord, Node, NodePhase
from cavvy.domain.services import SERVICE_TAG

# Few agents report at once, so that users see new figures immediately. With 2,000 agents or more,
# each reports once a minute, when its figures of the minute are due in any case.
_PAUSE_EACH = timedelta(milliseconds=30)
PAUSE_MOST = timedelta(minutes=1)
# While other servers write to the same database: a report lets this one notice what they have
# changed if the signal of it was lost.
_PAUSE_SHARED = timedelta(seconds=10)
_LEAST = timedelta(seconds=2)  # less is not worth to be said
# How long figures of a rank do not wait after a user has looked at them: a page that follows
# curves asks for them every two seconds.
_LOOKED_AT = timedelta(minutes=1)
_MOST_LOOKED_AT = 1000  # ranks; those that were not looked at for the longest time are dropped


class FigurePauses:
    """How long figures may wait, and at which of them a user has looked a moment ago."""

    def __init__(self) -> None:
        # by job and rank, until when its figures do not wait; the latest one last
        self._looked_at: dict[tuple[str, int], datetime] = {}

    def find(
        self, job: JobRecord, node: Node, agents: int, now: datetime, *, alone: bool
    ) -> timedelta | None:
        """Return how long the figures of the node may wait if so many agents report to this server,
        or None if they may not. `alone` says that no other server works with the database.
        """
        if self.is_looked_at(job.id, node.rank, now):
            return None
        if _is_watched(job) or node.phase is not NodePhase.RUNNING:
            return None
        pause = min(agents * _PAUSE_EACH, PAUSE_MOST if alone else _PAUSE_SHARED)
        return pause if pause >= _LEAST else None

    def look_at(self, job_id: str, ranks: Iterable[int], now: datetime) -> bool:
        """Let figures of these ranks of a job not wait for a minute. Return whether some could have
        waited until now."""
        new = False
        for rank in ranks:
            new |= not self.is_looked_at(job_id, rank, now)
            self._looked_at.pop((job_id, rank), None)
            self._looked_at[job_id, rank] = now + _LOOKED_AT
        while len(self._looked_at) > _MOST_LOOKED_AT:
            del self._looked_at[next(iter(self._looked_at))]
        return new

    def is_looked_at(self, job_id: str, rank: int, now: datetime) -> bool:
        """Return whether a user has looked at figures of the rank a moment ago."""
        until = self._looked_at.get((job_id, rank))
        return until is not None and until > now


def _is_watched(job: JobRecord) -> bool:
    """Whether something is decided by the figures that the job's nodes report: whether it is ended,
    moved or resized, what its sweep tries next, or how many replicas its service has."""
    task = job.task
    limits = task.limits
    return (
        any((limits.deadline, limits.deadline_after, limits.idle, limits.stuck))
        or any((task.elastic, task.stop_early, task.search))
        or SERVICE_TAG in task.tags
    )
