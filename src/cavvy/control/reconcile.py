"""Brings one job and its open attempts a step closer to what is wanted: observe, decide, act.

Rows are read once a pass; the steps that follow work on them in memory, and every write is guarded
by their versions. A provider is called only after what led to the call is stored.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import assert_never

from cavvy.control import attempts as gangs
from cavvy.control import jobs
from cavvy.control.agents.sessions import AgentSessions, first_lease, lease_paid_by
from cavvy.control.attempts import AttemptSnapshot, GangAbsence, Seen, decide_attempt
from cavvy.control.clock import ControlClock
from cavvy.control.deferred import Deferred
from cavvy.control.jobs import JobSnapshot, decide_job
from cavvy.control.markets.failure_kinds import failure_of
from cavvy.control.markets.history import observations_of
from cavvy.control.markets.standby import StandbyGangs
from cavvy.control.provider_pool import ProviderPool
from cavvy.control.schedules import ScheduleReconciler
from cavvy.control.unit_of_work import UnitOfWork
from cavvy.control.warm.keep_policy import bill_gang, keep_or_end
from cavvy.control.warm.pool import WarmPool
from cavvy.costs.metering import total
from cavvy.domain.allocations import Allocation
from cavvy.domain.jobs import (
    JOB_ENDS,
    Attempt,
    AttemptOutcome,
    AttemptPhase,
    FailureKind,
    Job,
    JobPhase,
    Order,
    StopCause,
)
from cavvy.domain.tasks import Delivery, VolumeKind
from cavvy.domain.units import HourlyRate, Money, format_duration, format_usd
from cavvy.providers.base import (
    AgentEndpoint,
    GangSeen,
    GangSpec,
    GangState,
    NoCapacity,
    Refused,
    TryAgain,
)
from cavvy.store.base import RowNotFound, StaleVersion

QUEUE = "queue"  # the key of the queue's reconciler on the same worklist
ACCRUE = timedelta(seconds=45)  # charges of living nodes are at most a minute behind
_FIRST_LOOK = timedelta(
    seconds=3
)  # after an accepted launch; short work is over by then and needs none
_LONGEST = timedelta(days=1)  # between two looks at a job that has a limit
_STEPS = 50  # of one pass; a pass that needs more goes on in the next
_AT_ONCE = timedelta(0)

Notify = Callable[[str, Delivery], None]  # job id, what happened


@dataclass(slots=True)
class _Memory:
    """What this process knows of one gang beyond the rows; losing it costs a look."""

    seen: Seen = GangAbsence.UNKNOWN
    looked_at: datetime | None = None
    doubt: bool = False  # a launch may have been made that no row tells of
    unsure: bool = False  # a request to launch was never answered
    denied: bool = False  # the last one was, with no
    fresh: bool = False  # the last look is newer than the last thing asked for
    told: GangSeen | None = None  # the last look that found it
    told_at: datetime | None = None
    removed_at: datetime | None = None
    accrued_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReconcilerDependencies:
    """What the job reconciler needs from elsewhere."""

    pool: ProviderPool
    agents: AgentSessions
    installation: str
    agent_endpoint: Callable[[str], AgentEndpoint]  # by gang
    hint: Callable[[str], None]
    notify: Notify
    standbys: StandbyGangs
    schedules: ScheduleReconciler
    warm: WarmPool


class JobReconciler:
    """Reconciles jobs; a key is a job's id."""

    def __init__(
        self, store: Deferred, clock: ControlClock, dependencies: JobReconcilerDependencies
    ) -> None:
        self._store = store.as_store()
        self._put = store.put
        self._clock = clock
        self._out = dependencies
        self._started_at = clock.now()
        self._memory: dict[str, _Memory] = {}  # by gang

    def look_now(self, gang: str) -> None:
        """The place said that something changed: do not trust the last look."""
        if gang in self._memory:
            self._memory[gang].looked_at = None
            self._memory[gang].fresh = False

    async def reconcile(self, key: str) -> timedelta | None:
        try:
            return await self._pass(key)
        except StaleVersion:
            return _AT_ONCE
        except RowNotFound:
            return None

    async def _pass(self, job_id: str) -> timedelta | None:
        job = await self._store.job(job_id)
        if job.held_until is not None and job.phase is JobPhase.QUEUED:
            return min(await self._out.schedules.step(job), _LONGEST)
        attempts = await self._store.attempts(job_id)
        if any(attempt.number > job.last_number for attempt in attempts):
            # the queue placed the job between the two reads: its new attempt is wanted
            return _AT_ONCE
        # Places are asked before the nodes are read: an agent reports its end before its place can
        # show it.
        for attempt in attempts:
            if attempt.phase is not AttemptPhase.ENDED:
                await self._observe(attempt)
        open_ids = [attempt.id for attempt in attempts if attempt.phase is not AttemptPhase.ENDED]
        uow = UnitOfWork(
            job, attempts, [await self._store.nodes(attempt_id) for attempt_id in open_ids]
        )
        for _ in range(_STEPS):
            after = await self._step(uow)
            if after is not None:
                await self._flush(uow)
                return None if after == timedelta.max else min(after, _LONGEST)
        await self._flush(uow)
        return _AT_ONCE

    async def _step(self, uow: UnitOfWork) -> timedelta | None:
        """Do what there is to do; when to look again once there is nothing left for now."""
        after = await self._step_job(uow)
        for attempt in uow.open:
            if after is None:
                break
            step = await self._step_attempt(uow, attempt)
            after = None if step is None else min(after, step)
        return after

    # The job

    async def _step_job(self, uow: UnitOfWork) -> timedelta | None:
        now = self._clock.now()
        self._accrue(uow, now)
        view = await self._job_view(uow, now)
        action = decide_job(view, now)
        match action:
            case jobs.RecheckJob():
                beside = await self._out.standbys.step(uow)
                return None if beside is None else min(action.after, beside)
            case jobs.RequeueJob() if uow.standbys:
                return self._out.standbys.take_over(uow, action, now)
            case jobs.AdvanceJob():
                self._turn(uow, action, now)
            case jobs.RequeueJob():
                await self._requeue(uow, action, now)
            case jobs.StopAtLimit():
                self._limit(uow, action, now)
            case _:
                assert_never(action)
        return None

    async def _job_view(self, uow: UnitOfWork, now: datetime) -> JobSnapshot:
        spent, rate = Money(0), HourlyRate(0)
        if uow.job.phase not in JOB_ENDS and jobs.cap_of(uow.job) is not None:
            spent, rate = await self._spending(uow, now)
            self._bound_leases(uow, spent, rate, now)
            uow.spent = spent
        return JobSnapshot(
            job=uow.job, attempt=uow.latest, spent=spent, rate=rate, ran=uow.ran(now)
        )

    async def _spending(self, uow: UnitOfWork, now: datetime) -> tuple[Money, HourlyRate]:
        """Spent until now with minimum charges, and what bills now. A look may be a poll old; it
        is only extended.
        """
        stored = await self._store.charges(uow.job.id)
        spent, rate = Money(0), HourlyRate(0)
        for attempt in uow.attempts.values():
            told = self._memory[attempt.gang].told if attempt.gang in self._memory else None
            if attempt.phase is AttemptPhase.ENDED or told is None:
                charged = total(charge for charge in stored if charge.attempt_id == attempt.id)
                if (
                    attempt.phase is AttemptPhase.RUNNING and attempt.launched_at is not None
                ):  # no look has come yet
                    price = attempt.offer.rate.times(attempt.nodes)
                    charged = max(charged, price.over(now - attempt.launched_at))
                    rate = HourlyRate(rate.micros_per_hour + price.micros_per_hour)
                spent += charged
                continue
            spent += total(bill_gang(attempt, told, now, final=True))
            alive = sum(1 for node in told.nodes if node.started_at and not node.ended_at)
            price = (
                max(told.rates, key=lambda entry: entry[0])[1] if told.rates else attempt.offer.rate
            )
            rate = HourlyRate(rate.micros_per_hour + price.times(alive).micros_per_hour)
        return spent, rate

    def _bound_leases(self, uow: UnitOfWork, spent: Money, rate: HourlyRate, now: datetime) -> None:
        cap = jobs.cap_of(uow.job)
        if cap is None or not rate.micros_per_hour:
            return
        left = Money(max(0, cap.micros - spent.micros))
        for attempt in uow.open:
            self._out.agents.afford(attempt.id, now + lease_paid_by(left, rate, uow.job))

    def _turn(self, uow: UnitOfWork, turn: jobs.AdvanceJob, now: datetime) -> None:
        uow.turn_job(turn.phase, turn.reason, now, turn.exit_code)
        uow.tell(now, turn.phase, turn.reason, fact=uow.job.stop_cause)
        if turn.phase in JOB_ENDS:
            failed = turn.phase is JobPhase.FAILED
            uow.notices.append(Delivery.FAILURE if failed else Delivery.FINISH)

    async def _requeue(self, uow: UnitOfWork, again: jobs.RequeueJob, now: datetime) -> None:
        job, attempt = uow.job, uow.latest
        avoid = {key: until for key, until in job.avoid.items() if until > now}
        failed = await self._failed_place(attempt) if attempt is not None and again.avoid else ""
        if failed:
            avoid[failed] = now + again.avoid
        if attempt is not None and attempt.outcome in (
            AttemptOutcome.PREEMPTED,
            AttemptOutcome.NODE,
        ):
            # what the place offered a moment ago may have gone with the node
            self._out.pool.expire()
        uow.put_job(
            replace(
                job,
                phase=JobPhase.QUEUED,
                since=now,
                reason=again.text,
                retries={**job.retries, again.kind: job.retries.get(again.kind, 0) + 1},
                avoid=avoid,
                standbys=(),
                not_before=now + again.delay if again.delay else None,
            )
        )
        failure = failure_of(attempt) if attempt is not None else None
        uow.tell(now, "queued", again.text, fact=failure)
        if failure is not None and failed:
            until = now + again.avoid
            text = f"{failed} is left alone until {until:%Y-%m-%d %H:%M:%S} UTC: {failure.label}"
            uow.tell(now, "avoided", text, fact=failure)

    async def _failed_place(self, attempt: Attempt) -> str:
        """What failed, as `Job.avoid` names it: the offer, or one host of the several that a
        gang was on.
        """
        if attempt.offer.shared and attempt.nodes > 1 and failure_of(attempt) is FailureKind.GPU:
            for allocation in await self._store.allocations():
                if (allocation.gang, allocation.rank) == (attempt.gang, attempt.first_failed_rank):
                    return allocation.host
        return attempt.offer.key

    def _limit(self, uow: UnitOfWork, limit: jobs.StopAtLimit, now: datetime) -> None:
        uow.tell(now, "limit", limit.reason, fact=limit.cause)
        if limit.cause is StopCause.BUDGET:
            uow.notices.append(Delivery.BUDGET)
        uow.put_job(replace(uow.job, stop_reason=limit.reason, stop_cause=limit.cause))
        if uow.job.phase is JobPhase.QUEUED:
            self._turn(uow, jobs.AdvanceJob(phase=JobPhase.FAILED, reason=limit.reason), now)
        else:
            uow.turn_job(JobPhase.STOPPING, limit.reason, now)

    # Its attempts

    async def _step_attempt(self, uow: UnitOfWork, attempt: Attempt) -> timedelta | None:
        if self._look_due(attempt):
            await self._flush(uow)
            attempt = uow.attempts[attempt.number]
            await self._observe(attempt)
            nodes = await self._store.nodes(attempt.id)
            uow.nodes[attempt.id] = list(nodes)
        now = self._clock.now()
        action = decide_attempt(self._attempt_view(uow, attempt), now)
        match action:
            case gangs.RecheckAttempt():
                self._tell_wait(uow, attempt, now)
                return action.after
            case gangs.LaunchGang():
                await self._launch(uow, attempt)
            case gangs.RemoveGang():
                await self._remove(uow, attempt, action.missed)
            case gangs.AdvanceAttempt():
                nodes, spent = uow.nodes[attempt.id], uow.spent
                await self._advance(
                    uow, attempt, keep_or_end(uow.job, attempt, nodes, action, spent, now), now
                )
            case gangs.OrderRanks():
                self._tell(uow, attempt, action, now)
            case gangs.CountMiss():
                uow.put_attempt(_missed(attempt, now))
            case gangs.ClearMisses():
                uow.put_attempt(replace(attempt, missed_looks=0, missed_since=None))
            case _:
                assert_never(action)
        return None

    def _tell_wait(self, uow: UnitOfWork, attempt: Attempt, now: datetime) -> None:
        """Why a gang waits in its place's own queue or does not come up, and until when the
        place thinks so.
        """
        seen = self._remember(attempt).seen
        if attempt.phase is not AttemptPhase.BOOTING or not isinstance(seen, GangSeen):
            return
        if seen.state is GangState.QUEUED:
            why = f"waits at {attempt.offer.provider}: {seen.reason or 'in its queue'}"
        elif seen.state is GangState.STARTING and seen.reason:
            why = f"starts at {attempt.offer.provider}: {seen.reason}"
        else:
            return
        expected = seen.eta if seen.eta is not None and seen.eta > now else None
        told = replace(attempt, reason=why, expected_at=expected)
        text = told.standing
        if attempt != told:
            if attempt.reason != why:
                uow.tell(now, "waits", text, attempt.number)
            uow.put_attempt(told)
            if attempt.number == uow.job.attempt and uow.job.phase is JobPhase.STARTING:
                uow.put_job(replace(uow.job, reason=text))

    def _attempt_view(self, uow: UnitOfWork, attempt: Attempt) -> AttemptSnapshot:
        memory = self._remember(attempt)
        nodes = [
            replace(node, heard_at=max(heard, node.heard_at or heard))
            if (heard := self._out.agents.heard(attempt.id, node.rank))
            else node
            for node in uow.nodes[attempt.id]
        ]
        return AttemptSnapshot(
            job=uow.job,
            attempt=attempt,
            nodes=tuple(nodes),
            seen=memory.seen,
            visibility_delay=self._out.pool.visibility_delay(attempt.offer.provider),
            listening_since=self._started_at,
            asked=memory.doubt,
            removed_at=memory.removed_at,
            unsure=memory.unsure,
            denied=memory.denied,
        )

    async def _launch(self, uow: UnitOfWork, attempt: Attempt) -> None:
        await self._flush(uow)
        attempt = uow.attempts[attempt.number]  # as it was written, should it be new
        memory = self._remember(attempt)
        memory.doubt, memory.fresh, memory.seen, memory.denied = (
            True,
            False,
            GangAbsence.UNKNOWN,
            False,
        )
        try:
            await self._out.pool.launch(await self._spec(uow, attempt))
        except NoCapacity as error:
            memory.denied = True
            await self._end(
                uow,
                attempt,
                AttemptOutcome.CAPACITY,
                f"no capacity at {attempt.offer.key}: {error}",
            )
        except Refused as error:
            memory.denied = True
            reason = f"{attempt.offer.provider} refused: {error}"
            await self._end(uow, attempt, AttemptOutcome.REFUSED, reason, error.kind)
        except TryAgain:
            memory.unsure = True
            memory.looked_at = (
                self._clock.now()
            )  # the next look waits a little: the answer may be on its way
        else:
            memory.doubt = False
            memory.looked_at = self._clock.now() - gangs.POLL + _FIRST_LOOK
            action = gangs.AdvanceAttempt(
                phase=AttemptPhase.BOOTING, reason="the place accepted the launch"
            )
            await self._advance(uow, attempt, action, self._clock.now())

    async def _spec(self, uow: UnitOfWork, attempt: Attempt) -> GangSpec:
        job = uow.job
        allocations: tuple[Allocation, ...] = ()
        longest = job.task.limits.duration
        if attempt.offer.shared:
            mine = [
                allocation
                for allocation in await self._store.allocations()
                if allocation.gang == attempt.gang
            ]
            allocations = tuple(sorted(mine, key=lambda allocation: allocation.rank))
        return GangSpec(
            name=attempt.gang,
            installation=self._out.installation,
            offer=attempt.offer,
            nodes=attempt.nodes,
            agent_endpoint=self._out.agent_endpoint(attempt.gang),
            lease=first_lease(job, attempt, uow.spent),
            longest=None
            if longest is None
            else max(_AT_ONCE, longest - uow.ran(self._clock.now())),
            allocations=allocations,
            labels={**job.task.tags, "project": job.project, "job": job.name},
            volumes=[
                each for each in job.task.volumes if each.kind is not VolumeKind.FOLDER
            ],  # the agent's own
            grace=job.task.grace,
            disk_gib=job.task.resources.disk_gib,
            disk_type=job.task.resources.disk_type,
            network=job.task.resources.network,
            image=job.task.image,
        )

    async def _end(
        self,
        uow: UnitOfWork,
        attempt: Attempt,
        outcome: AttemptOutcome,
        reason: str,
        failure: FailureKind | None = None,
    ) -> None:
        action = gangs.AdvanceAttempt(
            phase=AttemptPhase.ENDING, reason=reason, outcome=outcome, failure=failure
        )
        await self._advance(uow, attempt, action, self._clock.now())

    async def _remove(self, uow: UnitOfWork, attempt: Attempt, missed: bool) -> None:
        now = self._clock.now()
        if missed:
            attempt = _missed(attempt, now)
            uow.put_attempt(attempt)
        await self._flush(uow)
        memory = self._remember(attempt)
        try:
            await self._out.pool.remove(attempt.offer.provider, attempt.gang)
        except (TryAgain, Refused):
            memory.removed_at = (
                now - gangs.REMOVE_AGAIN + gangs.POLL
            )  # sooner than one that was accepted
        else:
            memory.removed_at = now
        memory.fresh = False

    async def _advance(
        self, uow: UnitOfWork, attempt: Attempt, action: gangs.AdvanceAttempt, now: datetime
    ) -> None:
        changed = replace(
            attempt, phase=action.phase, since=now, reason=action.reason, expected_at=None
        )
        memory = self._remember(attempt)
        match action.phase:
            case AttemptPhase.BOOTING:
                changed = replace(changed, launched_at=now, missed_looks=0, missed_since=None)
            case AttemptPhase.RUNNING:
                began = max(
                    (node.running_at for node in uow.nodes[attempt.id] if node.running_at),
                    default=now,
                )
                changed = replace(changed, running_at=began)
            case AttemptPhase.ENDING if attempt.phase is AttemptPhase.KEPT:
                changed = replace(changed, reason=attempt.reason, missed_looks=0, missed_since=None)
                uow.tell(now, "kept", action.reason, attempt.number)
                memory.removed_at = None
            case AttemptPhase.ENDING | AttemptPhase.KEPT:
                changed = replace(
                    changed,
                    outcome=action.outcome,
                    failure=action.failure,
                    exit_code=action.exit_code,
                    first_failed_rank=action.rank,
                    finished_at=_finished(uow, attempt, now),
                    missed_looks=0,
                    missed_since=None,
                )
                changed = _ran_unnoticed(uow, changed)
                if action.until is not None:
                    changed = replace(changed, kept_since=now, kept_until=action.until)
                    text = (
                        f"its nodes are kept, and paid, until {action.until:%Y-%m-%d %H:%M:%S} "
                        "UTC at the latest"
                    )
                    uow.tell(now, "kept", text, attempt.number)
                    memory.looked_at = memory.accrued_at = None
                    if memory.told is None:
                        await self._observe(attempt)
                    if memory.told is not None:  # whoever takes the gang over ends these stretches
                        uow.charge(bill_gang(changed, memory.told, now, final=False))
                if not _told_by_the_job(uow.job, action.outcome):
                    kind = action.outcome or "ended"
                    fact = failure_of(changed)
                    uow.tell(now, kind, action.reason, attempt.number, fact)
                memory.removed_at = None
            case AttemptPhase.ENDED:
                changed = replace(changed, ended_at=await self._close(uow, attempt, now))
            case AttemptPhase.LAUNCHING:
                raise AssertionError("no attempt goes back to its launch")
        uow.put_attempt(changed)
        for seen in observations_of(attempt, changed, uow.nodes[attempt.id], now):
            uow.see(seen)

    async def _close(self, uow: UnitOfWork, attempt: Attempt, now: datetime) -> datetime:
        """Charge each node's whole life and let go of what the gang held; when the gang ended."""
        memory = self._remember(attempt)
        ends = [attempt.finished_at or attempt.since]
        if memory.told is not None:
            told_at = memory.told_at or now
            if memory.told.state is GangState.ENDED and any(
                node.ended_at is None for node in memory.told.nodes
            ):
                told_at = now
            charges = bill_gang(attempt, memory.told, told_at, final=True)
            uow.charge(charges)
            ends += [node.ended_at or told_at for node in memory.told.nodes if node.started_at]
            if spent := total(charges).micros:
                life = sum((c.until - c.since for c in charges), timedelta(0))
                text = (
                    f"the gang is gone; it cost {format_usd(Money(spent))} for "
                    f"{format_duration(life)} of nodes"
                )
                uow.tell(now, "billed", text, attempt.number)
        uow.release(attempt.gang)
        return max(ends)

    def _tell(
        self, uow: UnitOfWork, attempt: Attempt, action: gangs.OrderRanks, now: datetime
    ) -> None:
        for rank in action.ranks:
            node = uow.nodes[attempt.id][rank]
            seq = node.order.seq + 1 if node.order else 1
            order = Order(seq=seq, kind=action.kind, seconds=action.seconds, reason=action.reason)
            uow.put_node(replace(node, order=order))
        uow.tell(now, action.kind, f"{action.reason}: {_told(action)}", attempt.number)

    # Looking, accruing, writing

    def _look_due(self, attempt: Attempt) -> bool:
        memory, now = self._remember(attempt), self._clock.now()
        if attempt.phase is AttemptPhase.LAUNCHING and not memory.doubt:
            return False
        if attempt.phase is AttemptPhase.ENDING:
            if memory.removed_at is None:
                return False
            if not memory.fresh:
                return True
        age = None if memory.looked_at is None else now - memory.looked_at
        return age is None or age >= self._look_interval(attempt, memory, now)

    def _look_interval(self, attempt: Attempt, memory: _Memory, now: datetime) -> timedelta:
        shortest = timedelta(milliseconds=100)
        unbilled = attempt.phase is AttemptPhase.KEPT and memory.accrued_at is None
        if attempt.phase in (AttemptPhase.ENDING, AttemptPhase.LAUNCHING) or unbilled:
            return min(gangs.POLL, max(shortest, (now - attempt.since) / 4))
        if memory.seen is GangAbsence.ABSENT:
            return max(shortest, self._out.pool.visibility_delay(attempt.offer.provider) / 8)
        return gangs.STEADY_POLL if attempt.phase is AttemptPhase.RUNNING else gangs.POLL

    async def _observe(self, attempt: Attempt) -> None:
        """Look at the gang if it is time."""
        if not self._look_due(attempt):
            return
        memory = self._remember(attempt)
        memory.looked_at, memory.fresh = self._clock.now(), True
        memory.seen = await self._out.pool.look(attempt.offer.provider, attempt.gang)
        if isinstance(memory.seen, GangSeen):
            memory.told, memory.told_at = memory.seen, memory.looked_at

    def _remember(self, attempt: Attempt) -> _Memory:
        known = self._memory.get(attempt.gang)
        if known is None:
            doubt = attempt.created_at < self._started_at
            known = self._memory[attempt.gang] = _Memory(doubt=doubt, unsure=doubt)
        return known

    def _accrue(self, uow: UnitOfWork, now: datetime) -> None:
        for attempt in uow.open:
            memory = self._remember(attempt)
            if memory.told is None or memory.told_at is None:
                continue
            paid = attempt.offer.rate.micros_per_hour or any(
                rate.micros_per_hour for _, rate in memory.told.rates
            )
            due = memory.accrued_at is None or memory.told_at - memory.accrued_at >= ACCRUE
            if due and (paid or attempt.phase is AttemptPhase.KEPT):
                charges = bill_gang(attempt, memory.told, memory.told_at, final=False)
                uow.charge(charges)
                if (
                    len({charge.rank for charge in charges}) == attempt.nodes
                ):  # else its place was late to tell
                    memory.accrued_at = memory.told_at
                if attempt.phase is AttemptPhase.KEPT:
                    uow.put_attempt(attempt)  # not written where the gang was handed on meanwhile

    async def _flush(self, uow: UnitOfWork) -> None:
        if not uow.dirty:
            return
        changes = uow.take_changes()
        await self._put(changes)
        for attempt in changes.attempts:
            self._out.warm.note(attempt)
            if attempt.phase is AttemptPhase.KEPT:
                self._out.hint(QUEUE)
            if attempt.phase is AttemptPhase.ENDED:
                self._memory.pop(attempt.gang, None)
                self._out.agents.forget(attempt)
            unbought = attempt.phase is AttemptPhase.ENDING and attempt.launched_at is None
            if (unbought or attempt.phase is AttemptPhase.ENDED) and self._out.pool.free(
                attempt.gang, attempt.offer
            ):
                self._out.hint(QUEUE)
        for attempt_id in {node.attempt_id for node in changes.nodes}:
            self._out.agents.notify(
                next(x.gang for x in uow.attempts.values() if x.id == attempt_id)
            )
        if changes.release or any(job.phase is JobPhase.QUEUED for job in changes.jobs):
            self._out.hint(QUEUE)
        for what in uow.take_notices():
            if uow.job.task.webhooks:
                self._out.notify(uow.job.id, what)


