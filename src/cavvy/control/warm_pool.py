"""Tracks the gangs that are kept warm after their work. A waiting job takes over a warm gang in one
write to the database.

Assigns named machines to waiting jobs. This module stores all state in the store.
"""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from cavvy.control.agents.sessions import AgentSessions
from cavvy.control.clock import ControlClock
from cavvy.control.decide.bills import closing_charges
from cavvy.control.decide.warm_pool import (
    MachineIsBusy,
    MachineIsFree,
    MachineIsReady,
    MachineIsUnfit,
    decide_turn_on_machine,
    find_gang,
    fits,
    hand_over,
    is_fresh,
    is_kept,
    is_leaving,
    list_kept,
    record_holder,
)
from cavvy.control.unit_of_work import make_write
from cavvy.domain.events import Charge
from cavvy.domain.jobs import Attempt, AttemptPhase, JobRecord
from cavvy.domain.machines import NamedMachine
from cavvy.domain.offers import Offer
from cavvy.domain.policies import BoundPolicy
from cavvy.domain.values import Struct, replace
from cavvy.store.base import RowNotFound
from cavvy.store.sql import Store

_SHARED_AGE = timedelta(seconds=1)

Allows = Callable[[Offer], bool]  # returns whether a job may run on an offer now


class WarmGang(Struct, frozen=True, kw_only=True):
    """A gang that a job may take over, with the gang's former job and that job's final charges."""

    attempt: Attempt
    former: JobRecord
    charges: list[Charge]


class WarmGangNotReady(Struct, frozen=True, kw_only=True):
    """A gang that fits the job but cannot be taken over yet. The gang's former job ended so
    recently that the agents do not wait for work yet, or the job's final charges are unknown.
    """

    attempt: Attempt


class WarmPool:
    """Tracks warm gangs. The gangs are read from the store once. If other servers also keep gangs
    (`shared`), the gangs are read again after one second.
    """

    def __init__(
        self, store: Store, clock: ControlClock, agents: AgentSessions, *, shared: bool = False
    ) -> None:
        self._store, self._clock, self._agents, self._shared = store, clock, agents, shared
        self._read_at: datetime | None = None
        self._kept: dict[str, Attempt] | None = None  # the warm gangs' attempts, by attempt ID

    def note(self, attempt: Attempt) -> None:
        """Update the list of warm gangs. The method must be called after each write of an
        attempt."""
        if self._kept is not None:
            if attempt.phase is AttemptPhase.KEPT:
                self._kept[attempt.id] = attempt
            else:
                self._kept.pop(attempt.id, None)

    async def any_for(self, job: JobRecord) -> bool:
        """Return whether the job's project has any warm gang."""
        return len(await self._of(job.project)) > 0

    async def find(self, job: JobRecord, allows: Allows) -> WarmGang | WarmGangNotReady | None:
        """Return the warm gang that fits the job. If several gangs fit, the ready gang that has
        been kept longest is preferred."""
        soon: WarmGangNotReady | None = None
        for known in await self._of(job.project):
            now = self._clock.now()
            waits, fresh = self._agents.waits(known), is_fresh(known, now)
            if not (waits or fresh) or not allows(known.offer):
                continue
            try:
                former = await self._store.job(known.job_id)
            except RowNotFound:
                continue
            attempts = await self._store.attempts(known.job_id)
            attempt = next((each for each in attempts if each.id == known.id), None)
            if attempt is None or not is_kept(attempt, now) or not fits(attempt, former, job):
                continue
            ready = await self.prepare(attempt, former, now)
            if ready is not None:
                return ready
            if fresh:
                soon = soon or WarmGangNotReady(attempt=attempt)
        return soon

    async def prepare(self, kept: Attempt, former: JobRecord, now: datetime) -> WarmGang | None:
        """Return the warm gang with the final charges of its former job, or None if no job can take
        the gang over yet.
        """
        stored, nodes = await self._store.charges(former.id), await self._store.nodes(kept.id)
        charges = closing_charges(kept, stored, now, nodes)
        if charges is None or not self._agents.waits(kept):
            return None
        return WarmGang(attempt=kept, former=former, charges=charges)

    async def hand_over(
        self, kept: WarmGang, job: JobRecord, now: datetime, machine: NamedMachine | None = None
    ) -> None:
        """Assign the gang to a new attempt of the job, and write the machine's row, if any. Raises
        StaleVersion if the gang, the job or the machine has changed meanwhile.
        """
        changes = hand_over(kept.attempt, kept.former, kept.charges, job, now)
        changes = replace(changes, machine=machine)
        await self._store.commit(make_write(changes))
        for attempt in changes.attempts:
            self.note(attempt)
        self._agents.forget(kept.attempt)

    async def _of(self, project: str) -> list[Attempt]:
        now = self._clock.now()
        if self._shared and self._read_at is not None and now - self._read_at >= _SHARED_AGE:
            self._kept = None
        if self._kept is None:
            kept = await self._store.kept_attempts()
            self._kept, self._read_at = {each.id: each for each in kept}, now
        return list_kept(self._kept.values(), project)


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
