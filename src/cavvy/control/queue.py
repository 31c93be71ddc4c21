"""The queue reconciler takes waiting jobs in order and places them. The queue reconciler handles a
single key. A pass reads only the first jobs of the queue (its head).

To place a job means to write its attempt, nodes, allocations and new phase in one write. After the
placement is written, the job's own reconciler launches the gang. While the first jobs are blocked,
later jobs are read only occasionally, to find jobs that fit on other offers.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial

from msgspec.msgpack import encode

from cavvy.control.budgets import BudgetKeeper
from cavvy.control.clock import ControlClock
from cavvy.control.decide.groups import UNSTARTED, explain_unready, is_founding, is_ready
from cavvy.control.decide.job import AdvanceJob
from cavvy.control.decide.maintenance import wait_for_reservation
from cavvy.control.decide.node_pools import (
    as_pool_gangs,
    explain_no_pool,
    follow_pool,
    opens_at,
    order_markets,
    release_for,
    restrict_to_pool,
    wait_for_offers,
)
from cavvy.control.decide.placement import (
    FREE_FIELDS,
    MarketSnapshot,
    find_allowed,
    find_placement,
    is_limited,
    is_steered,
    place_job,
    take_advice,
)
from cavvy.control.decide.queue import (
    EXPLAINED,
    Arrivals,
    GroupTurn,
    QueueWait,
    Start,
    decide_group,
    decide_return,
    decide_turn,
    explain_waits,
    is_blocked,
    line_up,
    looks_deep,
    make_wait,
    note_arrival,
    reclaim_gang,
    tell_reasons,
)
from cavvy.control.decide.rows import RowChanges, make_event
from cavvy.control.decide.schedule import bar_job, explain_bar
from cavvy.control.decide.start_trials import make_row, share_held, share_on
from cavvy.control.decide.transitions import advance_job
from cavvy.control.decide.warm_pool import MachineIsBusy, MachineIsUnfit
from cavvy.control.fair_queue import FairQueue
from cavvy.control.markets import DeadlineAdvisor
from cavvy.control.node_pools import PoolNodes
from cavvy.control.provider_pool import ProviderPool
from cavvy.control.reconcile import HOSTS
from cavvy.control.start_trials import keep_out, read_capacity, read_running
from cavvy.control.unit_of_work import join_writes, make_write
from cavvy.control.warm_pool import MachinePool, WarmGang, WarmGangNotReady, WarmPool
from cavvy.domain.allocations import Allocation
from cavvy.domain.elastic import NodeRange
from cavvy.domain.jobs import JOB_ENDS, Attempt, JobPhase, JobRecord
from cavvy.domain.machines import NamedMachine
from cavvy.domain.maintenance import Reservation
from cavvy.domain.offers import Offer
from cavvy.domain.shares import QueueRow, size_of_task
from cavvy.domain.tasks import Delivery
from cavvy.domain.values import replace
from cavvy.planner.candidates import Candidates, jobs_of, rank_candidates
from cavvy.planner.placements import PlanningContext
from cavvy.scheduler.maintenance import ReservedHosts
from cavvy.scheduler.node_pools import GrowPool, WaitForPool, decide_growth, explain_closed
from cavvy.scheduler.queue import (
    JobPlacement,
    JobScheduler,
    QueueCapacity,
)
from cavvy.scheduler.reclaim import ShareQuotas
from cavvy.scheduler.shares import ShareBook, ShareLimits
from cavvy.store.base import PER_MACHINE, AllocationConflict, AtomicWrite, RowNotFound, StaleVersion
from cavvy.store.sql import Store

_log = logging.getLogger(__name__)
_HEAD = 64  # jobs that one pass may start
_DEEP = 1000  # jobs that a pass may start which also looks behind blocked first jobs
_DEEP_PER_MACHINE = 100  # jobs of each machine that such a pass reads
# delay before a job tries again to take over a warm gang that was not ready
_SOON = timedelta(milliseconds=200)
_BUDGET_POLL = timedelta(seconds=30)  # interval for a job that waits because of a budget
_MACHINE_POLL = timedelta(seconds=1)  # interval for checking a machine while a job waits for it
_LOOK_AGAIN = timedelta(
    seconds=5
)  # interval for reading offers while jobs wait, because capacity may become free without a signal


class QueueReconciler:
    """Places waiting jobs. `name_gang` returns the name of an attempt's gang; `hint` adds a job to
    the worklist."""

    def __init__(
        self,
        store: Store,
        pool: ProviderPool,
        clock: ControlClock,
        *,
        advisor: DeadlineAdvisor,
        warm: WarmPool,
        machines: MachinePool,
        pools: PoolNodes,
        budgets: BudgetKeeper,
        fair_queue: FairQueue,
        name_gang: Callable[[str], str],
        hint: Callable[[str], None],
        notify: Callable[[str, Delivery], None],
    ) -> None:
        self._store, self._pool, self._clock, self._advisor = store, pool, clock, advisor
        self._warm, self._machines, self._pools, self._budgets = warm, machines, pools, budgets
        self._fair_queue, self._name_gang, self._hint = fair_queue, name_gang, hint
        self._notify = notify
        self._deep_at: datetime | None = None
        self._blocked = False
        self._behind: set[str] = set()  # offers for which jobs were waiting in the last pass
        self._snapshot: MarketSnapshot | None = None
        self._scheduler = JobScheduler(QueueCapacity())  # of the last pass
        self._trial = JobScheduler(QueueCapacity())  # of tries without borrowers
        self._arrivals = Arrivals()
        self._reserved = ReservedHosts((), (), {})
        # of the present pass: the limits of projects and users, the needs that they refuse, and
        # the writes of the jobs that start
        self._limits = ShareLimits(ShareBook())
        self._refused: dict[tuple[object, ...], str] = {}
        self._starting: list[asyncio.Task[None]] = []

    def delay_of_arrival(self) -> timedelta:
        """Return how long the first placement of a newly arrived job may wait. The method must be
        called once for each new job."""
        now = self._clock.now()
        self._arrivals, pause = note_arrival(self._arrivals, now, blocked=self._blocked)
        return pause

    async def reconcile(self, key: str) -> timedelta | None:
        now = self._clock.now()
        deep = self._blocked and looks_deep(self._snapshot, self._behind, self._deep_at, now)
        if deep:
            self._deep_at = now
        limit, per_machine = (_DEEP, _DEEP_PER_MACHINE) if deep else (_HEAD, PER_MACHINE)
        turns, book = await self._fair_queue.order_heads(limit, now)
        head = await self._store.waiting(now, [each.row.id for each in turns], per_machine)
        try:
            return await self._place_all(head, book, limit, now)
        except StaleVersion:
            return timedelta(milliseconds=10)
        except (
            AllocationConflict,
            RowNotFound,
        ):  # the host's allocations were changed meanwhile, or the store does not know the host
            self._hint(HOSTS)
            return timedelta(seconds=1)

    async def _place_all(
        self, head: Sequence[JobRecord], book: ShareBook, limit: int, now: datetime
    ) -> timedelta | None:
        """Process each job: start the job, fail the job, or record why the job waits. Jobs that
        wait for their machine, their pool or a limit of their project do not block other jobs.
        """
        if not head:
            self._blocked = False
            return await self._until_next([], now)
        head = await self._follow_pools(head, now)
        self._snapshot = snapshot = await self._pool.market()
        self._reserved = ReservedHosts(
            await self._store.maintenance.reservations(),
            snapshot.market.hosts,
            snapshot.market.policies.parents,
        )
        capacity = await self._capacity(snapshot)
        self._scheduler = scheduler = self._scheduler.renew(capacity)
        try:
            stays, lines, limited = await self._give_turns(head, book, scheduler, snapshot, now)
        except asyncio.CancelledError:
            for start in self._starting:
                start.cancel()  # else a write that hangs keeps the server from stopping
            raise
        finally:
            errors = await self._finish_starts()
        if errors:
            raise errors[0]
        stays, limited = await self._reclaim(stays, limited, book, snapshot, now)
        held_back = {each.wait.job.id for each in limited}
        head = [job for job in head if job.id not in held_back]
        jobs, events = explain_waits(stays, now, limited, *lines)
        if jobs:
            await self._store.commit(AtomicWrite(jobs=jobs, events=events))
        for event in events:
            if event.fact == "unusable":
                ids = {"job": event.job_id, "project": event.project}
                _log.warning("job %s %s", event.job_id, event.text, extra=ids)
        self._behind = scheduler.blocked
        in_lines = [each for waits in lines for each in waits]
        self._blocked = (
            bool(stays)
            or any(not each.busy for each in in_lines)
            or any(each.limited for each in limited)
        )
        free = sum(_line_of(job) is None for job in head)
        more = free >= limit and len(stays) < free and not _is_full(stays, snapshot, scheduler)
        if more or len(in_lines) < len(head) - free:
            return timedelta(0)
        return await self._until_next([*stays, *in_lines, *limited], now)

    async def _follow_pools(self, head: Sequence[JobRecord], now: datetime) -> Sequence[JobRecord]:
        """Let the jobs follow the files of their pools, which may have changed. Return all jobs."""
        keys = {(job.project, job.task.pool) for job in head if job.task.pool is not None}
        pools = {(project, name): await self._pools.read(project, name) for project, name in keys}
        followed, changed = list[JobRecord](), list[RowChanges]()
        for job in head:
            pool = pools.get((job.project, job.task.pool or ""))
            if pool is None or job.task.stated is None:
                followed.append(job)
                continue
            follows = follow_pool(job, pool)
            if follows != job and job.member is None:  # the task of an array is written once
                text = f"follows the changed file of pool {pool.name}"
                event = make_event(job, now, "waits", text)
                changed.append(RowChanges(job=follows, events=(event,)))
                follows = replace(follows, version=job.version + 1)
            followed.append(follows)
        if changed:
            await self._store.commit(join_writes(changed))
        return followed

    async def _give_turns(
        self,
        head: Sequence[JobRecord],
        book: ShareBook,
        scheduler: JobScheduler,
        snapshot: MarketSnapshot,
        now: datetime,
    ) -> tuple[Sequence[QueueWait], Collection[Sequence[QueueWait]], Sequence[QueueWait]]:
        """Start each job that can start now, and fail each job that can never start. Return why the
        jobs without a line of their own wait, why the jobs of each line wait, and which jobs wait
        for a limit, toward which only jobs count that have started. Each machine and each pool has
        a line. If it is busy, all its jobs have the same reason as its first job.
        """
        stays: list[QueueWait] = []
        limited: list[QueueWait] = []
        lines: defaultdict[tuple[str, str, str], list[QueueWait]] = defaultdict(list)
        full = False
        limits = self._limits = ShareLimits(book)
        self._refused = {}
        barred = await self._bar_jobs(head, now)
        grouped: dict[str, bool] = {}  # whether each group has started
        for job in head:
            if job.id in barred:
                continue
            if (group := job.array_id) is not None and job.task.group is not None:
                if group not in grouped:
                    grouped[group] = bool((await self._store.arrays.get(group)).started)
                    if not grouped[group]:
                        waits = await self._give_group(group, limits, scheduler, snapshot, now)
                        for each in waits:
                            (limited if each.limited else stays).append(each)
                if not grouped[group]:
                    continue
            row = make_row(job)
            if reason := limits.find(row):
                limited.append(make_wait(job, reason, now + _LOOK_AGAIN))
                continue
            line = _line_of(job)
            waits = stays if line is None else lines[line]
            if full and line is None:
                continue
            if waits and waits[-1].busy:
                waits.append(replace(waits[-1], wait=replace(waits[-1].wait, job=job)))
                continue
            stay = await self._give_turn(job, scheduler, snapshot, now)
            if stay is None:
                limits.start(row)
            else:
                (limited if stay.limited else waits).append(stay)
            full = _is_full(stays, snapshot, scheduler)
            await self._clock.rest()
        return stays, lines.values(), limited

    async def _finish_starts(self) -> Sequence[BaseException]:
        """Wait until the starts of this pass are written, and return the errors."""
        starting, self._starting = self._starting, []
        results = await asyncio.gather(*starting, return_exceptions=True)
        return [each for each in results if each is not None]

    async def _give_group(
        self,
        group_id: str,
        limits: ShareLimits,
        scheduler: JobScheduler,
        snapshot: MarketSnapshot,
        now: datetime,
    ) -> Sequence[QueueWait]:
        """Start all waiting jobs of a group that has not started, or none of them. Return why they
        wait. Jobs that have joined the group wait until it has started.
        """
        group = await self._store.find_jobs(await self._store.arrays.jobs(group_id))
        waiting = [job for job in group if is_ready(job, now)]
        again_at = now + _LOOK_AGAIN
        waits = [make_wait(job, UNSTARTED, again_at) for job in waiting if not is_founding(job)]
        jobs = sorted(
            filter(is_founding, waiting), key=lambda job: (-size_of_task(job.task), job.id)
        )
        if not jobs:
            return waits
        row = _make_group_row(group_id, jobs)
        if reason := explain_unready(group, await self._read_owns(group), now):
            return [*waits, *(make_wait(job, reason, again_at) for job in jobs)]
        if reason := limits.find(row):
            return [*waits, *(_wait_for_limit(job, reason, now) for job in jobs)]
        turns, began = [], self._clock.now()
        for job in jobs:
            found = await self._find_all(job, snapshot, now)
            ranked = self._admit(job, await self._rank(job, found))
            if ranked is None:
                reason = self._refused[_needs_of(job)]
                return [*waits, *(_wait_for_limit(each, reason, now) for each in jobs)]
            lines, reserved, closed = self._keep_out(job, ranked, now)
            if closed and not lines:
                return [*waits, *(wait_for_reservation(each, closed, now) for each in jobs)]
            turns.append(GroupTurn(job=job, found=found, ranked=lines, reserved=reserved))
        decision = decide_group(turns, scheduler, self._name_gang, now)
        if isinstance(decision, tuple):
            job, failed = decision
            await self._commit(job, advance_job(job, failed, now))
            return waits
        starts = [each for each in decision if isinstance(each, Start)]
        if not starts:
            return [*waits, *(each for each in decision if isinstance(each, QueueWait))]
        if reason := await self._find_group_block(starts, limits):
            scheduler.give_back([each.place for each in starts])
            return [*waits, *(_wait_for_limit(job, reason, now) for job in jobs)]
        planned = (began, self._clock.now())
        changes = [
            _note_plan(
                place_job(each.place, each.candidates, snapshot, self._name_gang, now), planned
            )
            for each in starts
        ]
        await self._store.commit(join_writes(changes))
        for job, each in zip(jobs, changes, strict=True):
            self._announce(job, each)
        limits.start(row)
        return waits

    async def _find_group_block(self, starts: Sequence[Start], limits: ShareLimits) -> str:
        """Return why the jobs of a group may not start on their offers because of a budget or a
        limit, or count what they hold there and return ""."""
        places = [each.place for each in starts]
        for place in places:
            if blocked := await self._find_block(place.job, place):
                return blocked.wait.reason
        return limits.start_gangs(
            [(make_row(each.job), share_on(each.job, each.offer)) for each in places]
        )

    async def _read_owns(self, group: Sequence[JobRecord]) -> Mapping[str, Attempt]:
        """Return the current attempts of those jobs of a group that do not wait, by job."""
        going = [job for job in group if job.phase not in (*JOB_ENDS, JobPhase.QUEUED)]
        return {
            job.id: each
            for job in going
            for each in await self._store.attempts(job.id)
            if each.number == job.attempt
        }

    async def _bar_jobs(self, head: Sequence[JobRecord], now: datetime) -> Collection[str]:
        """Hold the jobs that have not started yet and whose account may start no work. Return their
        IDs. A job that has started continues, also after its nodes are lost."""
        fresh = [job for job in head if job.account and not job.attempt]
        known = {each.name: each for each in await self._store.accounts()} if fresh else {}
        barred = set()
        for job in fresh:
            if why := explain_bar(job, known.get(job.account)):
                await self._commit(job, bar_job(job, why, now))
                barred.add(job.id)
        return barred

    async def _give_turn(
        self, job: JobRecord, scheduler: JobScheduler, snapshot: MarketSnapshot, now: datetime
    ) -> QueueWait | None:
        """Start the job if it can start now. If the job can never start, end the job as failed. If
        the job must wait, return the reason.
        """
        if job.task.machine is not None:
            if blocked := await self._find_wait(job):
                return blocked
            return await self._give_machine(job, scheduler, snapshot, now)
        if job.task.pool is not None:
            return await self._give_pool(job, scheduler, snapshot, now)
        match await self._take_warm(job, scheduler, snapshot, now):
            case WarmGang():
                return None
            case WarmGangNotReady(attempt=soon):
                return _wait_for_warm(job, soon, now)
        return await self._place(job, scheduler, snapshot, now)

    async def _give_pool(
        self, job: JobRecord, scheduler: JobScheduler, snapshot: MarketSnapshot, now: datetime
    ) -> QueueWait | None:
        """Start the job on an idle gang of its pool or on new nodes, or let idle gangs that do not
        fit be removed. Return why the job waits, or None if it starts.
        """
        assert job.task.pool is not None
        pool = await self._pools.read(job.project, job.task.pool)
        if pool is None:
            return make_wait(job, explain_no_pool(job), now + _LOOK_AGAIN, busy=True)
        closed = opens_at(pool, now)
        attempts = await self._pools.list_attempts(job.project, pool.name)
        wish = follow_pool(job, pool)
        if wish != job and job.member is None and job.task.stated is not None:
            reason = f"the file of pool {pool.name} has just changed"
            return make_wait(job, reason, now, busy=True)  # the next pass lets the job follow it
        if not explain_closed(pool, closed):
            match await self._take_warm(wish, scheduler, snapshot, now):
                case WarmGang():
                    return None
                case WarmGangNotReady(attempt=soon):
                    return _wait_for_warm(job, soon, now)
        match decide_growth(pool, as_pool_gangs(attempts, now), job.task.nodes, closed):
            case WaitForPool(reason=reason, release=release, again_at=again_at):
                for gang in (each for each in attempts if each.id in release):
                    await self._release(gang, job, now)
                return make_wait(job, reason, again_at or now + _LOOK_AGAIN, busy=True)
            case GrowPool(markets=markets):
                wish, within = restrict_to_pool(wish, snapshot, pool, markets)
                stay = await self._place(wish, scheduler, within, now)
                if stay is None:
                    return None
                reason = f"pool {pool.name}: {stay.wait.reason}"
                wait = replace(stay.wait, job=job, reason=reason)
                return replace(stay, wait=wait, busy=True)

    async def _release(self, gang: Attempt, job: JobRecord, now: datetime) -> None:
        """Let an idle gang of the job's pool be removed."""
        owner = await self._store.job(gang.job_id)
        await self._store.commit(make_write(release_for(job, owner, gang, now)))
        self._warm.note(replace(gang, kept_until=now, version=gang.version + 1))
        self._hint(owner.id)

    async def _give_machine(
        self, job: JobRecord, scheduler: JobScheduler, snapshot: MarketSnapshot, now: datetime
    ) -> QueueWait | None:
        """Start the job on its machine. If the machine has no gang, place the job on an offer.
        Return why the job waits, or None if it does not wait.
        """
        policies = snapshot.market.policies.find(job.project)
        limits = partial(self._count_gang, job)
        match await self._machines.give_turn(job, now, policies, limits):
            case MachineIsBusy(reason=reason):
                return make_wait(job, reason, now + _MACHINE_POLL, busy=True)
            case MachineIsUnfit(reason=reason):
                failed = AdvanceJob(phase=JobPhase.FAILED, reason=reason)
                await self._commit(job, advance_job(job, failed, now))
            case NamedMachine() as row:
                return await self._place(job, scheduler, snapshot, now, row)
            case None:
                self._hint(job.id)
        return None

    async def _place(
        self,
        job: JobRecord,
        scheduler: JobScheduler,
        snapshot: MarketSnapshot,
        now: datetime,
        machine: NamedMachine | None = None,
    ) -> QueueWait | None:
        """Start the job on an offer. If no offer can ever fit, end the job as failed. If the job
        must wait, return the reason.
        """
        if self._refused and (reason := self._refused.get(_needs_of(job))):
            return _wait_for_limit(job, reason, now)
        began = self._clock.now()
        decision, lines = await self._decide(job, scheduler, snapshot, now)
        if isinstance(decision, Start) and (finer := _find_finer(decision.place.job)):
            scheduler.give_back([decision.place])
            decision, lines = await self._decide(job, scheduler, snapshot, now, finer)
        match decision:
            case QueueWait():
                return decision
            case Start(place=place, candidates=candidates):
                if blocked := await self._find_block(job, place):
                    return blocked
                if job.task.retry.parallel > 1:
                    usable = {offer.key for _, offers in lines for offer in offers}
                    offers = tuple(each for each in candidates.offers if each.key in usable)
                    candidates = replace(candidates, offers=offers)
                changes = place_job(place, candidates, snapshot, self._name_gang, now)
                changes = _note_plan(changes, (began, self._clock.now()))
                changes = replace(changes, machine=machine)
            case AdvanceJob():
                changes = advance_job(job, decision, now)
        for attempt in changes.attempts:
            self._limits.start_gang(job.project, job.user, share_held(attempt, job))
        write = self._commit(job, changes)
        if _line_of(job) is None and len(changes.attempts) < 2:
            # Nothing that this pass reads later depends on this start, so the starts of a pass are
            # written together.
            self._starting.append(asyncio.create_task(write))
        else:
            await write
        return None

    async def _decide(
        self,
        job: JobRecord,
        scheduler: JobScheduler,
        snapshot: MarketSnapshot,
        now: datetime,
        tried: NodeRange | None = None,
    ) -> tuple[Start | QueueWait | AdvanceJob, Sequence[tuple[JobRecord, tuple[Offer, ...]]]]:
        """Decide whether the job starts, if it is elastic with one of the sizes `tried`. Return the
        decision, and the offers that the job may use."""
        found = await self._find_all(job, snapshot, now, tried)
        lines = await self._rank(job, found)
        if (admitted := self._admit(job, lines)) is None:
            return _wait_for_limit(job, self._refused[_needs_of(job)], now), ()
        lines, reserved, closed = self._keep_out(job, admitted, now)
        if closed and not lines:
            return wait_for_reservation(job, closed, now), ()
        if job.task.pool is not None:
            found, lines = (
                [(each, wait_for_offers(each, some)) for each, some in found],
                order_markets(lines),
            )
        decision = decide_turn(job, found, lines, scheduler, self._name_gang, now, reserved)
        return decision, lines

    def _keep_out(
        self, job: JobRecord, lines: Sequence[tuple[JobRecord, tuple[Offer, ...]]], now: datetime
    ) -> tuple[
        Sequence[tuple[JobRecord, tuple[Offer, ...]]], tuple[Allocation, ...], Sequence[Reservation]
    ]:
        """Return the offers that reservations leave to the job, the reserved parts of their hosts,
        and the reservations that keep the job out."""
        return keep_out(self._reserved, job, lines, now)

    def _admit(
        self, job: JobRecord, lines: Sequence[tuple[JobRecord, tuple[Offer, ...]]]
    ) -> Sequence[tuple[JobRecord, tuple[Offer, ...]]] | None:
        """Return the offers that the limits of projects and users allow, or None if they allow none
        of them. Later jobs under the same limits then wait, too."""
        if not self._limits.count_offers:
            return lines
        row = make_row(job)
        shares = {
            (wish.task.nodes, offer.key): share_on(wish, offer)
            for wish, offers in lines
            for offer in offers
        }
        kept = [
            (
                wish,
                tuple(
                    each
                    for each in offers
                    if self._limits.admits(row, shares[wish.task.nodes, each.key])
                ),
            )
            for wish, offers in lines
        ]
        if not shares or any(offers for _, offers in kept):
            return kept
        reasons = [self._limits.hold(row, each) for each in dict.fromkeys(shares.values())]
        self._refused[_needs_of(job)] = reasons[0]
        return None

    def _within_limits(
        self, job: JobRecord, allows: Callable[[Offer], bool]
    ) -> Callable[[Offer], bool]:
        row = make_row(job)
        return lambda offer: self._limits.admits(row, share_on(job, offer)) and allows(offer)

    def _count_gang(self, job: JobRecord, offer: Offer) -> str:
        """Return why the limits keep the job from taking over a gang on this offer, or count it as
        held and return ""."""
        row, share = make_row(job), share_on(job, offer)
        if not self._limits.admits(row, share):
            return self._limits.hold(row, share)
        self._limits.start_gang(job.project, job.user, share)
        return ""

    async def _find_block(self, job: JobRecord, place: JobPlacement) -> QueueWait | None:
        """Return why the job must wait because of a budget. Offers that cost nothing are never
        blocked.
        """
        if not place.offer.rate.micros_per_hour:
            return None
        return await self._find_wait(job)

    async def _find_wait(self, job: JobRecord) -> QueueWait | None:
        reason = await self._budgets.find_block(job)
        return make_wait(job, reason, self._clock.now() + _BUDGET_POLL) if reason else None

    async def _commit(self, job: JobRecord, changes: RowChanges) -> None:
        await self._store.commit(make_write(changes))
        self._announce(job, changes)

    def _announce(self, job: JobRecord, changes: RowChanges) -> None:
        for attempt in changes.attempts:
            self._pool.place(attempt.gang, attempt.offer, attempt.nodes)
        self._hint(job.id)
        for what in changes.notices if job.task.webhooks else ():
            self._notify(job.id, what)

    async def _take_warm(
        self, job: JobRecord, scheduler: JobScheduler, snapshot: MarketSnapshot, now: datetime
    ) -> WarmGang | WarmGangNotReady | None:
        """Assign a warm gang of the job's project to the job, if such a gang fits. Jobs with a
        deadline policy get no warm gang.

        If the task orders its alternatives, an earlier alternative that can start now takes
        precedence over a warm gang that fits only a later alternative.
        """
        if is_steered(job) or not await self._warm.any_for(job):
            return None
        if await self._budgets.find_block(job):
            return None  # the time of a warm gang is paid, too
        soon: WarmGangNotReady | None = None
        for each in jobs_of(job):
            situation, objections = await self._situation(each, now), self._pool.objections
            allows = find_allowed(each, snapshot, objections, situation, now)
            found = await self._warm.find(each, self._within_limits(each, allows))
            if isinstance(found, WarmGang):
                self._count_gang(each, found.attempt.offer)
                await self._warm.hand_over(found, each, self._clock.now())
                self._hint(job.id)
                return found
            soon = soon or found
            if job.task.resources.ordered:
                candidates = await self._candidates(each, snapshot, now)
                waiting = line_up(each, candidates.offers, self._name_gang, now)
                if soon or scheduler.can_start(waiting):
                    break
        return soon

    async def _until_next(self, stays: Sequence[QueueWait], now: datetime) -> timedelta | None:
        times = [each.again_at for each in stays] + [await self._store.next_waiting(now)]
        waits = [at - now for at in times if at is not None]
        waits += [self._pool.next_news(_LOOK_AGAIN)] if stays else []
        return max(timedelta(0), min(waits)) if waits else None

    async def _find_all(
        self,
        job: JobRecord,
        snapshot: MarketSnapshot,
        now: datetime,
        tried: NodeRange | None = None,
    ) -> Sequence[tuple[JobRecord, Candidates]]:
        """Return the candidates of each alternative and size of the job, see `jobs_of`."""
        found: list[tuple[JobRecord, Candidates]] = []
        for each in jobs_of(job, tried):
            if found:
                await self._clock.rest()  # requests have their turn
            found.append((each, await self._candidates(each, snapshot, now)))
        return found

    async def _candidates(
        self, job: JobRecord, snapshot: MarketSnapshot, now: datetime
    ) -> Candidates:
        if is_steered(job):
            recommendation = await self._advisor.place(job, snapshot)
            if recommendation is not None:
                return take_advice(recommendation, now)
        situation = await self._situation(job, now)
        return find_placement(job, snapshot, self._pool.objections, situation, now)

    async def _situation(self, job: JobRecord, now: datetime) -> PlanningContext:
        """Return the planner's context for the job: its progress, spending and cooldowns. The job's
        earlier attempts are read only if the job has limits.
        """
        attempts = await self._store.attempts(job.id) if job.attempt and is_limited(job) else ()
        return await self._advisor.situation(job, attempts, now)

    async def _reclaim(
        self,
        stays: Sequence[QueueWait],
        limited: Sequence[QueueWait],
        book: ShareBook,
        snapshot: MarketSnapshot,
        now: datetime,
    ) -> tuple[Sequence[QueueWait], Sequence[QueueWait]]:
        """Let other jobs give their gangs back if the first jobs of the queue wait within their
        projects' quotas for nodes, or for a limit of a project above. Return all waits; the reasons
        of these jobs say who has borrowed the quota, and when it comes back.
        """
        looked = [each for each in stays[:EXPLAINED] if each.wait.behind] + [*limited[:EXPLAINED]]
        # What one job gets back may not suffice for its group.
        looked = [each for each in looked if each.wait.job.task.group is None]
        if not looked or not any(each.all_quotas for each in book.rules.values()):
            return stays, limited
        quotas, reasons = ShareQuotas(book), dict[str, str]()
        running: Sequence[tuple[Attempt, JobRecord]] = ()
        for job in (each.wait.job for each in looked):
            found = await self._find_all(job, snapshot, now)
            row = make_row(job)
            ranked = await self._rank(job, found)
            wanted = [
                (wish, tuple(one for one in offers if quotas.entitles(row, share_on(wish, one))))
                for wish, offers in ranked
            ]
            entitled = [(wish, offers) for wish, offers in wanted if offers]
            if not entitled:
                first = next((share_on(wish, each[0]) for wish, each in ranked if each), None)
                reasons[job.id] = quotas.explain(row, first) if first else ""
                continue
            unreserved, reserved, _ = self._keep_out(job, entitled, now)
            if not unreserved:
                reasons[job.id] = ""
                continue
            lines = [
                line_up(wish, offers, self._name_gang, now, reserved) for wish, offers in unreserved
            ]
            running = running or await read_running(self._store)
            capacity = await self._capacity(snapshot)
            self._trial = trial = self._trial.renew(capacity)
            chosen, reasons[job.id] = decide_return(
                row, lines, running, capacity, trial, book, now, self._fair_queue.min_run
            )
            if chosen and self._pool.is_outdated:
                break  # a gang that has just ended may suffice
            for attempt, owner in running:
                if attempt.gang in chosen:
                    changes = reclaim_gang(attempt, owner, job.project, now)
                    await self._store.commit(make_write(changes))
                    self._hint(owner.id)
            if chosen:
                break
        return tell_reasons(stays, reasons), tell_reasons(limited, reasons)

    async def _rank(
        self, job: JobRecord, found: Sequence[tuple[JobRecord, Candidates]]
    ) -> Sequence[tuple[JobRecord, tuple[Offer, ...]]]:
        """Return the offers to try, best first, each with the job of its alternative."""
        resting = await self._advisor.history.cooling_down()
        prices = await self._advisor.egress_of(job.task)
        return rank_candidates(found, resting, prices)

    async def _capacity(self, snapshot: MarketSnapshot) -> QueueCapacity:
        resting = await self._advisor.history.cooling_down()
        return await read_capacity(self._store, snapshot, resting, self._behind)


