"""Decides the next step of one job from its latest attempt, its limits and its spending."""

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

from cavvy.control.decide.budgets import BudgetAllowance
from cavvy.control.decide.failures import cooldown_after, failure_of
from cavvy.control.decide.rows import NEVER, SOON
from cavvy.domain.jobs import (
    Attempt,
    AttemptOutcome,
    AttemptPhase,
    FailureKind,
    JobPhase,
    JobRecord,
    StopCause,
)
from cavvy.domain.units import HourlyRate, Money, format_duration, format_usd
from cavvy.domain.values import Struct, field, replace

MARGIN = timedelta(seconds=5)  # how long billing may continue after the grace period of a stop
LONGEST_DELAY = timedelta(hours=1)
# The time within which a program fails, or says nothing, that does not take a new number of nodes.
TAKES_SIZE = timedelta(minutes=10)
_FREES = timedelta(minutes=2)  # how long a job waits at most for its own nodes to be free
_SETTLED = frozenset({AttemptPhase.KEPT, AttemptPhase.ENDING, AttemptPhase.ENDED})


class JobSnapshot(Struct, frozen=True, kw_only=True):
    """All inputs of a decision about a job."""

    job: JobRecord
    attempt: Attempt | None  # the latest attempt
    spent: Money  # spent by all attempts until now, minimum charges included
    rate: HourlyRate  # hourly rate of all nodes of this job
    ran: timedelta = timedelta(0)  # total running time of all attempts
    # the checkpoint from which the latest attempt started, and the one before if it is stored, if
    # the attempt ended soon after its start and saved nothing
    fallback: tuple[int, int | None] | None = None
    standby: bool = False  # whether a standby gang can take over
    # whether the server must wait for the gang's end to know if a person cancelled it at the
    # provider
    awaits_end: bool = False
    allowance: BudgetAllowance | None = None  # what budgets of its project, user and tags permit


class AdvanceJob(Struct, frozen=True, kw_only=True):
    """Move the job to another phase."""

    phase: JobPhase
    reason: str
    exit_code: int | None = None


class RequeueJob(Struct, frozen=True, kw_only=True):
    """Queue the job again for another attempt."""

    kind: str  # kind of failure, as counted in JobRecord.retries
    reason: str
    by_rules: bool = False  # whether the task's `retry` limits retries of this kind
    delay: timedelta = timedelta(0)
    avoid: timedelta = timedelta(0)  # the cooldown of the failed offer
    anew: bool = False  # whether earlier failures of this kind no longer count
    skip: int | None = None  # the checkpoint that the next attempt must not start from
    unskip: bool = False  # whether the next attempt may start from the newest checkpoint again
    untaken: int | None = None  # a number of nodes that the program did not take

    @property
    def text(self) -> str:
        """The reason that users see while the job waits for its next attempt."""
        return f"{self.reason}; tried again" if self.by_rules else self.reason


class TakeOver(Struct, frozen=True, kw_only=True):
    """Assign the job to a standby gang, because the job's own gang is lost."""

    kind: str  # kind of failure, as counted in JobRecord.retries
    reason: str


class StopAtLimit(Struct, frozen=True, kw_only=True):
    """Stop the job because a limit is reached."""

    reason: str
    cause: StopCause


class RecheckJob(Struct, frozen=True, kw_only=True):
    """Do nothing until the time `after` has passed or an agent sends a report."""

    after: timedelta = field(default=NEVER)


Action = AdvanceJob | RequeueJob | TakeOver | StopAtLimit | RecheckJob


def decide_job(view: JobSnapshot, now: datetime) -> Action:
    """Return the next step of one job.

    A job with a standby gang is not queued again; instead, the standby gang takes over.
    """
    action = DECIDE[view.job.phase](view, now)
    if isinstance(action, RequeueJob) and view.standby:
        return TakeOver(kind=action.kind, reason=action.reason)
    return action


def _queued(view: JobSnapshot, now: datetime) -> Action:
    if view.job.stop_reason is not None:
        return _stopped(view.job)
    return _limits(view, now)


