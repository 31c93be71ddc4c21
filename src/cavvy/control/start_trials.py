"""Reads what decides whether jobs could start, as a pass of the queue does, for those who only want
to know: nothing is placed or counted."""

from collections.abc import Callable, Collection, Sequence
from datetime import datetime

from cavvy.control.clock import ControlClock
from cavvy.control.decide.maintenance import compare_reserved
from cavvy.control.decide.placement import MarketSnapshot, find_placement
from cavvy.control.decide.queue import line_up
from cavvy.control.decide.start_trials import StartTrial, make_row
from cavvy.control.fair_queue import FairQueue
from cavvy.control.markets import DeadlineAdvisor
from cavvy.control.provider_pool import ProviderPool
from cavvy.domain.allocations import Allocation
from cavvy.domain.jobs import Attempt, JobRecord
from cavvy.domain.maintenance import Reservation
from cavvy.domain.offers import Offer
from cavvy.domain.values import replace
from cavvy.planner.candidates import Candidates, rank_candidates, tasks_of
from cavvy.scheduler.maintenance import ReservedHosts
from cavvy.scheduler.queue import JobScheduler, QueueCapacity, WaitingJob
from cavvy.scheduler.shares import ShareBook
from cavvy.store.sql import Store

Gangs = Sequence[tuple[Attempt, JobRecord]]
# the offers that a job may use, best first, each with the job of its alternative and size
Lines = Sequence[tuple[JobRecord, tuple[Offer, ...]]]


async def read_running(store: Store) -> Gangs:
    """Return all attempts that have not ended, with their jobs."""
    attempts = await store.open_attempts()
    ids = [*dict.fromkeys(each.job_id for each in attempts)]
    jobs = {job.id: job for job in await store.find_jobs(ids)}
    return [(each, jobs[each.job_id]) for each in attempts if each.job_id in jobs]


async def read_capacity(
    store: Store,
    snapshot: MarketSnapshot,
    resting: Collection[str],
    awaited: Collection[str] = (),
) -> QueueCapacity:
    """Return what is free. `resting` are offers on which a job failed recently, `awaited` the hosts
    for which jobs wait."""
    hosts = snapshot.market.hosts
    allocations = await store.allocations() if hosts else ()
    if not all(host.separates for host in hosts) and not await store.accounts():
        # Without accounts, all projects belong to the one user of the server. A setting that
        # requires separation applies to them too.
        hosts = [host if host.obstacle else replace(host, separates=True) for host in hosts]
    return QueueCapacity(
        hosts=hosts,
        allocations=allocations,
        used=snapshot.used,
        resting=resting,
        awaited=awaited,
    )


def keep_out(
    reserved: ReservedHosts, job: JobRecord, lines: Lines, now: datetime
) -> tuple[Lines, tuple[Allocation, ...], Sequence[Reservation]]:
    """Return the offers that reservations leave to the job, the reserved parts of their hosts, and
    the reservations that keep the job out."""
    closed = reserved.find_closed(compare_reserved(job), now)
    if not closed:
        return lines, (), ()
    occupied = reserved.occupy(closed)
    left = [
        (wish, reserved.list_open(wish.task, job.project, offers, occupied))
        for wish, offers in lines
    ]
    return [(wish, offers) for wish, offers in left if offers], occupied, closed


