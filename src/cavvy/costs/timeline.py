"""Splits a job's time into the states that users see: at every moment, the job is queued, starting,
running, lost, stopping or, before the user retries it, ended.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import zip_longest

from cavvy.domain.jobs import Attempt, AttemptOutcome, JobRecord
from cavvy.domain.values import Struct


class TimeUse(StrEnum):
    """What a job did in one period of its life."""

    QUEUED = "queued"  # waiting for an offer, for an automatic retry, or for its schedule
    STARTING = "starting"  # from the placement until every rank works
    RUNNING = "running"  # working, without work that was lost later
    # work after the newest checkpoint that was lost with a node or by a preemption
    LOST = "lost"
    STOPPING = "stopping"  # from the end of the work until the gang has ended
    ENDED = "ended"  # from the job's end until the user retried it


class TimelineStretch(Struct, frozen=True, kw_only=True):
    """A half-open period [since, until) with one use of the job's time. `attempt` is 0 before the
    first attempt.
    """

    spell: TimeUse
    since: datetime
    until: datetime
    attempt: int = 0

    @property
    def length(self) -> timedelta:
        return self.until - self.since


class JobTimeline(Struct, frozen=True, kw_only=True):
    """A job's time so far, as consecutive periods."""

    stretches: tuple[TimelineStretch, ...]

    def total(self, *spells: TimeUse) -> timedelta:
        """Return the total length of the periods in which the job did one of `spells`. Without
        arguments, return the total length of all periods.
        """
        return sum(
            (s.length for s in self.stretches if not spells or s.spell in spells), timedelta(0)
        )

    @property
    def totals(self) -> Mapping[TimeUse, timedelta]:
        """The time that each use took, in the order of `TimeUse`. A use that took no time has the
        value 0.
        """
        return {spell: self.total(spell) for spell in TimeUse}


_LOSSES = frozenset({AttemptOutcome.PREEMPTED, AttemptOutcome.NODE})


def trace(job: JobRecord, attempts: Iterable[Attempt], now: datetime) -> JobTimeline:
    """Return the periods of `job` from its submission to its end, or to `now` if it has not ended.

    Lost work begins at the newest checkpoint or, if the job has no checkpoint, when the work began
    to run. The period of lost work ends when the attempt stops working. If the machines' clocks
    disagree, the recorded periods can differ from the real periods, but no time is counted twice.
    """
    end = max(job.submitted_at, job.ended_at or now)
    cursor = job.submitted_at
    stretches: list[TimelineStretch] = []
    ordered = _one_after_another(job, attempts, end)
    for attempt, following in zip_longest(ordered, ordered[1:]):
        # An attempt's time ends when the next attempt is created, even if the old gang still
        # exists. A standby gang's time begins when the work of the gang before it ends.
        over = min(max(following.created_at, _work_until(attempt, end)), end) if following else end
        edges = [
            (TimeUse.QUEUED, min(attempt.created_at, end)),
            *((s, min(t, over)) for s, t in _edges(attempt, end)),
        ]
        for spell, until in edges:
            if spell is TimeUse.QUEUED:
                _append_wait(stretches, job, cursor, until, attempt.number - 1)
            else:
                _append(stretches, spell, cursor, until, attempt.number)
            cursor = max(cursor, until)
    _append_wait(stretches, job, cursor, end, ordered[-1].number if ordered else 0)
    return JobTimeline(stretches=tuple(stretches))


def _one_after_another(job: JobRecord, attempts: Iterable[Attempt], end: datetime) -> list[Attempt]:
    """Return the attempts, sorted by number. Standby gangs that never received the work are
    omitted."""
    kept: list[Attempt] = []
    for attempt in sorted(attempts, key=lambda attempt: attempt.number):
        beside = bool(kept) and attempt.created_at < _work_until(kept[-1], end)
        if not beside or attempt.running_at is not None or attempt.number == job.attempt:
            kept.append(attempt)
    return kept


def _work_until(attempt: Attempt, end: datetime) -> datetime:
    """Return when the attempt's work ended, or `end` if the work may still be running. If the work
    never ran, return the time of the attempt's creation, so that no time is assigned to the
    attempt.
    """
    return (
        attempt.created_at
        if attempt.running_at is None
        else attempt.finished_at or attempt.ended_at or end
    )


def _edges(attempt: Attempt, end: datetime) -> Iterator[tuple[TimeUse, datetime]]:
    """Yield the use and the end time of each period of an attempt, in chronological order."""
    gone = attempt.ended_at or end
    worked = attempt.finished_at or gone
    if attempt.running_at is None:
        yield TimeUse.STARTING, worked
    else:
        yield TimeUse.STARTING, attempt.running_at
        if attempt.outcome in _LOSSES:
            yield TimeUse.RUNNING, attempt.checkpoint_at or attempt.running_at
            yield TimeUse.LOST, worked
        else:
            yield TimeUse.RUNNING, worked
    yield TimeUse.STOPPING, gone


def _append_wait(
    stretches: list[TimelineStretch], job: JobRecord, since: datetime, until: datetime, attempt: int
) -> None:
    """Append a period without an attempt: the job was queued, or it had ended and was not yet
    retried.
    """
    for ended, retried in job.ended_spells:
        if since < retried and ended < until:
            _append(stretches, TimeUse.QUEUED, since, ended, attempt)
            since, over = max(since, ended), min(retried, until)
            _append(stretches, TimeUse.ENDED, since, over, attempt)
            since = over
    _append(stretches, TimeUse.QUEUED, since, until, attempt)


def _append(
    stretches: list[TimelineStretch], spell: TimeUse, since: datetime, until: datetime, attempt: int
) -> None:
    if since < until:
        stretches.append(TimelineStretch(spell=spell, since=since, until=until, attempt=attempt))