def _starting(view: JobSnapshot, now: datetime) -> Action:
    attempt = view.attempt
    if view.job.stop_reason is not None:
        return AdvanceJob(phase=JobPhase.STOPPING, reason=view.job.stop_reason)
    if attempt is not None and attempt.number == view.job.attempt:
        if attempt.phase in _SETTLED:
            return _settle(view, attempt, now)
        if attempt.phase is AttemptPhase.RUNNING and view.job.phase is JobPhase.STARTING:
            return AdvanceJob(phase=JobPhase.RUNNING, reason=f"runs on {attempt.offer.key}")
    return _limits(view, now)


def _stopping(view: JobSnapshot, now: datetime) -> Action:
    attempt = view.attempt
    if attempt is not None and attempt.phase not in _SETTLED:
        return RecheckJob()
    if attempt is not None and attempt.outcome is AttemptOutcome.SUCCEEDED:
        return AdvanceJob(
            phase=JobPhase.DONE,
            reason="the work succeeded before the stop reached it",
            exit_code=0,
        )
    if attempt is not None and attempt.outcome in (AttemptOutcome.EXIT, AttemptOutcome.SETUP):
        return _failed(attempt, f"{attempt.reason}, before the stop reached it")
    return _stopped(view.job, attempt.exit_code if attempt else None)


def _over(view: JobSnapshot, now: datetime) -> Action:
    return RecheckJob()


DECIDE: dict[JobPhase, Callable[[JobSnapshot, datetime], Action]] = {
    JobPhase.QUEUED: _queued,
    JobPhase.STARTING: _starting,
    JobPhase.RUNNING: _starting,
    JobPhase.STOPPING: _stopping,
    JobPhase.DONE: _over,
    JobPhase.FAILED: _over,
    JobPhase.STOPPED: _over,
}


def _stopped(job: JobRecord, exit_code: int | None = None) -> AdvanceJob:
    if job.stop_cause in (StopCause.HELPED, StopCause.EARLY):
        return AdvanceJob(phase=JobPhase.DONE, reason=job.stop_reason or "stopped", exit_code=0)
    phase = JobPhase.FAILED if job.stop_outcome is AttemptOutcome.LIMIT else JobPhase.STOPPED
    return AdvanceJob(phase=phase, reason=job.stop_reason or "stopped", exit_code=exit_code)


def _settle(view: JobSnapshot, attempt: Attempt, now: datetime) -> Action:
    """Decide by the attempt's outcome whether the job ends or is tried again."""
    job, retry = view.job, view.job.task.retry
    match attempt.outcome:
        case AttemptOutcome.SUCCEEDED:
            return AdvanceJob(phase=JobPhase.DONE, reason="the work succeeded", exit_code=0)
        case AttemptOutcome.LIMIT:
            return _limited(job, attempt)
        case AttemptOutcome.EXIT | AttemptOutcome.SETUP:
            again = _again_or_fail(view, attempt, "exit", _tries_of(job, attempt.exit_code))
            return (
                _leave_size(job, attempt) or _read_older(view, attempt) or _read_newest(view, again)
            )
        case AttemptOutcome.STOPPED:
            return AdvanceJob(
                phase=JobPhase.STOPPED, reason=attempt.reason, exit_code=attempt.exit_code
            )
        case AttemptOutcome.PREEMPTED if _may_work_still(attempt) or (
            view.awaits_end and attempt.phase is not AttemptPhase.ENDED
        ):
            return RecheckJob(after=SOON)
        case AttemptOutcome.PREEMPTED if _awaits_own_nodes(job, attempt, now):
            return RecheckJob(after=SOON)
        case AttemptOutcome.PREEMPTED if attempt.moved:
            return RequeueJob(kind="move", reason=attempt.reason)
        case AttemptOutcome.PREEMPTED:
            return _again_or_fail(view, attempt, "preemption", retry.preemption)
        case AttemptOutcome.CAPACITY:
            return RequeueJob(
                kind="capacity", reason=attempt.reason, avoid=_rest(job, attempt, "capacity")
            )
        case AttemptOutcome.REFUSED:
            return RequeueJob(
                kind="refused", reason=attempt.reason, avoid=_rest(job, attempt, "refused")
            )
        case AttemptOutcome.NODE | AttemptOutcome.TIMEOUT | None:
            return _again_or_fail(view, attempt, "node", retry.node, _rest(job, attempt, "node"))


