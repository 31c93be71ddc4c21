"""Prepares the inputs of the deadline policy for one job, and restricts the policy's recommendation
to offers that can be used.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.control.decide.job import deadline_of
from cavvy.domain.jobs import COMING, GOING, Attempt, JobRecord, Node
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import Money
from cavvy.domain.values import Struct, field, replace
from cavvy.planner.candidates import Candidates
from cavvy.planner.deadline.inputs import (
    JobProgress,
    PolicyInputs,
    find_inputs,
    find_pace,
    is_about_as_cheap,
    share_done,
)
from cavvy.planner.deadline.policy import AHEAD, NOT_AHEAD
from cavvy.planner.deadline.recommendation import Recommendation, advise
from cavvy.planner.markets import MarketKnowledge
from cavvy.planner.spot.view import RunMode

# if an offer's cooldown is longer than this, the job does not wait for the offer
_LONG = timedelta(hours=2)
# A task and its work mean the same number of samples if the numbers differ by at most this share.
_SAME_WORK = 0.01

PolicyFacts = tuple[PolicyInputs, MarketKnowledge, JobProgress]


class StoredFacts(Struct, frozen=True, kw_only=True):
    """The stored facts that the deadline policy needs about a job. `current` is the attempt that is
    running or starting."""

    attempts: Sequence[Attempt]
    nodes: Sequence[Node] = ()  # the nodes of the current attempt
    current: Attempt | None = None
    budget_left: Money | None = None
    egress: Mapping[str, Money] = field(default_factory=dict)  # prices for moving the checkpoint


def make_facts(
    job: JobRecord,
    offers: Sequence[Offer],
    knowledge: MarketKnowledge,
    stored: StoredFacts,
    now: datetime,
) -> PolicyFacts | None:
    """Return the inputs of the policy, or None if the policy does not apply."""
    deadline = deadline_of(job)
    if deadline is None:
        return None
    current, nodes = stored.current, stored.nodes
    own = (attempt.offer for attempt in stored.attempts if attempt.number == job.attempt)
    counted = _count_done(job, nodes)
    progress = JobProgress(
        submitted_at=job.submitted_at,
        deadline=deadline,
        done=_done(job, stored.attempts, nodes, now, current),
        current=current.offer if current else None,
        works=current is not None and current.phase not in COMING,
        starting_for=now - current.created_at if current else timedelta(0),
        unsaved=_unsaved(current, now),
        at_risk=any(node.risk_at is not None for node in nodes),
        home=next(own, None),
        setup=_setup_time(job, nodes),
        budget_left=stored.budget_left,
        saved_bytes=_saved_bytes(stored.attempts),
        pace=find_pace(job.task, stored.attempts, now, job.attempt, counted)
        if counted is not None
        else 1.0,
        egress=stored.egress,
    )
    inputs = find_inputs(job.task, offers, knowledge, progress, floor=not stored.attempts)
    return None if inputs is None else (inputs, knowledge, progress)


def recommend(
    facts: PolicyFacts, job: JobRecord, avoid: Mapping[str, datetime], now: datetime
) -> Recommendation:
    """Return the policy's recommendation, restricted to the offers that can be used now."""
    inputs, knowledge, progress = facts
    return usable_now(advise(inputs, knowledge, progress, now, avoid=avoid), job, knowledge, now)


def list_worth(job: JobRecord, usable: Sequence[Offer], now: datetime) -> list[Offer]:
    """Return the offers that have no cooldown, or whose cooldown ends so soon that waiting is
    worthwhile.
    """
    return [offer for offer in usable if job.avoid.get(offer.key, now) - now <= _LONG]


def is_reviewed(job: JobRecord, current: Attempt) -> bool:
    """Return whether the policy may move the job. The policy may not move the job if the job's gang
    is ending, or if results would be lost."""
    saves = job.task.checkpoint is not None or current.running_at is None
    return saves and current.phase not in GOING


def leave_offer(job: JobRecord, offer: Offer, now: datetime) -> JobRecord:
    """Return the job with a cooldown of one minute for this offer."""
    return replace(job, avoid={**job.avoid, offer.key: now + timedelta(minutes=1)})


def find_successor(candidates: Candidates) -> Recommendation:
    """Return the recommended offers for a second gang of a job that has no deadline policy."""
    offers = tuple(offer for offer in candidates.offers if not offer.shared)
    spot = bool(offers) and offers[0].purchase is Purchase.SPOT
    mode = RunMode.SPOT if spot else RunMode.ON_DEMAND
    return Recommendation(mode=mode, offers=offers, reason="the best remaining offer")


