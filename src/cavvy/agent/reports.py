"""What the task reports to its agent over the socket `$CAVVY_NOTICE`."""

from __future__ import annotations

from .config import BadConfig
from .ends import describe_failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .config import ConfigFields

# the longest time for saving a checkpoint, in seconds, that a task may report
LONGEST_SAVE_S = 86400.0


class TaskReports:
    """The task's reports so far."""

    def __init__(self) -> None:
        self.again = False  # whether the task has saved its state and asked to be run again
        self.failure = ""  # how the task failed, in its newest report of a failure
        self.cost_s: float | None = None  # seconds that saving the newest checkpoint took

    def hear(self, fields: ConfigFields) -> None:
        """Record a report of the task. Raises BadConfig."""
        self.again = self.again or fields.inner("again") is not None
        failed, saved = fields.inner("failed"), fields.inner("saved")
        if failed is not None:
            self.failure = describe_failure(failed)
        if saved is not None:
            seconds = saved.read("seconds", "float")
            if not 0 <= seconds <= LONGEST_SAVE_S:
                raise BadConfig(f"`saved.seconds` is {seconds!r}, which is not a valid duration")
            self.cost_s = seconds
