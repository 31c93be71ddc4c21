"""Assigns named machines to waiting jobs. This module stores all state in the store."""

from collections.abc import Callable, Sequence
from datetime import datetime

from cavvy.control.decide.machines import (
    MachineIsBusy,
    MachineIsFree,
    MachineIsReady,
    MachineIsUnfit,
    decide_turn_on_machine,
    find_gang,
    is_leaving,
    record_holder,
)
from cavvy.control.warm.pool import WarmPool
from cavvy.domain.jobs import Attempt, JobRecord
from cavvy.domain.machines import NamedMachine
from cavvy.domain.offers import Offer
from cavvy.domain.policies import BoundPolicy
from cavvy.store.base import RowNotFound
from cavvy.store.sql import Store


class MachinePool:
    """Reads machines and their gangs, and assigns gangs of machines to jobs."""

    def __init__(self, store: Store, warm: WarmPool) -> None:
        self._store = store
        self._warm = warm

    async def read(self, project: str, name: str) -> NamedMachine | None:
        """Return the machine's row, or None if no such machine exists."""
        try:
            return await self._store.machine(project, name)
        except RowNotFound:
            return None

    async def gang_of(
        self, machine: NamedMachine | None
    ) -> tuple[JobRecord | None, Attempt | None]:
        """Return the machine's newest job, and the machine's gang if it has one."""
        if machine is None or machine.job_id is None:
            return None, None
        try:
            holder = await self._store.job(machine.job_id)
        except RowNotFound:
            return None, None
        return holder, find_gang(await self._store.attempts(holder.id), holder)

    async def is_leaving(self, holder: JobRecord | None) -> bool:
        """Return whether nodes of the machine's newest job are still being released."""
        return holder is not None and is_leaving(await self._store.attempts(holder.id))

    async def give_turn(
        self,
        job: JobRecord,
        now: datetime,
        policies: Sequence[BoundPolicy],
        find_limit: Callable[[Offer], str],
    ) -> MachineIsBusy | MachineIsUnfit | NamedMachine | None:
        """Start the job on its machine and return None. If the job must wait or fail, return why.
        If the machine has no gang, return a changed row of the machine. The caller must write this
        row when it starts a new gang for the job. `find_limit` returns why a limit keeps the job
        from the machine's gang, or "".
        """
        assert job.task.machine is not None
        machine = await self.read(job.project, job.task.machine)
        holder, gang = await self.gang_of(machine)
        match decide_turn_on_machine(job, machine, holder, gang, now, policies):
            case MachineIsFree():
                return record_holder(machine, job, bought_at=now)
            case MachineIsReady(gang=kept):
                assert holder is not None
                if kept.offer.by_user and holder.user != job.user:
                    return MachineIsUnfit(
                        reason=f"machine {job.task.machine} runs as the Unix user of {holder.user},"
                        f" and this job is of {job.user}"
                    )
                if limit := find_limit(kept.offer):
                    return MachineIsBusy(reason=limit)
                ready = await self._warm.prepare(kept, holder, now)
                if ready is None:
                    return MachineIsBusy(
                        reason=f"machine {job.task.machine} is not yet ready for its next job"
                    )
                row = record_holder(machine, job, bought_at=None)
                await self._warm.hand_over(ready, job, now, row)
                return None
            case MachineIsBusy() | MachineIsUnfit() as answer:
                return answer
