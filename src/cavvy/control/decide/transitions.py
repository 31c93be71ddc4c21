"""Computes how the rows of a job or an attempt change when an action is taken.

Derives market observations from the phase changes of an attempt.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import assert_never

from cavvy.control.decide import attempt as gangs
from cavvy.control.decide import job as jobs
from cavvy.control.decide.bills import ClosedBill, bill_gang, close_bill
from cavvy.control.decide.failures import STACKS, failure_of
from cavvy.control.decide.looks import GangLook, is_starting
from cavvy.control.decide.losses import RepairGang
from cavvy.control.decide.rows import JobRows, RowChanges, make_event, shrink
from cavvy.costs.extras import bill_traffic
from cavvy.costs.metering import total
from cavvy.domain.allocations import Allocation
from cavvy.domain.elastic import SizeCause, SizeChange
from cavvy.domain.events import Charge, ChargeKind, Event
from cavvy.domain.jobs import (
    JOB_ENDS,
    Attempt,
    AttemptOutcome,
    AttemptPhase,
    FailureKind,
    JobPhase,
    JobRecord,
    Node,
    Order,
    StopCause,
    UnsureBill,
)
from cavvy.domain.markets import Observation, ObservationKind
from cavvy.domain.tasks import Delivery
from cavvy.domain.units import Money, format_duration, format_usd
from cavvy.domain.values import copy_fields, replace

# Jobs


def turn_job(
    job: JobRecord, phase: JobPhase, reason: str, now: datetime, exit_code: int | None = None
) -> JobRecord:
    """Return the job after it has entered another phase."""
    if phase not in JOB_ENDS:
        return replace(job, phase=phase, reason=reason, since=now, ended_at=None)
    return replace(job, phase=phase, reason=reason, since=now, ended_at=now, exit_code=exit_code)


def advance_job(job: JobRecord, action: jobs.AdvanceJob, now: datetime) -> RowChanges:
    """Move the job to its next phase. When the job ends, its webhooks are notified too."""
    turned = turn_job(job, action.phase, action.reason, now, action.exit_code)
    return RowChanges(
        job=turned,
        events=(make_event(job, now, action.phase, action.reason, fact=job.stop_cause),),
        notices=deliveries_of(turned) if action.phase in JOB_ENDS else (),
    )


def deliveries_of(job: JobRecord) -> tuple[Delivery, ...]:
    """Return the webhook events of an ended job."""
    return (Delivery.FAILURE if job.phase is JobPhase.FAILED else Delivery.FINISH,)


def wanted_deliveries(job: JobRecord) -> list[Delivery]:
    """Return the webhook events that the job has caused so far, if at least one of its webhooks
    subscribes to them."""
    news: tuple[Delivery, ...] = (Delivery.BUDGET,) if job.stop_cause is StopCause.BUDGET else ()
    news += deliveries_of(job) if job.phase in JOB_ENDS else ()
    return [what for what in news if any(what in hook.on for hook in job.task.webhooks)]


def find_undelivered(
    job: JobRecord, wanted: Sequence[Delivery], events: Sequence[Event]
) -> list[Delivery]:
    """Return the deliveries that are still pending for at least one webhook: not received yet and
    not failed permanently.
    """
    facts = [event.fact for event in events if event.kind == "webhook"]
    hooks = job.task.webhooks
    return [what for what in wanted if facts.count(what) < sum(what in hook.on for hook in hooks)]


def stop_at_limit(job: JobRecord, action: jobs.StopAtLimit, now: datetime) -> RowChanges:
    """Stop the job: immediately if it is waiting, otherwise with its grace period."""
    stopped = replace(job, stop_reason=action.reason, stop_cause=action.cause)
    changes = RowChanges(
        job=stopped,
        events=(make_event(job, now, "limit", action.reason, fact=action.cause),),
        notices=(Delivery.BUDGET,) if action.cause is StopCause.BUDGET else (),
    )
    if job.phase is JobPhase.QUEUED:
        end = jobs.AdvanceJob(phase=JobPhase.FAILED, reason=action.reason)
        return changes.then(advance_job(stopped, end, now))
    return replace(changes, job=turn_job(stopped, JobPhase.STOPPING, action.reason, now))


def requeue_job(
    job: JobRecord, own: Attempt | None, action: jobs.RequeueJob, failed: str, now: datetime
) -> RowChanges:
    """Queue the job again. `failed` is the offer or host that the job must avoid, or ""."""
    avoid = drop_past(job.avoid, now)
    if failed:
        avoid[failed] = now + action.avoid
    skipped = job.skipped_checkpoints + (() if action.skip is None else (action.skip,))
    if action.unskip and (skips := job.retries.get("checkpoint", 0)):
        skipped = skipped[:-skips]
    cleared = ([action.kind] if action.anew else []) + (["checkpoint"] if action.unskip else [])
    counted = replace(job, retries={**job.retries, **dict.fromkeys(cleared, 0)})
    changed = replace(
        job,
        task=shrink(job.task),
        phase=JobPhase.QUEUED,
        since=now,
        reason=action.text,
        setback=action.reason,
        retries=count_retry(counted, action.kind),
        skipped_checkpoints=skipped,
        avoid=avoid,
        standbys=(),
        not_before=now + action.delay if action.delay else None,
    )
    if action.untaken is not None:
        changed = roll_back_size(changed, action.untaken, now)
    failure = failure_of(own) if own is not None else None
    events = [make_event(job, now, "queued", action.text, fact=failure)]
    if failure is not None and failed:
        until = now + action.avoid
        text = f"{failed} is avoided until {until:%Y-%m-%d %H:%M:%S} UTC: {failure.label}"
        events.append(make_event(job, now, "avoided", text, fact=failure))
    gone = own is not None and own.outcome in (AttemptOutcome.PREEMPTED, AttemptOutcome.NODE)
    return RowChanges(job=changed, events=tuple(events), stale_market=gone)


def roll_back_size(job: JobRecord, untaken: int, now: datetime) -> JobRecord:
    """Let the next attempt of an elastic job have the number of nodes from before its last change,
    and no attempt the number that the program did not take."""
    assert job.sizing is not None  # only a change of size can be rolled back
    back = SizeChange(
        nodes=job.sizing.before,
        before=untaken,
        cause=SizeCause.ROLL_BACK,
        at=now,
        attempt=job.attempt,
        told=True,
    )
    return replace(job, sizing=back, untaken=tuple(sorted({*job.untaken, untaken})))


def drop_past(avoid: dict[str, datetime], now: datetime) -> dict[str, datetime]:
    """Return only the cooldowns that have not ended."""
    return {key: until for key, until in avoid.items() if until > now}


def count_retry(job: JobRecord, kind: str) -> dict[str, int]:
    """Return the job's retry counts with one more retry of this kind."""
    return {**job.retries, kind: job.retries.get(kind, 0) + 1}


