"""Finds why a running elastic job has no more nodes, and what is written when the reason changes.
No I/O."""

from collections.abc import Sequence
from datetime import datetime

from cavvy.control.decide.rows import RowChanges, make_event
from cavvy.domain.elastic import HoldCause, SizeHold
from cavvy.domain.jobs import Attempt, JobRecord
from cavvy.domain.values import Struct, replace


class GrowthFacts(Struct, frozen=True, kw_only=True):
    """What decides whether a job that may change its size can have more nodes now. `taken` are the
    sizes that it may have and whose nodes the program took, `room` is the most that it could have,
    and `offered` whether a place has the next larger size for it, free or not. `waiting` names the
    job that waits for the free nodes, `rests_until` is the time from which the job may change."""

    taken: Sequence[int]
    room: int
    offered: bool = True
    over_budget: bool = False
    waiting: str | None = None
    rests_until: datetime
    pays: bool = True


def list_larger(job: JobRecord, nodes: int) -> Sequence[int]:
    """Return the sizes above `nodes` that the job may have, ascending."""
    assert job.task.elastic is not None
    return sorted(each for each in job.task.elastic.list_sizes(job.most_nodes) if each > nodes)


def find_hold(
    job: JobRecord, attempt: Attempt, facts: GrowthFacts, now: datetime
) -> SizeHold | None:
    """Return why the job has no more nodes, the first reason that applies. The result is None if it
    has its most nodes, is about to grow, or would grow if other jobs did not get the nodes first.
    """
    larger = list_larger(job, attempt.nodes)
    if not larger:
        return None
    wanted = min((each for each in facts.taken if each > attempt.nodes), default=larger[0])
    cause = _find_cause(attempt, facts, now)
    if cause is None:
        return None
    return SizeHold(
        cause=cause,
        attempt=attempt.number,
        nodes=wanted,
        job=facts.waiting or "" if cause is HoldCause.WAITING else "",
        until=facts.rests_until if cause is HoldCause.RESTS else None,
    )


def _find_cause(attempt: Attempt, facts: GrowthFacts, now: datetime) -> HoldCause | None:
    if max(facts.taken, default=0) <= attempt.nodes:
        return HoldCause.UNTAKEN
    if facts.over_budget:
        return HoldCause.BUDGET
    if facts.room <= attempt.nodes:
        return HoldCause.NO_ROOM if facts.offered else HoldCause.NO_OFFER
    if facts.waiting is not None:
        return HoldCause.WAITING
    if now < facts.rests_until:
        return HoldCause.RESTS
    return None if facts.pays else HoldCause.NO_GAIN


def note_hold(
    job: JobRecord, attempt: Attempt, hold: SizeHold | None, now: datetime
) -> RowChanges | None:
    """Return what to write if the reason has changed. An event tells each reason once in an
    attempt, so that reasons which alternate do not fill the list; that a job rests is none, since
    every job does after its start."""
    before = job.hold if job.hold is not None and job.hold.attempt == attempt.number else None
    told = () if before is None else before.told
    news = hold is not None and hold.cause not in (*told, HoldCause.RESTS)
    if hold is not None:
        hold = replace(hold, told=(*told, hold.cause) if news else told)
    if hold == before and (hold is not None or job.hold is None):
        return None
    changed = replace(job, hold=hold)
    if hold is None or not news:
        return RowChanges(job=changed)
    text = f"keeps {attempt.nodes} of at most {list_larger(job, attempt.nodes)[-1]} nodes, because "
    event = make_event(job, now, "size", text + hold.explain(), attempt.number, fact=hold.cause)
    return RowChanges(job=changed, events=(event,))
