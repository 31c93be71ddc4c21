"""Moves one job and its open attempts a step closer to their wanted state: polls their gangs,
decides what to do, and executes the decision.

Each pass reads the rows once and changes them in memory. A write fails if another writer has
changed a row since it was read. Before a provider is called, the reason for the call is stored. The
package `decide` makes the decisions; `gang_operator.py` calls the providers.
"""

from collections.abc import Callable
from datetime import datetime, timedelta

from cavvy.control.agents.checkpoints import find_sources
from cavvy.control.agents.deposits import Deposits
from cavvy.control.agents.leases import lease_paid_by
from cavvy.control.agents.sessions import AgentSessions
from cavvy.control.agents.uploads import UnfinishedUploads
from cavvy.control.budgets import BudgetKeeper
from cavvy.control.clock import ControlClock
from cavvy.control.decide import attempt as gangs
from cavvy.control.decide import job as jobs
from cavvy.control.decide.attempt import STEADY_POLL
from cavvy.control.decide.attempt_snapshot import (
    HEARD_LATELY,
    AttemptSnapshot,
    is_gone,
    list_unreported,
)
from cavvy.control.decide.bills import budget_left, paid_time, spending
from cavvy.control.decide.budgets import BudgetAllowance
from cavvy.control.decide.groups import AT_WORK, decide_dependent, decide_end, decide_return
from cavvy.control.decide.losses import RepairGang
from cavvy.control.decide.rows import NEVER, JobRows
from cavvy.control.decide.standby import take_over
from cavvy.control.decide.transitions import (
    adjust_attempt,
    advance_job,
    failed_place,
    fails_a_host,
    is_freed,
    requeue_job,
    stop_at_limit,
    wakes_queue,
)
from cavvy.control.deferred import Deferred
from cavvy.control.gang_operator import GangOperator
from cavvy.control.markets import StandbyGangs
from cavvy.control.node_pools import PoolNodes
from cavvy.control.provider_pool import ProviderPool
from cavvy.control.schedules import ScheduleReconciler
from cavvy.control.unit_of_work import UnitOfWork, make_write
from cavvy.control.warm_pool import WarmPool
from cavvy.control.worklist import QUEUE
from cavvy.domain.gangs import GangSeen
from cavvy.domain.jobs import (
    JOB_ENDS,
    Attempt,
    AttemptOutcome,
    AttemptPhase,
    JobPhase,
    JobRecord,
)
from cavvy.domain.services import SERVICE_TAG
from cavvy.domain.tasks import Delivery
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import Struct, replace
from cavvy.store.base import JobReading, RowNotFound, StaleVersion

UPLOADS = "uploads"  # the worklist's key for aborting the uploads of ended attempts
HOSTS = "hosts"  # the worklist's key for publishing shared hosts
_LONGEST = timedelta(days=1)  # maximum time between two passes of a job
_READS = timedelta(minutes=2)  # maximum time in which work reads its checkpoint
_STEPS = 50  # maximum steps of one pass; the next pass takes further steps
_AT_ONCE = timedelta(0)
# longest time between two whole passes of work that goes on, unless very many nodes report
_STEADY = 4 * STEADY_POLL
_REMEMBERED = 4096  # ends of jobs after which other jobs need no second check

Notify = Callable[[str, Delivery], None]  # job ID, event


class JobReconcilerDependencies(Struct, frozen=True, kw_only=True):
    """Services that the job reconciler needs."""

    pool: ProviderPool
    agents: AgentSessions
    deposits: Deposits
    uploads: UnfinishedUploads
    operator: GangOperator
    budgets: BudgetKeeper
    hint: Callable[[str], None]
    notify: Notify
    standbys: StandbyGangs
    schedules: ScheduleReconciler
    warm: WarmPool
    pools: PoolNodes


class SteadyWork(Struct, frozen=True):
    """Work that runs on one node, and about which nothing is to be decided until `until` as long as
    polls find it like `seen`, its agent reports, no new budget may stop it, and no hint about the
    job arrives."""

    job: JobRecord
    attempt: Attempt
    divided: bool
    seen: GangSeen | None
    until: datetime


