"""Decides whether a gang is kept warm after its work, which jobs can take over the gang, and what
the takeover changes."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from cavvy.control.decide.job import MARGIN, cap_of, ends_job
from cavvy.control.decide.placement import make_attempt, start_job
from cavvy.control.decide.rows import RowChanges, make_event
from cavvy.costs.metering import total
from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.jobs import (
    NODE_SPARED,
    Attempt,
    AttemptOutcome,
    AttemptPhase,
    JobRecord,
    Node,
    NodePhase,
    StopCause,
)
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import Money, format_rate, format_usd
from cavvy.domain.values import replace

# How much longer than the keep time an agent waits, unless the server orders it to exit.
FAREWELL = timedelta(minutes=1)
_NOTHING = timedelta(0)
# The maximum time after the work's end until agents request their next work: they do so within a
# second, but a kubelet reports a start two or more seconds late.
_FRESH = timedelta(seconds=10)
_BY_ITSELF = frozenset({AttemptOutcome.SUCCEEDED, AttemptOutcome.EXIT})
_WORKED = frozenset({AttemptPhase.BOOTING, AttemptPhase.RUNNING})
_LONGEST_H = 24


def may_keep(task: TaskSpec, offer: Offer) -> bool:
    """Return True if the task asks to keep its nodes after the work and nodes of this offer can be
    kept. The nodes of a named machine can always be kept. Without a named machine, nodes on a
    shared host are not kept, because the host releases its devices immediately. Without a named
    machine, nodes with volumes or a time limit are not kept, because these nodes may not suit the
    next job.
    """
    if task.keep <= _NOTHING:
        return False
    bound = offer.shared or task.volumes or task.limits.duration is not None
    return task.machine is not None or not bound


def _endings(task: TaskSpec) -> frozenset[AttemptOutcome]:
    """Return the outcomes of a node's work after which the node can be kept."""
    return NODE_SPARED if task.on_kept_nodes else _BY_ITSELF


def waits_on(job: JobRecord, attempt: Attempt, node: Node) -> bool:
    """Return whether an agent that requests work for this rank may be waiting for the next job."""
    if attempt.phase is AttemptPhase.KEPT:
        return True
    over = node.phase is NodePhase.EXITED and node.exit_outcome in _endings(job.task)
    return (
        attempt.phase in _WORKED and over and not job.released and may_keep(job.task, attempt.offer)
    )


def keeps_until(
    job: JobRecord,
    attempt: Attempt,
    nodes: Sequence[Node],
    end: tuple[AttemptOutcome | None, int | None],
    spent: Money | None,
    now: datetime,
) -> datetime | None:
    """Return the time until which the gang is kept, or None if it is released.

    A gang is kept if the work on every node ended without an order to stop, and the job is not
    retried. A machine's gang is kept whenever the gang's work ends and all of its nodes are intact.
    """
    if attempt.phase not in _WORKED or job.released or not may_keep(job.task, attempt.offer):
        return None
    if attempt.number != job.attempt or job.standbys or not _leaves_nodes(job, end):
        return None
    if attempt.drill_until is not None or any(node.notice_until is not None for node in nodes):
        return None
    if any(
        node.phase is not NodePhase.EXITED or node.exit_outcome not in _endings(job.task)
        for node in nodes
    ):
        return None
    length = min(job.task.keep, paid_for(job, attempt, spent))
    return now + length if length > _NOTHING else None


def _leaves_nodes(job: JobRecord, end: tuple[AttemptOutcome | None, int | None]) -> bool:
    """Return whether the nodes can run another job after this job's work has ended with the outcome
    and the exit code in `end`.
    """
    if not job.task.on_kept_nodes:
        return job.stop_reason is None and ends_job(job, *end)
    timed = job.stop_cause in (StopCause.DURATION, StopCause.DEADLINE)
    return end[0] in NODE_SPARED or (end[0] is AttemptOutcome.LIMIT and timed)


def paid_for(job: JobRecord, attempt: Attempt, spent: Money | None) -> timedelta:
    """Return how long the rest of the budget can pay for the gang, minus the time that removing the
    gang takes.
    """
    cap, rate = cap_of(job), attempt.offer.rate.times(attempt.nodes).micros_per_hour
    if cap is None or not rate:
        return timedelta.max
    left = 0 if spent is None else max(0, cap.micros - spent.micros)
    paid = timedelta(hours=min(_LONGEST_H, left / rate))
    return paid - min(MARGIN, paid / 2)


def fits(kept: Attempt, former: JobRecord, job: JobRecord) -> bool:
    """Return whether a warm gang would suit the job as well as a new gang on the same offer. The
    caller checks that the offer suits the job. The tags of a pool's nodes are those of the job that
    started them.
    """
    old, new = former.task, job.task
    if (
        former.project != job.project
        or old.machine is not None
        or old.pool != new.pool
        or kept.nodes != new.nodes
        or (kept.offer.by_user and former.user != job.user)
        or new.volumes
        or new.retry.parallel > 1
    ):
        return False
    return all(
        getattr(old, name) == getattr(new, name)
        for name in ("image", "image_build", "image_login", "grace", "tags", "topology")
        if name != "tags" or new.pool is None
    ) and all(
        getattr(old.resources, name) == getattr(new.resources, name)
        for name in ("disk_gib", "disk_type", "network", "options")
    )


def is_fresh(kept: Attempt, now: datetime) -> bool:
    """Return whether the gang was kept so recently that its agents may still be about to request
    their next work.
    """
    return now - (kept.kept_since or kept.since) < _FRESH


def is_kept(attempt: Attempt, now: datetime) -> bool:
    """Return whether the attempt's gang is kept warm and still waits for a job."""
    until = attempt.kept_until
    return attempt.phase is AttemptPhase.KEPT and until is not None and until > now


def list_kept(kept: Iterable[Attempt], project: str) -> list[Attempt]:
    """Return the project's warm gangs. The gang that has been kept longest comes first."""
    mine = [each for each in kept if each.project == project]
    return sorted(mine, key=lambda each: (each.kept_since or each.since, each.id))


def hand_over(
    old: Attempt, former: JobRecord, charges: Sequence[Charge], job: JobRecord, now: datetime
) -> RowChanges:
    """Assign a warm gang to a new attempt of the job. `charges` are the charges of `old`, the
    attempt that used the gang before.
    """
    reason = f"took over the gang of {former.name}"
    fresh, nodes = make_attempt(job, old.offer, lambda _: old.gang, now, reason)
    adopted = replace(fresh, phase=AttemptPhase.BOOTING, launched_at=now, adopted_at=now)
    handed = replace(
        old,
        phase=AttemptPhase.ENDED,
        since=now,
        ended_at=now,
        gang=f"{old.gang}@{old.id}",
        kept_until=now,
    )
    reason = f"starts on {old.offer.key}, on the gang kept by job {former.name}"
    if job.task.machine is not None:
        price = format_rate(old.offer.rate.times(old.nodes))
        reason = f"starts on machine {job.task.machine}, {price}: {old.offer.key}"
    started = start_job(job, adopted, reason, now)
    cost = format_usd(total(each for each in charges if each.kind is ChargeKind.KEPT))
    text = f"job {job.name} took over the gang, whose last idle period cost {cost}"
    return RowChanges(
        job=started,
        attempts=(handed, adopted),
        nodes=tuple(nodes),
        events=(
            make_event(started, now, "placed", reason),
            make_event(former, now, "kept", text, old.number),
        ),
        charges=tuple(charges),
    )
