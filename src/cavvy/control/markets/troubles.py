"""What kind of failure ended an attempt, and so for how long its place is left alone. Pure;
`control/jobs.py` decides what is tried again.
"""

from datetime import timedelta
from enum import StrEnum

from cavvy.domain.jobs import Attempt, Outcome


class Trouble(StrEnum):
    """A kind of failure, by what it says about the place."""

    CAPACITY = "no capacity"
    QUOTA = "quota"  # a person must act
    REFUSED = "refused"  # a person must act
    TAKEN = "preempted"
    GPU = "GPU fault"
    LINK = "slow link"
    NODE = "node fault"
    NETWORK = "network"
    BOOT = "did not boot"
    PROGRAM = "the program failed"  # the same anywhere


_QUOTA = ("quota", "limit exceeded", "limitexceeded", "vcpulimit")
_NETWORK = ("silent", "no longer knows the gang", "unreachable", "connection", "network")
GPU_FAULT = "GPU fault"  # how an agent's reason begins that found one
SLOW_LINK = "slow link"  # and how where nodes do not reach each other as they should

# (of the first time, at most): doubled with each in a row. A node that is broken is often given out
# again at once, so its zone rests for longer than one that had no room.
_RESTS: dict[Trouble, tuple[timedelta, timedelta]] = {
    Trouble.CAPACITY: (timedelta(seconds=30), timedelta(hours=1)),
    Trouble.QUOTA: (timedelta(days=1), timedelta(days=1)),
    Trouble.REFUSED: (timedelta(days=1), timedelta(days=1)),
    Trouble.TAKEN: (timedelta(0), timedelta(0)),
    Trouble.GPU: (timedelta(minutes=10), timedelta(hours=6)),
    Trouble.LINK: (timedelta(minutes=10), timedelta(hours=6)),
    Trouble.NODE: (timedelta(seconds=30), timedelta(hours=1)),
    Trouble.NETWORK: (timedelta(minutes=1), timedelta(hours=1)),
    Trouble.BOOT: (timedelta(minutes=1), timedelta(hours=1)),
    Trouble.PROGRAM: (timedelta(0), timedelta(0)),
}
_OF_THE_PLACE = frozenset(
    {Trouble.CAPACITY, Trouble.QUOTA, Trouble.REFUSED, Trouble.GPU, Trouble.LINK}
)


def find_trouble(attempt: Attempt) -> Trouble:
    """The kind of failure that ended an attempt which did not succeed."""
    said = attempt.reason.lower()
    match attempt.outcome:
        case Outcome.CAPACITY:
            return Trouble.CAPACITY
        case Outcome.REFUSED:
            return Trouble.QUOTA if any(word in said for word in _QUOTA) else Trouble.REFUSED
        case Outcome.PREEMPTED:
            return Trouble.TAKEN
        case Outcome.TIMEOUT:
            return Trouble.BOOT
        case Outcome.EXIT | Outcome.SETUP | Outcome.LIMIT:
            return Trouble.PROGRAM
    if attempt.reason.startswith(GPU_FAULT):
        return Trouble.GPU
    if attempt.reason.startswith(SLOW_LINK):
        return Trouble.LINK
    return Trouble.NETWORK if any(word in said for word in _NETWORK) else Trouble.NODE


def rest_after(trouble: Trouble, attempt: Attempt, before: int) -> timedelta:
    """How long the attempt's place is left alone, after so many failures of the kind `before` it.

    A shared host is not left alone for what may have been one process of it.
    """
    if attempt.offer.shared and trouble not in _OF_THE_PLACE:
        return timedelta(0)
    first, most = _RESTS[trouble]
    return min(most, first * (1 << min(before, 16)))
