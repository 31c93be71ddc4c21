"""Where a job's time went: every moment of its life is queued, starting, running, lost or
stopping; shown to users.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import zip_longest

from cavvy.domain.jobs import Attempt, AttemptOutcome, Job


class TimeUse(StrEnum):
    """What a stretch of a job's life was spent on."""

    QUEUED = "queued"  # waiting for a place, a retry or its schedule
    STARTING = "starting"  # from the placement until every rank worked
    RUNNING = "running"  # work that was kept
    # work since the newest checkpoint when the place or a node was lost; it was done again
    LOST = "lost"
    STOPPING = "stopping"  # from the end of the work until the gang was gone


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineStretch:
    """The half-open stretch [since, until) of a job's life. `attempt` is 0 before the first."""

    spell: TimeUse
    since: datetime
    until: datetime
    attempt: int = 0

    @property
    def length(self) -> timedelta:
        return self.until - self.since


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTimeline:
    """A job's life, or its life so far, as contiguous stretches in order."""

    stretches: tuple[TimelineStretch, ...]

    def total(self, *spells: TimeUse) -> timedelta:
        """The time spent on these; on everything where none is given."""
        return sum(
            (s.length for s in self.stretches if not spells or s.spell in spells), timedelta(0)
        )

    @property
    def totals(self) -> Mapping[TimeUse, timedelta]:
        """By spell, in the order of a job's life, those of no length included."""
        return {spell: self.total(spell) for spell in TimeUse}


_LOSSES = frozenset({AttemptOutcome.PREEMPTED, AttemptOutcome.NODE})


def trace(job: Job, attempts: Iterable[Attempt], now: datetime) -> JobTimeline:
    """The stretches of `job` from its submission to its end, or to `now` while it lives.

    Work is lost from the newest checkpoint, or from the start of running where there was none, to
    the end of the work. Between an end and a retry that the user asked for later, the job counts as
    queued. Times that contradict each other (clocks of several machines) are moved, never counted
    twice.
    """
    end = max(job.submitted_at, job.ended_at or now)
    cursor = job.submitted_at
    stretches: list[TimelineStretch] = []
    ordered = _one_after_another(job, attempts, end)
    for attempt, following in zip_longest(ordered, ordered[1:]):
        # What follows an attempt begins with the next one's creation, even if the old gang is not
        # quite gone; a gang that was started beside it begins when the work of the first was over.
        over = min(max(following.created_at, _work_until(attempt, end)), end) if following else end
        edges = [
            (TimeUse.QUEUED, min(attempt.created_at, end)),
            *((s, min(t, over)) for s, t in _edges(attempt, end)),
        ]
        for spell, until in edges:
            number = attempt.number - 1 if spell is TimeUse.QUEUED else attempt.number
            _append(stretches, spell, cursor, until, number)
            cursor = max(cursor, until)
    _append(stretches, TimeUse.QUEUED, cursor, end, ordered[-1].number if ordered else 0)
    return JobTimeline(stretches=tuple(stretches))


def _one_after_another(job: Job, attempts: Iterable[Attempt], end: datetime) -> list[Attempt]:
    """By number, without those that were started beside the job's gang and never got the work."""
    kept: list[Attempt] = []
    for attempt in sorted(attempts, key=lambda attempt: attempt.number):
        beside = bool(kept) and attempt.created_at < _work_until(kept[-1], end)
        if not beside or attempt.running_at is not None or attempt.number == job.attempt:
            kept.append(attempt)
    return kept


def _work_until(attempt: Attempt, end: datetime) -> datetime:
    """Until when it worked, or may; an attempt that never worked holds up no other."""
    return (
        attempt.created_at
        if attempt.running_at is None
        else attempt.finished_at or attempt.ended_at or end
    )


def _edges(attempt: Attempt, end: datetime) -> Iterator[tuple[TimeUse, datetime]]:
    """What an attempt did, and until when, in order."""
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


def _append(
    stretches: list[TimelineStretch], spell: TimeUse, since: datetime, until: datetime, attempt: int
) -> None:
    if since < until:
        stretches.append(TimelineStretch(spell=spell, since=since, until=until, attempt=attempt))