def fails_a_host(attempt: Attempt) -> bool:
    """Return whether a GPU failed in a gang on several shared hosts. If a GPU failed on one of
    several hosts, the job avoids only the failed host, not the whole offer.
    """
    shared = attempt.offer.shared and attempt.nodes > 1
    return shared and failure_of(attempt) is FailureKind.GPU


def failed_place(attempt: Attempt, allocations: Sequence[Allocation]) -> str:
    """Return the key for `JobRecord.avoid` after a failure: the offer, or the host of the rank that
    failed first.

    `allocations` are needed only if `fails_a_host` returns True.
    """
    first = (attempt.gang, attempt.first_failed_rank)
    hosts = (each.host for each in allocations if (each.gang, each.rank) == first)
    return next(hosts, attempt.offer.key) if fails_a_host(attempt) else attempt.offer.key


# Attempts


def advance_attempt(
    rows: JobRows,
    attempt: Attempt,
    action: gangs.AdvanceAttempt,
    look: GangLook,
    now: datetime,
    stored: Sequence[Charge] = (),
) -> RowChanges:
    """Move the attempt to its next phase, and record the resulting market observations. `stored`
    are the job's charges, which are needed only when the attempt has ended.
    """
    changes = _move(rows, attempt, action, look, now, stored)
    nodes = rows.nodes_of(attempt)
    seen = observations_of(attempt, changes.attempts[0], nodes, now)
    return replace(changes, observations=tuple(seen))


