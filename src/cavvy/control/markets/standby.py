"""A second gang for a job whose own gang works still, or does not come up: started beside it, and
given the job once the first can do no more work. Claims guard it: a gang that is not the job's own
is granted ranks and no work, and the job changes hands in one write that every claim of the old
gang still open would make stale.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from cavvy.control.clock import ControlClock
from cavvy.control.jobs import RequeueJob, cap_of, gives_back
from cavvy.control.markets.deadline_advisor import DeadlineAdvisor, is_steered
from cavvy.control.markets.failure_kinds import cooldown_after, failure_of
from cavvy.control.provider_pool import ProviderPool
from cavvy.control.starts import make_attempt
from cavvy.control.unit_of_work import UnitOfWork
from cavvy.domain.jobs import (
    COMING,
    GOING,
    Attempt,
    AttemptOutcome,
    AttemptPhase,
    Job,
    JobPhase,
    Node,
    NodePhase,
    PlanState,
)
from cavvy.domain.offers import Offer, Purchase
from cavvy.planner.deadline.recommendation import Recommendation
from cavvy.planner.spot.view import RunMode

_REVIEW = timedelta(seconds=60)  # between two looks at whether a job is where it should be
_HANDOVER = timedelta(
    seconds=30
)  # for the last checkpoint of the gang that leaves, or the task's grace if longer
_LONGEST_WAIT = timedelta(minutes=10)  # for a checkpoint to leave at
_RISKY = timedelta(
    minutes=30
)  # that a job does not go back to a place which said that its gang was at risk
_CALM = timedelta(
    minutes=5
)  # that a gang stays before a second move on such a word; doubled with each that follows
_LONGEST_CALM = timedelta(hours=6)
_ADVISED = "advice"  # moves on such a word, in Job.retries
_START = timedelta(minutes=10)  # that two gangs may have to be paid for at once
_SOON = timedelta(seconds=1)
_NEVER = timedelta.max
_MOVED_ENOUGH = (
    "the place says that this gang is at risk, and the job moved on such a word "
    "before: it may again after"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyDependencies:
    """What starting a gang needs from around."""

    advisor: DeadlineAdvisor
    pool: ProviderPool
    gang_of: Callable[[str], str]


class StandbyGangs:
    """Steps of one job that concern gangs beside its own; each changes the unit of work, and says
    when to look again.
    """

    def __init__(self, clock: ControlClock, beside: StandbyDependencies) -> None:
        self._clock = clock
        self._out = beside
        self._reviewed: dict[str, datetime] = {}

    async def step(self, uow: UnitOfWork) -> timedelta | None:
        """What there is to do now, before the job's own next step; None once something was done."""
        now, job, own = self._clock.now(), uow.job, uow.latest
        if self._drop(uow, now):
            return None
        if (
            job.phase not in (JobPhase.STARTING, JobPhase.RUNNING)
            or job.stop_reason is not None
            or own is None
        ):
            for key in (job.id, *(attempt.id for attempt in uow.attempts.values())):
                self._reviewed.pop(key, None)
            return _NEVER
        if own.phase in GOING or own.offer.shared:
            return _NEVER
        if uow.standbys:
            return self._watch(uow, own, now)
        if own.drill_until is not None and gives_back(job):
            return _NEVER
        if (
            (until := _taken_at(uow, own)) is not None
            and until > now
            and own.phase is AttemptPhase.RUNNING
        ):
            return await self._succeed(uow, own, now)
        if not _is_at_risk(uow, own):
            return await self._review(uow, own, now, uow.nodes.get(own.id, ()))
        if (until := _calm_until(uow, own)) <= now:
            return await self._leave_ahead(uow, own, now)
        self._stay(uow, own, f"{_MOVED_ENOUGH} {until:%Y-%m-%d %H:%M:%S} UTC", now)
        calm = [replace(node, risk_at=None) for node in uow.nodes[own.id]]
        after = await self._review(uow, own, now, calm)
        return None if after is None else min(after, until - now)

    def take_over(self, uow: UnitOfWork, again: RequeueJob, now: datetime) -> timedelta | None:
        """The job's own gang is lost: give the job to one beside it, once the old one surely
        works no more.
        """
        own = uow.latest
        assert own is not None
        if not _is_quiet(own, uow.nodes.get(own.id, ())):
            return _SOON
        ready = [standby for standby in uow.standbys if _is_ready(uow, standby)]
        self._swap(
            uow,
            (ready or uow.standbys)[0],
            again.reason,
            now,
            again.kind,
        )
        return None

    # Standby gangs that exist

    def _drop(self, uow: UnitOfWork, now: datetime) -> bool:
        """Forget those that came to nothing."""
        job = uow.job
        lost = [
            uow.attempts[n]
            for n in job.standbys
            if n in uow.attempts and uow.attempts[n].phase in GOING
        ]
        if not lost:
            return False
        left = tuple(
            number for number in job.standbys if number not in {attempt.number for attempt in lost}
        )
        avoid = {key: until for key, until in job.avoid.items() if until > now}
        for attempt in lost:
            failure = failure_of(attempt)
            if attempt.outcome is not AttemptOutcome.STOPPED and (
                rest := cooldown_after(failure, attempt, 0)
            ):
                avoid[attempt.offer.key] = max(now + rest, avoid.get(attempt.offer.key, now))
            uow.tell(
                now,
                "standby",
                f"attempt {attempt.number} came to nothing ({failure.label}): {attempt.reason}",
                fact=failure,
            )
        uow.put_job(replace(job, standbys=left, avoid=avoid))
        return True

    def _watch(self, uow: UnitOfWork, own: Attempt, now: datetime) -> timedelta | None:
        """Give the job to a standby gang that is ready, or ask the gang that works to leave at a
        checkpoint.
        """
        if _taken_at(uow, own) is None and self._end_race(uow, own, now):
            return None
        ready = next((standby for standby in uow.standbys if _is_ready(uow, standby)), None)
        if ready is None:
            return _NEVER
        if not _has_work(uow, own):
            self._swap(uow, ready, f"it was ready before attempt {own.number}", now)
            return None
        if _taken_at(uow, own) is not None:
            return _NEVER
        wait = _until_boundary(uow, own, ready, now)
        if wait > timedelta(0):
            return wait
        notice = max(_HANDOVER, uow.job.task.grace)
        uow.put_attempt(replace(own, drill_until=now + notice, moved=True))
        uow.tell(
            now,
            "handover",
            f"leaves for attempt {ready.number} on {ready.offer.key}, which is ready",
            own.number,
        )
        return None

    def _end_race(self, uow: UnitOfWork, own: Attempt, now: datetime) -> bool:
        """The job's gang has its work: those that were started when it was still coming are
        given back.
        """
        if own.running_at is None:
            return False
        late = [standby for standby in uow.standbys if standby.created_at < own.running_at]
        if not late:
            return False
        numbers = {standby.number for standby in late}
        uow.put_job(
            replace(uow.job, standbys=tuple(n for n in uow.job.standbys if n not in numbers))
        )
        for standby in late:
            uow.tell(
                now,
                "standby",
                f"attempt {standby.number} is given back: attempt {own.number} was first",
            )
        return True

    def _swap(
        self, uow: UnitOfWork, standby: Attempt, why: str, now: datetime, kind: str | None = None
    ) -> None:
        """The standby gang is the job's gang from now on. A rank of the old gang that is being
        claimed now is not granted.
        """
        job, own = uow.job, uow.latest
        assert own is not None
        if own.phase not in GOING:
            for node in uow.nodes[own.id]:
                uow.put_node(node)
        later = tuple(number for number in job.standbys if number > standby.number)
        retries = {**job.retries, kind: job.retries.get(kind, 0) + 1} if kind else job.retries
        text = f"attempt {standby.number} on {standby.offer.key} takes over: {why}"
        changed = replace(job, attempt=standby.number, standbys=later, retries=retries, reason=text)
        if job.phase is JobPhase.RUNNING:
            changed = replace(changed, phase=JobPhase.STARTING, since=now)
        uow.put_job(changed)
        uow.tell(now, "takeover", text)

    # Starting one

    async def _succeed(self, uow: UnitOfWork, own: Attempt, now: datetime) -> timedelta | None:
        """The place takes the gang back soon: have the next one started while this one shuts
        down.
        """
        job = uow.job
        if not _may_be_preempted(job):
            return _NEVER
        if not self._due(own.id, now):
            return _REVIEW
        recommendation = await self._out.advisor.successor(job, list(uow.attempts.values()), own)
        if not recommendation.offers:
            return _REVIEW
        return self._start(uow, recommendation, now, "the gang before it is being taken away")

    async def _leave_ahead(self, uow: UnitOfWork, own: Attempt, now: datetime) -> timedelta | None:
        """The place says that it may take the gang back: leave before it does, where that costs
        little.
        """
        job = uow.job
        if not self._due(own.id, now):
            return max(_SOON, self._reviewed[own.id] - now)
        recommendation = await self._out.advisor.ahead(
            job, list(uow.attempts.values()), own, uow.nodes.get(own.id, ())
        )
        if recommendation is None:
            return _REVIEW
        if recommendation.offers and not recommendation.stay:
            after = self._start(uow, recommendation, now, recommendation.reason)
            if after is None:
                avoid = {
                    **job.avoid,
                    own.offer.key: max(now + _RISKY, job.avoid.get(own.offer.key, now)),
                }
                moves = {**job.retries, _ADVISED: job.retries.get(_ADVISED, 0) + 1}
                uow.put_job(replace(uow.job, avoid=avoid, retries=moves))
            return after
        if is_steered(job):
            self._note(uow, recommendation, own.offer, now)
        self._stay(uow, own, recommendation.reason, now)
        return _REVIEW

    def _stay(self, uow: UnitOfWork, own: Attempt, why: str, now: datetime) -> None:
        """Say once why a gang at risk is not left."""
        if own.reason != why:
            uow.put_attempt(replace(own, reason=why))
            uow.tell(now, "stays", f"stays on {own.offer.key}: {why}", own.number)

    async def _review(
        self, uow: UnitOfWork, own: Attempt, now: datetime, nodes: Sequence[Node]
    ) -> timedelta | None:
        """Whether the gang is where it should be."""
        job = uow.job
        if not is_steered(job) or own.phase is AttemptPhase.LAUNCHING:
            return _NEVER
        if not self._due(job.id, now):
            return max(_SOON, self._reviewed[job.id] - now)
        recommendation = await self._out.advisor.review(job, list(uow.attempts.values()), nodes)
        if recommendation is None:
            return _REVIEW
        if recommendation.mode is RunMode.IDLE and self._leaves_to_wait(
            uow, own, recommendation, now
        ):
            return None
        if recommendation.stay or not recommendation.offers:
            again = (
                _REVIEW
                if recommendation.again_at is None
                else min(_REVIEW, max(_SOON, recommendation.again_at - now))
            )
            self._reviewed[job.id] = now + again
            self._note(uow, recommendation, own.offer, now)
            return again
        return self._start(uow, recommendation, now, recommendation.reason)

    def _leaves_to_wait(
        self, uow: UnitOfWork, own: Attempt, recommendation: Recommendation, now: datetime
    ) -> bool:
        """The slack is enough to wait for spot: a gang on demand that has just saved is given
        back.
        """
        saved = own.checkpoint_at
        if own.phase is not AttemptPhase.RUNNING or own.offer.purchase is Purchase.SPOT:
            return False
        if not _may_move(uow.job) or not _may_be_preempted(uow.job):
            return False
        if saved is None or now - saved > _REVIEW:
            return False
        self._note(uow, recommendation, None, now)
        uow.put_attempt(
            replace(own, drill_until=now + max(_HANDOVER, uow.job.task.grace), moved=True)
        )
        uow.tell(now, "waits", f"gives {own.offer.key} back: {recommendation.reason}", own.number)
        return True

    def _due(self, key: str, now: datetime) -> bool:
        """Whether it is time to ask again about this job, or about this gang's successor."""
        at = self._reviewed.get(key)
        if at is not None and at > now:
            return False
        self._reviewed[key] = now + _REVIEW
        return True

    def _start(
        self, uow: UnitOfWork, recommendation: Recommendation, now: datetime, why: str
    ) -> timedelta | None:
        job, own = uow.job, uow.latest
        works = own is not None and own.phase is AttemptPhase.RUNNING
        offers = [each for each in recommendation.offers if _has_room(each, job)]
        if (
            works
            and own is not None
            and own.offer.purchase is not Purchase.SPOT
            and not _may_be_preempted(job)
        ):
            offers = [
                each for each in offers if each.purchase is not Purchase.SPOT
            ]  # the next preemption is the end
        if not offers or not _pays(uow, offers[0]) or (works and not _may_move(job)):
            return _REVIEW
        offer = offers[0]
        attempt, nodes = make_attempt(
            job, offer, self._out.gang_of, now, "placed beside the job's gang"
        )
        if is_steered(job):
            self._note(uow, recommendation, offer, now)
        uow.put_job(
            replace(uow.job, standbys=(*job.standbys, attempt.number), numbered=attempt.number)
        )
        uow.add_attempt(attempt, nodes)
        uow.tell(now, "standby", f"a second gang starts on {offer.key}: {why}", attempt.number)
        self._out.pool.expire()
        return None

    def _note(
        self, uow: UnitOfWork, recommendation: Recommendation, offer: Offer | None, now: datetime
    ) -> None:
        """Remember the decision where it is another than the last."""
        plan_state, place = uow.job.plan_state, offer.key if offer else None
        if plan_state is None or (plan_state.mode, plan_state.reason, plan_state.place) != (
            recommendation.mode,
            recommendation.reason,
            place,
        ):
            plan_state = PlanState(
                at=now, mode=recommendation.mode, reason=recommendation.reason, place=place
            )
            uow.put_job(replace(uow.job, plan_state=plan_state))


