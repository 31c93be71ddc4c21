"""Determines what kind of failure ended an attempt, and how long the job avoids the attempt's offer
(the cooldown).

`job.py` decides about retries.
"""

from datetime import timedelta

from cavvy.domain.jobs import Attempt, AttemptOutcome, FailureKind
from cavvy.planner.markets import LONGEST_REST

# Cooldowns as (first, maximum). A cooldown doubles with each consecutive failure. Providers often
# return the same broken node at once, so broken GPUs and links have longer cooldowns than missing
# capacity.
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
    FailureKind.STUCK: (timedelta(seconds=30), timedelta(hours=1)),
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
    """Return the failure kind that the attempt or its outcome states, or NODE if neither states a
    kind."""
    known = attempt.failure or (attempt.outcome and _BY_OUTCOME.get(attempt.outcome))
    return known or FailureKind.NODE


def cooldown_after(kind: FailureKind, attempt: Attempt, before: int) -> timedelta:
    """Return the cooldown of the attempt's offer, after `before` earlier failures of the same kind.

    Most failures cause no cooldown of a shared host, because the cause may be a single process.
    """
    if attempt.offer.shared and kind not in _OF_THE_PLACE:
        return timedelta(0)
    first, most = _COOLDOWNS[kind]
    return min(most, first * (1 << min(before, 16)))
