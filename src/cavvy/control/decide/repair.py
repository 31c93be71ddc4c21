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
from cavvy.domain.events import Charge
from cavvy.domain.jobs import Attempt, AttemptPhase, JobPhase, Node
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
    fresh_ranks = dict.fromkeys(action.ranks, rows.job.last_number + 1)
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
    ranks = ", ".join(map(str, action.ranks))
    lost = f"rank {ranks}" if len(action.ranks) == 1 else f"ranks {ranks}"
    left = attempt.nodes - len(action.ranks)
    sizes, waits = rows.job.task.elastic, wait_for_capacity(attempt, len(action.ranks))
    if sizes is not None and left >= sizes.least:
        waits = timedelta(0)  # without capacity, the job goes on with fewer nodes
    why = f"the node of {lost} is replaced" if len(action.ranks) == 1 else f"{lost} are replaced"
    fresh, expected = make_attempt(rows.job, attempt.offer, lambda _: attempt.gang, now, why)
    next_one = replace(
        fresh,
        nodes=attempt.nodes,
        launched_at=now,
        adopted_at=seen_at,
        repairs=action.ranks,
        repair_until=now + waits,
        rounds={**attempt.rounds, **fresh_ranks},
        open_ranks=_list_open(attempt, nodes, action.ranks),
    )
    job = replace(
        rows.job,
        retries={**rows.job.retries, **({action.kind: 0} if action.anew else {})},
    )
    job = replace(job, retries=count_retry(job, action.kind))
    text = f"{action.reason}; {why}, and {left} of {attempt.nodes} nodes are kept"
    started = replace(start_job(job, next_one, text, now), setback=action.reason)
    if rows.job.phase is JobPhase.STARTING:
        started = replace(started, since=rows.job.since)
    limit = format_duration(waits)
    price = format_rate(attempt.offer.rate.times(left))
    event = make_event(
        started,
        now,
        "repair",
        f"{text}; they wait for it, at {price}" + (f", for at most {limit}" if waits else ""),
        next_one.number,
        fact=ranks.replace(" ", ""),
    )
    failure = failure_of(ended)
    events = [make_event(rows.job, now, action.outcome, action.reason, attempt.number, failure)]
    if (unsure := bill.unsure_bill) is not None:
        told = f"up to {format_usd(unsure.more)} more than billed, for {lost}"
        events.append(make_event(rows.job, now, "unsure", told, attempt.number))
    return RowChanges(
        job=started,
        attempts=(ended, next_one),
        nodes=tuple(expected),
        events=(*events, event),
        charges=bill.charges,
        observations=tuple(observe_losses(ended, nodes, len(action.ranks), now)),
    )


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