def _needs_of(job: JobRecord) -> tuple[object, ...]:
    """Return what decides which offers a job may use: jobs with the same needs wait for the same
    limits."""
    own = job.id if job.attempt else ""  # a job avoids offers on which it failed
    task = encode(replace(job.task, **FREE_FIELDS))
    return job.project, job.user, job.consented, own, task


def _make_group_row(group_id: str, jobs: Sequence[JobRecord]) -> QueueRow:
    """Return the row of the jobs of a group, which start together."""
    size, first = sum(size_of_task(job.task) for job in jobs), jobs[0]
    return QueueRow(group_id, first.project, first.user, size, group_id, jobs=len(jobs))


def _is_full(stays: Sequence[QueueWait], snapshot: MarketSnapshot, scheduler: JobScheduler) -> bool:
    """Return whether to skip the remaining jobs. They are skipped if each offer already has a
    waiting job, and if the reasons of enough waiting jobs were computed for users.
    """
    return len(stays) >= EXPLAINED and is_blocked(snapshot, scheduler.blocked)


def _note_plan(changes: RowChanges, planned: tuple[datetime, datetime]) -> RowChanges:
    """Record when the offers were compared that the new attempts are on."""
    attempts = tuple(replace(each, planned=planned) for each in changes.attempts)
    return replace(changes, attempts=attempts)


def _find_finer(job: JobRecord) -> NodeRange | None:
    """Return the sizes between the one with which the job can start, and the next larger one that
    was tried."""
    sizes = job.task.elastic
    return None if sizes is None else sizes.find_finer(job.task.nodes, job.most_next)


def _line_of(job: JobRecord) -> tuple[str, str, str] | None:
    """Return the line in which the job waits: that of its machine or pool, or None for the queue of
    the jobs of all projects."""
    machine, pool = job.task.machine, job.task.pool
    return None if machine is None and pool is None else (job.project, machine or "", pool or "")


def _wait_for_warm(job: JobRecord, soon: Attempt, now: datetime) -> QueueWait:
    reason = f"takes over the warm gang on {soon.offer.key} shortly"
    return make_wait(job, reason, now + _SOON)


def _wait_for_limit(job: JobRecord, reason: str, now: datetime) -> QueueWait:
    return make_wait(job, reason, now + _LOOK_AGAIN, limited=True)
