"""Asks the deadline policy about one job: gathers what it is to know, and turns its answer into
offers.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from cavvy.control.clock import ControlClock
from cavvy.control.jobs import cap_of, deadline_of
from cavvy.control.markets.history import MarketHistory
from cavvy.control.provider_pool import MarketSnapshot, ProviderPool
from cavvy.costs.metering import total
from cavvy.domain.jobs import COMING, GOING, Attempt, Job, Node
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import SpotPolicy
from cavvy.domain.units import Money
from cavvy.planner.candidates import find_candidates, find_usable, match
from cavvy.planner.deadline.inputs import (
    JobProgress,
    PolicyInputs,
    find_inputs,
    is_about_as_cheap,
    share_done,
)
from cavvy.planner.deadline.policy import AHEAD, NOT_AHEAD
from cavvy.planner.deadline.recommendation import Recommendation, advise
from cavvy.planner.markets import MarketKnowledge
from cavvy.planner.placements import PlanningContext
from cavvy.planner.spot.view import RunMode
from cavvy.store.base import Store

_LONG = timedelta(hours=2)  # offers avoided for longer were refused: a person must act
_LAST = timedelta(seconds=30)  # offers this old will do for a job that has a place

ReadEgress = Callable[
    [], Awaitable[Mapping[str, Money]]
]  # prices per GB, by provider or "provider/region"


def is_steered(job: Job) -> bool:
    """Whether the deadline policy decides about this job."""
    return job.task.resources.spot is SpotPolicy.AUTO and deadline_of(job) is not None


class DeadlineAdvisor:
    """Knows what to do with a steered job now."""

    def __init__(
        self,
        store: Store,
        pool: ProviderPool,
        clock: ControlClock,
        history: MarketHistory,
        egress: ReadEgress | None = None,
    ) -> None:
        self._store = store
        self._pool = pool
        self._clock = clock
        self.history = history
        self._read_egress = egress
        self._egress: Mapping[str, Money] | None = None

    async def place(self, job: Job, snapshot: MarketSnapshot) -> Recommendation | None:
        """Where a job without a gang should start, or that it should wait; None where the policy
        has no say.
        """
        attempts = await self._store.attempts(job.id) if job.attempt else []
        return self._advise(job, await self._policy_inputs(job, attempts, snapshot, None))

    async def review(
        self, job: Job, attempts: Sequence[Attempt], nodes: Sequence[Node]
    ) -> Recommendation | None:
        """Whether a job's gang is where it should be; None where the policy has no say."""
        current = next((attempt for attempt in attempts if attempt.number == job.attempt), None)
        if current is None or current.phase in GOING:
            return None
        if job.task.checkpoint is None and current.running_at is not None:
            return None  # whatever was done would be lost
        snapshot = await self._pool.market(_LAST)
        return self._advise(job, await self._policy_inputs(job, attempts, snapshot, current, nodes))

    def _advise(
        self, job: Job, policy_inputs: tuple[PolicyInputs, MarketKnowledge, JobProgress] | None
    ) -> Recommendation | None:
        if policy_inputs is None:
            return None
        inputs, knowledge, progress = policy_inputs
        now = self._clock.now()
        recommendation = advise(inputs, knowledge, progress, now, avoid=job.avoid)
        return _usable_now(recommendation, job, knowledge, now)

    async def successor(
        self, job: Job, attempts: Sequence[Attempt], current: Attempt
    ) -> Recommendation:
        """Where to go from a gang that is about to be taken away; no offers: nowhere for now."""
        snapshot, now = await self._pool.market(), self._clock.now()
        gone = {**job.avoid, current.offer.key: now + timedelta(minutes=1)}
        found = await self._policy_inputs(job, attempts, snapshot, None)
        if found is not None:
            inputs, knowledge, progress = found
            return _usable_now(
                advise(inputs, knowledge, progress, now, avoid=gone), job, knowledge, now
            )
        candidates = find_candidates(
            replace(job, avoid=gone),
            snapshot.market,
            match(job, snapshot.market),
            self._pool.objections,
            situation=await self.situation(job, attempts, now),
            now=now,
        )
        offers = tuple(offer for offer in candidates.offers if not offer.shared)
        mode = RunMode.SPOT if offers and offers[0].purchase is Purchase.SPOT else RunMode.ON_DEMAND
        return Recommendation(mode=mode, offers=offers, reason="the best place left")

    async def situation(
        self, job: Job, attempts: Sequence[Attempt], now: datetime
    ) -> PlanningContext:
        """What the job did and used of its limits in these attempts, and which places rest."""
        ran = [(x.finished_at or now) - x.running_at for x in attempts if x.running_at is not None]
        spent = (
            total(await self._store.charges(job.id))
            if attempts and cap_of(job) is not None
            else Money(0)
        )
        avoid = await self.history.cooling_down()
        return PlanningContext(
            submitted_at=job.submitted_at,
            avoid=avoid,
            ran=sum(ran, timedelta(0)),
            done=share_done(
                job.task, attempts, now, job.attempt if job.task.checkpoint is not None else 0
            ),
            spent=spent,
        )

    async def ahead(
        self, job: Job, attempts: Sequence[Attempt], own: Attempt, nodes: Sequence[Node]
    ) -> Recommendation | None:
        """Where to go from a gang that its place says is at risk; no offers: it stays. None: a
        move would lose work.
        """
        if job.task.checkpoint is None or own.offer.purchase is not Purchase.SPOT:
            return None
        if is_steered(job):
            return await self.review(job, attempts, nodes)
        recommendation = await self.successor(job, attempts, own)
        near = [
            offer
            for offer in recommendation.offers
            if offer.purchase is Purchase.SPOT and offer.key != own.offer.key
        ]
        offers = tuple(offer for offer in near if is_about_as_cheap(job.task, offer, own.offer))
        return Recommendation(
            mode=RunMode.SPOT, offers=offers, stay=not offers, reason=AHEAD if offers else NOT_AHEAD
        )

    async def policy_inputs(
        self, job: Job
    ) -> tuple[PolicyInputs, MarketKnowledge, JobProgress] | None:
        """What the policy is told now: for a forecast on the rest of the job."""
        attempts = await self._store.attempts(job.id)
        current = next(
            (x for x in attempts if x.number == job.attempt and x.phase not in GOING), None
        )
        nodes = await self._store.nodes(current.id) if current else ()
        return await self._policy_inputs(
            job, attempts, await self._pool.market(_LAST), current, nodes
        )

    async def _policy_inputs(
        self,
        job: Job,
        attempts: Sequence[Attempt],
        snapshot: MarketSnapshot,
        current: Attempt | None,
        nodes: Sequence[Node] = (),
    ) -> tuple[PolicyInputs, MarketKnowledge, JobProgress] | None:
        deadline, now = deadline_of(job), self._clock.now()
        if deadline is None or not is_steered(job):
            return None
        usable = find_usable(
            job, snapshot.market, match(job, snapshot.market), self._pool.objections
        )
        offers = [offer for offer in usable if job.avoid.get(offer.key, now) - now <= _LONG]
        if not offers:
            return None
        await self.history.note_prices(offers)
        knowledge = await self.history.knowledge(
            [offer.key for offer in offers if not offer.shared]
        )
        progress = JobProgress(
            submitted_at=job.submitted_at,
            deadline=deadline,
            done=_done(job, attempts, nodes, now, current),
            current=current.offer if current else None,
            works=current is not None and current.phase not in COMING,
            starting_for=now - current.created_at if current else timedelta(0),
            unsaved=_unsaved(current, now),
            at_risk=any(node.risk_at is not None for node in nodes),
            home=next(
                (attempt.offer for attempt in attempts if attempt.number == job.attempt), None
            ),
            setup=_setup_time(job, nodes),
            budget_left=await self._budget_left(job),
            saved_bytes=_saved_bytes(attempts),
            egress=await self._prices() if job.task.checkpoint is not None else {},
        )
        inputs = find_inputs(job.task, offers, knowledge, progress, floor=not attempts)
        return None if inputs is None else (inputs, knowledge, progress)

    async def _prices(self) -> Mapping[str, Money]:
        """What clouds take for data that leaves them: read once, for a catalog changes with the
        server's release.
        """
        if self._egress is None:
            self._egress = await self._read_egress() if self._read_egress is not None else {}
        return self._egress

    async def _budget_left(self, job: Job) -> Money | None:
        cap = cap_of(job)
        if cap is None:
            return None
        return Money(max(0, cap.micros - total(await self._store.charges(job.id)).micros))


