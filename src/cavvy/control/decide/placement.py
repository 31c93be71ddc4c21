"""Finds the offers that can run a task, and creates the rows that start the task on an offer."""

from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime
from fractions import Fraction
from typing import Any

from msgspec.msgpack import encode

from cavvy.catalog.fit import OfferMatches
from cavvy.control.decide.job import cap_of, deadline_of
from cavvy.control.decide.rows import RowChanges, make_event, ran
from cavvy.domain.jobs import Attempt, JobPhase, JobRecord, Node, PlanState, attempt_id
from cavvy.domain.offers import Offer
from cavvy.domain.policies import ProjectPolicy
from cavvy.domain.tasks import ResourceSpec, SpotPolicy
from cavvy.domain.units import Money
from cavvy.domain.values import replace
from cavvy.planner.candidates import (
    Candidates,
    Objections,
    OfferedMarket,
    find_candidates,
    find_usable,
    jobs_of,
    match,
)
from cavvy.planner.deadline.inputs import share_done
from cavvy.planner.deadline.recommendation import Recommendation
from cavvy.planner.placements import PlanningContext
from cavvy.scheduler.offer_lines import count_left, place_of
from cavvy.scheduler.queue import JobPlacement

# The fields of tasks and policies on which no offer depends, but for what providers object to. With
# a new field, jobs that differ in it are compared with the offers one by one.
FREE_FIELDS: dict[str, Any] = {
    "name": "",
    "project": "",
    "run": "",
    "tags": {},
    "priority": 0,
    "params": {},
    "array": (),
    "sweep": (),
    "parallel": None,
    "after": (),
    "env": {},
    "stated": None,
}
_FREE_POLICIES: dict[str, Any] = {
    "keep_jobs_days": None,
    "share": None,
    "quota_gpus": None,
    "max_gpus": None,
    "user_gpus": None,
    "user_jobs": None,
    "user_waiting": None,
    "quota_accelerators": {},
    "max_accelerators": {},
    "user_accelerators": {},
    "quota_micros_per_hour": None,
    "max_micros_per_hour": None,
    "user_micros_per_hour": None,
    "users": {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MarketSnapshot:
    """The recent offers of all providers, and the capacity used since the offers were read."""

    market: OfferedMarket
    as_of: datetime
    used: dict[str, Fraction] = field(default_factory=dict)
    _matches: dict[ResourceSpec, OfferMatches] = field(default_factory=dict, init=False)
    _restricted: dict[str, "MarketSnapshot"] = field(default_factory=dict, init=False)
    _candidates: dict[object, Candidates] = field(default_factory=dict, init=False)
    _places: set[str] = field(default_factory=set, init=False)
    _accounts: dict[ResourceSpec, Sequence[str]] = field(default_factory=dict, init=False)

    @property
    def places(self) -> Set[str]:
        """What jobs wait for that need any of the offers."""
        if not self._places:
            self._places.update(map(place_of, self.market.offers))
        return self._places

    def match(self, job: JobRecord) -> OfferMatches:
        """Return the offers that can run one node of the job. Jobs that need the same resources
        share one computed result.
        """
        need = job.task.resources
        if need not in self._matches:
            self._matches[need] = match(job, self.market)
        return self._matches[need]

    def list_accounts(self, job: JobRecord) -> Sequence[str]:
        """Return the accounts of the offers that can run one node of the job."""
        need = job.task.resources
        if need not in self._accounts:
            found = {offer.account for offer in self.match(job).offers}
            self._accounts[need] = sorted(found)
        return self._accounts[need]

    def restrict(self, project: str) -> "MarketSnapshot":
        """Return the part of the market that a project's jobs may use. The result is computed only
        once for each project."""
        if not self.market.credentials:
            return self
        if project not in self._restricted:
            self._restricted[project] = MarketSnapshot(
                market=self.market.restrict(project), as_of=self.as_of, used=self.used
            )
        return self._restricted[project]


def find_placement(
    job: JobRecord,
    snapshot: MarketSnapshot,
    objections: Objections,
    situation: PlanningContext,
    now: datetime,
) -> Candidates:
    """Return the offers for the first alternative of the job's task, and the reason if no offer
    fits.

    All code that places, refuses or moves a job uses this function.
    """
    snapshot = snapshot.restrict(job.project)
    key = _find_key(job, snapshot, objections, situation, now)
    found = None if key is None else snapshot._candidates.get(key)
    if found is None:
        market, matches = snapshot.market, snapshot.match(job)
        found = find_candidates(job, market, matches, objections, situation=situation, now=now)
    if key is not None:
        snapshot._candidates[key] = found
    return found


def _find_key(
    job: JobRecord,
    snapshot: MarketSnapshot,
    objections: Objections,
    situation: PlanningContext,
    now: datetime,
) -> object:
    """Return a key that jobs share which have the same candidates in this snapshot, because they
    differ only in what no offer depends on. Return None if the candidates also depend on the time,
    or on the progress of this job."""
    usual = replace(situation, submitted_at=None, avoid=()) == PlanningContext()
    if not usual or is_limited(job) or any(until > now for until in job.avoid.values()):
        return None
    policies = [
        (bound.owner, policy)
        for bound in snapshot.market.policies.find(job.project)
        if (policy := replace(bound.policy, **_FREE_POLICIES)) != ProjectPolicy()
    ]
    avoid = frozenset(situation.avoid)
    return job.consented, avoid, find_needs(job, snapshot, objections), encode(policies)


def find_needs(job: JobRecord, snapshot: MarketSnapshot, objections: Objections) -> bytes:
    """Return what jobs share that would get the same offers, if their policies and limits, their
    progress and their users' consent are the same."""
    own = {"project": job.project} if job.task.volumes else {}  # which are of one project
    task = replace(job.task, **{**FREE_FIELDS, **own})
    verdicts = [objections(job.task, account) for account in snapshot.list_accounts(job)]
    return encode((task, verdicts))


def find_placements(
    job: JobRecord,
    snapshot: MarketSnapshot,
    objections: Objections,
    situation: PlanningContext,
    now: datetime,
) -> Iterator[tuple[JobRecord, Candidates]]:
    """Yield the offers for each alternative and size of the job. The caller can let others have
    their turn between them."""
    for wish in jobs_of(job):
        yield wish, find_placement(wish, snapshot, objections, situation, now)


def find_allowed(
    job: JobRecord,
    snapshot: MarketSnapshot,
    objections: Objections,
    situation: PlanningContext,
    now: datetime,
) -> Callable[[Offer], bool]:
    """Return a function that reports whether the job may run on an offer, assuming that the offer
    has free capacity."""

    def allows(offer: Offer) -> bool:
        market = replace(snapshot.market, offers=[replace(offer, capacity=None)], hosts=())
        alone = MarketSnapshot(market=market, as_of=snapshot.as_of)
        return len(find_placement(job, alone, objections, situation, now).offers) > 0

    return allows


def list_usable(
    job: JobRecord, snapshot: MarketSnapshot, objections: Objections
) -> Sequence[Offer]:
    """Return the offers that suit the job, regardless of the job's limits and of cooldowns."""
    snapshot = snapshot.restrict(job.project)
    return find_usable(job, snapshot.market, snapshot.match(job), objections)


# The job's progress and limits


def is_steered(job: JobRecord) -> bool:
    """Return whether the deadline policy applies to this job. The policy does not apply to jobs on
    machines and in pools."""
    if job.task.machine is not None or job.task.pool is not None:
        return False
    return job.task.resources.spot is SpotPolicy.AUTO and deadline_of(job) is not None


def is_limited(job: JobRecord) -> bool:
    """Return whether the job has a spending limit, a maximum duration or a deadline. The progress
    and spending of a job with a limit restrict the offers that the job may use.
    """
    limits = (cap_of(job), job.task.limits.duration, deadline_of(job))
    return any(limit is not None for limit in limits)


def make_situation(
    job: JobRecord, attempts: Sequence[Attempt], spent: Money, avoid: Collection[str], now: datetime
) -> PlanningContext:
    """Build the planner's context: the job's progress and spending, and the offers to avoid."""
    current = job.attempt if job.task.checkpoint is not None else 0
    return PlanningContext(
        submitted_at=job.submitted_at,
        avoid=avoid,
        ran=ran(attempts, now),
        done=share_done(job.task, attempts, now, current),
        spent=spent,
    )


def take_advice(recommendation: Recommendation, now: datetime) -> Candidates:
    """Return the candidates that the deadline policy recommends for a job without a gang."""
    reason = recommendation.reason
    return Candidates(
        offers=recommendation.offers,
        reason=reason if recommendation.offers else f"waits: {reason}",
        again_at=recommendation.again_at,
        plan_state=PlanState(at=now, mode=recommendation.mode, reason=reason),
    )


def record_plan(
    job: JobRecord, recommendation: Recommendation, offer: Offer | None, now: datetime
) -> JobRecord:
    """Return the job with the policy's decision recorded. The recorded time changes only if the
    mode or the offer changes.
    """
    plan = PlanState(
        at=now,
        mode=recommendation.mode,
        reason=recommendation.reason,
        place=offer.key if offer else None,
    )
    return replace(job, plan_state=date_plan(job.plan_state, plan))


def date_plan(old: PlanState | None, new: PlanState) -> PlanState:
    """Return the new decision, with the time of the old decision if mode and offer are
    unchanged.
    """
    return new if is_news(old, new) or old is None else replace(new, at=old.at)


def is_news(old: PlanState | None, new: PlanState) -> bool:
    """Return whether the new decision has a different mode or offer than the old decision."""
    return old is None or (old.mode, old.place) != (new.mode, new.place)


# Rows


def make_attempt(
    job: JobRecord, offer: Offer, name_gang: Callable[[str], str], now: datetime, reason: str
) -> tuple[Attempt, list[Node]]:
    """Create the rows of the job's next attempt. The rows must be written before the gang is
    launched.
    """
    number = job.last_number + 1
    mine = attempt_id(job.id, number)
    attempt = Attempt(
        id=mine,
        job_id=job.id,
        project=job.project,
        number=number,
        gang=name_gang(mine),
        offer=offer,
        nodes=job.task.nodes,
        reason=reason,
        created_at=now,
        since=now,
    )
    return attempt, [
        Node(attempt_id=mine, project=job.project, rank=rank) for rank in range(job.task.nodes)
    ]


def start_job(job: JobRecord, attempt: Attempt, reason: str, now: datetime) -> JobRecord:
    """Return the job in phase STARTING, with this attempt as its current attempt."""
    return replace(
        job,
        phase=JobPhase.STARTING,
        since=now,
        reason=reason,
        attempt=attempt.number,
        numbered=attempt.number if job.numbered else 0,
        not_before=None,
    )


def place_job(
    place: JobPlacement,
    candidates: Candidates,
    snapshot: MarketSnapshot,
    name_gang: Callable[[str], str],
    now: datetime,
) -> RowChanges:
    """Start the job on its offer. If the task requests parallel gangs, also start the job on
    additional offers.
    """
    job, plan = place.job, candidates.plan_state
    attempt, nodes = make_attempt(job, place.offer, name_gang, now, "placed")
    reason = f"starts on {place.offer.key}"
    if plan is not None:
        plan = replace(plan, at=now, place=place.offer.key)
        reason = f"{reason}: {plan.reason}"
    started = replace(start_job(job, attempt, reason, now), plan_state=plan or job.plan_state)
    attempts, events = [attempt], [make_event(started, now, "placed", reason)]
    for offer in list_rivals(job, place.offer, candidates.offers, snapshot):
        why = "started in addition to the job's gang"
        rival, more = make_attempt(started, offer, name_gang, now, why)
        attempts.append(rival)
        nodes += more
        standbys = (*started.standbys, rival.number)
        started = replace(started, numbered=rival.number, standbys=standbys)
        text = (
            f"attempt {rival.number} starts on {offer.key} at the same time: the first gang to be "
            "ready gets the work"
        )
        events.append(make_event(started, now, "standby", text))
    return RowChanges(
        job=started,
        attempts=tuple(attempts),
        nodes=tuple(nodes),
        allocations=place.allocations,
        events=tuple(events),
    )


def list_rivals(
    job: JobRecord, chosen: Offer, offers: Sequence[Offer], snapshot: MarketSnapshot
) -> Sequence[Offer]:
    """Return the additional offers on which a job with parallel gangs starts. Shared hosts are
    omitted."""
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