def _move(
    rows: JobRows,
    attempt: Attempt,
    action: gangs.AdvanceAttempt,
    look: GangLook,
    now: datetime,
    stored: Sequence[Charge],
) -> RowChanges:
    nodes = rows.nodes_of(attempt)
    fresh = replace(
        attempt,
        phase=action.phase,
        outcome=action.outcome or attempt.outcome,
        since=now,
        reason=action.reason,
        expected_at=None,
        wait=None,
    )
    found = replace(fresh, missed_looks=0, missed_since=None)
    match action.phase:
        case AttemptPhase.BOOTING:
            return _boot(rows, attempt, replace(found, launched_at=now))
        case AttemptPhase.RUNNING:
            began = max((node.running_at for node in nodes if node.running_at), default=now)
            return RowChanges(attempts=(replace(fresh, running_at=began),))
        case AttemptPhase.ENDING if attempt.phase is AttemptPhase.KEPT:
            changed = replace(found, reason=attempt.reason)
            event = make_event(rows.job, now, "kept", action.reason, attempt.number)
            return RowChanges(attempts=(changed,), events=(event,))
        case AttemptPhase.ENDING | AttemptPhase.KEPT:
            return _end_work(rows, settle_work(found, nodes, action, now), action, look, now)
        case AttemptPhase.ENDED:
            return _close(rows, fresh, close_bill(attempt, look, nodes, stored, now), now)
        case AttemptPhase.LAUNCHING:
            raise AssertionError("an attempt never returns to its launch")


def _boot(rows: JobRows, before: Attempt, attempt: Attempt) -> RowChanges:
    """Return the changes for a launched gang. If the launch was delayed, the job's reason is the
    delay, which is over.
    """
    late = before.wait is not None and is_starting(rows.job, before)
    job = replace(rows.job, reason=f"starts on {attempt.offer.key}") if late else None
    return RowChanges(job=job, attempts=(attempt,))


def settle_work(
    attempt: Attempt,
    nodes: Sequence[Node],
    action: gangs.AdvanceAttempt | RepairGang,
    now: datetime,
) -> Attempt:
    """Return the attempt with the outcome of its work.

    If all ranks have reported their exits, the work ended at the last exit; otherwise the work ends
    now. If the start of the work was not recorded before, it is recorded now, so that the running
    time is counted.
    """
    exits = [node.exited_at for node in nodes]
    known = [at for at in exits if at is not None]
    names = ["outcome", "failure"]
    if not isinstance(action, RepairGang):
        names.append("exit_code")
    began = [node.running_at for node in nodes if node.running_at]
    unnoticed = attempt.running_at is None and len(began) == attempt.nodes
    return replace(
        copy_fields(attempt, action, *names),
        first_failed_rank=action.rank,
        finished_at=max(known) if known and len(known) == len(exits) else now,
        running_at=max(began) if unnoticed else attempt.running_at,
    )


def _end_work(
    rows: JobRows, ended: Attempt, action: gangs.AdvanceAttempt, look: GangLook, now: datetime
) -> RowChanges:
    events, charges = [], []
    if action.until is not None:
        ended = replace(ended, kept_since=now, kept_until=action.until)
        until = f"{action.until:%Y-%m-%d %H:%M:%S} UTC"
        text = f"the nodes are kept and billed until {until} at the latest"
        events.append(make_event(rows.job, now, "kept", text, ended.number))
        if look.told is not None:  # a takeover by another job ends these charges
            charges = bill_gang(ended, look.told, now, final=False)
            charges += bill_traffic(ended, rows.nodes_of(ended))
    if not is_told_by_job(rows.job, action.outcome):
        kind = action.outcome or "ended"
        fact = failure_of(ended)
        events.append(make_event(rows.job, now, kind, action.reason, ended.number, fact))
    return RowChanges(attempts=(ended,), events=tuple(events), charges=tuple(charges))


def is_told_by_job(job: JobRecord, outcome: AttemptOutcome | None) -> bool:
    """Return whether the job's own events explain why this attempt ended."""
    return outcome in (AttemptOutcome.SUCCEEDED, AttemptOutcome.STOPPED) or (
        outcome is not None and outcome is job.stop_outcome
    )