def _told_by_the_job(job: Job, outcome: AttemptOutcome | None) -> bool:
    """Whether the job's own events say why this attempt ended."""
    return outcome in (AttemptOutcome.SUCCEEDED, AttemptOutcome.STOPPED) or (
        outcome is not None and outcome is job.stop_outcome
    )


def _missed(attempt: Attempt, now: datetime) -> Attempt:
    return replace(
        attempt, missed_looks=attempt.missed_looks + 1, missed_since=attempt.missed_since or now
    )


def _finished(uow: UnitOfWork, attempt: Attempt, now: datetime) -> datetime:
    """The work's end: the last exit that was reported, else now."""
    exits = [node.exited_at for node in uow.nodes[attempt.id]]
    known = [at for at in exits if at is not None]
    return max(known) if known and len(known) == len(exits) else now


def _ran_unnoticed(uow: UnitOfWork, attempt: Attempt) -> Attempt:
    """Work that was over before its start was noticed did run: its running time counts."""
    if attempt.running_at is not None:
        return attempt
    began = [node.running_at for node in uow.nodes[attempt.id] if node.running_at]
    return replace(attempt, running_at=max(began)) if len(began) == attempt.nodes else attempt


def _told(action: gangs.OrderRanks) -> str:
    ranks = (
        "the node"
        if action.ranks == (0,)
        else "ranks " + ", ".join(str(rank) for rank in action.ranks)
    )
    if action.kind == "stop":
        return f"{ranks} must stop within {action.seconds:.0f} s"
    return f"{ranks} will be gone in {action.seconds:.0f} s"
