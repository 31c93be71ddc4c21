"""Decides whether a job that waits for other jobs may start, waits on, or can never start."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from cavvy.control.decide.requests import retry_job
from cavvy.control.decide.rows import RowChanges, make_event
from cavvy.control.decide.schedule import find_hold, say_end, say_waiting
from cavvy.control.decide.transitions import deliveries_of, turn_job
from cavvy.domain.jobs import JOB_ENDS, JobPhase, JobRecord, StopCause
from cavvy.domain.tasks import JobDependency, StartCondition
from cavvy.domain.values import replace
from cavvy.spec.problems import listed

_ENDS = {
    StartCondition.SUCCESS: frozenset({JobPhase.DONE}),
    StartCondition.FAILURE: frozenset({JobPhase.FAILED}),
    StartCondition.ANY: JOB_ENDS,
}
_ENDED = {
    JobPhase.DONE: "succeeded",
    JobPhase.FAILED: "failed",
    JobPhase.STOPPED: "was stopped or did not start",
    None: "was removed",
}

Phases = Mapping[str, JobPhase]  # of the jobs that another job waits for, by ID


def find_missed(after: Iterable[JobDependency], phases: Phases) -> JobDependency | None:
    """Return a job that did not end as required, or None if a job after these may still start."""
    for each in after:
        phase = phases.get(each.id)
        if phase not in _ENDS[each.on] and (phase is None or phase in JOB_ENDS):
            return each
    return None


def say_missed(missed: JobDependency, phases: Phases) -> str:
    """Return why a job after this job cannot start."""
    end = _ENDED[phases.get(missed.id)]
    return f"it starts after {missed.job} {say_end(missed.on)}, but {missed.job} {end}"


def advise_retry(missed: JobDependency, phases: Phases) -> str:
    """Return what to do instead of a retry of a job after this job."""
    if phases.get(missed.id) in (JobPhase.FAILED, JobPhase.STOPPED):
        return f"`cavvy retry {missed.job}` retries both"
    return "submit the task again without this condition"


def list_unmet(after: Iterable[JobDependency], phases: Phases) -> Sequence[JobDependency]:
    """Return the jobs that have not ended as required."""
    return [each for each in after if phases.get(each.id) not in _ENDS[each.on]]


def decide_dependent(job: JobRecord, phases: Phases, now: datetime) -> RowChanges | None:
    """Return the changes of a job that waits for other jobs, or None if there are none.

    The result depends only on the present phases, so it does not matter how often, when and after
    which crash a job is checked.
    """
    missed = find_missed(job.after, phases)
    if job.phase is JobPhase.STOPPED and job.stop_cause is StopCause.DEPENDENCY:
        return None if missed else _wait_again(job, now)
    if job.phase is not JobPhase.QUEUED or job.stop_reason is not None:
        return None
    if missed:
        return _end(job, say_missed(missed, phases), now)
    unmet = list_unmet(job.after, phases)
    return _note(job, unmet) if unmet else _release(job, phases, now)


def _end(job: JobRecord, missed: str, now: datetime) -> RowChanges:
    reason = f"did not start: {missed}"
    cause = StopCause.DEPENDENCY
    stopped = turn_job(job, JobPhase.STOPPED, reason, now)
    stopped = replace(stopped, stop_reason=reason, stop_cause=cause)
    event = make_event(job, now, JobPhase.STOPPED, reason, fact=cause)
    return RowChanges(job=stopped, events=(event,), notices=deliveries_of(stopped))


def _wait_again(job: JobRecord, now: datetime) -> RowChanges:
    return retry_job(job, now, job.account, "a job before it was retried")


def _note(job: JobRecord, unmet: Sequence[JobDependency]) -> RowChanges | None:
    reason = say_waiting(unmet)
    return None if reason == job.reason else RowChanges(job=replace(job, reason=reason))


def _release(job: JobRecord, phases: Phases, now: datetime) -> RowChanges:
    """Put the job into the queue, or hold it until its own time or window."""
    not_before, held_until = find_hold(job.task, now)
    reason = listed([f"{each.job} {_ENDED[phases.get(each.id)]}" for each in job.after], "and")
    released = replace(job, after=(), reason=reason, not_before=not_before, held_until=held_until)
    return RowChanges(job=released, events=(make_event(job, now, "queued", reason),))