def _has_room(offer: Offer, job: Job) -> bool:
    return not offer.shared and (offer.capacity is None or offer.capacity >= job.task.nodes)


def _pays(uow: UnitOfWork, offer: Offer) -> bool:
    """Whether the budget can bear two gangs for as long as a start may take."""
    cap = cap_of(uow.job)
    if cap is None:
        return True
    both = offer.rate.times(uow.job.task.nodes).over(_START + offer.minimum_charge)
    return uow.spent is not None and cap.micros - uow.spent.micros > 2 * both.micros


def _may_be_preempted(job: Job) -> bool:
    """Whether the job goes on after one more preemption."""
    allowed = job.task.retry.preemption
    return allowed is None or job.retries.get("preemption", 0) < allowed


def _may_move(job: Job) -> bool:
    """Whether a gang that works may be left. That is no preemption, but work which bears none is
    not begun again.
    """
    return job.task.retry.preemption != 0


def _is_at_risk(uow: UnitOfWork, own: Attempt) -> bool:
    """Whether the place said that it may soon take this spot gang back."""
    works = own.phase is AttemptPhase.RUNNING and own.offer.purchase is Purchase.SPOT
    return works and any(node.risk_at for node in uow.nodes.get(own.id, ()))


def _calm_until(uow: UnitOfWork, own: Attempt) -> datetime:
    """Until when the word that a gang is at risk moves it no more: later after each gang started on
    such a word.

    Counted from when the gang's work began or, where a gang was started beside it since, from that.
    """
    job = uow.job
    last = uow.attempts.get(job.last_number, own)
    since = max(own.running_at or own.created_at, last.created_at)
    moves = job.retries.get(_ADVISED, 0)
    return since + (
        min(_LONGEST_CALM, _CALM * (1 << min(moves - 1, 16))) if moves else timedelta(0)
    )


