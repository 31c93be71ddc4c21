"""The service that turns users' requests into rows: submit, stop, retry, drill. The reconcilers do
the rest.

Errors:

* JobServiceError
  + TooLate        the job has ended, or has not begun: the wish has nothing to act on
  + UnsupportedTask    the task asks for what this server cannot do yet
"""

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from cavvy.control.clock import ControlClock
from cavvy.control.deferred import Deferred
from cavvy.control.schedules import allocation_of, say_next
from cavvy.domain.events import Event
from cavvy.domain.jobs import (
    FAR,
    JOB_ENDS,
    Attempt,
    AttemptPhase,
    Job,
    JobPhase,
    RunOrigin,
    StopCause,
)
from cavvy.domain.tasks import Delivery, Task
from cavvy.domain.units import Money
from cavvy.store.base import AtomicWrite, StaleVersion

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no i, l, o, u
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_RANDOM_BITS = 30
_TRIES = 10  # of a write that meets a newer version
_LIVE = frozenset({AttemptPhase.LAUNCHING, AttemptPhase.BOOTING, AttemptPhase.RUNNING})


class JobServiceError(Exception):
    """Base of what this service refuses. `code` is stable; `hint` says what to do."""

    code = "refused"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class TooLate(JobServiceError):
    """The job is not in a phase in which this can be done."""

    code = "too-late"


class UnsupportedTask(JobServiceError):
    """The task asks for what this server cannot do yet."""

    code = "not-honoured"


class JobIds:
    """Makes ids of 16 characters that sort by time, also within one millisecond."""

    def __init__(
        self, clock: ControlClock, random_bits: Callable[[int], int] = secrets.randbits
    ) -> None:
        self._clock = clock
        self._random_bits = random_bits
        self._last = 0

    def make(self) -> str:
        """The next id: 50 bits of milliseconds, 30 of chance."""
        millis = (self._clock.now() - _EPOCH) // timedelta(milliseconds=1)
        value = (millis << _RANDOM_BITS) | self._random_bits(_RANDOM_BITS)
        self._last = value if value > self._last else self._last + 1
        return "".join(_ALPHABET[(self._last >> shift) & 31] for shift in range(75, -5, -5))


def gang_name(installation: str, attempt: str) -> str:
    """The name under which a place knows an attempt: ours to recognise, and of no other
    installation.
    """
    return f"rm-{hashlib.sha256(installation.encode()).hexdigest()[:8]}-{attempt}"