def _done(
    job: Job,
    attempts: Sequence[Attempt],
    nodes: Sequence[Node],
    now: datetime,
    current: Attempt | None,
) -> float:
    """By the time that the work ran; where the task says itself how far it is, by that."""
    if job.task.checkpoint is None and current is None:
        return 0.0
    for node in nodes:
        said = node.progress.get(
            "fraction"
        )  # of the whole job; "done" of "total" may be of one epoch
        if isinstance(said, float) and 0 <= said <= 1:
            return said
    return share_done(job.task, attempts, now, job.attempt)


def _saved_bytes(attempts: Sequence[Attempt]) -> int:
    """The size of the newest checkpoint; 0 before the first."""
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


def _setup_time(job: Job, nodes: Sequence[Node]) -> timedelta | None:
    if job.task.setup is None:
        return timedelta(0)
    spans = [
        node.running_at - node.claimed_at for node in nodes if node.running_at and node.claimed_at
    ]
    return max(spans, default=None)


def _usable_now(
    recommendation: Recommendation, job: Job, knowledge: MarketKnowledge, now: datetime
) -> Recommendation:
    """Offers that failed a moment ago come when their time is over; on demand the next best is
    there at once.
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
    reason = f"{recommendation.reason}, and every place for it said no a moment ago"
    return Recommendation(mode=recommendation.mode, again_at=again, reason=reason)
