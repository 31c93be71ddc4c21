"""Reads market observations and records prices; market records are cached for a few seconds.

Requests a recommendation about one job from the deadline policy: reads the policy's inputs and
passes them to `decide.deadline`. Carries out the decisions of `decide.standby`. Queries the
deadline advisor if a decision needs its answer, and checks budgets and limits before a second gang
starts.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta

from cavvy.control.clock import ControlClock
from cavvy.control.decide.bills import budget_left
from cavvy.control.decide.deadline import (
    PolicyFacts,
    StoredFacts,
    find_successor,
    go_ahead,
    is_reviewed,
    leave_offer,
    list_worth,
    make_facts,
    may_go_ahead,
    recommend,
)
from cavvy.control.decide.job import cap_of
from cavvy.control.decide.placement import (
    MarketSnapshot,
    find_placement,
    is_steered,
    list_usable,
    make_situation,
)
from cavvy.control.decide.rows import JobRows, Step
from cavvy.control.decide.standby import (
    NO_STANDBY,
    REVIEW,
    AskAdvisor,
    StandbyQuestion,
    answer_standby,
    decide_standby,
    list_started,
)
from cavvy.control.provider_pool import ProviderPool
from cavvy.control.unit_of_work import UnitOfWork
from cavvy.costs.metering import total
from cavvy.domain.jobs import GOING, Attempt, JobRecord, Node
from cavvy.domain.markets import Observation, ObservationKind
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import Money
from cavvy.domain.values import replace
from cavvy.planner.deadline.recommendation import Recommendation
from cavvy.planner.markets import LONGEST_REST, MarketKnowledge, MarketRecord, standings_of
from cavvy.planner.placements import PlanningContext
from cavvy.planner.transfers import find_egress_date, price_upload
from cavvy.store.base import AtomicWrite
from cavvy.store.sql import Store

SINCE = timedelta(days=30)  # age of the oldest observations that market records include
RECENT = timedelta(days=3)  # age of the oldest single observations that policies get
KEEP = timedelta(days=90)
_AGE = timedelta(seconds=5)
_MOST = 400  # maximum number of observations that a policy gets for one decision


class MarketHistory:
    """Reads the records and observations of markets from the store, and records prices in the
    store.
    """

    def __init__(self, store: Store, clock: ControlClock) -> None:
        self._store = store
        self._clock = clock
        self._standings: Mapping[str, MarketRecord] = {}
        self._read_at: datetime | None = None
        self._prices: dict[str, int] = {}
        self._resting: Collection[str] = ()
        self._rested_at: datetime | None = None

    async def standings(self) -> Mapping[str, MarketRecord]:
        """Return the record of each market that was used recently."""
        now = self._clock.now()
        if self._read_at is None or now - self._read_at >= _AGE:
            self._standings, self._read_at = (
                standings_of(await self._store.tallies(now - SINCE)),
                now,
            )
        return self._standings

    async def knowledge(self, markets: Collection[str]) -> MarketKnowledge:
        """Return the records of all markets, and the recent observations of the given markets."""
        recent: dict[str, list[Observation]] = {}
        for seen in await self._store.observations(markets, self._clock.now() - RECENT, _MOST):
            recent.setdefault(seen.market, []).append(seen)
        return MarketKnowledge(standings=await self.standings(), recent=recent)

    async def cooling_down(self) -> Collection[str]:
        """Return the markets in which a launch or a gang of any job has failed recently, or in
        which several launches in a row ended before their nodes had booted. Jobs should try all
        other markets before the returned markets.
        """
        now = self._clock.now()
        if self._rested_at is None or now - self._rested_at >= _AGE:
            lately = [
                key
                for key, known in (await self.standings()).items()
                if (known.refused_at is not None and now - known.refused_at <= LONGEST_REST)
                # After launches that never worked, the cooldown can be as long as their period.
                or (known.lost_at is not None and now - known.lost_at <= RECENT)
            ]
            known = await self.knowledge(lately) if lately else MarketKnowledge()
            until = {
                key: known.cooldown_until(key, works_after=known.of(key).expect_boot())
                for key in lately
            }
            self._resting = {key for key, at in until.items() if at is not None and at > now}
            self._rested_at = now
        return self._resting

    async def note_prices(self, offers: Iterable[Offer]) -> None:
        """Record the spot prices that have changed since they were last recorded."""
        spot = {offer.key: offer.rate for offer in offers if offer.purchase is Purchase.SPOT}
        unknown = [key for key in spot if key not in self._prices]
        now = self._clock.now()
        if unknown:
            for seen in await self._store.observations(unknown, now - SINCE):
                if seen.rate is not None:
                    self._prices[seen.market] = seen.rate.micros_per_hour
        news = {
            key: rate for key, rate in spot.items() if self._prices.get(key) != rate.micros_per_hour
        }
        if news:
            observations = [
                Observation(market=key, kind=ObservationKind.PRICE, at=now, rate=rate)
                for key, rate in news.items()
            ]
            await self._store.commit(AtomicWrite(observations=observations))
            self._prices.update({key: rate.micros_per_hour for key, rate in news.items()})

    async def forget(self) -> None:
        """Remove observations that are too old to be useful."""
        await self._store.forget_observations(self._clock.now() - KEEP)


_LAST = timedelta(seconds=30)  # maximum age of the offers that are used for a job with a gang
# time after which egress prices are read again, because there may be a new catalog
_EGRESS_AGE = timedelta(hours=1)

# Reads prices per GB, by provider or "provider/region".
ReadEgress = Callable[[], Awaitable[Mapping[str, Money]]]
ReadEgressDates = Callable[[], Awaitable[Mapping[str, date]]]

# Returns why a job may not start these further gangs, or "".
FindBlock = Callable[[JobRecord, Sequence[Attempt]], Awaitable[str]]


class DeadlineAdvisor:
    """Recommends the next action for a job with a deadline policy."""

    def __init__(
        self,
        store: Store,
        pool: ProviderPool,
        clock: ControlClock,
        history: MarketHistory,
        egress: ReadEgress | None = None,
    ) -> None:
        self._store, self._pool, self._clock, self.history = store, pool, clock, history
        self._read_egress = egress
        self.read_egress_dates: ReadEgressDates | None = None  # set by the control plane
        self._egress: Mapping[str, Money] = {}
        self._egress_dates: Mapping[str, date] = {}
        self._egress_read: datetime | None = None

    async def place(self, job: JobRecord, snapshot: MarketSnapshot) -> Recommendation | None:
        """Recommend where a job without a gang should start, or recommend that the job waits.
        Returns None if the policy does not apply.
        """
        attempts = await self._store.attempts(job.id) if job.attempt else []
        facts = await self._facts(job, attempts, snapshot, None)
        return facts and recommend(facts, job, job.avoid, self._clock.now())

    async def review(
        self, job: JobRecord, attempts: Sequence[Attempt], nodes: Sequence[Node]
    ) -> Recommendation | None:
        """Recommend where a job with a gang should run. Returns None if the policy does not
        apply.
        """
        current = next((attempt for attempt in attempts if attempt.number == job.attempt), None)
        if current is None or not is_reviewed(job, current):
            return None
        snapshot = await self._pool.market(_LAST)
        facts = await self._facts(job, attempts, snapshot, current, nodes)
        return facts and recommend(facts, job, job.avoid, self._clock.now())

    async def successor(
        self, job: JobRecord, attempts: Sequence[Attempt], current: Attempt
    ) -> Recommendation:
        """Recommend where to move from a gang that will be reclaimed soon. If the recommendation
        contains no offers, the job cannot move now."""
        snapshot, now = await self._pool.market(), self._clock.now()
        left = leave_offer(job, current.offer, now)
        facts = await self._facts(job, attempts, snapshot, None)
        if facts is not None:
            return recommend(facts, job, left.avoid, now)
        situation = await self.situation(job, attempts, now)
        return find_successor(find_placement(left, snapshot, self._pool.objections, situation, now))

    async def situation(
        self, job: JobRecord, attempts: Sequence[Attempt], now: datetime
    ) -> PlanningContext:
        """Return the planner's context: the job's progress and spending in these attempts, and the
        markets that have a cooldown.
        """
        limited = bool(attempts) and cap_of(job) is not None
        spent = total(await self._store.charges(job.id)) if limited else Money(0)
        known = make_situation(job, attempts, spent, await self.history.cooling_down(), now)
        return replace(known, egress=await self.egress_of(job.task))

    async def egress_of(self, task: TaskSpec) -> Mapping[str, Money]:
        """Return the prices of outgoing data by provider if the task states the size of an input or
        output; otherwise return no prices.
        """
        sized = any(each.size_mib is not None for each in (*task.inputs, *task.outputs))
        return await self._prices() if sized else {}

    async def price_upload(self, url: str | None, offer: Offer) -> tuple[Money | None, date | None]:
        """Return the price per GB that a node of the offer pays to send data to the URL, and the
        date of this price. If the URL is None, the data is sent to the server. Unknown values are
        None.
        """
        price = price_upload(url, offer, await self._prices())
        return price, find_egress_date(offer, self._egress_dates) if price else None

    async def ahead(
        self, job: JobRecord, attempts: Sequence[Attempt], own: Attempt, nodes: Sequence[Node]
    ) -> Recommendation | None:
        """Recommend where to move from a gang at risk. If the recommendation contains no offers,
        the job stays on its gang. Returns None if a move would lose work.
        """
        if not may_go_ahead(job, own):
            return None
        if is_steered(job):
            return await self.review(job, attempts, nodes)
        return go_ahead(job, own, await self.successor(job, attempts, own))

    async def policy_inputs(self, job: JobRecord) -> PolicyFacts | None:
        """Return the deadline policy's current inputs, for a forecast of the job's remaining
        run.
        """
        attempts = await self._store.attempts(job.id)
        current = next(
            (x for x in attempts if x.number == job.attempt and x.phase not in GOING), None
        )
        nodes = await self._store.nodes(current.id) if current else ()
        return await self._facts(job, attempts, await self._pool.market(_LAST), current, nodes)

    async def _facts(
        self,
        job: JobRecord,
        attempts: Sequence[Attempt],
        snapshot: MarketSnapshot,
        current: Attempt | None,
        nodes: Sequence[Node] = (),
    ) -> PolicyFacts | None:
        now = self._clock.now()
        usable = list_usable(job, snapshot, self._pool.objections) if is_steered(job) else ()
        offers = list_worth(job, usable, now)
        if not offers:
            return None
        await self.history.note_prices(offers)
        own = [offer.key for offer in offers if not offer.shared]
        knowledge = await self.history.knowledge(own)
        capped = cap_of(job) is not None
        spent = total(await self._store.charges(job.id)) if capped else Money(0)
        egress = await self._prices() if job.task.checkpoint is not None else {}
        stored = StoredFacts(
            attempts=attempts,
            nodes=nodes,
            current=current,
            budget_left=budget_left(job, spent),
            egress=egress,
        )
        return make_facts(job, offers, knowledge, stored, now)

    async def _prices(self) -> Mapping[str, Money]:
        """Return the clouds' prices for outgoing data (egress), at most `_EGRESS_AGE` old."""
        now, read = self._clock.now(), self._egress_read
        is_old = read is None or not now - _EGRESS_AGE < read <= now
        if self._read_egress is not None and is_old:
            self._egress, self._egress_read = await self._read_egress(), now
            if self.read_egress_dates is not None:
                self._egress_dates = await self.read_egress_dates()
        return self._egress


