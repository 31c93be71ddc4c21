"""Decides whether a gang that has lost a node is repaired: its other nodes are kept, with their
setup and their cache, and only the lost node is replaced.

The work of the other nodes is ended first, so that it can save a checkpoint. Their agents then wait
on their nodes, until the next attempt has all of its nodes.
"""

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

from cavvy.control.decide.attempt_snapshot import MARGIN, AttemptSnapshot, GangAbsence
from cavvy.domain.gangs import GangSeen, GangState
from cavvy.domain.jobs import (
    Attempt,
    AttemptOutcome,
    AttemptPhase,
    FailureKind,
    JobRecord,
    Node,
    NodePhase,
)
from cavvy.domain.tasks import LossPolicy, TaskSpec
from cavvy.domain.values import Struct

# Outcomes of a rank after which its agent waits on its node for a repair. Work often fails when it
# loses its connection to the lost rank, before it is told to stop.
AWAITS_REPAIR = frozenset({AttemptOutcome.STOPPED, AttemptOutcome.EXIT})
_LOSSES = frozenset({AttemptOutcome.NODE, AttemptOutcome.PREEMPTED})
_WORKED = frozenset({AttemptPhase.BOOTING, AttemptPhase.RUNNING})
# How long the other nodes wait for capacity, at least and at most.
_SHORTEST, LONGEST_WAIT = timedelta(minutes=1), timedelta(minutes=15)
_ANSWER = timedelta(minutes=2)  # how long a provider may take to say which node was lost
# How long agents wait for the next attempt, unless the server orders them to exit: the longest wait
# for capacity, the longest boot of a node, and the time until all ranks have ended.
_AGENTS_WAIT = timedelta(minutes=45)


class RepairGang(Struct, frozen=True, kw_only=True):
    """End the attempt, and let the job's next attempt take over its gang, in which the nodes of
    `ranks` are replaced."""

    ranks: tuple[int, ...]
    outcome: AttemptOutcome
    reason: str
    failure: FailureKind | None = None
    rank: int | None = None  # the rank that was lost first
    kind: str  # as counted in JobRecord.retries
    anew: bool  # whether earlier failures of this kind no longer count


def can_repair(task: TaskSpec) -> bool:
    """Return whether a gang of this task is repaired if it loses a node. Replicas of services,
    sessions, and jobs on nodes that are kept for other work have rules of their own; a job of a
    group has told the other jobs its addresses.
    """
    return (
        task.on_loss is LossPolicy.REPAIR
        and task.nodes > 1
        and task.service is None
        and task.group is None
        and task.retry.parallel == 1
        and not (task.session or task.on_kept_nodes)
    )


def may_repair(job: JobRecord, attempt: Attempt) -> bool:
    """Return whether the attempt's gang would be repaired now if it lost a node, at a provider that
    can replace nodes.
    """
    return (
        can_repair(job.task)
        and attempt.number == job.attempt
        and attempt.phase in _WORKED
        and attempt.drill_until is None
        and job.stop_reason is None
        and not job.standbys
    )


def awaits_repair(job: JobRecord, attempt: Attempt, node: Node) -> bool:
    """Return whether the agent of this rank may be waiting for a repair of its gang."""
    over = node.phase is NodePhase.EXITED and node.exit_outcome in AWAITS_REPAIR
    return over and may_repair(job, attempt)


def agents_wait(task: TaskSpec) -> timedelta:
    """Return how long an agent waits on its node for the repair of its gang."""
    return task.grace + _AGENTS_WAIT if can_repair(task) else timedelta(0)


def keeps_rest(view: AttemptSnapshot) -> bool:
    """Return whether a loss of a node is repaired, so that the other nodes must be kept."""
    return view.replaces and loses_part(view.job, view.attempt, view.nodes)


def loses_part(job: JobRecord, attempt: Attempt, nodes: Sequence[Node]) -> bool:
    """Return whether the gang may be repaired, and its provider does not reclaim all of it."""
    return may_repair(job, attempt) and any(node.notice_until is None for node in nodes)