def _close(rows: JobRows, ended: Attempt, bill: ClosedBill, now: datetime) -> RowChanges:
    """Close the bill of an attempt whose gang has ended, and release the gang's allocations."""
    cost = total(bill.charges)
    machines = [each for each in bill.charges if each.kind.is_machine]
    life = sum((each.until - each.since for each in machines), timedelta(0))
    sent = total(each for each in bill.charges if each.kind is ChargeKind.TRAFFIC)
    text = f"the gang has ended; it cost {format_usd(cost)} for {format_duration(life)} of use"
    text += f", of which {format_usd(sent)} is for traffic" if sent.micros else ""
    events = [make_event(rows.job, now, "billed", text, ended.number)] if cost.micros else []
    if (unseen := bill.unsure_bill) is not None:
        text = _say_range(ended.offer.provider, cost, unseen)
        events.append(make_event(rows.job, now, "unsure", text, ended.number))
    return RowChanges(
        attempts=(replace(ended, ended_at=bill.ended_at, unsure_bill=unseen),),
        events=tuple(events),
        charges=bill.charges,
        release=(ended.gang,),
    )


def _say_range(provider: str, cost: Money, unsure: UnsureBill) -> str:
    least, most = format_usd(cost), format_usd(cost + unsure.more)
    if unsure.more == unsure.traffic:
        return (
            f"a node was lost and may have been sending a checkpoint: including the traffic, the "
            f"gang cost between {least} and {most}"
        )
    if unsure.latest is None:
        return (
            f"{provider} did not report when the bill of each node began: the gang cost between "
            f"{least} and {most}"
        )
    return (
        f"{provider} did not report when the gang ended: it cost between {least} (until it was "
        f"last seen) and {most} (until {unsure.latest:%Y-%m-%d %H:%M:%S} UTC)"
    )


def adjust_attempt(
    rows: JobRows,
    attempt: Attempt,
    action: gangs.OrderRanks
    | gangs.EndStuck
    | gangs.CountMiss
    | gangs.ClearMisses
    | gangs.NoteSilent
    | gangs.NoteSlow
    | gangs.KeepGang,
    now: datetime,
) -> RowChanges:
    """Change an attempt without changing its phase: send orders to its ranks, change its count of
    missed polls, or keep its idle gang longer.
    """
    match action:
        case gangs.OrderRanks():
            return order_ranks(rows, attempt, action, now)
        case gangs.EndStuck():
            return _end_stuck(rows, attempt, action, now)
        case gangs.CountMiss():
            return RowChanges(attempts=(count_miss(attempt, now),))
        case gangs.ClearMisses():
            return RowChanges(attempts=(replace(attempt, missed_looks=0, missed_since=None),))
        case gangs.NoteSilent():
            text = f"{action.work.reason}; the job goes on"
            event = make_event(rows.job, now, "silent", text, attempt.number)
            known = attempt.silent is not None and attempt.silent.reason == action.work.reason
            events = () if known else (event,)
            return RowChanges(attempts=(replace(attempt, silent=action.work),), events=events)
        case gangs.NoteSlow():
            fact = ",".join(map(str, action.new))
            event = make_event(rows.job, now, "straggler", action.text, attempt.number, fact)
            events = (event,) if action.new else ()
            return RowChanges(attempts=(replace(attempt, slow=action.slow),), events=events)
        case gangs.KeepGang():
            return RowChanges(attempts=(replace(attempt, kept_until=action.until),))
        case _:
            assert_never(action)


def _end_stuck(
    rows: JobRows, attempt: Attempt, action: gangs.EndStuck, now: datetime
) -> RowChanges:
    order = gangs.OrderRanks(
        ranks=action.ranks,
        kind="stop",
        seconds=action.grace.total_seconds(),
        reason=action.work.reason,
    )
    changes = order_ranks(rows, attempt, order, now)
    fact = ",".join(map(str, action.work.ranks))
    event = make_event(rows.job, now, "stuck", action.work.reason, attempt.number, fact)
    return replace(changes, attempts=(replace(attempt, stuck=action.work),), events=(event,))


def count_miss(attempt: Attempt, now: datetime) -> Attempt:
    """Return the attempt after one more poll that did not find its gang."""
    since = attempt.missed_since or now
    return replace(attempt, missed_looks=attempt.missed_looks + 1, missed_since=since)


def order_ranks(
    rows: JobRows, attempt: Attempt, action: gangs.OrderRanks, now: datetime
) -> RowChanges:
    """Send an order to each of these ranks. Each order to a rank has a higher number than the
    rank's previous order.
    """
    nodes = []
    for rank in action.ranks:
        node = rows.nodes_of(attempt)[rank]
        seq = node.order.seq + 1 if node.order else 1
        order = Order(
            seq=seq, kind=action.kind, seconds=action.seconds, reason=action.reason, at=now
        )
        nodes.append(replace(node, order=order))
    text = f"{action.reason}: {_describe(action, len(rows.nodes_of(attempt)))}"
    event = make_event(rows.job, now, action.kind, text, attempt.number)
    return RowChanges(nodes=tuple(nodes), events=(event,))


