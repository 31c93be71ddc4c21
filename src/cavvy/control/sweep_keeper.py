"""What the core asks of a capability for sweeps that learn."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Protocol, runtime_checkable

from cavvy.control.decide.rows import RowChanges
from cavvy.domain.jobs import JobRecord
from cavvy.domain.tasks import TaskSpec
from cavvy.store.base import OwnWrite

# why values cannot be chosen by results, and jobs not be stopped early
NO_SWEEPS = "this installation has no capability that searches, or stops jobs early"


@runtime_checkable
class SweepKeeper(Protocol):
    """A reconciler that chooses the values of jobs of sweeps, and stops such jobs early: what the
    core asks it, since task files say how (`best`, `trials`, `stop_early`).
    """

    def find_objection(self, task: TaskSpec) -> tuple[str, str] | None:
        """Return why this server cannot run such a task, and what to do, or None."""
        ...

    async def settle(self, job: JobRecord, now: datetime) -> JobRecord:
        """Return the job, which starts, with its values. Raises StaleVersion, RowNotFound."""
        ...

    async def check(
        self, job: JobRecord, progress: Mapping[str, float | str], now: datetime
    ) -> tuple[Sequence[OwnWrite], RowChanges]:
        """Return what to store of a report, and the end of the job if it stops early."""
        ...
