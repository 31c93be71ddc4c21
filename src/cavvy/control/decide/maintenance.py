"""Turns rows into what `scheduler.maintenance` decides about, and their
decisions into rows.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.control.decide.queue import QueueWait, make_wait
from cavvy.control.decide.rows import RowChanges, make_event
from cavvy.control.decide.standby import HANDOVER
from cavvy.domain.jobs import JOB_ENDS, Attempt, AttemptPhase, JobRecord
from cavvy.domain.maintenance import NodeState, Reservation
from cavvy.domain.units import Money, format_duration, format_usd
from cavvy.domain.values import Struct, replace
from cavvy.planner.candidates import OfferedMarket
from cavvy.scheduler.maintenance import NodeWork, ReservedFor, close_hosts, close_offers

_NONE = timedelta(0)
_HELD = frozenset({AttemptPhase.LAUNCHING, AttemptPhase.BOOTING, AttemptPhase.RUNNING})


def apply_states(market: OfferedMarket, states: Mapping[str, NodeState]) -> OfferedMarket:
    """Return the market as new work may use it, after what operators have ordered for hosts."""
    if not states and not any(host.sick for host in market.hosts):
        return market
    hosts = close_hosts(market.hosts, states)
    changed = {
        after.name for before, after in zip(market.hosts, hosts, strict=True) if after is not before
    }
    if not changed:
        return market
    return replace(market, hosts=hosts, offers=close_offers(market.offers, hosts, changed))


def make_work(attempt: Attempt, job: JobRecord) -> NodeWork:
    """Return the attempt's gang as work on a host that is drained."""
    stopping = job.stop_reason is not None or job.phase in JOB_ENDS
    held = attempt.phase in _HELD and attempt.number == job.attempt and not stopping
    saves = job.task.checkpoint is not None and attempt.phase is AttemptPhase.RUNNING
    return NodeWork(
        gang=attempt.gang,
        notice=max(HANDOVER, job.task.grace),
        saves=saves,
        idle=attempt.phase is AttemptPhase.KEPT,
        leaving=attempt.drill_until is not None
        or (not held and attempt.phase is not AttemptPhase.KEPT),
    )


def leave_host(
    attempt: Attempt, job: JobRecord, why: str, until: datetime, now: datetime
) -> RowChanges:
    """Let the job save a checkpoint, leave its nodes until the time `until`, and return to the
    queue. `why` says what is done with the host."""
    lost = find_loss(attempt, job, now)
    told = f"leaves its nodes within {format_duration(until - now)}, because {why}"
    if lost.length:
        told += f"; {format_duration(lost.length)} of its work is lost"
        told += f" ({format_usd(lost.cost)})" if lost.cost.micros else ""
        told += "" if job.task.checkpoint else ", because it saves no checkpoints"
    return RowChanges(
        attempts=(replace(attempt, drill_until=until, moved=True, moved_because=why),),
        events=(make_event(job, now, "drained", told, attempt.number),),
    )


def release_host(attempt: Attempt, job: JobRecord, why: str, now: datetime) -> RowChanges:
    """Release an idle gang that is kept after the job."""
    return RowChanges(
        attempts=(replace(attempt, kept_until=now),),
        events=(make_event(job, now, "kept", f"removed, because {why}", attempt.number),),
    )


class WorkLoss(Struct, frozen=True, kw_only=True):
    """The work that is repeated if a gang ends, and what this work has cost."""

    length: timedelta = _NONE
    cost: Money = Money(0)


def find_loss(attempt: Attempt, job: JobRecord, now: datetime) -> WorkLoss:
    """Return what a job loses that leaves its nodes now: nothing if it saves checkpoints, as it
    saves one then."""
    if attempt.running_at is None or job.task.checkpoint is not None:
        return WorkLoss()
    length = max(_NONE, (attempt.finished_at or now) - attempt.running_at)
    rate = attempt.offer.rate.times(attempt.nodes)
    return WorkLoss(length=length, cost=rate.over(length))


def find_end(attempt: Attempt, job: JobRecord) -> tuple[datetime | None, str]:
    """Return when the gang certainly ends, if that is known, and from what: its notice, the time
    for which it is kept without work, or the job's time limit. Earlier attempts count toward the
    limit too, so the work may end earlier.
    """
    if attempt.drill_until is not None:
        return attempt.drill_until, "notice"
    if attempt.phase is AttemptPhase.KEPT:
        return attempt.kept_until, "kept"
    longest = job.task.limits.duration
    if longest is None or job.task.machine is not None:
        return None, ""
    return (attempt.running_at or attempt.created_at) + longest, "limit"


def compare_reserved(job: JobRecord) -> ReservedFor:
    """Return what the job is compared with reservations by. The jobs of a machine have no end, as
    the machine keeps its nodes."""
    task = job.task
    longest = task.limits.duration if task.machine is None else None
    runs = None if longest is None else longest + task.grace
    return ReservedFor(project=job.project, user=job.user, runs=runs)


def wait_for_reservation(job: JobRecord, closed: Sequence[Reservation], now: datetime) -> QueueWait:
    """Return why the job waits whose offers are all reserved for others."""
    first = min(closed, key=lambda each: each.ends_at)
    hosts = ", ".join(dict.fromkeys(part.host for part in first.parts))
    reason = f"waits because {hosts} is {first.describe(job.project)}"
    if job.project == first.project:
        reason += f" (reservation {first.name})"
    if first.begins_at > now:
        reason += "; a `limits.duration` that ends before lets it start"
    times = [each.begins_at if each.begins_at > now else each.ends_at for each in closed]
    return make_wait(job, reason, min(times))
