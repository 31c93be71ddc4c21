"""Determines the kind of failure that ended an attempt, and the cooldown of the attempt's offer.

`job.py` decides about retries.
"""

from datetime import timedelta

from cavvy.domain.jobs import Attempt, AttemptOutcome, FailureKind
from cavvy.planner.markets import LONGEST_REST

# Cooldowns as (first, maximum); they double with each failure in a row. Providers often return the
# same broken node at once, so a broken GPU or link has a longer cooldown than missing capacity.
_COOLDOWNS: dict[FailureKind, tuple[timedelta, timedelta]] = {
    FailureKind.CAPACITY: (timedelta(seconds=30), LONGEST_REST),
    FailureKind.QUOTA: (timedelta(days=1), timedelta(days=1)),
    FailureKind.REFUSED: (timedelta(days=1), timedelta(days=1)),
    FailureKind.PREEMPTED: (timedelta(0), timedelta(0)),
    FailureKind.GPU: (timedelta(minutes=10), timedelta(hours=6)),
    FailureKind.LINK: (timedelta(minutes=10), timedelta(hours=6)),
    FailureKind.NODE: (timedelta(seconds=30), timedelta(hours=1)),
    FailureKind.NETWORK: (timedelta(minutes=1), timedelta(hours=1)),
    FailureKind.BOOT: (timedelta(minutes=1), timedelta(hours=1)),
    FailureKind.PROGRAM: (timedelta(0), timedelta(0)),
}
_OF_THE_PLACE = frozenset(
    {
        FailureKind.CAPACITY,
        FailureKind.QUOTA,
        FailureKind.REFUSED,
        FailureKind.GPU,
        FailureKind.LINK,
    }
)


_BY_OUTCOME = {
    AttemptOutcome.CAPACITY: FailureKind.CAPACITY,
    AttemptOutcome.REFUSED: FailureKind.REFUSED,
    AttemptOutcome.PREEMPTED: FailureKind.PREEMPTED,
    AttemptOutcome.TIMEOUT: FailureKind.BOOT,
    AttemptOutcome.EXIT: FailureKind.PROGRAM,
    AttemptOutcome.SETUP: FailureKind.PROGRAM,
    AttemptOutcome.LIMIT: FailureKind.PROGRAM,
}


def failure_of(attempt: Attempt) -> FailureKind:
    """The kind of failure of an unsuccessful attempt; NODE unless more is known."""
    known = attempt.failure or (attempt.outcome and _BY_OUTCOME.get(attempt.outcome))
    return known or FailureKind.NODE


def cooldown_after(kind: FailureKind, attempt: Attempt, before: int) -> timedelta:
    """The cooldown of the attempt's offer after `before` earlier failures of the kind.

    A shared host gets no cooldown for most failures, since one process may be the cause.
    """
    if attempt.offer.shared and kind not in _OF_THE_PLACE:
        return timedelta(0)
    first, most = _COOLDOWNS[kind]
    return min(most, first * (1 << min(before, 16)))
