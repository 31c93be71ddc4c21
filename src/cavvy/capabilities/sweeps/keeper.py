"""What the core asks of sweeps: `control.sweep_keeper.SweepKeeper`."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from importlib.util import find_spec

from cavvy.capabilities.sweeps.choices import SweepSearcher
from cavvy.capabilities.sweeps.early import EarlyStopper
from cavvy.control.decide.rows import RowChanges
from cavvy.control.parts import ControlParts
from cavvy.domain.jobs import JobRecord
from cavvy.domain.tasks import TaskSpec
from cavvy.packages import extra_command
from cavvy.store.base import OwnWrite


class SweepsOfStore:
    """Chooses values and judges reports by what the store has. It reconciles nothing."""

    waits_outside = False

    def __init__(self, parts: ControlParts) -> None:
        self.search = SweepSearcher(parts.store)
        self.early = EarlyStopper(parts.store)

    def find_objection(self, task: TaskSpec) -> tuple[str, str] | None:
        if task.search is None or find_spec("optuna") is not None:
            return None
        return (
            "search: the server has no Optuna, which decides which values jobs get",
            f"install it on the server: {extra_command('tuning')}",
        )

    async def settle(self, job: JobRecord, now: datetime) -> JobRecord:
        return await self.search.settle(job, now)

    async def check(
        self, job: JobRecord, progress: Mapping[str, float | str], now: datetime
    ) -> tuple[Sequence[OwnWrite], RowChanges]:
        return await self.early.check(job, progress, now)

    def owns(self, key: str) -> bool:
        return False

    async def unfinished(self) -> Sequence[str]:
        return ()

    async def reconcile(self, key: str) -> timedelta | None:
        return None