class StandbyGangs:
    """Carries out the decisions about standby gangs."""

    def __init__(
        self,
        clock: ControlClock,
        advisor: DeadlineAdvisor,
        name_gang: Callable[[str], str],
        find_block: FindBlock,
    ) -> None:
        self._clock = clock
        self._advisor = advisor
        self._name_gang = name_gang
        self._find_block = find_block
        # job -> key -> when to query the advisor again
        self._reviews: dict[str, dict[str, datetime]] = {}

    async def step(
        self, uow: UnitOfWork, *, awaits_end: bool = False, replaces: bool = False
    ) -> timedelta | None:
        """Execute the decision of `decide_standby`, before the job's own next step. Returns None if
        the next check should follow immediately, otherwise the time until the next check.
        """
        now, job_id = self._clock.now(), uow.job.id
        reviews = self._reviews.setdefault(job_id, {})
        step = decide_standby(uow.rows, reviews, now, awaits_end=awaits_end, replaces=replaces)
        if step.changes is not None:
            uow.apply(step.changes)
        if isinstance(step, AskAdvisor):
            asked, reviews[step.key] = step, now + REVIEW
            answer = await self._ask(uow.rows, asked)
            step = answer_standby(uow.rows, asked, answer, self._name_gang, now)
            started = list_started(step, uow.job)
            if started and await self._find_block(uow.job, started):
                step = Step(after=min(REVIEW, asked.within))
            reviews[asked.key] = step.review_at or reviews[asked.key]
            if step.changes is not None:
                uow.apply(step.changes)
        if step is NO_STANDBY:
            del self._reviews[job_id]
        return step.after

    async def _ask(self, rows: JobRows, asked: AskAdvisor) -> Recommendation | None:
        job, own, attempts = rows.job, rows.own, list(rows.attempts.values())
        assert own is not None
        match asked.question:
            case StandbyQuestion.SUCCESSOR:
                return await self._advisor.successor(job, attempts, own)
            case StandbyQuestion.AHEAD:
                return await self._advisor.ahead(job, attempts, own, asked.nodes)
            case StandbyQuestion.REVIEW:
                return await self._advisor.review(job, attempts, asked.nodes)