def _leave_size(job: JobRecord, attempt: Attempt) -> RequeueJob | None:
    """Let the next attempt have the former number of nodes if this attempt, the first one on
    another number, failed soon and saved nothing. With the former number, the program has worked.
    """
    change = job.sizing
    if change is None or attempt.number != change.attempt + 1 or attempt.nodes == change.before:
        return None
    began, ended = attempt.running_at, attempt.finished_at
    late = began is not None and ended is not None and ended - began > TAKES_SIZE
    if late or attempt.checkpoint_at is not None:
        return None
    reason = (
        f"{attempt.reason}, soon after its nodes had changed from {change.before} to "
        f"{attempt.nodes}: it goes back to {change.before}"
    )
    return RequeueJob(kind="size", reason=reason, untaken=attempt.nodes)


def _read_older(view: JobSnapshot, attempt: Attempt) -> RequeueJob | None:
    """Let the next attempt start from an older checkpoint if this attempt failed while it read the
    newest one. If the cause of the failure is known, it is not the checkpoint."""
    if view.fallback is None or attempt.outcome is not AttemptOutcome.EXIT or not attempt.exit_code:
        return None
    newest, older = view.fallback
    if older is None or attempt.failure is FailureKind.PROGRAM:
        return None
    reason = (
        f"{attempt.reason}, soon after it had started from checkpoint {newest}, which may be "
        f"damaged: checkpoint {older} is used instead"
    )
    return RequeueJob(kind="checkpoint", reason=reason, skip=newest)


def _read_newest(view: JobSnapshot, again: Action) -> Action:
    """Let the next attempt start from the newest checkpoint again if an attempt from an older one
    failed in the same way, since the checkpoint was not the cause then."""
    if view.fallback and view.job.retries.get("checkpoint") and isinstance(again, RequeueJob):
        return replace(again, unskip=True)
    return again


def _limited(job: JobRecord, attempt: Attempt) -> AdvanceJob:
    """End a job that has reached a limit. A session that was ended because it was idle does not
    count as failed.
    """
    if job.task.session and job.stop_cause is None:
        return AdvanceJob(phase=JobPhase.DONE, reason=f"the session ended: {attempt.reason}")
    return _failed(attempt, attempt.reason)


def ends_job(job: JobRecord, outcome: AttemptOutcome | None, exit_code: int | None) -> bool:
    """Return whether an attempt with this outcome and exit code ends the job without a retry."""
    if outcome is not AttemptOutcome.EXIT:
        return outcome is AttemptOutcome.SUCCEEDED
    allowed = _tries_of(job, exit_code)
    return allowed is not None and job.retries.get("exit", 0) >= allowed


def _tries_of(job: JobRecord, exit_code: int | None) -> int | None:
    """Return how many retries the task allows after this exit code, or None if there is no
    limit."""
    retry = job.task.retry
    return retry.exit if not retry.exit_codes or exit_code in retry.exit_codes else 0


def _may_work_still(attempt: Attempt) -> bool:
    """Return whether the work may still be running in a gang that the control plane is removing:
    the gang still exists, and its agents have not reported an exit.
    """
    ours = attempt.drill_until is not None and attempt.exit_code is None
    return ours and attempt.phase is not AttemptPhase.ENDED


def _awaits_own_nodes(job: JobRecord, attempt: Attempt, now: datetime) -> bool:
    """Return whether a job that gets another number of nodes waits for its own to be free: they are
    a part of what it shall have next."""
    if job.sizing is None or job.sizing.attempt != attempt.number:
        return False
    ended = attempt.finished_at or attempt.since
    return attempt.phase is not AttemptPhase.ENDED and now - ended < _FREES


