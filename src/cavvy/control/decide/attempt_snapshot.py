"""The inputs of a decision about an attempt, and functions that derive facts about its nodes from
these inputs.

Words for what a gang lacks that was requested and does not work yet.

Finds the ranks whose results could be in a bucket.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from enum import StrEnum

from cavvy.domain.gangs import GangSeen, GangState
from cavvy.domain.jobs import Attempt, AttemptOutcome, AttemptPhase, JobRecord, Node, NodePhase
from cavvy.domain.units import Money
from cavvy.domain.values import Struct
from cavvy.scheduler.node_pools import KeepIdle

HEARD_LATELY = timedelta(
    seconds=60
    # the length of two long polls. A gang whose agent reported within this time exists, even if the
    # provider does not list it.
)
MARGIN = timedelta(
    seconds=5
    # time added to the grace period, in which the signal, the last log lines and the report are
    # delivered
)

_LONGEST = 400  # characters; some APIs return pages of text


class GangAbsence(StrEnum):
    """The reason why a poll did not return the gang."""

    UNKNOWN = "unknown"  # the provider was not polled, or did not answer
    ABSENT = "absent"  # the provider does not know the gang


Seen = GangSeen | GangAbsence


class AttemptSnapshot(Struct, frozen=True, kw_only=True):
    """All inputs of a decision about an attempt."""

    job: JobRecord
    attempt: Attempt
    nodes: tuple[Node, ...]
    seen: Seen
    trouble: str = ""  # the error of the last call of the provider about the gang
    visibility_delay: timedelta  # how long a new gang may be missing from the provider's lists
    # when this server started; the silence of agents is counted only since then
    listening_since: datetime
    # whether this server has requested the launch, and no poll has succeeded since then
    asked: bool = False
    removed_at: datetime | None = None  # when this server last requested the removal
    # whether a launch request was never answered, so that it may still take effect
    unsure: bool = False
    sold_out: str = ""  # why the nodes that are to be replaced got no capacity when last asked for
    denied: bool = False  # whether the provider refused the last launch request
    requested: bool = True  # whether this server or an earlier one may have requested the launch
    spent: Money | None = None  # what the job has spent until now; None if it has no budget
    pays: timedelta | None = None  # how long the rest of the budget lasts at the current price
    # how long the job's pool keeps the idle gang; None if the job has no pool
    pool: KeepIdle | None = None
    replaces: bool = False  # whether the provider can replace single nodes of the gang
    unpaid: str = ""  # why no budget pays for nodes that are kept any longer
    collecting: frozenset[int] = frozenset()  # ranks whose results are being read from a bucket


def is_surely_absent(view: AttemptSnapshot) -> bool:
    """Return whether the gang certainly does not exist. This is certain after two polls that did
    not find the gang. Between the two polls, the provider has enough time to list a gang that
    exists.

    One poll that does not find the gang is enough if no launch was requested, or if the provider
    itself refused the only launch request.
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
    """Return the end of the node's lease. If the agent sends no more messages, it ends the work
    before this time.
    """
    task = view.job.task
    return heard(view, node) + task.limits.unattended + task.grace + MARGIN


def name_silent(nodes: Sequence[Node]) -> str:
    """Return the ranks whose agents have never contacted the server, such as "rank 0, 3", or "" if
    all agents have.
    """
    silent = ", ".join(str(node.rank) for node in nodes if not node.claim)
    return f"rank {silent}" if silent else ""


def add_cause(text: str, cause: str) -> str:
    """Return the text with its cause, if the cause is known."""
    return f"{text}: {cause}" if cause else text


def find_cause(view: AttemptSnapshot) -> str:
    """Return what the provider last said about a gang that does not start: the gang's own reason
    or, if the provider did not answer, the error. Return "" if the provider gave no reason.
    """
    return view.seen.reason if isinstance(view.seen, GangSeen) else view.trouble


def say_ended(nodes: Sequence[Node]) -> str:
    """Return what happened to the work of a gang that the provider reports as ended."""
    silent = name_silent(nodes)
    if silent:
        return f"the gang ended before the agent of {silent} contacted the server"
    return "the gang ended before its work was complete"


def say_lost(node: Node) -> str:
    """Return what happened to a node that the provider reports as ended while its gang goes on."""
    early = "" if node.claim else " before its agent contacted the server"
    return f"the node of rank {node.rank} was lost{early}"


def shorten(text: str) -> str:
    """Return an error as one line of limited length."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


def list_unreported(view: AttemptSnapshot, now: datetime) -> list[int]:
    """Return the ranks that have ended without a report of their exit: the node has ended, or the
    agent was silent for longer than its lease. Before the server counts a rank as lost, it looks
    for the rank's results in the bucket.

    An agent stores results in the bucket if no response of the server reaches it. The server's
    responses can be lost although the agent's requests arrive. Therefore the server looks for
    results even if the agent sent requests until its node ended.
    """
    if view.attempt.phase not in (AttemptPhase.BOOTING, AttemptPhase.RUNNING):
        return []
    ended: set[int] = set()
    if isinstance(view.seen, GangSeen):
        ended = {node.rank for node in view.seen.nodes if node.ended_at}
    gone = is_gone(view, now)
    return [
        node.rank
        for node in view.nodes
        if node.claim and node.phase is not NodePhase.EXITED
        if gone or node.rank in ended or now >= lease_end(view, node)
    ]


def is_gone(view: AttemptSnapshot, now: datetime) -> bool:
    """Return whether all nodes of the gang have ended; if so, waiting for results costs nothing."""
    if isinstance(view.seen, GangSeen):
        return view.seen.state is GangState.ENDED
    absent = view.seen is GangAbsence.ABSENT and is_surely_absent(view)
    return absent and not is_heard_lately(view, now)
