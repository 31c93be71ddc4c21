"""Whether a gang is kept when its work is over, whom it fits, and what each of its owners pays.
Pure.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from cavvy.control.attempts import AdvanceAttempt
from cavvy.control.jobs import cap_of, ends_job
from cavvy.costs.metering import bill
from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.jobs import Attempt, AttemptOutcome, AttemptPhase, Job, Node, NodePhase
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Task
from cavvy.domain.units import Money
from cavvy.providers.base import GangSeen

FAREWELL = timedelta(
    minutes=1
)  # how much longer an agent waits than its gang is kept, should nobody tell it
_NOTHING = timedelta(0)
_BY_ITSELF = frozenset({AttemptOutcome.SUCCEEDED, AttemptOutcome.EXIT})
_WORKED = frozenset({AttemptPhase.BOOTING, AttemptPhase.RUNNING})
_LONGEST_H = 24


def may_keep(task: Task, offer: Offer) -> bool:
    """Whether the task wants its nodes kept, and they can be: a shared host frees its devices at
    once.
    """
    return (
        task.keep > _NOTHING
        and not offer.shared
        and not task.volumes
        and task.limits.duration is None
    )


def waits_on(job: Job, attempt: Attempt, node: Node) -> bool:
    """Whether an agent that asks for work at this rank may be one that waits for the next job
    there.
    """
    if attempt.phase is AttemptPhase.KEPT:
        return True
    over = node.phase is NodePhase.EXITED and node.exit_outcome in _BY_ITSELF
    return attempt.phase in _WORKED and over and may_keep(job.task, attempt.offer)


def keep_or_end(
    job: Job,
    attempt: Attempt,
    nodes: Sequence[Node],
    end: AdvanceAttempt,
    spent: Money | None,
    now: datetime,
) -> AdvanceAttempt:
    """`end` as it was decided, or the gang is kept: its work ended by itself, everywhere, and
    ends the job.
    """
    if (
        end.phase is not AttemptPhase.ENDING
        or attempt.phase not in _WORKED
        or not may_keep(job.task, attempt.offer)
    ):
        return end
    if job.stop_reason is not None or attempt.number != job.attempt or job.standbys:
        return end
    if end.outcome not in _BY_ITSELF or not ends_job(job, end.outcome, end.exit_code):
        return end
    if attempt.drill_until is not None or any(node.notice_until is not None for node in nodes):
        return end
    if any(
        node.phase is not NodePhase.EXITED or node.exit_outcome not in _BY_ITSELF for node in nodes
    ):
        return end
    length = min(job.task.keep, _paid_for(job, attempt, spent))
    return replace(end, phase=AttemptPhase.KEPT, until=now + length) if length > _NOTHING else end


def _paid_for(job: Job, attempt: Attempt, spent: Money | None) -> timedelta:
    """For how long what is left of the budget pays the gang."""
    cap, rate = cap_of(job), attempt.offer.rate.times(attempt.nodes).micros_per_hour
    if cap is None or not rate:
        return timedelta.max
    left = 0 if spent is None else max(0, cap.micros - spent.micros)
    return timedelta(hours=min(_LONGEST_H, left / rate))


def fits(kept: Attempt, former: Job, job: Job) -> bool:
    """Whether a kept gang is what the job would be given on the same offer; the offer itself is
    not looked at here.
    """
    old, new = former.task, job.task
    if (
        former.project != job.project
        or kept.nodes != new.nodes
        or new.volumes
        or new.retry.parallel > 1
    ):
        return False
    return all(
        getattr(old, name) == getattr(new, name)
        for name in ("image", "image_build", "image_login", "grace", "tags")
    ) and all(
        getattr(old.resources, name) == getattr(new.resources, name)
        for name in ("disk_gib", "disk_type", "network")
    )


def bill_gang(attempt: Attempt, told: GangSeen, until: datetime, *, final: bool) -> list[Charge]:
    """What the gang's nodes cost this attempt, each until its end or `until`: from when it took the
    gang over, if it did, and the time in which it was kept on lines of its own. The minimum charge
    is of the node's whole life.
    """
    charges: list[Charge] = []
    for node in told.nodes:
        if node.started_at is None:
            continue
        end = node.ended_at or until
        began = max(node.started_at, attempt.adopted_at or node.started_at)
        kept = end if attempt.kept_since is None else min(end, max(began, attempt.kept_since))
        charges += bill(
            attempt=attempt,
            rank=node.rank,
            started=began,
            until=kept,
            rates=told.rates,
            final=False,
        )
        waited = bill(
            attempt=attempt, rank=node.rank, started=kept, until=end, rates=told.rates, final=False
        )
        charges += [replace(charge, kind=ChargeKind.KEPT) for charge in waited]
        if final:
            whole = bill(
                attempt=attempt,
                rank=node.rank,
                started=node.started_at,
                until=end,
                rates=told.rates,
                final=True,
            )
            charges += [charge for charge in whole if charge.kind is ChargeKind.MINIMUM]
    return charges


def closing_charges(kept: Attempt, charges: Iterable[Charge], now: datetime) -> list[Charge] | None:
    """The last stretch of each rank of a kept gang, until it is handed on now; None where a rank
    has none yet.
    """
    last: dict[int, Charge] = {}
    for charge in charges:
        if charge.attempt_id == kept.id and charge.kind is not ChargeKind.MINIMUM:
            before = last.get(charge.rank)
            if before is None or charge.since >= before.since:
                last[charge.rank] = charge
    if len(last) < kept.nodes:
        return None
    since = kept.kept_since or now
    closed: list[Charge] = []
    for charge in last.values():
        if charge.kind is ChargeKind.NODE:
            closed.append(_until(charge, since))
            charge = replace(charge, kind=ChargeKind.KEPT, since=since)
        closed.append(_until(charge, max(now, charge.since)))
    return closed


def _until(charge: Charge, end: datetime) -> Charge:
    return replace(charge, until=end, amount=charge.rate.over(end - charge.since))
