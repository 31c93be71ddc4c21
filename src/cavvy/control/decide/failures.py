"""What kind of failure ended an attempt, and so how long its offer is not used.

`job.py` decides what is tried again.
"""

from datetime import timedelta

from cavvy.domain.jobs import Attempt, AttemptOutcome, FailureKind

# (of the first time, at most): doubled with each in a row. A node that is broken is often given out
# again at once, so its zone rests for longer than one that had no capacity.
_COOLDOWNS: dict[FailureKind, tuple[timedelta, timedelta]] = {
    FailureKind.CAPACITY: (timedelta(seconds=30), timedelta(hours=1)),
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
    """What failed, of an attempt that did not succeed: a node where nothing better is known."""
    known = attempt.failure or (attempt.outcome and _BY_OUTCOME.get(attempt.outcome))
    return known or FailureKind.NODE


def cooldown_after(kind: FailureKind, attempt: Attempt, before: int) -> timedelta:
    """How long the attempt's place is left alone, after so many failures of the kind `before` it.

    A shared host is not left alone for what may have been one process of it.
    """
    if attempt.offer.shared and kind not in _OF_THE_PLACE:
        return timedelta(0)
    first, most = _COOLDOWNS[kind]
    return min(most, first * (1 << min(before, 16)))
