"""Computes the changes that users request: submit, stop, retry and drill."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from cavvy.control.decide.job import deadline_of
from cavvy.control.decide.rows import RowChanges, make_event, shrink
from cavvy.control.decide.schedule import find_hold, say_next, say_waiting
from cavvy.control.decide.transitions import deliveries_of, turn_job
from cavvy.domain.elastic import SizeCause, SizeChange
from cavvy.domain.events import Event
from cavvy.domain.jobs import (
    FAR,
    JOB_ENDS,
    Attempt,
    AttemptPhase,
    JobPhase,
    JobRecord,
    Node,
    StopCause,
)
from cavvy.domain.units import format_duration
from cavvy.domain.values import replace

_LIVE = frozenset({AttemptPhase.LAUNCHING, AttemptPhase.BOOTING, AttemptPhase.RUNNING})
RETRIED = frozenset({JobPhase.FAILED, JobPhase.STOPPED})


def hold_job(job: JobRecord, now: datetime) -> tuple[JobRecord, Event]:
    """Return the newly submitted job, which waits until it may start, and the event of its
    submission. Raises ValueError if the job would never start."""
    not_before, held_until = find_hold(job.task, now)
    if job.task.after:
        held = replace(
            job, after=job.task.after, not_before=FAR, reason=say_waiting(job.task.after)
        )
        return held, make_event(held, now, "queued", f"submitted, {held.reason}", fact="submitted")
    start = held_until if held_until is not None and held_until > now else not_before
    at_once = start in (None, FAR)
    text = "submitted" if at_once else f"submitted, to start at {start:%Y-%m-%d %H:%M:%S} UTC"
    held = replace(job, not_before=not_before, held_until=held_until)
    if held_until is not None:
        repeats = job.task.schedule is not None and job.task.schedule.cron is not None
        held = replace(held, reason=say_next(held_until) if repeats else text)
    fact = "submitted" if at_once else "scheduled"
    return held, make_event(held, now, "queued", text, fact=fact)


def is_timed(job: JobRecord) -> bool:
    """Return whether a waiting job must be checked again at a known time, or now because the jobs
    that it waits for may have ended."""
    limits = job.task.limits
    times = (job.held_until, limits.deadline, limits.deadline_after)
    return bool(job.after) or any(time is not None for time in times)


def is_stopping(job: JobRecord) -> bool:
    """Return whether the job has ended or is already stopping; if so, a stop would change
    nothing."""
    return job.phase in JOB_ENDS or job.stop_reason is not None


def stop_job(job: JobRecord, reason: str, now: datetime) -> RowChanges:
    """Stop the job: immediately if it is queued, otherwise with its grace period."""
    phase = JobPhase.STOPPED if job.phase is JobPhase.QUEUED else JobPhase.STOPPING
    cause = StopCause.USER
    stopped = replace(
        turn_job(job, phase, reason, now, job.exit_code), stop_reason=reason, stop_cause=cause
    )
    return RowChanges(
        job=stopped,
        events=(make_event(job, now, phase, reason, fact=cause),),
        notices=deliveries_of(stopped) if phase in JOB_ENDS else (),
    )


def release_kept(job: JobRecord, attempts: Sequence[Attempt], now: datetime) -> RowChanges | None:
    """Release the gangs that are kept warm after the job's work. Return None if no gangs are kept
    warm.
    """
    kept = [attempt for attempt in attempts if attempt.phase is AttemptPhase.KEPT]
    if not kept:
        return None
    return RowChanges(
        attempts=tuple(replace(attempt, kept_until=now) for attempt in kept),
        events=(make_event(job, now, "kept", "released by the user"),),
    )


def can_retry(job: JobRecord) -> bool:
    """Return whether the job has ended such that it can be queued again. A session is done when it
    was idle, so that it can be resumed.
    """
    return job.phase in RETRIED or (job.phase is JobPhase.DONE and job.task.session)


def object_to_retry(job: JobRecord, now: datetime) -> tuple[str, str] | None:
    """Return the reason why the job cannot be retried, with a hint for the user. The result is None
    if the job can be retried."""
    if job.removing:
        return f"job {job.name} is being removed", f"`cavvy rm {job.name}` completes the removal"
    if can_retry(job):
        return _object_to_limit(job, now)
    done = job.phase is JobPhase.DONE
    return (
        f"job {job.name} is {job.phase}; only failed and stopped jobs can be retried",
        "use `cavvy rerun` to submit the job again" if done else "the job has not ended",
    )


def _object_to_limit(job: JobRecord, now: datetime) -> tuple[str, str] | None:
    """Return the limit that would end the job at once if it were retried, with a hint."""
    deadline, duration = deadline_of(job), job.task.limits.duration
    if deadline is not None and deadline <= now:
        limit = f"its deadline has passed ({deadline:%Y-%m-%d %H:%M:%S} UTC)"
        hint = "set a later `limits.deadline` in the task file"
    elif duration is not None and job.stop_cause is StopCause.DURATION:
        limit = f"it has run for its `limits.duration`, {format_duration(duration)}"
        hint = "set a longer `limits.duration` in the task file"
    else:
        return None
    return f"job {job.name} cannot be retried: {limit}", f"{hint}, and submit it with `cavvy run`"


def retry_job(
    job: JobRecord,
    now: datetime,
    account: str = "",
    text: str = "retried by the user",
    moved: JobRecord | None = None,
) -> RowChanges:
    """Queue the job again, with its retry counts reset, as a job of the account that asks. A job
    that waited for other jobs waits for them again. If `moved` is given, the job gets its resources
    and its consent.
    """
    if moved is not None:
        needs = moved.task
        task = replace(job.task, resources=needs.resources, stated=needs.stated)
        job, text = (
            replace(job, task=task, consented=moved.consented),
            f"{text} with other resources",
        )
    not_before, held_until = (FAR, None) if job.after else find_hold(job.task, now)
    fresh = replace(
        job,
        task=shrink(job.task),
        phase=JobPhase.QUEUED,
        reason=say_waiting(job.after) if job.after else text,
        since=now,
        account=account,
        barred=False,
        not_before=FAR if job.after else not_before if held_until is not None else None,
        held_until=held_until,
        stop_reason=None,
        stop_cause=None,
        released=False,
        exit_code=None,
        ended_at=None,
        ended_spells=(*job.ended_spells, *([(job.ended_at, now)] if job.ended_at else [])),
        retries={},
        avoid={},
    )
    return RowChanges(job=fresh, events=(make_event(job, now, "queued", text),))


def find_live(job: JobRecord, attempts: Sequence[Attempt]) -> Attempt | None:
    """Return the attempt whose nodes a drill can reclaim, or None."""
    own = next((attempt for attempt in attempts if attempt.number == job.attempt), None)
    live = own is not None and own.phase in _LIVE and job.phase not in JOB_ENDS
    return own if live else None


def drill_node(
    job: JobRecord, attempt: Attempt, node: Node, notice: timedelta, now: datetime
) -> RowChanges:
    """Reclaim one node of the attempt as a spot market would."""
    seconds = notice.total_seconds()
    text = f"a fire drill reclaims the node of rank {node.rank} in {seconds:.0f} s"
    return RowChanges(
        nodes=(replace(node, notice_until=now + notice),),
        events=(make_event(job, now, "drill", text),),
    )


def resize_job(
    job: JobRecord, live: Attempt | None, nodes: int, notice: timedelta, now: datetime
) -> RowChanges:
    """Let an elastic job have at most this many nodes. If it has another number of nodes now, its
    work is ended with a notice, and starts again from its newest checkpoint on that many nodes, or
    on fewer if no more are free.
    """
    changed = replace(job, most_nodes=nodes, sizing=None, untaken=())
    size = "node" if nodes == 1 else "nodes"
    if live is None or live.nodes == nodes or live.drill_until is not None:
        text = f"the job gets at most {nodes} {size} when it starts next"
        return RowChanges(job=changed, events=(make_event(job, now, "resize", text),))
    text = f"the job is resized from {live.nodes} to {nodes} {size}"
    moved = replace(live, drill_until=now + notice, moved=True, moved_because=text)
    event = make_event(job, now, "resize", text)
    change = SizeChange(
        nodes=nodes, before=live.nodes, cause=SizeCause.ASKED, at=now, attempt=live.number
    )
    return RowChanges(job=replace(changed, sizing=change), attempts=(moved,), events=(event,))


def change_size(
    job: JobRecord, live: Attempt, change: SizeChange, text: str, notice: timedelta, now: datetime
) -> RowChanges:
    """Let an elastic job start again on the number of nodes that the scheduler has chosen. Its work
    ends with a notice, as in `resize_job`. `text` says what the change costs and wins."""
    moved = replace(live, drill_until=now + notice, moved=True, moved_because=text)
    return RowChanges(
        job=replace(job, sizing=change),
        attempts=(moved,),
        events=(make_event(job, now, "resize", text, live.number),),
    )


def drill_attempt(job: JobRecord, attempt: Attempt, notice: timedelta, now: datetime) -> RowChanges:
    """Reclaim the attempt's nodes as a spot market would."""
    text = f"a fire drill reclaims the node in {notice.total_seconds():.0f} s"
    return RowChanges(
        attempts=(replace(attempt, drill_until=now + notice),),
        events=(make_event(job, now, "drill", text),),
    )
