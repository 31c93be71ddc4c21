"""Decides what jobs do because of other jobs: those of a group start together and end together, and
a job that waits for other jobs may start, waits on, or can never start.

A job is founding if it was submitted with its group. The founding jobs start together or not at
all; the others join the group when it has started. All decisions depend only on the present rows,
so it does not matter how often, when and after which crash a job is checked.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.control.decide.requests import retry_job
from cavvy.control.decide.rows import NEVER, RowChanges, Step, make_event
from cavvy.control.decide.schedule import find_hold, say_end, say_waiting
from cavvy.control.decide.transitions import deliveries_of, turn_job
from cavvy.domain.jobs import (
    COMING,
    JOB_ENDS,
    Attempt,
    JobPhase,
    JobRecord,
    Node,
    StopCause,
)
from cavvy.domain.tasks import JobDependency, StartCondition
from cavvy.domain.values import replace
from cavvy.spec.problems import listed

# how long the other jobs of a group keep their nodes while one of them looks for other nodes
PATIENCE = timedelta(seconds=30)


AT_WORK = frozenset({JobPhase.STARTING, JobPhase.RUNNING})
UNSTARTED = "waits until its group has started"  # the reason of a job that joins


def is_ready(job: JobRecord, now: datetime) -> bool:
    """Return whether the job is in the queue and may start now."""
    held = job.not_before is not None and job.not_before > now
    return job.phase is JobPhase.QUEUED and job.stop_reason is None and not held


def is_helper(job: JobRecord) -> bool:
    return job.task.group is not None and job.task.group.helper


def is_founding(job: JobRecord) -> bool:
    return job.task.group is not None and not job.task.group.joins


def decide_end(job: JobRecord, group: Sequence[JobRecord], now: datetime) -> Step:
    """Return how the job must be stopped because of the other jobs of its group, or when to check
    it again. `group` contains all jobs of the group."""
    if job.phase in JOB_ENDS or job.stop_reason is not None:
        return Step(after=NEVER)
    failed = [each for each in group if each.phase is JobPhase.FAILED and is_founding(each)]
    if failed:
        first = min(failed, key=lambda each: (each.ended_at or now, each.id))
        reason = f"{first.name}, a job of its group, failed: {first.reason}"
        return Step(changes=_stop(job, reason, StopCause.GROUP, now))
    helped = [each for each in group if not is_helper(each)]
    if not is_helper(job) or not helped or not JOB_ENDS.issuperset(x.phase for x in helped):
        return Step(after=NEVER)
    assert job.task.group is not None
    until = max(each.ended_at or now for each in helped) + job.task.group.linger
    if now < until:
        return Step(after=until - now)
    done = all(each.phase is JobPhase.DONE for each in helped)
    reason = "the jobs that it helped have " + ("succeeded" if done else "ended")
    return Step(changes=_stop(job, reason, StopCause.HELPED if done else StopCause.GROUP, now))


def object_to_lone_retry(job: JobRecord, group: Sequence[JobRecord], now: datetime) -> str:
    """Return why an ended job can only be retried together with others of its group, or ""."""
    others = [each for each in group if each.id != job.id]
    waiting = replace(job, phase=JobPhase.QUEUED, stop_reason=None, ended_at=None)
    step = decide_end(waiting, [*others, waiting], now)
    if step.changes is not None and step.changes.job is not None:
        return step.changes.job.reason
    ended = [each.name for each in others if each.phase in (JobPhase.FAILED, JobPhase.STOPPED)]
    if ended and all(each.phase in JOB_ENDS for each in others):
        return f"{ended[0]} of its group has ended too"
    return ""


def _stop(job: JobRecord, reason: str, cause: StopCause, now: datetime) -> RowChanges:
    phase = JobPhase.STOPPING
    if job.phase is JobPhase.QUEUED:
        phase = JobPhase.DONE if cause is StopCause.HELPED else JobPhase.STOPPED
    exit_code = 0 if phase is JobPhase.DONE else job.exit_code
    stopped = turn_job(job, phase, reason, now, exit_code)
    stopped = replace(stopped, stop_reason=reason, stop_cause=cause)
    return RowChanges(
        job=stopped,
        events=(make_event(job, now, phase, reason, fact=cause),),
        notices=deliveries_of(stopped) if phase in JOB_ENDS else (),
    )


def decide_return(
    job: JobRecord, own: Attempt | None, group: Sequence[JobRecord], now: datetime
) -> Step:
    """Decide whether a job of a group that has not started gives its nodes back, because another
    of the founding jobs finds no nodes, or never starts. Otherwise return when to check the job
    again."""
    if not is_founding(job):
        return _end_unstarted(job, group, now)
    if own is None or own.phase not in COMING or own.drill_until is not None:
        return Step(after=NEVER)
    missing = [each for each in group if is_founding(each) and each.phase is JobPhase.QUEUED]
    if not missing:
        return Step(after=NEVER)
    first = min(missing, key=lambda each: (each.since, each.id))
    if now < first.since + PATIENCE:
        return Step(after=first.since + PATIENCE - now)
    because = f"{first.name} of its group found no nodes"
    left = replace(own, drill_until=now, moved=True, moved_because=because)
    return Step(
        changes=RowChanges(
            attempts=(left,),
            events=(
                make_event(job, now, "returned", f"gives its nodes back: {because}", own.number),
            ),
        )
    )


def _end_unstarted(job: JobRecord, group: Sequence[JobRecord], now: datetime) -> Step:
    """Stop a job that has joined a group whose founding jobs have all ended before they started."""
    if not all(each.phase in JOB_ENDS for each in group if is_founding(each)):
        return Step(after=NEVER)
    reason = "the jobs with which its group began have ended before they started"
    return Step(changes=_stop(job, reason, StopCause.GROUP, now))


def explain_unready(group: Sequence[JobRecord], owns: Mapping[str, Attempt], now: datetime) -> str:
    """Return why the founding jobs of the group that wait cannot be placed now, or "". `owns` are
    the current attempts of those that do not wait, by job."""
    for job in filter(is_founding, group):
        if job.phase is JobPhase.QUEUED and not is_ready(job, now):
            return f"waits for {job.name} of its group"
        own = owns.get(job.id)
        if own is not None and (own.drill_until is not None or own.phase not in COMING):
            return f"waits until {job.name} of its group has given its nodes back"
    return ""


def is_assembled(group: Sequence[JobRecord], nodes: Mapping[str, Sequence[Node]]) -> bool:
    """Return whether each node of all founding jobs that have not ended has an agent. `nodes` are
    those of the current attempts, by job."""
    return all(
        job.phase in AT_WORK and nodes.get(job.id) and all(node.claim for node in nodes[job.id])
        for job in group
        if is_founding(job) and job.phase not in JOB_ENDS
    )


def list_variables(
    name: str, group: Sequence[JobRecord], nodes: Mapping[str, Sequence[Node]]
) -> dict[str, str]:
    """Return the variables with the name and the addresses of the group, for its programs."""
    found = {"CAVVY_GROUP": name}
    for each in group:
        addresses = [node.address or "" for node in nodes.get(each.id, ()) if node.claim]
        if each.phase not in JOB_ENDS and addresses:
            variable = each.task.name.upper().replace("-", "_")
            found[f"CAVVY_HOSTS_{variable}"] = ",".join(addresses)
    return found


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
