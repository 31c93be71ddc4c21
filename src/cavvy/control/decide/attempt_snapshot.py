"""All inputs of a decision about an attempt, and conclusions about its nodes."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from cavvy.domain.gangs import GangSeen
from cavvy.domain.jobs import Attempt, AttemptOutcome, Job, Node
from cavvy.domain.units import Money

HEARD_LATELY = timedelta(
    seconds=60
)  # two long polls: a gang whose agent reported within this time exists, even if not listed
MARGIN = timedelta(
    seconds=5
)  # time added to the grace period for the signal, the last log lines and the report


class GangAbsence(StrEnum):
    """The result of a poll that did not return the gang."""

    UNKNOWN = "unknown"  # the provider was not polled, or did not answer
    ABSENT = "absent"  # the provider does not know the gang


Seen = GangSeen | GangAbsence


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSnapshot:
    """All inputs of a decision about an attempt."""

    job: Job
    attempt: Attempt
    nodes: tuple[Node, ...]
    seen: Seen
    visibility_delay: timedelta  # how long a new gang may be missing from the provider's answers
    listening_since: datetime  # this server's start: agents count as silent only since then
    asked: bool = False  # this server requested the launch, and no poll has succeeded since then
    removed_at: datetime | None = None  # when this server last requested the removal
    unsure: bool = False  # a launch request was never answered: it may still take effect
    denied: bool = False  # the provider refused the last launch request
    requested: bool = True  # this server, or an earlier one, may have requested the launch
    spent: Money | None = None  # spent by the job until now, if it has a budget
    pays: timedelta | None = None  # how long the rest of the budget lasts at the current price
    collecting: frozenset[int] = frozenset()  # ranks whose results are being read from a bucket


def is_surely_absent(view: AttemptSnapshot) -> bool:
    """Whether two polls have missed the gang, so far apart that an existing gang would have
    appeared in between.

    One poll is enough if no launch was requested, or if the provider itself refused the only launch
    request.
    """
    attempt = view.attempt
    refused = view.denied or attempt.outcome in (AttemptOutcome.CAPACITY, AttemptOutcome.REFUSED)
    if (refused or not view.requested) and attempt.launched_at is None and not view.unsure:
        return attempt.missed_looks >= 1
    return attempt.missed_looks >= 2


def is_heard_lately(view: AttemptSnapshot, now: datetime) -> bool:
    return any(now - heard(view, node) < HEARD_LATELY for node in view.nodes if node.claim)


def heard(view: AttemptSnapshot, node: Node) -> datetime:
    return max(view.listening_since, node.heard_at or node.claimed_at or view.listening_since)


def lease_end(view: AttemptSnapshot, node: Node) -> datetime:
    """When the work of this node must have ended if its agent sends nothing more."""
    task = view.job.task
    return heard(view, node) + task.limits.unattended + task.grace + MARGIN
