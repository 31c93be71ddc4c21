"""The queue: takes waiting jobs in order and gives them places. One key; a pass costs what the
queue's head costs.

Placing a job writes the attempt, its nodes, what it holds and the job's new phase at once; the
job's own reconciler launches. A head that is all blocked is read no further, except now and then,
for jobs that fit elsewhere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from cavvy.catalog.query import OfferMatches
from cavvy.control.clock import ControlClock
from cavvy.control.jobs import cap_of, deadline_of
from cavvy.control.markets.deadline_advisor import DeadlineAdvisor, is_steered
from cavvy.control.provider_pool import MarketSnapshot, ProviderPool
from cavvy.control.starts import make_attempt, start_job
from cavvy.control.warm.pool import WarmGang, WarmGangNotReady, WarmPool
from cavvy.domain.events import Event
from cavvy.domain.jobs import Job, JobPhase, PlanState, attempt_id
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Delivery, Resources
from cavvy.planner.candidates import (
    Candidates,
    find_candidates,
    jobs_of,
    match,
    merge_candidates,
    rank_candidates,
)
from cavvy.planner.deadline.recommendation import Recommendation
from cavvy.planner.placements import PlanningContext
from cavvy.scheduler.pools import count_left
from cavvy.scheduler.queue import (
    JobPlacement,
    JobScheduler,
    JobWait,
    QueueCapacity,
    WaitingJob,
    place_of,
)
from cavvy.store.base import AllocationConflict, AtomicWrite, RowNotFound, StaleVersion, Store

_HEAD = 16  # jobs read by a pass
_DEEP = 1000  # jobs read by the pass that looks behind a blocked head
_DEEP_EVERY = timedelta(seconds=10)
_HOSTS = "hosts"  # the control plane's key: what shared hosts have is written down again
_SOON = timedelta(milliseconds=200)  # until a kept gang that was not ready is asked for again
_LOOK_AGAIN = timedelta(seconds=5)  # while jobs wait: capacity may have come back without a sign
_EXPLAINED = 4  # of the jobs that stay, how many are told why in one pass
_BUSY_PAUSE = timedelta(milliseconds=250)  # of the passes that new jobs cause while nothing is free
_BURST, _BURST_SPAN, _BURST_PAUSE = 20, timedelta(milliseconds=200), timedelta(seconds=1)


class QueueReconciler:
    """Places jobs. `gang_of` names an attempt's gang; `hint` puts a job's key on the worklist."""

    def __init__(
        self,
        store: Store,
        pool: ProviderPool,
        clock: ControlClock,
        *,
        advisor: DeadlineAdvisor,
        warm: WarmPool,
        gang_of: Callable[[str], str],
        hint: Callable[[str], None],
        notify: Callable[[str, Delivery], None],
    ) -> None:
        self._store = store
        self._pool = pool
        self._clock = clock
        self._advisor = advisor
        self._warm = warm
        self._gang_of = gang_of
        self._hint = hint
        self._notify = notify
        self._deep_at: datetime | None = None
        self._blocked = False
        self._behind: set[str] = set()  # the places that the last pass found jobs waiting for
        self._matches: dict[Resources, OfferMatches] = {}
        self._snapshot: MarketSnapshot | None = None
        self._arrivals: list[datetime] = []
        self._burst_since: datetime | None = None

    def delay_of_arrival(self) -> timedelta:
        """How long a new job's first look may wait; called for each.

        While nothing is free it cannot start anyway. In a burst of submissions the answers go
        first, for a second.
        """
        now = self._clock.now()
        self._arrivals = [at for at in self._arrivals[-_BURST:] if now - at < _BURST_SPAN]
        self._arrivals.append(now)
        if self._blocked:
            return _BUSY_PAUSE
        if len(self._arrivals) < _BURST:
            self._burst_since = None
            return timedelta(0)
        self._burst_since = self._burst_since or now
        return max(timedelta(0), min(_BURST_SPAN, self._burst_since + _BURST_PAUSE - now))

    async def reconcile(self, key: str) -> timedelta | None:
        now = self._clock.now()
        deep = self._look_deep(now)
        limit = _DEEP if deep else _HEAD
        head = await self._store.waiting(now, limit)
        if not head:
            self._blocked = False
            return await self._until_next(now, None)
        try:
            return await self._place_all(head, len(head) == limit, now)
        except StaleVersion:
            return timedelta(milliseconds=10)
        except (
            AllocationConflict,
            RowNotFound,
        ):  # the books of a host changed under the plan, or it is new to them
            self._hint(_HOSTS)
            return timedelta(seconds=1)

    def _look_deep(self, now: datetime) -> bool:
        """Whether jobs behind a blocked head may fit at places that the head does not wait for."""
        if not self._blocked or self._snapshot is None:
            return False
        if self._deep_at is not None and now - self._deep_at < _DEEP_EVERY:
            return False
        if all(place_of(offer) in self._behind for offer in self._snapshot.market.offers):
            return False  # nobody could be placed anyway
        self._deep_at = now
        return True

    async def _place_all(self, head: Sequence[Job], more: bool, now: datetime) -> timedelta | None:
        snapshot = await self._market()
        scheduler = JobScheduler(await self._capacity(snapshot))
        stays: list[JobWait] = []
        courses: dict[str, PlanState | None] = {}
        again: list[datetime] = []
        changed = 0
        for job in head:
            match await self._take_warm(job, scheduler, snapshot, now):
                case WarmGang():
                    changed += 1
                    continue
                case WarmGangNotReady(attempt=soon):
                    stays.append(
                        JobWait(
                            job=job, reason=f"takes over {soon.offer.key} in a moment", behind=()
                        )
                    )
                    courses[job.id] = None
                    again.append(now + _SOON)
                    continue
            found = [(each, await self._candidates(each, snapshot, now)) for each in jobs_of(job)]
            candidates = merge_candidates([each for _, each in found])
            decision = await self._decide(job, found, candidates, scheduler, now)
            match decision:
                case JobPlacement():
                    chosen = next(each for wish, each in found if wish is decision.job)
                    await self._place(decision, chosen, snapshot, now)
                    changed += 1
                case JobWait():
                    stays.append(decision)
                    courses[job.id] = candidates.plan_state
                    again += [candidates.again_at] if candidates.again_at else []
                case None:
                    await self._give_up(job, candidates.reason, now)
                    changed += 1
            if len(stays) >= _EXPLAINED and self._all_blocked(scheduler, snapshot):
                more = False
                break
            await self._clock.rest()
        await self._explain(stays, courses, now)
        self._blocked = len(stays) > 0
        self._behind = scheduler.blocked
        if more and changed:
            return timedelta(0)
        return await self._until_next(
            now, min(again, default=None) if stays else None, waiting=bool(stays)
        )

    async def _take_warm(
        self, job: Job, scheduler: JobScheduler, snapshot: MarketSnapshot, now: datetime
    ) -> WarmGang | WarmGangNotReady | None:
        """Gives the job a gang that its project kept, if one fits; one that the policy steers goes
        where that says.

        Of wishes in order, one that can be had now goes before a gang that was kept and fits only a
        later one.
        """
        if is_steered(job) or not await self._warm.any_for(job):
            return None
        soon: WarmGangNotReady | None = None
        for each in jobs_of(job):
            match await self._warm.find(each, await self._allows(each, snapshot, now)):
                case WarmGang() as kept:
                    await self._warm.hand_over(kept, each, self._clock.now())
                    self._hint(job.id)
                    return kept
                case WarmGangNotReady() as found:
                    soon = soon or found
            if job.task.resources.ordered and (
                soon or await self._can_start(each, scheduler, snapshot, now)
            ):
                break
        return soon

    async def _can_start(
        self, wish: Job, scheduler: JobScheduler, snapshot: MarketSnapshot, now: datetime
    ) -> bool:
        candidates = await self._candidates(wish, snapshot, now)
        return scheduler.can_start(self._waiting(wish, candidates.offers, now))

    async def _allows(
        self, job: Job, snapshot: MarketSnapshot, now: datetime
    ) -> Callable[[Offer], bool]:
        """Whether the job may run on an offer, were it free."""
        situation = await self._situation(job, now)

        def allows(offer: Offer) -> bool:
            market = replace(snapshot.market, offers=[replace(offer, capacity=None)], hosts=())
            objections = self._pool.objections
            found = find_candidates(
                job, market, match(job, market), objections, situation=situation, now=now
            )
            return len(found.offers) > 0

        return allows

    async def _decide(
        self,
        job: Job,
        found: Sequence[tuple[Job, Candidates]],
        candidates: Candidates,
        scheduler: JobScheduler,
        now: datetime,
    ) -> JobPlacement | JobWait | None:
        """The job's turn; None if it has none and never will."""
        if not candidates.offers:
            return (
                None
                if candidates.hopeless
                else JobWait(job=job, reason=candidates.reason, behind=())
            )
        lines = rank_candidates(found, await self._advisor.history.cooling_down())
        first, *others = [self._waiting(each, offers, now) for each, offers in lines]
        return scheduler.decide(first, *others)

    def _waiting(self, wish: Job, offers: tuple[Offer, ...], now: datetime) -> WaitingJob:
        gang = self._gang_of(attempt_id(wish.id, wish.last_number + 1))
        avoid = frozenset(place for place, until in wish.avoid.items() if until > now)
        return WaitingJob(job=wish, gang=gang, offers=offers, avoid=avoid)

    def _all_blocked(self, scheduler: JobScheduler, snapshot: MarketSnapshot) -> bool:
        return all(place_of(offer) in scheduler.blocked for offer in snapshot.market.offers)

    async def _until_next(
        self, now: datetime, again_at: datetime | None, *, waiting: bool = False
    ) -> timedelta | None:
        times = [
            at - now for at in (again_at, await self._store.next_waiting(now)) if at is not None
        ]
        times += [self._pool.next_news(_LOOK_AGAIN)] if waiting else []
        return max(timedelta(0), min(times)) if times else None

    async def _market(self) -> MarketSnapshot:
        snapshot = await self._pool.market()
        if snapshot is not self._snapshot:
            self._snapshot = snapshot
            self._matches = {}
        return snapshot

    async def _candidates(self, job: Job, snapshot: MarketSnapshot, now: datetime) -> Candidates:
        if is_steered(job):
            recommendation = await self._advisor.place(job, snapshot)
            if recommendation is not None:
                plan_state = PlanState(
                    at=now, mode=recommendation.mode, reason=recommendation.reason
                )
                return Candidates(
                    offers=recommendation.offers,
                    reason=_wait(recommendation),
                    again_at=recommendation.again_at,
                    plan_state=plan_state,
                )
        need = job.task.resources
        matches = self._matches.get(need)
        if matches is None:
            matches = self._matches[need] = match(job, snapshot.market)
        situation = await self._situation(job, now)
        return find_candidates(
            job, snapshot.market, matches, self._pool.objections, situation=situation, now=now
        )

    async def _situation(self, job: Job, now: datetime) -> PlanningContext:
        """What it did and used so far is asked for only where it had an attempt and has limits."""
        limits = (cap_of(job), job.task.limits.duration, deadline_of(job))
        limited = any(limit is not None for limit in limits)
        attempts = await self._store.attempts(job.id) if job.attempt and limited else ()
        return await self._advisor.situation(job, attempts, now)

    async def _capacity(self, snapshot: MarketSnapshot) -> QueueCapacity:
        hosts = snapshot.market.hosts
        return QueueCapacity(
            hosts=hosts,
            allocations=await self._store.allocations() if hosts else (),
            used=snapshot.used,
        )

    async def _place(
        self, place: JobPlacement, candidates: Candidates, snapshot: MarketSnapshot, now: datetime
    ) -> None:
        """Write the intent; everything that follows can be found again from it."""
        job, plan_state = place.job, candidates.plan_state
        attempt, nodes = make_attempt(job, place.offer, self._gang_of, now, "placed")
        reason = f"starts on {place.offer.key}"
        if plan_state is not None:
            plan_state = replace(plan_state, at=now, place=place.offer.key)
            reason = f"{reason}: {plan_state.reason}"
        started = replace(
            start_job(job, attempt, reason, now), plan_state=plan_state or job.plan_state
        )
        events = [_event(started, now, "placed", reason)]
        attempts = [attempt]
        for offer in _rivals(job, place.offer, candidates.offers, snapshot):
            rival, more = make_attempt(
                started, offer, self._gang_of, now, "placed beside the job's gang"
            )
            attempts.append(rival)
            nodes += more
            started = replace(
                started, numbered=rival.number, standbys=(*started.standbys, rival.number)
            )
            text = (
                f"attempt {rival.number} starts on {offer.key} at the same time: the first to "
                "be ready gets the work"
            )
            events.append(_event(started, now, "standby", text))
        await self._store.commit(
            AtomicWrite(
                jobs=[started],
                attempts=attempts,
                nodes=nodes,
                allocations=place.allocations,
                events=events,
            )
        )
        for each in attempts:
            self._pool.place(each.gang, each.offer, job.task.nodes)
        self._hint(job.id)

    async def _give_up(self, job: Job, reason: str, now: datetime) -> None:
        failed = replace(job, phase=JobPhase.FAILED, since=now, ended_at=now, reason=reason)
        await self._store.commit(
            AtomicWrite(jobs=[failed], events=[_event(failed, now, "failed", reason)])
        )
        self._hint(job.id)
        if job.task.webhooks:
            self._notify(job.id, Delivery.FAILURE)

    async def _explain(
        self, stays: Sequence[JobWait], courses: Mapping[str, PlanState | None], now: datetime
    ) -> None:
        """Say why on the first jobs that stay, where it is news; a decision of the policy is an
        event too.
        """
        told = [stay for stay in stays[:_EXPLAINED] if stay.reason != stay.job.reason]
        news = [
            replace(
                stay.job, reason=stay.reason, plan_state=courses[stay.job.id] or stay.job.plan_state
            )
            for stay in told
        ]
        decided = [(job, plan_state) for job in news if (plan_state := courses[job.id]) is not None]
        events = [_event(job, now, "waits", plan_state.reason) for job, plan_state in decided]
        if news:
            await self._store.commit(AtomicWrite(jobs=news, events=events))


def _rivals(
    job: Job, chosen: Offer, offers: Sequence[Offer], snapshot: MarketSnapshot
) -> Sequence[Offer]:
    """Where else a job that asks for several places at once is started; shared hosts are given
    to one job only.
    """
    if job.task.retry.parallel < 2 or chosen.shared:
        return ()
    others = [
        offer
        for offer in offers
        if offer.key != chosen.key
        and not offer.shared
        and ((left := count_left(offer, snapshot.used)) is None or left >= job.task.nodes)
    ]
    return others[: job.task.retry.parallel - 1]


def _wait(recommendation: Recommendation) -> str:
    return recommendation.reason if recommendation.offers else f"waits: {recommendation.reason}"


def _event(job: Job, now: datetime, kind: str, text: str) -> Event:
    return Event(
        project=job.project, job_id=job.id, attempt=job.attempt, at=now, kind=kind, text=text
    )
