"""Records what the task reports to its agent over the socket `$CAVVY_NOTICE`."""

from __future__ import annotations

from .config import BadConfig
from .ends import describe_failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .config import ConfigFields

# the longest time for saving a checkpoint, in seconds, that a task may report
LONGEST_SAVE_S = 86400.0
MOST_PROCESSES = 4096  # on one node; this limits the memory that reports of failures use


class TaskReports:
    """The task's reports so far."""

    def __init__(self) -> None:
        self.again = False  # whether the task has saved its state and asked to be restarted
        # how the task failed, keyed by the number of the reporting process on this node
        self._failures: dict[int, str] = {}
        self.cost_s: float | None = None  # seconds that saving the newest checkpoint took
        # the number of checkpoints, and the seconds of all their pauses
        self._saves, self._saves_s = 0, 0.0

    @property
    def failure(self) -> str:
        """The newest report of how the task failed, or "" if no report was sent."""
        return next(reversed(self._failures.values()), "")

    def hear(self, fields: ConfigFields) -> None:
        """Record a report of the task. Raises BadConfig."""
        self.again = self.again or fields.inner("again") is not None
        failed, saved = fields.inner("failed"), fields.inner("saved")
        started = fields.inner("started")
        if started is not None:  # a new process has replaced the process that failed
            self._failures.pop(_read_process(started), None)
        if failed is not None:
            process, failure = _read_process(failed), describe_failure(failed)
            self._failures.pop(process, None)
            self._failures[process] = failure
        if saved is not None:
            seconds = saved.read("seconds", "float")
            if not 0 <= seconds <= LONGEST_SAVE_S:
                raise BadConfig(f"`saved.seconds` is {seconds!r}, which is not a valid duration")
            self.cost_s = seconds
            self._count(seconds)

    def saw(self, seconds: float) -> None:
        """Count a checkpoint that the agent has found, and record how long the task took to write
        the checkpoint. Do nothing if the task reports its checkpoints itself.
        """
        if self.cost_s is None:
            self._count(seconds)

    def _count(self, seconds: float) -> None:
        self._saves, self._saves_s = self._saves + 1, self._saves_s + seconds

    @property
    def totals(self) -> dict[str, float]:
        """The telemetry values about the checkpoints, or {} before the first checkpoint."""
        if not self._saves:
            return {}
        return {"checkpoints": self._saves, "checkpoint_pause_s": round(self._saves_s, 3)}


def _read_process(fields: ConfigFields) -> int:
    """Return the number of the reporting process on this node. Raises BadConfig."""
    process = int(fields.read("process", "int", 0))
    if not 0 <= process < MOST_PROCESSES:
        raise BadConfig(f"`process` is {process}, which is not below {MOST_PROCESSES}")
    return process
