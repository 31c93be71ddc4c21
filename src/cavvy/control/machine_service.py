"""Handles users' requests about named machines: list, start, stop, keep and forget. The module also
handles the submission of jobs to machines.

Errors, which are subclasses of JobServiceError:

* MachineUnfit: the machine cannot run the task
* MachineStopped: the machine has no nodes
* MachineInUse: the machine still has nodes or unfinished jobs
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

from cavvy.control.clock import ControlClock
from cavvy.control.decide.warm_pool import (
    complete_task,
    extend_machine,
    make_start,
    object_to_task,
    state_of,
)
from cavvy.control.job_service import JobService, JobServiceError
from cavvy.control.running_costs import sum_gang
from cavvy.control.unit_of_work import make_write
from cavvy.control.warm_pool import MachinePool
from cavvy.costs.metering import total
from cavvy.domain.jobs import Attempt, RunOrigin
from cavvy.domain.machines import MachineStatus, NamedMachine
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import Money
from cavvy.domain.values import Struct, replace
from cavvy.store.base import AtomicWrite, ProjectFilter, RowNotFound, StaleVersion
from cavvy.store.sql import Store

_TRIES = 10  # tries of a write that fails because a row was changed meanwhile


class MachineUnfit(JobServiceError):
    """Raised if the machine cannot run the task."""


class MachineStopped(JobServiceError):
    """Raised if the machine has no nodes."""


class MachineInUse(JobServiceError):
    """Raised if the machine still has nodes or unfinished jobs."""


class MachineSubmission(Struct, frozen=True, kw_only=True):
    """A task as it will run on its machine, the row of the machine, and the machine's gang (None if
    there is none).
    """

    task: TaskSpec
    machine: NamedMachine | None
    gang: Attempt | None


class MachineService:
    """Handles users' requests about machines. `hint` adds a job to the worklist."""

    def __init__(
        self,
        store: Store,
        clock: ControlClock,
        pool: MachinePool,
        jobs: JobService,
        hint: Callable[[str], None],
    ) -> None:
        self._store, self._clock, self._pool, self._jobs = store, clock, pool, jobs
        self._hint = hint

    async def list(self, project: ProjectFilter) -> Sequence[MachineStatus]:
        """Return the machines of these projects."""
        return [await self._status(each) for each in await self._store.machines(project)]

    async def get(self, project: str, name: str) -> MachineStatus:
        """Return one machine. Raises RowNotFound."""
        return await self._status(await self._store.machine(project, name))

    async def prepare(self, task: TaskSpec) -> MachineSubmission:
        """Add the settings of a task's machine to the task. Raises MachineUnfit."""
        assert task.machine is not None
        machine = await self._pool.read(task.project, task.machine)
        _, gang = await self._pool.gang_of(machine)
        task = complete_task(task, machine)
        if machine and gang and (reason := object_to_task(task, machine, gang)):
            raise MachineUnfit(reason)
        return MachineSubmission(task=task, machine=machine, gang=gang)

    async def record(self, found: MachineSubmission, user: str, *, consented: bool) -> None:
        """Store the machine's row, with the task's keep time, before the task is submitted."""
        row, task = found.machine, found.task
        if row is None:
            assert task.machine is not None
            row = NamedMachine(project=task.project, name=task.machine, user=user, task=task)
        changed = replace(
            row,
            task=replace(row.task, keep=task.keep),
            consented=row.consented or (consented and user == row.user),
        )
        if changed != found.machine:
            with suppress(StaleVersion):  # another request has just stored the machine
                await self._store.commit(AtomicWrite(machines=[changed]))

    async def start_task(self, project: str, name: str) -> tuple[TaskSpec, RunOrigin]:
        """Return the task that starts the machine, and the origin of the files that its setup uses.
        Raises RowNotFound.
        """
        machine = await self._store.machine(project, name)
        holder, _ = await self._pool.gang_of(machine)
        origin = RunOrigin() if holder is None else RunOrigin(snapshot=holder.origin.snapshot)
        return make_start(machine), origin

    async def stop(self, project: str, name: str) -> MachineStatus:
        """Stop the machine's jobs and release its gang. Raises RowNotFound."""
        machine = await self._store.machine(project, name)
        jobs = [*await self._store.jobs_of_machine(project, name)]
        if machine.job_id is not None and machine.job_id not in jobs:
            jobs.append(machine.job_id)
        # newest first, so that no waiting job takes the machine over in between
        for job_id in reversed(jobs):
            reason = f"machine {name} is being stopped"
            with suppress(RowNotFound):  # the machine's last job has already been removed
                await self._jobs.stop(project, job_id, reason, release=True)
        return await self._status(machine)

    async def keep(self, project: str, name: str, length: timedelta) -> MachineStatus:
        """Keep the machine's gang for the time `length` after its work or, if the gang is idle,
        from now. Raises RowNotFound, MachineStopped.
        """
        for _ in range(_TRIES):
            machine = await self._store.machine(project, name)
            holder, gang = await self._pool.gang_of(machine)
            if holder is None or gang is None:
                raise MachineStopped(f"machine {name} is stopped")
            row = replace(machine, task=replace(machine.task, keep=length))
            spent = total(await self._store.charges(holder.id))
            changes = extend_machine(holder, gang, length, spent, self._clock.now())
            with suppress(StaleVersion):
                await self._store.commit(make_write(replace(changes, machine=row)))
                self._hint(holder.id)
                return await self._status(replace(row, version=row.version + 1))
        raise StaleVersion(f"machine {name} kept changing during the request; try again")

    async def forget(self, project: str, name: str) -> None:
        """Delete the row of a stopped machine. Raises RowNotFound, MachineInUse."""
        machine = await self._store.machine(project, name)
        holder, gang = await self._pool.gang_of(machine)
        leaving = await self._pool.is_leaving(holder)
        if gang is not None or leaving or await self._store.jobs_of_machine(project, name):
            raise MachineInUse(f"machine {name} has nodes or unfinished jobs")
        await self._store.delete_machine(machine)

    async def _status(self, machine: NamedMachine) -> MachineStatus:
        holder, gang = await self._pool.gang_of(machine)
        leaving = await self._pool.is_leaving(holder)
        jobs = await self._store.jobs_of_machine(machine.project, machine.name)
        busy = machine.job_id in jobs and gang is not None
        spent = Money(0)
        if gang is not None:
            spent = await sum_gang(self._store, gang, self._clock.now())
        return MachineStatus(
            machine=machine,
            state=state_of(gang, holder, leaving=leaving),
            holder=holder,
            gang=gang,
            waiting=len(jobs) - busy,
            spent=spent,
        )