class JobReconciler:
    """Reconciles jobs; a key is the ID of a job."""

    def __init__(
        self, store: Deferred, clock: ControlClock, dependencies: JobReconcilerDependencies
    ) -> None:
        self._store = store.as_store()
        self._put, self._unwritten = store.put, store.pending
        self._clock = clock
        self._out = dependencies
        self._operator = dependencies.operator
        self._steady: dict[str, SteadyWork] = {}  # by job
        self._passing: set[str] = set()  # jobs whose pass is under way, and which no hint concerns
        # when jobs ended, of those that ended last, after which the jobs behind them were checked
        self._hinted: dict[str, datetime] = {}

    def wake(self, key: str) -> None:
        """Let the next pass of this job read and decide all, because something has changed."""
        self._steady.pop(key, None)
        self._passing.discard(key)

    def start_over(self) -> None:
        """Read and decide all jobs in their next pass, because this server has other ones now."""
        self._steady.clear()
        self._passing.clear()

    async def reconcile(self, key: str) -> timedelta | None:
        try:
            if (after := await self._look_on(key)) is not None:
                return after
            self._passing.add(key)
            return await self._pass(key)
        except StaleVersion:
            return _AT_ONCE
        except RowNotFound:
            return None
        finally:
            self._passing.discard(key)

    async def _look_on(self, job_id: str) -> timedelta | None:
        """Poll the gang of work that goes on. Return when to poll it again, or None if the job must
        be decided, for which its rows are read after the poll.
        """
        steady = self._steady.get(job_id)
        if steady is None:
            return None
        attempt = steady.attempt
        await self._operator.observe(attempt)
        watched = await self._out.budgets.watches(steady.job)
        now, heard_at = self._clock.now(), self._out.agents.heard(attempt.id, 0)
        if (
            self._steady.get(job_id) is steady
            and now < steady.until
            and not watched
            and steady.seen is not None
            and self._operator.find_seen(attempt, divided=steady.divided) == steady.seen
            and heard_at is not None
            and now - heard_at < HEARD_LATELY
        ):
            return min(STEADY_POLL, steady.until - now)
        self._steady.pop(job_id, None)
        return None

    def _note_steady(self, uow: UnitOfWork, found: JobReading) -> None:
        """Remember that the work goes on, if a pass has changed nothing, and no other writer has
        changed something since the pass has read the rows."""
        job, own = uow.job, uow.rows.own
        if job.id not in self._passing:
            return
        if own is None or own.phase is not AttemptPhase.RUNNING or own.nodes != 1:
            return
        if [*uow.rows.open] != [own] or job.version != found.job.version:
            return
        divided = SERVICE_TAG in job.task.tags
        seen = self._operator.find_seen(own, divided=divided)
        # its costs are written by a whole pass
        until = self._clock.now() + min(uow.holds, max(_STEADY, self._operator.accrual_pause))
        self._steady[job.id] = SteadyWork(job, own, divided, seen, until)

    async def _pass(self, job_id: str) -> timedelta | None:
        found = await self._store.read_job(job_id)
        job, attempts = found.job, found.attempts
        if job.after and await self._step_dependent(job):
            return _AT_ONCE
        if job.held_until is not None and job.phase is JobPhase.QUEUED:
            return min(await self._out.schedules.step(job), _LONGEST)
        if any(attempt.number > job.last_number for attempt in attempts):
            # The queue has placed the job between the two reads, so read again to get the new
            # attempt.
            return _AT_ONCE
        # If a provider is polled, read the nodes afterwards. If it reports an end, any report that
        # the agent sent before the end is then read too.
        opened = [attempt for attempt in attempts if attempt.phase is not AttemptPhase.ENDED]
        polled = [await self._operator.observe(attempt) for attempt in opened]
        nodes = [
            await self._store.nodes(attempt.id) if stale else found.nodes[attempt.id]
            for attempt, stale in zip(opened, polled, strict=True)
        ]
        uow = UnitOfWork(job, attempts, nodes)
        after, soonest = None, await self._step_in_group(uow)
        for _ in range(_STEPS):
            after = await self._step(uow)
            if after is not None:
                after = min(after, soonest)
                break
        uow.holds = min(uow.holds, soonest)
        await self._flush(uow)
        await self._hint_dependents(uow.job)
        await self._hint_group(uow.job)
        if after is not None and not self._unwritten.is_set():
            self._note_steady(uow, found)
        return None if after == NEVER else min(after or _AT_ONCE, _LONGEST)

    async def _step_dependent(self, job: JobRecord) -> bool:
        """Check whether a job that waits for other jobs may start now, or never. Return whether the
        job was changed.
        """
        phases = await self._store.dependencies.phases(job.after)
        changes = decide_dependent(job, phases, self._clock.now())
        if changes is None:
            return False
        uow = UnitOfWork(job, (), ())
        uow.apply(changes)
        await self._flush(uow)
        return True

    async def _step_in_group(self, uow: UnitOfWork) -> timedelta:
        """Apply what the other jobs of its group mean for the job. Return when to check this
        again.
        """
        group_id = uow.job.array_id
        if group_id is None or uow.job.task.group is None or uow.job.phase in JOB_ENDS:
            return NEVER
        group = await self._store.find_jobs(await self._store.arrays.jobs(group_id))
        now = self._clock.now()
        step = decide_end(uow.job, group, now)
        if step.changes is None and not (await self._store.arrays.get(group_id)).started:
            back = decide_return(uow.job, uow.rows.own, group, now)
            step = replace(back, after=min(step.after or NEVER, back.after or NEVER))
        if step.changes is not None:
            uow.apply(step.changes)
            return NEVER
        return step.after or NEVER

    async def _hint_dependents(self, job: JobRecord) -> None:
        """If the job has ended or was retried, let the jobs after it be checked, once for each end
        that is written. A server that starts checks all jobs that wait, so a crash loses no hint
        for them.
        """
        ended = job.phase in JOB_ENDS
        if not ended and not (job.phase is JobPhase.QUEUED and job.ended_spells):
            return
        if ended and self._hinted.get(job.id) == job.since:
            return
        for each in await self._store.dependencies.concerned(job):
            self._out.hint(each)
        if len(self._hinted) >= _REMEMBERED:
            self._hinted.clear()
        if ended and not self._unwritten.is_set():
            self._hinted[job.id] = job.since

    async def _hint_group(self, job: JobRecord) -> None:
        """Let the jobs of its group be checked for which it matters that the job has ended, or
        that it waits. A server that starts checks all jobs that have not ended.
        """
        if job.task.group is None or job.array_id is None or job.phase in AT_WORK:
            return
        for each in await self._store.arrays.members(job.array_id):
            phase = each.job.phase
            if phase in AT_WORK or (phase is JobPhase.QUEUED and job.phase in JOB_ENDS):
                self._out.hint(each.job.id)

    async def _step(self, uow: UnitOfWork) -> timedelta | None:
        """Execute the next steps of the job and its attempts. Returns the time until the next pass,
        or None if the next pass should follow immediately.
        """
        after = await self._step_job(uow)
        for attempt in uow.rows.open:
            if after is None:
                break
            step = await self._step_attempt(uow, attempt)
            after = None if step is None else min(after, step)
        return after

    # The job

    async def _step_job(self, uow: UnitOfWork) -> timedelta | None:
        now = self._clock.now()
        divided = SERVICE_TAG in uow.rows.job.task.tags
        for attempt in uow.rows.open:
            uow.apply(await self._operator.accrue(uow.rows, attempt, divided=divided))
        view = await self._job_view(uow, now)
        action, rows = jobs.decide_job(view, now), uow.rows
        match action:
            case jobs.RecheckJob():
                replaces = rows.own and self._out.pool.can_replace(rows.own.offer.account)
                beside = await self._out.standbys.step(
                    uow, awaits_end=view.awaits_end, replaces=bool(replaces)
                )
                if beside is None:
                    return None
                uow.holds = min(action.after, beside)
                return min(action.after, beside)
            case jobs.TakeOver():
                step = take_over(rows, action, now)
                if step.changes is not None:
                    uow.apply(step.changes)
                return step.after
            case jobs.AdvanceJob():
                uow.apply(advance_job(rows.job, action, now))
            case jobs.RequeueJob():
                failed = await self._failed_place(rows.own, action)
                uow.apply(requeue_job(rows.job, rows.own, action, failed, now))
            case jobs.StopAtLimit():
                uow.apply(stop_at_limit(rows.job, action, now))
        return None

    async def _job_view(self, uow: UnitOfWork, now: datetime) -> jobs.JobSnapshot:
        spent, rate, allowance = Money(0), HourlyRate(0), None
        capped = jobs.cap_of(uow.job) is not None
        if uow.job.phase not in JOB_ENDS and (capped or await self._out.budgets.watches(uow.job)):
            stored = await self._store.charges(uow.job.id)
            spent, rate = spending(uow.rows, stored, self._operator.looks, now)
            allowance = await self._out.budgets.find_allowance(uow.job, spent, rate)
            self._bound_leases(uow.rows, spent, rate, now, allowance)
            uow.set_spent(spent)
        elif uow.job.phase not in JOB_ENDS:
            self._free_leases(uow.rows)
        own = uow.rows.own
        return jobs.JobSnapshot(
            job=uow.job,
            attempt=own,
            spent=spent,
            rate=rate,
            allowance=allowance,
            ran=uow.rows.ran(now),
            fallback=await self._find_fallback(uow.job, own, now),
            standby=bool(uow.rows.standbys),
            awaits_end=own is not None and self._out.pool.reports_cancelled(own.offer.account),
        )

    async def _find_fallback(
        self, job: JobRecord, own: Attempt | None, now: datetime
    ) -> tuple[int, int | None] | None:
        """Return the checkpoint from which an attempt started that failed soon, and the one before,
        if it is stored."""
        if own is None or own.outcome is not AttemptOutcome.EXIT or own.number != job.attempt:
            return None
        since = own.running_at or own.created_at
        if own.checkpoint_at is not None or (own.ended_at or now) - since > _READS:
            return None
        saved = find_sources(await self._store.checkpoints(job.id), job, own.number)
        numbers = [each.number for each in saved]
        return (numbers[0], numbers[1] if len(numbers) > 1 else None) if numbers else None

    def _bound_leases(
        self,
        rows: JobRows,
        spent: Money,
        rate: HourlyRate,
        now: datetime,
        allowance: BudgetAllowance | None,
    ) -> None:
        left = budget_left(rows.job, spent)
        if allowance is not None:
            rest = Money(max(0, allowance.most.micros - spent.micros))
            left = rest if left is None else min(left, rest)
        if left is None or not rate.micros_per_hour:
            return
        for attempt in rows.open:
            self._operator.afford(attempt, paid_time(left, rate))
            self._out.agents.afford(attempt.id, now + lease_paid_by(left, rate, rows.job))

    def _free_leases(self, rows: JobRows) -> None:
        """Remove the time limits of the leases, because no budget limits the job now."""
        for attempt in rows.open:
            self._operator.afford(attempt, None)
            self._out.agents.afford(attempt.id, None)

    async def _failed_place(self, own: Attempt | None, again: jobs.RequeueJob) -> str:
        """Return the offer or host that the job must avoid, or ""."""
        if own is None or not again.avoid:
            return ""
        on_hosts = fails_a_host(own)
        return failed_place(own, await self._store.allocations_of(own.gang) if on_hosts else ())

    # Its attempts

    async def _step_attempt(self, uow: UnitOfWork, attempt: Attempt) -> timedelta | None:
        if self._operator.is_look_due(attempt):
            await self._flush(uow)
            attempt = uow.rows.attempts[attempt.number]
            await self._operator.observe(attempt)
            uow.read_nodes(attempt, await self._store.nodes(attempt.id))
        return await self._act(uow, attempt, self._clock.now())

    async def _act(self, uow: UnitOfWork, attempt: Attempt, now: datetime) -> timedelta | None:
        view = await self._view(uow, attempt, now)
        attempt = view.attempt
        action = gangs.decide_attempt(view, now)
        match action:
            case gangs.RecheckAttempt():
                if action.looks:
                    self._operator.look_now(attempt.gang)
                uow.apply(self._operator.note_wait(uow.rows, attempt))
                uow.holds = min(uow.holds, action.holds)
                return action.after
            case gangs.LaunchGang():
                await self._flush(uow)
                # The write gave the attempt a new version, so take it from the rows.
                answer = await self._operator.launch(uow.rows, uow.rows.attempts[attempt.number])
                if answer is not None:
                    uow.apply(await self._operator.advance(uow.rows, attempt.number, answer))
            case gangs.RemoveGang():
                if action.missed:
                    uow.apply(adjust_attempt(uow.rows, attempt, gangs.CountMiss(), now))
                await self._flush(uow)
                uow.apply(await self._operator.remove(uow.rows, attempt))
            case gangs.AdvanceAttempt():
                uow.apply(await self._operator.advance(uow.rows, attempt.number, action))
            case RepairGang() if await self._is_unpaid(uow.job, attempt):
                end = gangs.end_lost(action)
                uow.apply(await self._operator.advance(uow.rows, attempt.number, end))
            case RepairGang():
                if not self._operator.has_seen(uow.rows, attempt):
                    self._operator.look_now(attempt.gang)  # the bill depends on who runs now
                    return None
                uow.apply(await self._operator.repair(uow.rows, attempt, action))
                await self._flush(uow)
                self._out.agents.forget(attempt)  # under its former name, which wakes its agents
            case _:
                uow.apply(adjust_attempt(uow.rows, attempt, action, now))
        return None

    async def _is_unpaid(self, job: JobRecord, attempt: Attempt) -> bool:
        """Return whether a budget forbids to request nodes of this attempt's offer now."""
        paid = attempt.offer.rate.micros_per_hour > 0
        return paid and bool(await self._out.budgets.find_stop(job))

    async def _view(self, uow: UnitOfWork, attempt: Attempt, now: datetime) -> AttemptSnapshot:
        """Return a snapshot of the attempt. If a rank may have stored results in a bucket, the
        control plane reads these results before it decides the rank's outcome. All other decisions
        continue.
        """
        view, deposits = self._operator.view(uow.rows, attempt), self._out.deposits
        unreported = list_unreported(view, now)
        if attempt.phase is AttemptPhase.KEPT and attempt.offer.rate.micros_per_hour:
            view = replace(view, unpaid=await self._out.budgets.find_stop(uow.job))
        if attempt.phase is AttemptPhase.KEPT and uow.job.task.pool is not None:
            view = replace(view, pool=await self._out.pools.decide_idle(uow.job, attempt, now))
        ranks = {node.rank: node.heard_at for node in view.nodes if node.rank in unreported}
        collecting = deposits.collect(uow.job, attempt, ranks, billed=not is_gone(view, now))
        if collecting is None:
            return view
        await self._flush(uow)
        attempt = uow.rows.attempts[attempt.number]
        # Results may have been applied after the nodes were read, so read the nodes again.
        uow.read_nodes(attempt, await self._store.nodes(attempt.id))
        return replace(self._operator.view(uow.rows, attempt), collecting=collecting)

    async def _flush(self, uow: UnitOfWork) -> None:
        """Write the pending changes, and report the changes to the rest of the control plane."""
        if not uow.dirty:
            return
        changes = uow.take_changes()
        if changes.stale_market:
            self._out.pool.expire()
        await self._put(make_write(changes))
        for attempt in changes.attempts:
            self._out.warm.note(attempt)
            self._operator.note(attempt)
            self._out.deposits.note(uow.job, attempt)
            if attempt.phase is AttemptPhase.ENDED and self._out.uploads.is_recorded(attempt.id):
                self._out.hint(UPLOADS)
            if is_freed(attempt) and self._out.pool.free(attempt.gang, attempt.offer):
                self._out.hint(QUEUE)
        written = {node.attempt_id for node in changes.nodes}
        for attempt in uow.rows.attempts.values():
            if attempt.id in written:
                self._out.agents.notify(attempt.gang)
        if wakes_queue(changes):
            self._out.hint(QUEUE)
        for what in changes.notices if uow.job.task.webhooks else ():
            self._out.notify(uow.job.id, what)