def _is_ready(uow: UnitOfWork, attempt: Attempt) -> bool:
    nodes = uow.nodes.get(attempt.id, ())
    return (
        attempt.phase is AttemptPhase.BOOTING
        and len(nodes) > 0
        and all(node.claim for node in nodes)
    )


def _has_work(uow: UnitOfWork, own: Attempt) -> bool:
    """Whether its agents may have been given the work: every rank is claimed."""
    return all(node.claim for node in uow.nodes.get(own.id, ()))


def _is_quiet(own: Attempt, nodes: Sequence[Node]) -> bool:
    """Whether nothing of this gang can work any more."""
    if own.phase is AttemptPhase.ENDED:
        return True
    claimed = [node for node in nodes if node.claim]
    return all(node.phase is NodePhase.EXITED for node in claimed) or len(claimed) < len(nodes)


def _taken_at(uow: UnitOfWork, own: Attempt) -> datetime | None:
    times = [node.notice_until for node in uow.nodes.get(own.id, ()) if node.notice_until]
    return min([*times, own.drill_until] if own.drill_until else times, default=None)


def _until_boundary(uow: UnitOfWork, own: Attempt, ready: Attempt, now: datetime) -> timedelta:
    """Until the gang that works has saved something since the other was ready, but not for ever."""
    checkpoint = uow.job.task.checkpoint
    if checkpoint is None or own.phase in COMING:
        return timedelta(0)
    every = checkpoint.every or _LONGEST_WAIT
    saved = own.checkpoint_at or own.running_at
    if saved is not None and now - saved > 1.5 * every:
        return timedelta(0)  # there will be none
    since = max(node.claimed_at or now for node in uow.nodes[ready.id])
    if own.checkpoint_at is not None and own.checkpoint_at >= since:
        return timedelta(0)
    return since + min(_LONGEST_WAIT, every) - now
