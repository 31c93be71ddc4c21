"""Computes the changes with which an attempt hands its gang to the job's next attempt, which
replaces the nodes that the gang has lost."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from cavvy.control.decide.bills import close_part
from cavvy.control.decide.failures import failure_of
from cavvy.control.decide.looks import GangLook
from cavvy.control.decide.losses import RepairGang, wait_for_capacity
from cavvy.control.decide.placement import make_attempt, start_job
from cavvy.control.decide.rows import JobRows, RowChanges, make_event
from cavvy.control.decide.transitions import count_retry, observe_losses, settle_work
from cavvy.domain.events import Charge, Event
from cavvy.domain.jobs import Attempt, AttemptPhase, JobPhase, JobRecord, Node
from cavvy.domain.units import format_duration, format_rate, format_usd
from cavvy.domain.values import replace


def repair_gang(
    rows: JobRows,
    attempt: Attempt,
    action: RepairGang,
    look: GangLook,
    stored: Sequence[Charge],
    now: datetime,
) -> RowChanges:
    """End the attempt and create the next one, which has the same gang. One write does both, so
    that there is no time at which the gang belongs to no attempt. `stored` are the job's charges.
    """
    nodes = rows.nodes_of(attempt)
    seen_at = look.told_at or now  # what happens to a node afterwards is billed to the next attempt
    bill = close_part(attempt, look, nodes, stored, seen_at)
    ended = replace(
        settle_work(attempt, nodes, action, now),
        phase=AttemptPhase.ENDED,
        since=now,
        reason=action.reason,
        ended_at=seen_at,
        unsure_bill=bill.unsure_bill,
        gang=f"{attempt.gang}@{attempt.id}",
        wait=None,
        expected_at=None,
    )
    next_one, expected = _make_next(rows, attempt, action, seen_at, now)
    return RowChanges(
        job=_start_next(rows.job, next_one, action, now),
        attempts=(ended, next_one),
        nodes=tuple(expected),
        events=_make_events(rows.job, ended, next_one, action, now),
        charges=bill.charges,
        observations=tuple(observe_losses(ended, nodes, len(action.ranks), now)),
    )


def _make_next(
    rows: JobRows, attempt: Attempt, action: RepairGang, seen_at: datetime, now: datetime
) -> tuple[Attempt, Sequence[Node]]:
    """Return the attempt that takes over the gang, and its nodes."""
    why = _tell_replaced(action.ranks)
    fresh, expected = make_attempt(rows.job, attempt.offer, lambda _: attempt.gang, now, why)
    left = attempt.nodes - len(action.ranks)
    sizes, waits = rows.job.task.elastic, wait_for_capacity(attempt, len(action.ranks))
    if sizes is not None and left >= sizes.least:
        waits = timedelta(0)  # without capacity, the job goes on with fewer nodes
    next_one = replace(
        fresh,
        nodes=attempt.nodes,
        launched_at=now,
        adopted_at=seen_at,
        repairs=action.ranks,
        repair_until=now + waits,
        rounds={**attempt.rounds, **dict.fromkeys(action.ranks, fresh.number)},
        open_ranks=_list_open(attempt, rows.nodes_of(attempt), action.ranks),
    )
    return next_one, expected


def _start_next(
    before: JobRecord, next_one: Attempt, action: RepairGang, now: datetime
) -> JobRecord:
    """Return the job with the next attempt, and with its loss counted."""
    job = replace(
        before,
        retries={**before.retries, **({action.kind: 0} if action.anew else {})},
    )
    job = replace(job, retries=count_retry(job, action.kind))
    started = start_job(job, next_one, _tell_repair(action, next_one), now)
    if before.phase is JobPhase.STARTING:
        started = replace(started, since=before.since)
    return replace(started, setback=action.reason)


def _make_events(
    job: JobRecord, ended: Attempt, next_one: Attempt, action: RepairGang, now: datetime
) -> tuple[Event, ...]:
    """Return what the attempt's end, its unsure bill and the repair tell the job's user."""
    failure = failure_of(ended)
    events = [make_event(job, now, action.outcome, action.reason, ended.number, failure)]
    if (unsure := ended.unsure_bill) is not None:
        told = f"up to {format_usd(unsure.more)} more than billed, for {_name_ranks(action.ranks)}"
        events.append(make_event(job, now, "unsure", told, ended.number))
    left = next_one.nodes - len(action.ranks)
    price = format_rate(next_one.offer.rate.times(left))
    text = f"{_tell_repair(action, next_one)}; they wait for it, at {price}"
    if next_one.repair_until is not None and next_one.repair_until > now:
        text += f", for at most {format_duration(next_one.repair_until - now)}"
    ranks = ",".join(map(str, action.ranks))
    return *events, make_event(job, now, "repair", text, next_one.number, fact=ranks)


def _tell_repair(action: RepairGang, next_one: Attempt) -> str:
    left = next_one.nodes - len(action.ranks)
    kept = f"{left} of {next_one.nodes} nodes are kept"
    return f"{action.reason}; {_tell_replaced(action.ranks)}, and {kept}"


def _tell_replaced(ranks: Sequence[int]) -> str:
    named = _name_ranks(ranks)
    return f"the node of {named} is replaced" if len(ranks) == 1 else f"{named} are replaced"


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _list_open(attempt: Attempt, nodes: Sequence[Node], replaced: Sequence[int]) -> tuple[int, ...]:
    """Return the kept ranks whose agents have no token of their own: they have got no work in the
    gang yet, or only from a server of an earlier version."""
    got = {each.rank for each in nodes if each.sealed and (each.running_at or each.exited_at)}
    own = got | {rank for rank in range(attempt.nodes) if _had_own(attempt, rank)}
    return tuple(rank for rank in range(attempt.nodes) if rank not in {*own, *replaced})


def _had_own(attempt: Attempt, rank: int) -> bool:
    """Return whether the agent of this rank had a token of its own before the attempt."""
    taken_over = attempt.repairs and rank not in attempt.repairs
    return bool(taken_over) and rank not in attempt.open_ranks