def may_go_ahead(job: JobRecord, own: Attempt) -> bool:
    """Return whether the job can move to another gang without losing work, before the provider
    reclaims the job's gang. The job can move if it saves checkpoints and runs on spot.
    """
    return job.task.checkpoint is not None and own.offer.purchase is Purchase.SPOT


def go_ahead(job: JobRecord, own: Attempt, best: Recommendation) -> Recommendation:
    """Return the spot offers in `best` to which the job may move. An offer must be in another
    market than the gang's offer, and cost at most slightly more than the gang's offer. If there is
    no such offer, the job stays on its gang.
    """
    offers = tuple(
        offer
        for offer in best.offers
        if offer.purchase is Purchase.SPOT
        and offer.key != own.offer.key
        and is_about_as_cheap(job.task, offer, own.offer)
    )
    return Recommendation(
        mode=RunMode.SPOT, offers=offers, stay=not offers, reason=AHEAD if offers else NOT_AHEAD
    )


def _done(
    job: JobRecord,
    attempts: Sequence[Attempt],
    nodes: Sequence[Node],
    now: datetime,
    current: Attempt | None,
) -> float:
    """Return the completed fraction of the work, as the task reports it. If the task reports no
    fraction, the fraction is estimated from the running time.
    """
    if job.task.checkpoint is None and current is None:
        return 0.0
    for node in nodes:
        said = node.progress.get(
            "fraction"
        )  # use only the progress of the whole job; `done` and `total` may refer to one epoch
        if isinstance(said, float) and 0 <= said <= 1:
            return said
    counted = _count_done(job, nodes)
    if counted is not None:
        return counted
    return share_done(job.task, attempts, now, job.attempt)


def _count_done(job: JobRecord, nodes: Sequence[Node]) -> float | None:
    """Return the share of the work's samples that the task has reported as done, as `cavvy.train`
    reports it every few seconds. The result is None if the task reports no samples, or if they are
    only those of a part of the work, such as an epoch.
    """
    wanted = job.task.work.samples if job.task.work is not None else None
    for node in nodes if wanted else ():
        done, total, unit = (node.progress.get(name) for name in ("done", "total", "unit"))
        if unit != "samples" or not isinstance(done, int | float) or not wanted:
            continue
        is_whole = isinstance(total, int | float) and abs(total / wanted - 1) <= _SAME_WORK
        if is_whole and 0 <= done <= wanted * (1 + _SAME_WORK):
            return min(done / wanted, 1.0)
    return None


def _saved_bytes(attempts: Sequence[Attempt]) -> int:
    """Return the size of the newest checkpoint in bytes, or 0 before the first checkpoint."""
    saved = [
        attempt
        for attempt in attempts
        if attempt.checkpoint_at is not None and attempt.checkpoint_bytes
    ]
    return max(saved, key=lambda attempt: attempt.number).checkpoint_bytes if saved else 0


def _unsaved(current: Attempt | None, now: datetime) -> timedelta:
    if current is None or current.running_at is None:
        return timedelta(0)
    return now - max(current.running_at, current.checkpoint_at or current.running_at)


def _setup_time(job: JobRecord, nodes: Sequence[Node]) -> timedelta | None:
    if job.task.setup is None:
        return timedelta(0)
    spans = [
        node.running_at - node.claimed_at for node in nodes if node.running_at and node.claimed_at
    ]
    return max(spans, default=None)


def usable_now(
    recommendation: Recommendation, job: JobRecord, knowledge: MarketKnowledge, now: datetime
) -> Recommendation:
    """Return the recommendation without the offers whose cooldown has not ended. If no offer is
    left, the recommendation says when the first cooldown ends.
    """
    if not recommendation.offers:
        return recommendation

    def free_at(offer: Offer) -> datetime:
        rest = knowledge.cooldown_until(offer.key) if offer.purchase is Purchase.ON_DEMAND else None
        return max(at for at in (job.avoid.get(offer.key), rest, now) if at is not None)

    ready = tuple(offer for offer in recommendation.offers if free_at(offer) <= now)
    if ready:
        return Recommendation(
            mode=recommendation.mode,
            offers=ready,
            again_at=recommendation.again_at,
            reason=recommendation.reason,
        )
    again = min(free_at(offer) for offer in recommendation.offers)
    reason = f"{recommendation.reason}, but all of these offers failed recently"
    return Recommendation(mode=recommendation.mode, again_at=again, reason=reason)