def _describe(action: gangs.OrderRanks, nodes: int) -> str:
    """Say what the order asks of its ranks, after the reason, which says that a node goes."""
    one = len(action.ranks) == 1
    names = ", ".join(str(rank) for rank in action.ranks)
    ranks = "the node" if nodes == 1 else f"rank {names}" if one else f"ranks {names}"
    if action.kind == "stop":
        return f"{ranks} must stop within {action.seconds:.0f} s"
    if action.kind == STACKS:
        return f"{ranks} must report the stacks of the work"
    return f"{ranks} {'has' if one else 'have'} {action.seconds:.0f} s left"


# The effects of a write


def is_freed(attempt: Attempt) -> bool:
    """Return whether the gang has ended or will not be launched, which frees the capacity that was
    reserved for the gang.
    """
    unbought = attempt.phase is AttemptPhase.ENDING and attempt.launched_at is None
    return unbought or attempt.phase is AttemptPhase.ENDED


def wakes_queue(changes: RowChanges) -> bool:
    """Return whether these changes may allow a waiting job to be placed."""
    frees = (AttemptPhase.KEPT, AttemptPhase.ENDED)
    freed = any(attempt.phase in frees for attempt in changes.attempts)
    queued = changes.job is not None and changes.job.phase is JobPhase.QUEUED
    return freed or queued or bool(changes.release)


def observations_of(
    before: Attempt, after: Attempt, nodes: Sequence[Node], now: datetime
) -> list[Observation]:
    """Return the market observations that follow from a change of an attempt's phase. Shared hosts
    belong to no market.
    """
    if after.offer.shared:
        return []
    seen = Observation(
        market=after.offer.key,
        kind=ObservationKind.GRANTED,
        at=now,
        nodes=len(after.repairs) or after.nodes,
    )
    match after.phase:
        case AttemptPhase.BOOTING:
            return [seen]
        case AttemptPhase.RUNNING:
            claimed = [node.claimed_at for node in nodes if node.claimed_at is not None]
            if (
                after.launched_at is None
                or len(claimed) < after.nodes
                or after.adopted_at is not None
            ):
                return []
            booted = (max(claimed) - after.launched_at).total_seconds()
            return [replace(seen, kind=ObservationKind.BOOTED, seconds=max(0.0, booted))]
        case AttemptPhase.ENDING if before.launched_at is None:
            if after.outcome in (AttemptOutcome.CAPACITY, AttemptOutcome.REFUSED):
                return [replace(seen, kind=ObservationKind.REFUSED, text=after.reason)]
            return []
        case AttemptPhase.ENDING if after.launched_at is not None:
            return [
                _life(
                    replace(seen, seconds=(now - after.launched_at).total_seconds()), after, nodes
                )
            ]
        case _:
            return []


def observe_losses(
    attempt: Attempt, nodes: Sequence[Node], lost: int, now: datetime
) -> list[Observation]:
    """Return the market observation of an attempt that has lost nodes of a gang that goes on."""
    if attempt.offer.shared or attempt.launched_at is None:
        return []
    seen = Observation(
        market=attempt.offer.key,
        kind=ObservationKind.ENDED,
        at=now,
        nodes=lost,
        seconds=(now - attempt.launched_at).total_seconds(),
    )
    return [_life(seen, attempt, nodes)]


def _life(seen: Observation, attempt: Attempt, nodes: Sequence[Node]) -> Observation:
    """Return the market observation that the end of a gang causes. A drill or a move does not count
    as a preemption.
    """
    if attempt.outcome is AttemptOutcome.PREEMPTED and attempt.drill_until is None:
        told = any(node.notice_until is not None for node in nodes)
        return replace(
            seen, kind=ObservationKind.TAKEN, text="with notice" if told else "without notice"
        )
    if attempt.outcome is AttemptOutcome.CAPACITY:
        return replace(seen, kind=ObservationKind.REFUSED, text=attempt.reason)
    failed = attempt.outcome in (AttemptOutcome.NODE, AttemptOutcome.TIMEOUT)
    return replace(
        seen,
        kind=ObservationKind.FAILED if failed else ObservationKind.ENDED,
        text=attempt.reason if failed else "",
    )
