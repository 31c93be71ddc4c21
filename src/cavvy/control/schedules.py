"""Jobs that wait outside the queue: schedules that repeat, which start a run when its time comes,
and jobs that may wait for their window.

Both are queued jobs with `held_until`, which the queue does not see; their reconciler comes here
instead.
"""

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from cavvy.control.clock import ControlClock
from cavvy.control.jobs import deadline_of
from cavvy.control.markets.history import MarketHistory
from cavvy.control.provider_pool import ProviderPool
from cavvy.domain.events import Event
from cavvy.domain.jobs import FAR, JOB_ENDS, Job
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Schedule, Task
from cavvy.planner.calendar import (
    HISTORY,
    Prices,
    TimeInterval,
    choose_start,
    find_interval,
    next_time,
    parse_cron,
)
from cavvy.planner.candidates import find_usable, jobs_of, match
from cavvy.store.base import AtomicWrite, RowNotFound, StaleVersion, Store

_OLD = timedelta(seconds=60)  # offers this old will do

Submit = Callable[
    [Job, Task, str], Awaitable[Job]
]  # of a schedule's job: a run of this task with this id


def allocation_of(task: Task, now: datetime) -> tuple[datetime | None, datetime | None]:
    """(`not_before`, `held_until`) of a job that is submitted now. Raises ValueError where it
    would never start.
    """
    schedule = task.schedule
    if schedule is not None and schedule.cron is not None:
        return FAR, _next(schedule, now)
    start = schedule.at if schedule is not None else None
    return (FAR, start or now) if task.window is not None else (start, None)


class ScheduleReconciler:
    """Looks after held jobs, one step at a time."""

    def __init__(
        self,
        store: Store,
        clock: ControlClock,
        pool: ProviderPool,
        history: MarketHistory,
        submit: Submit,
        arrived: Callable[[], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._pool = pool
        self._book = history
        self._submit = submit
        self._arrived = arrived

    async def step(self, job: Job) -> timedelta:
        """Do what is due; when to look again. Raises StaleVersion, RowNotFound."""
        now = self._clock.now()
        if job.held_until is not None and now < job.held_until:
            return job.held_until - now
        if job.task.schedule is not None and job.task.schedule.cron is not None:
            return await self._start_run(job, job.task.schedule, now)
        return await self._open(job, now)

    # Schedules

    async def _start_run(self, job: Job, schedule: Schedule, now: datetime) -> timedelta:
        due, running = job.held_until or now, await self._unfinished(job)
        upcoming = _next(schedule, now)
        run_id = job.last_run
        if running is None:
            run_id = make_run_id(job.id, due, now)
            try:
                run = await self._submit(
                    job,
                    replace(job.task, schedule=None, name=_run_name(job, schedule, due)),
                    run_id,
                )
                text = f"run {run.name} begins"
            except StaleVersion:
                text = "its run had begun already"  # by us, before a crash
        else:
            text = (
                f"the run of {due:%Y-%m-%d %H:%M} UTC is left out: {running.name} is still "
                f"{running.phase}"
            )
        reason = say_next(upcoming)
        held = replace(job, held_until=upcoming, last_run=run_id, reason=reason)
        await self._write(held, now, "schedule", f"{text}; {reason}")
        return upcoming - now

    async def _unfinished(self, job: Job) -> Job | None:
        if job.last_run is None:
            return None
        try:
            last = await self._store.job(job.last_run)
        except RowNotFound:
            return None
        return None if last.phase in JOB_ENDS else last

    # Windows

    async def _open(self, job: Job, now: datetime) -> timedelta:
        window, deadline = job.task.window, deadline_of(job)
        if window is None or (deadline is not None and now >= deadline):
            return await self._release(job, now, "it waits no longer")
        interval = find_interval(window, ZoneInfo(window.time_zone), now)
        start = choose_start(interval, now, await self._prices(job, interval, now))
        if start.at is None:
            return await self._release(job, now, start.reason)
        look = start.at if deadline is None else min(start.at, deadline)
        if job.reason != start.reason or job.held_until != look:
            held = replace(job, held_until=look, reason=start.reason)
            await self._write(held, now, "window", start.reason)
        return look - now

    async def _prices(self, job: Job, interval: TimeInterval, now: datetime) -> Prices:
        """Of the place that is cheapest now; () before the window opens, and where there is
        none.
        """
        if now < interval.start:
            return ()
        market = (await self._pool.market(_OLD)).market
        usable: Sequence[Offer] = [
            offer
            for each in jobs_of(job)
            for offer in find_usable(each, market, match(each, market), self._pool.objections)
        ]
        if not usable:
            return ()
        await self._book.note_prices(usable)
        cheapest = min(usable, key=lambda offer: offer.rate)
        seen = await self._store.observations([cheapest.key], now - HISTORY)
        prices = [(each.at, each.rate) for each in seen if each.rate is not None]
        return [*prices, (now, cheapest.rate)]

    async def _release(self, job: Job, now: datetime, reason: str) -> timedelta:
        await self._write(
            replace(job, not_before=None, held_until=None, reason=reason), now, "window", reason
        )
        self._arrived()
        return timedelta(0)

    async def _write(self, job: Job, now: datetime, kind: str, text: str) -> None:
        event = Event(
            project=job.project, job_id=job.id, attempt=job.attempt, at=now, kind=kind, text=text
        )
        await self._store.commit(AtomicWrite(jobs=[job], events=[event]))


def say_next(upcoming: datetime) -> str:
    """The reason of a job that repeats."""
    return f"next run at {upcoming:%Y-%m-%d %H:%M} UTC"


def make_run_id(job_id: str, due: datetime, now: datetime) -> str:
    """The same for the same run, whoever makes it: as long as every id, and it sorts by when the
    schedule was due.
    """
    alphabet = "0123456789abcdefghjkmnpqrstvwxyz"
    millis = (due - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
    chance = (
        int.from_bytes(hashlib.sha256(f"{job_id} {due.isoformat()}".encode()).digest()[:4], "big")
        >> 2
    )
    value = (millis << 30) | chance
    return "".join(alphabet[(value >> shift) & 31] for shift in range(75, -5, -5))


def _run_name(job: Job, schedule: Schedule, due: datetime) -> str:
    local = due.astimezone(ZoneInfo(schedule.time_zone))
    return f"{job.name[:48]}-{local:%Y%m%d-%H%M}"


def _next(schedule: Schedule, after: datetime) -> datetime:
    """Raises ValueError where the line names no day that exists."""
    found = next_time(parse_cron(schedule.cron or ""), ZoneInfo(schedule.time_zone), after)
    if found is None:
        raise ValueError(f"no day is ever like {schedule.cron!r}")
    return found
