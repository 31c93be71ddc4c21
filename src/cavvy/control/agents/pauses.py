"""How long figures of a node may wait before its agent sends them, by what a late report would
lose. All else that agents report, such as a notice or the end of the work, never waits.
"""

from datetime import timedelta

from cavvy.domain.jobs import JobRecord, Node, NodePhase
from cavvy.domain.services import SERVICE_TAG

# Few agents report at once, so that users see new figures immediately. With 2,000 agents or more,
# each reports once a minute, when its figures of the minute are due in any case.
_PAUSE_EACH = timedelta(milliseconds=30)
PAUSE_MOST = timedelta(minutes=1)
# While other servers write to the same database: a report lets this one notice what they have
# changed if the signal of it was lost.
PAUSE_SHARED = timedelta(seconds=10)
_LEAST = timedelta(seconds=2)  # less is not worth to be said


def find_pause(job: JobRecord, node: Node, agents: int, *, alone: bool) -> timedelta | None:
    """Return how long the figures of the node may wait if so many agents report to this server, or
    None if they may not. `alone` says that no other server works with the database.
    """
    if is_watched(job) or node.phase is not NodePhase.RUNNING:
        return None
    pause = min(agents * _PAUSE_EACH, PAUSE_MOST if alone else PAUSE_SHARED)
    return pause if pause >= _LEAST else None


def is_watched(job: JobRecord) -> bool:
    """Whether something is decided by the figures that the job's nodes report: whether it is ended,
    moved or resized, what its sweep tries next, or how many replicas its service has."""
    task = job.task
    limits = task.limits
    return (
        any((limits.deadline, limits.deadline_after, limits.idle, limits.stuck))
        or any((task.elastic, task.stop_early, task.search))
        or SERVICE_TAG in task.tags
    )
