"""Handles held jobs, which wait outside the queue: repeating jobs, whose runs start when they are
due, and jobs that wait for their time window.

A held job has the phase of a queued job and a value of `held_until`; the queue ignores held jobs.
"""

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta

from cavvy.control.clock import ControlClock
from cavvy.control.decide.placement import list_usable
from cavvy.control.decide.rows import RowChanges
from cavvy.control.decide.schedule import (
    bar_job,
    explain_bar,
    find_run,
    find_window,
    hold_schedule,
    hold_window,
    release_job,
    say_left_out,
)
from cavvy.control.markets import MarketHistory
from cavvy.control.provider_pool import ProviderPool
from cavvy.control.unit_of_work import make_write
from cavvy.domain.jobs import JOB_ENDS, JobRecord
from cavvy.domain.tasks import EdgeStep, JobSchedule, TaskSpec
from cavvy.planner.calendar import HISTORY, Prices, TimeInterval
from cavvy.planner.candidates import jobs_of
from cavvy.store.base import RowNotFound, StaleVersion
from cavvy.store.sql import Store

_OLD = timedelta(seconds=60)  # maximum age of the offers whose prices are used

# Looks at the step of a job that has no program; returns the time until the next look
LookAtStep = Callable[[JobRecord, EdgeStep], Awaitable[timedelta]]
# Submits one run of a repeating job. The arguments are the repeating job, the run's task, and the
# run's ID.
Submit = Callable[[JobRecord, TaskSpec, str], Awaitable[JobRecord]]


class ScheduleReconciler:
    """Handles held jobs, one step at a time."""

    def __init__(
        self,
        store: Store,
        clock: ControlClock,
        pool: ProviderPool,
        history: MarketHistory,
        submit: Submit,
        arrived: Callable[[], None],
        look_at_step: LookAtStep,
    ) -> None:
        self._store, self._clock, self._pool, self._history = store, clock, pool, history
        self._submit, self._arrived, self._look_at_step = submit, arrived, look_at_step

    async def step(self, job: JobRecord) -> timedelta:
        """Start the job, or its next run, if the start is due. Returns the time until the next
        step. Raises StaleVersion, RowNotFound.
        """
        now, schedule = self._clock.now(), job.task.schedule
        if job.held_until is not None and now < job.held_until:
            return job.held_until - now
        if not job.attempt and (why := await find_bar(self._store, job)):
            changes = bar_job(job, why, now)
        elif job.task.edge is not None:
            return await self._look_at_step(job, job.task.edge)
        elif schedule is not None and schedule.cron is not None:
            changes = await self._start_run(job, schedule, now)
        elif (interval := find_window(job, now)) is None:
            changes = release_job(job, _say_released(job), now)
        else:
            changes = hold_window(job, interval, await self._prices(job, interval, now), now)
        held = changes.job
        if held != job:
            await self._store.commit(make_write(changes))
        if held is not None and held.held_until is not None:
            return held.held_until - now
        self._arrived()
        return timedelta(0)

    async def _start_run(self, job: JobRecord, schedule: JobSchedule, now: datetime) -> RowChanges:
        running = await self._unfinished(job)
        if running is not None:
            return hold_schedule(job, schedule, None, say_left_out(job, running, now), now)
        run = find_run(job, schedule, now)
        try:
            text = f"run {(await self._submit(job, run.task, run.run_id)).name} was submitted"
        except StaleVersion:
            # this server submitted the run before it crashed
            text = "the run had already been submitted"
        return hold_schedule(job, schedule, run.run_id, text, now)

    async def _unfinished(self, job: JobRecord) -> JobRecord | None:
        if job.last_run is None:
            return None
        try:
            last = await self._store.job(job.last_run)
        except RowNotFound:
            return None
        return None if last.phase in JOB_ENDS else last

    async def _prices(self, job: JobRecord, interval: TimeInterval, now: datetime) -> Prices:
        """Return the recent prices of the cheapest current offer. Return () if the window is not
        open yet, or if there is no offer.
        """
        if now < interval.start:
            return ()
        snapshot, objections = await self._pool.market(_OLD), self._pool.objections
        usable = [x for wish in jobs_of(job) for x in list_usable(wish, snapshot, objections)]
        if not usable:
            return ()
        await self._history.note_prices(usable)
        cheapest = min(usable, key=lambda offer: offer.rate)
        seen = await self._store.observations([cheapest.key], now - HISTORY)
        prices = [(each.at, each.rate) for each in seen if each.rate is not None]
        return [*prices, (now, cheapest.rate)]


async def find_bar(store: Store, job: JobRecord) -> str:
    """Return why the job's account may start no work now, or "" if it may."""
    if not job.account:
        return ""
    known = {each.name: each for each in await store.accounts()}
    return explain_bar(job, known.get(job.account))


def _say_released(job: JobRecord) -> str:
    if job.barred:
        return f"the account {job.account} may start jobs again"
    return "the job no longer waits for its window"