class StartTrials:
    """Makes trials of whether jobs could start. `name_gang` returns the name of an attempt's
    gang."""

    def __init__(
        self,
        store: Store,
        pool: ProviderPool,
        clock: ControlClock,
        advisor: DeadlineAdvisor,
        fair_queue: FairQueue,
        name_gang: Callable[[str], str],
    ) -> None:
        self.store, self.pool, self.clock, self.advisor = store, pool, clock, advisor
        self.fair_queue, self.name_gang = fair_queue, name_gang
        self._scheduler = JobScheduler(QueueCapacity())

    async def begin(self) -> "OpenTrial":
        """Read the present state."""
        now = self.clock.now()
        snapshot = await self.pool.market()
        resting = await self.advisor.history.cooling_down()
        turns, book = await self.fair_queue.order_heads(_FIRST, now)
        capacity = await read_capacity(self.store, snapshot, resting)
        running = await read_running(self.store)
        self._scheduler = self._scheduler.renew(capacity)
        trial = StartTrial(running, capacity, self._scheduler, book)
        reserved = ReservedHosts(
            await self.store.maintenance.reservations(),
            snapshot.market.hosts,
            snapshot.market.policies.parents,
        )
        ids = [turn.row.id for turn in turns if not turn.limit]
        known = {job.id: job for job in await self.store.find_jobs(ids)}
        waiting = [known[each] for each in ids if each in known]
        return OpenTrial(self, snapshot, resting, reserved, book, running, waiting, trial, now)


_FIRST = 16  # jobs of the queue that are looked at


class OpenTrial:
    """The state at one moment: what runs, the first jobs that wait in their order, and the shares
    of projects."""

    def __init__(
        self,
        trials: StartTrials,
        snapshot: MarketSnapshot,
        resting: Collection[str],
        reserved: ReservedHosts,
        book: ShareBook,
        running: Gangs,
        waiting: Sequence[JobRecord],
        trial: StartTrial,
        now: datetime,
    ) -> None:
        self.book, self.running, self.waiting, self.now = book, running, waiting, now
        self._trials, self._snapshot, self._resting = trials, snapshot, resting
        self._reserved, self._trial = reserved, trial
        self._lines: dict[tuple[str, int], Sequence[WaitingJob]] = {}

    async def line_up(self, job: JobRecord, nodes: int) -> Sequence[WaitingJob]:
        """Return the job as an entry of the queue with so many nodes, for the offers that it may
        use; none if no offer fits."""
        key = job.id, nodes
        if key not in self._lines:
            self._lines[key] = await self._line_up(job, nodes)
        return self._lines[key]

    async def _line_up(self, job: JobRecord, nodes: int) -> Sequence[WaitingJob]:
        trials, now = self._trials, self.now
        attempts = await trials.store.attempts(job.id) if job.attempt else ()
        situation = await trials.advisor.situation(job, attempts, now)
        found: list[tuple[JobRecord, Candidates]] = []
        for task in tasks_of(replace(job.task, nodes=nodes)):
            wish, objections = replace(job, task=task), trials.pool.objections
            found.append((wish, find_placement(wish, self._snapshot, objections, situation, now)))
            await trials.clock.rest()
        prices = await trials.advisor.egress_of(job.task)
        lines = rank_candidates(found, self._resting, prices)
        left, reserved, _ = keep_out(self._reserved, job, lines, now)
        return [
            line_up(wish, offers, trials.name_gang, now, reserved)
            for wish, offers in left
            if offers
        ]

    async def can_start(
        self,
        job: JobRecord,
        nodes: int,
        gone: Collection[str] = (),
        beside: Sequence[WaitingJob] = (),
    ) -> bool:
        """Return whether the job could start on so many nodes if the gangs with these names had
        ended, and other jobs had started instead of them."""
        lines = await self.line_up(job, nodes)
        wish = lines[0].job if lines else job
        return bool(lines) and self._trial.can_start(make_row(wish), lines, gone, beside)

    def can_start_now(
        self, lines: Sequence[WaitingJob], gone: Collection[str], beside: Sequence[WaitingJob]
    ) -> bool:
        """Return the same for a job that was lined up before."""
        return self._trial.can_start(make_row(lines[0].job), lines, gone, beside)


def find_same(lines: Sequence[WaitingJob], offer: Offer) -> WaitingJob | None:
    """Return the entry of a job with only this offer, as the market has it now."""
    for line in lines:
        for each in line.offers:
            if each.key == offer.key:
                return replace(line, offers=(each,))
    return None