def explain_restart(
    job: JobRecord,
    attempt: Attempt,
    nodes: Sequence[Node],
    seen: GangSeen | None,
    outcome: AttemptOutcome | None,
) -> bool:
    """Return whether users should be told why a gang that has lost some of its nodes is not
    repaired, at a provider that cannot replace single nodes.
    """
    alive = seen is not None and seen.state is not GangState.ENDED
    return outcome in _LOSSES and alive and loses_part(job, attempt, nodes)


def find_repair(
    view: AttemptSnapshot,
    outcome: AttemptOutcome,
    reason: str,
    failure: FailureKind | None,
    rank: int,
    lost: Collection[int],
) -> RepairGang | None:
    """Return the repair of a gang that ends because it has lost the node of `rank`. The result is
    None if the gang cannot be repaired. `lost` are the ranks that the provider or the lease reports
    as lost; ranks whose agents reported a failure of their node are lost, too.
    """
    if outcome not in _LOSSES or failure is FailureKind.STUCK or not keeps_rest(view):
        return None
    if failure is FailureKind.GPU and view.attempt.offer.shared:
        return None  # on the same host, the rank would get the same GPU
    if not isinstance(view.seen, GangSeen) or view.seen.state is GangState.ENDED:
        return None
    gone = [x.rank for x in view.nodes if x.rank in lost or x.exit_outcome in _LOSSES]
    alive = {node.rank for node in view.seen.nodes if node.started_at and not node.ended_at}
    left = [node for node in view.nodes if node.rank not in gone]
    waits = all(node.rank in alive and _waits(view.nodes, node) for node in left)
    if not gone or not left or not waits:
        return None
    counted = count_loss(view.job, view.attempt, outcome)
    if counted is None:
        return None
    kind, anew = counted
    return RepairGang(
        ranks=tuple(gone),
        outcome=outcome,
        reason=reason,
        failure=failure,
        rank=rank,
        kind=kind,
        anew=anew,
    )


def awaits_look(view: AttemptSnapshot, now: datetime) -> bool:
    """Return whether to wait for an answer of the provider before a gang with failed ranks ends,
    because the answer may show that the gang has lost a node."""
    if isinstance(view.seen, GangSeen) or not keeps_rest(view):
        return False
    ends = [node.exited_at for node in view.nodes if node.exited_at is not None]
    return view.seen is GangAbsence.UNKNOWN and bool(ends) and now - max(ends) < _ANSWER


def _waits(nodes: Sequence[Node], node: Node) -> bool:
    """Return whether the agent of a rank waits for work, or for the agents of other ranks."""
    if node.phase is NodePhase.EXITED:
        return node.exit_outcome in AWAITS_REPAIR
    return not all(each.claim for each in nodes)  # no rank has got its work


def count_loss(
    job: JobRecord, attempt: Attempt, outcome: AttemptOutcome
) -> tuple[str, bool] | None:
    """Return the kind of failure as which a loss counts, and whether the count begins again, as it
    does if a checkpoint was saved since. Return None if the task allows no more of them.
    """
    retry = job.task.retry
    preempted = outcome is AttemptOutcome.PREEMPTED
    kind, allowed = ("preemption", retry.preemption) if preempted else ("node", retry.node)
    anew = not preempted and attempt.checkpoint_at is not None
    used = 0 if anew else job.retries.get(kind, 0)
    return None if allowed is not None and used >= allowed else (kind, anew)


def wait_for_capacity(attempt: Attempt, lost: int) -> timedelta:
    """Return how long the other nodes wait for capacity for the `lost` nodes. They wait as long as
    that costs no more than to start all nodes of the gang again, which took as long as the gang
    took from its launch to its work.
    """
    began = attempt.running_at or attempt.since
    start = began - attempt.created_at
    left = max(1, attempt.nodes - lost)
    return min(LONGEST_WAIT, max(_SHORTEST, start * attempt.nodes / left)) + MARGIN
