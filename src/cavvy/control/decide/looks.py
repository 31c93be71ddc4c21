"""When a gang is looked at again, and what a job's user is told of a look."""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from cavvy.control.decide.attempt import POLL, STEADY_POLL, GangAbsence, Seen
from cavvy.control.decide.rows import JobRows, RowChanges, make_event
from cavvy.domain.gangs import GangSeen, GangState
from cavvy.domain.jobs import Attempt, AttemptPhase, AttemptWait, Job, JobPhase, WaitKind

_SHORTEST = timedelta(milliseconds=100)
# After an accepted launch. Short work is over by then and needs no look.
FIRST_LOOK = timedelta(seconds=3)
_WAITS = {GangState.QUEUED: WaitKind.QUEUED, GangState.STARTING: WaitKind.STARTING}


@dataclass(frozen=True, slots=True, kw_only=True)
class GangSight:
    """What this process knows of one gang beyond the rows; losing it costs a look."""

    seen: Seen = GangAbsence.UNKNOWN
    looked_at: datetime | None = None
    doubt: bool = False  # a launch may have been requested that no row records
    unsure: bool = False  # a launch request was never answered
    denied: bool = False  # the last launch request was answered with no
    fresh: bool = False  # the last look is newer than the last request
    told: GangSeen | None = None  # the last look that found it
    told_at: datetime | None = None
    removed_at: datetime | None = None  # when its removal was last requested
    accrued_at: datetime | None = None  # charges are complete until then


def first_sight(attempt: Attempt, started_at: datetime) -> GangSight:
    """Of a gang that an earlier server may have requested, its launch is in doubt."""
    doubt = attempt.created_at < started_at
    return GangSight(doubt=doubt, unsure=doubt)


def after_look(sight: GangSight, seen: Seen, at: datetime) -> GangSight:
    """The sight after a look that was begun `at`."""
    sight = replace(sight, seen=seen, looked_at=at, fresh=True)
    return replace(sight, told=seen, told_at=at) if isinstance(seen, GangSeen) else sight


def after_move(sight: GangSight, phase: AttemptPhase) -> GangSight:
    """The sight once the attempt goes on to `phase`: one that ends is removed anew."""
    if phase is AttemptPhase.KEPT:
        return replace(sight, removed_at=None, looked_at=None, accrued_at=None)
    return replace(sight, removed_at=None) if phase is AttemptPhase.ENDING else sight


def is_look_due(
    attempt: Attempt, sight: GangSight, visibility_delay: timedelta, now: datetime
) -> bool:
    """Whether to ask the provider for the gang before the next decision."""
    if attempt.phase is AttemptPhase.LAUNCHING and not sight.doubt:
        return False
    if attempt.phase is AttemptPhase.ENDING:
        if sight.removed_at is None:
            return False
        if not sight.fresh:
            return True
    age = None if sight.looked_at is None else now - sight.looked_at
    return age is None or age >= look_interval(attempt, sight, visibility_delay, now)


def look_interval(
    attempt: Attempt, sight: GangSight, visibility_delay: timedelta, now: datetime
) -> timedelta:
    """How old a look may get."""
    unbilled = attempt.phase is AttemptPhase.KEPT and sight.accrued_at is None
    if attempt.phase in (AttemptPhase.ENDING, AttemptPhase.LAUNCHING) or unbilled:
        return min(POLL, max(_SHORTEST, (now - attempt.since) / 4))
    if sight.seen is GangAbsence.ABSENT:
        return max(_SHORTEST, visibility_delay / 8)
    return STEADY_POLL if attempt.phase is AttemptPhase.RUNNING else POLL


def find_wait(attempt: Attempt, seen: Seen) -> AttemptWait | None:
    """What keeps the gang from coming up, as its provider reports it."""
    if attempt.phase is not AttemptPhase.BOOTING or not isinstance(seen, GangSeen):
        return None
    kind = _WAITS.get(seen.state)
    if kind is None or (kind is WaitKind.STARTING and not seen.reason):
        return None
    return AttemptWait(kind=kind, said=seen.reason)


def note_wait(rows: JobRows, attempt: Attempt, seen: Seen, now: datetime) -> RowChanges:
    """Record why a gang waits or does not come up, and until when its provider expects that.

    Another reason is an event; another expected start is not.
    """
    wait = find_wait(attempt, seen)
    if wait is None or not isinstance(seen, GangSeen):
        return RowChanges()
    expected = seen.eta if seen.eta is not None and seen.eta > now else None
    if (wait, expected) == (attempt.wait, attempt.expected_at):
        return RowChanges()
    changed = replace(attempt, wait=wait, expected_at=expected, reason=_say(attempt, wait))
    text = changed.standing
    news = wait != attempt.wait
    return RowChanges(
        job=replace(rows.job, reason=text) if _is_starting(rows.job, attempt) else None,
        attempts=(changed,),
        events=(make_event(rows.job, now, "waits", text, attempt.number),) if news else (),
    )


def _is_starting(job: Job, attempt: Attempt) -> bool:
    return attempt.number == job.attempt and job.phase is JobPhase.STARTING


def _say(attempt: Attempt, wait: AttemptWait) -> str:
    if wait.kind is WaitKind.QUEUED:
        return f"waits at {attempt.offer.provider}: {wait.said or 'in its queue'}"
    return f"starts at {attempt.offer.provider}: {wait.said}"
