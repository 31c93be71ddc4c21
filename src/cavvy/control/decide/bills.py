"""The costs of gangs: until now, until their end, and until another job takes one over."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from cavvy.control.decide.job import cap_of
from cavvy.control.decide.looks import GangLook
from cavvy.control.decide.rows import JobRows
from cavvy.costs.metering import bill, total
from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.gangs import GangSeen, GangState
from cavvy.domain.jobs import Attempt, AttemptPhase, Job
from cavvy.domain.units import HourlyRate, Money

ACCRUE = timedelta(seconds=45)  # charges of living nodes are at most a minute behind


def spending(
    rows: JobRows, stored: Sequence[Charge], looks: Mapping[str, GangLook], now: datetime
) -> tuple[Money, HourlyRate]:
    """Money spent until now with minimum charges, and the rate that bills now.

    A gang's last look may be one poll old; its nodes are billed until now.
    """
    spent, rate = Money(0), 0
    for attempt in rows.attempts.values():
        look = looks.get(attempt.gang)
        if attempt.phase is AttemptPhase.ENDED or look is None or look.told is None:
            charged = total(charge for charge in stored if charge.attempt_id == attempt.id)
            if attempt.phase is AttemptPhase.RUNNING and attempt.launched_at is not None:
                price = attempt.offer.rate.times(attempt.nodes)  # not observed yet
                charged = max(charged, price.over(now - attempt.launched_at))
                rate += price.micros_per_hour
            spent += charged
            continue
        told = look.told
        spent += total(bill_gang(attempt, told, now, final=True))
        alive = sum(1 for node in told.nodes if node.started_at and not node.ended_at)
        price = max(told.rates, key=lambda entry: entry[0])[1] if told.rates else attempt.offer.rate
        rate += price.times(alive).micros_per_hour
    return spent, HourlyRate(rate)


def budget_left(job: Job, spent: Money) -> Money | None:
    """The rest of the job's budget; None: no limit."""
    cap = cap_of(job)
    return None if cap is None else Money(max(0, cap.micros - spent.micros))


def accrue(attempt: Attempt, look: GangLook) -> tuple[tuple[Charge, ...], GangLook]:
    """The charges of the gang's nodes until the last look, if they are due."""
    if look.told is None or look.told_at is None:
        return (), look
    paid = attempt.offer.rate.micros_per_hour or any(
        rate.micros_per_hour for _, rate in look.told.rates
    )
    due = look.accrued_at is None or look.told_at - look.accrued_at >= ACCRUE
    if not due or not (paid or attempt.phase is AttemptPhase.KEPT):
        return (), look
    charges = bill_gang(attempt, look.told, look.told_at, final=False)
    if len({charge.rank for charge in charges}) == attempt.nodes:  # otherwise its provider was late
        look = replace(look, accrued_at=look.told_at)
    return tuple(charges), look


def close_bill(
    attempt: Attempt, look: GangLook, now: datetime
) -> tuple[tuple[Charge, ...], datetime]:
    """Each node's lifetime, and when the last one ended."""
    ends = [attempt.finished_at or attempt.since]
    if look.told is None:
        return (), ends[0]
    told, told_at = look.told, look.told_at or now
    if told.state is GangState.ENDED and any(node.ended_at is None for node in told.nodes):
        told_at = now
    ends += [node.ended_at or told_at for node in told.nodes if node.started_at]
    return tuple(bill_gang(attempt, told, told_at, final=True)), max(ends)


def bill_gang(attempt: Attempt, told: GangSeen, until: datetime, *, final: bool) -> list[Charge]:
    """The charges of this attempt for the gang's nodes, each until its end or `until`: from the
    takeover, if there was one, with separate lines for the time in which the gang was kept. The
    minimum charge covers the node's whole life.
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
    """The last stretch of each rank of a kept gang, until its handover now; None if a rank has none
    yet.
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