class JobService:
    """Takes users' wishes. `hint` puts a job's key on the worklist, `arrived` says that one is
    queued.
    """

    def __init__(
        self,
        store: Deferred,
        clock: ControlClock,
        ids: JobIds,
        *,
        hint: Callable[[str], None],
        arrived: Callable[[], None],
        notify: Callable[[str, Delivery], None],
    ) -> None:
        self._store = store.as_store()
        self._put = store.put
        self._clock = clock
        self._ids = ids
        self._hint = hint
        self._arrived = arrived
        self._notify = notify

    async def submit(
        self,
        task: Task,
        origin: RunOrigin,
        project: str,
        *,
        user: str = "",
        consented: bool = False,
        ceiling: Money | None = None,
        job_id: str | None = None,
    ) -> Job:
        """Queue a job; its name is the task's, or the first free of name-2, name-3... Raises
        UnsupportedTask.

        `job_id` is an id that the caller proposes, so that a repeated submission is found out.
        Raises StaleVersion if taken.
        """
        now = self._clock.now()
        try:
            not_before, held_until = allocation_of(task, now)
        except ValueError as error:
            raise UnsupportedTask(f"schedule.cron: {error}", "write one that comes") from error
        job = Job(
            id=job_id or self._ids.make(),
            project=project,
            name=task.name,
            user=user,
            task=task,
            origin=origin,
            submitted_at=now,
            since=now,
            not_before=not_before,
            held_until=held_until,
            consented=consented,
            ceiling=ceiling,
        )
        start = held_until if held_until is not None and held_until > now else not_before
        at_once = start in (None, FAR)
        text = "submitted" if at_once else f"submitted, to start at {start:%Y-%m-%d %H:%M:%S} UTC"
        if held_until is not None:
            repeats = task.schedule is not None and task.schedule.cron is not None
            job = replace(job, reason=say_next(held_until) if repeats else text)
        fact = "submitted" if at_once else "scheduled"
        stored = await self._store.submit(job, _event(job, now, "queued", text, fact))
        if (
            held_until is not None
            or task.limits.deadline is not None
            or task.limits.deadline_after is not None
        ):
            self._hint(stored.id)
        self._arrived()
        return stored

    async def stop(self, project: str, name: str, reason: str = "stopped by the user") -> Job:
        """Stop a job: at once where it is queued, else with its grace. Raises NotFound.

        Of one that has ended already, only what it keeps is given back.
        """
        for _ in range(_TRIES):
            job = await self._store.find_job(project, name)
            try:
                if job.phase in JOB_ENDS:
                    await self._give_back(job)
                if job.phase in JOB_ENDS or job.stop_reason is not None:
                    return job
                return await self._stop(job, reason)
            except StaleVersion:
                continue
        raise StaleVersion(f"job {name} is being changed all the time")

    async def retry(self, project: str, name: str) -> Job:
        """Queue a failed or stopped job again, with fresh counts of retries. Raises NotFound,
        TooLate.
        """
        for _ in range(_TRIES):
            job = await self._store.find_job(project, name)
            if job.phase not in (JobPhase.FAILED, JobPhase.STOPPED):
                hint = (
                    "`cavvy rerun` submits it again"
                    if job.phase is JobPhase.DONE
                    else "it is still under way"
                )
                raise TooLate(
                    f"job {job.name} is {job.phase}; only failed and stopped jobs can be retried",
                    hint,
                )
            try:
                return await self._retry(job)
            except StaleVersion:
                continue
        raise StaleVersion(f"job {name} is being changed all the time")

    async def drill_preempt(self, project: str, name: str, notice: timedelta) -> Attempt:
        """Take the job's nodes away as a spot market would, `notice` from now. Raises NotFound,
        TooLate.
        """
        for _ in range(_TRIES):
            job = await self._store.find_job(project, name)
            attempts = await self._store.attempts(job.id)
            live = [x for x in attempts if x.number == job.attempt and x.phase in _LIVE]
            if not live or job.phase in JOB_ENDS:
                raise TooLate(
                    f"job {job.name} is {job.phase}; it has no node to take away",
                    "wait until it runs",
                )
            try:
                return await self._drill(job, live[0], notice)
            except StaleVersion:
                continue
        raise StaleVersion(f"job {name} is being changed all the time")

    async def _stop(self, job: Job, reason: str) -> Job:
        now = self._clock.now()
        phase = JobPhase.STOPPED if job.phase is JobPhase.QUEUED else JobPhase.STOPPING
        stopped = replace(
            job,
            phase=phase,
            reason=reason,
            since=now,
            stop_reason=reason,
            stop_cause=StopCause.USER,
            ended_at=now if phase is JobPhase.STOPPED else None,
        )
        told = _event(job, now, phase, reason, StopCause.USER)
        await self._put(AtomicWrite(jobs=[stopped], events=[told]))
        self._hint(job.id)
        written = replace(stopped, version=job.version + 1)
        if written.phase is JobPhase.STOPPED and job.task.webhooks:
            self._notify(job.id, Delivery.FINISH)
        return written

    async def _give_back(self, job: Job) -> None:
        """End the time of gangs that the job keeps for the next one."""
        now = self._clock.now()
        kept = [
            each for each in await self._store.attempts(job.id) if each.phase is AttemptPhase.KEPT
        ]
        if kept:
            ended = [replace(each, kept_until=now) for each in kept]
            told = _event(job, now, "kept", "given back by the user")
            await self._put(AtomicWrite(attempts=ended, events=[told]))
            self._hint(job.id)

    async def _retry(self, job: Job) -> Job:
        now = self._clock.now()
        not_before, held_until = allocation_of(job.task, now)
        fresh = replace(
            job,
            phase=JobPhase.QUEUED,
            reason="retried by the user",
            since=now,
            not_before=not_before if held_until is not None else None,
            held_until=held_until,
            stop_reason=None,
            stop_cause=None,
            exit_code=None,
            ended_at=None,
            retries={},
            avoid={},
        )
        written = await self._write(fresh, _event(job, now, "queued", "retried by the user"))
        self._arrived()
        return written

    async def _drill(self, job: Job, attempt: Attempt, notice: timedelta) -> Attempt:
        now = self._clock.now()
        drilled = replace(attempt, drill_until=now + notice)
        text = f"a fire drill takes the node away in {notice.total_seconds():.0f} s"
        await self._store.commit(
            AtomicWrite(attempts=[drilled], events=[_event(job, now, "drill", text)])
        )
        self._hint(job.id)
        return replace(drilled, version=attempt.version + 1)

    async def _write(self, job: Job, event: Event) -> Job:
        await self._store.commit(AtomicWrite(jobs=[job], events=[event]))
        self._hint(job.id)
        return replace(job, version=job.version + 1)


def _event(job: Job, now: datetime, kind: str, text: str, fact: str | None = None) -> Event:
    return Event(
        project=job.project,
        job_id=job.id,
        attempt=job.attempt,
        at=now,
        kind=kind,
        fact=fact,
        text=text,
    )