def _again_or_fail(
    view: JobSnapshot,
    attempt: Attempt,
    kind: str,
    allowed: int | None,
    avoid: timedelta = timedelta(0),
) -> Action:
    job = view.job
    # a node that was lost after a checkpoint has cost no progress, so the count begins again
    anew = kind == "node" and attempt.checkpoint_at is not None
    used = 0 if anew else job.retries.get(kind, 0)
    if allowed is not None and used >= allowed:
        tries = f" (tried {used + 1} times)" if used else ""
        return _failed(attempt, f"{attempt.reason}{tries}")
    delay = min(LONGEST_DELAY, job.task.retry.delay * (1 << min(used, 16)))
    return RequeueJob(
        kind=kind, reason=attempt.reason, by_rules=True, delay=delay, avoid=avoid, anew=anew
    )


def _failed(attempt: Attempt, reason: str) -> AdvanceJob:
    """End the job as failed. The exit code 0 is omitted, because work that was ordered to end exits
    with this code.
    """
    return AdvanceJob(phase=JobPhase.FAILED, reason=reason, exit_code=attempt.exit_code or None)


def _rest(job: JobRecord, attempt: Attempt, kind: str) -> timedelta:
    return cooldown_after(failure_of(attempt), attempt, job.retries.get(kind, 0))


def _limits(view: JobSnapshot, now: datetime) -> Action:
    """Stop the job if a limit is reached; otherwise wait until the next limit may be reached."""
    job, times = view.job, [NEVER]
    deadline = deadline_of(job)
    if deadline is not None:
        if now >= deadline:
            return StopAtLimit(
                cause=StopCause.DEADLINE,
                reason=f"the deadline has passed ({deadline:%Y-%m-%d %H:%M:%S} UTC)",
            )
        times.append(deadline - now)
    duration = job.task.limits.duration
    if duration is not None:
        if view.ran >= duration:
            return StopAtLimit(
                cause=StopCause.DURATION,
                reason=f"limits.duration reached: the work ran for {format_duration(duration)}",
            )
        if job.phase is JobPhase.RUNNING:
            times.append(duration - view.ran)
    for cap, words in _list_caps(view):
        # At most half of the budget is reserved for the cost of the grace period.
        ending = view.rate.over(job.task.grace + MARGIN)
        left = cap.micros - view.spent.micros - min(ending.micros, cap.micros // 2)
        if (view.rate.micros_per_hour and left <= 0) or (view.spent.micros and view.spent >= cap):
            rest = (
                f", {format_usd(ending)} reserved for the grace period" if view.spent < cap else ""
            )
            return StopAtLimit(
                cause=StopCause.BUDGET, reason=f"{words}: {format_usd(view.spent)} spent{rest}"
            )
        if view.rate.micros_per_hour:
            times.append(timedelta(hours=left / view.rate.micros_per_hour))
    return RecheckJob(after=min(times))


def _list_caps(view: JobSnapshot) -> Iterator[tuple[Money, str]]:
    """List the maximum amounts that the job's own limits and the budgets allow the job to spend,
    each with a readable reason.
    """
    cap, allowance = cap_of(view.job), view.allowance
    if cap is not None:
        yield cap, f"spending limit of {format_usd(cap)} reached"
    if allowance is not None:
        yield (
            allowance.most,
            f"the budget {allowance.budget} is used up by its running jobs{allowance.part}",
        )


def gives_back(job: JobRecord) -> bool:
    """Return whether the deadline policy has decided to release the job's gang and to wait for spot
    capacity.
    """
    return (
        job.plan_state is not None
        and job.plan_state.mode == "idle"
        and job.plan_state.place is None
    )


def deadline_of(job: JobRecord) -> datetime | None:
    """Return the earlier of the two deadlines: the absolute deadline, and the deadline relative to
    the submission."""
    limits = job.task.limits
    after = job.submitted_at + limits.deadline_after if limits.deadline_after is not None else None
    return min((time for time in (limits.deadline, after) if time is not None), default=None)


def is_free_only(job: JobRecord) -> bool:
    """Return whether the job may spend nothing, even if its user has agreed to what a machine or a
    pool costs: so are jobs that a coding agent starts without a question to the user."""
    cap = cap_of(job)
    return cap is not None and not cap.micros


def cap_of(job: JobRecord) -> Money | None:
    """Return the maximum that the job may spend: its budget or, if lower, the ceiling to which its
    user consented.
    """
    return min(
        (cap for cap in (job.task.limits.budget, job.ceiling) if cap is not None), default=None
    )
