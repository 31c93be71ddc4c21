"""Decides when held jobs start: the runs of repeating jobs, and jobs that wait for their time
window."""

import hashlib
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from cavvy.control.decide.job import deadline_of
from cavvy.control.decide.rows import RowChanges, make_event
from cavvy.domain.accounts import Account
from cavvy.domain.jobs import FAR, JobRecord
from cavvy.domain.tasks import JobDependency, JobSchedule, StartCondition, TaskSpec
from cavvy.domain.values import Struct, replace
from cavvy.planner.calendar import (
    Prices,
    TimeInterval,
    choose_start,
    find_interval,
    next_time,
    parse_cron,
)
from cavvy.spec.problems import listed

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no i, l, o, u
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ENDS = {
    StartCondition.SUCCESS: "succeeds",
    StartCondition.FAILURE: "fails",
    StartCondition.ANY: "ends",
}
_BARRED = timedelta(minutes=1)  # how long a barred job is held before its account is read again


def find_hold(task: TaskSpec, now: datetime) -> tuple[datetime | None, datetime | None]:
    """Return the values of `not_before` and `held_until` for a newly submitted job. Raises
    ValueError if the job would never start.
    """
    schedule = task.schedule
    if schedule is not None and schedule.cron is not None:
        return FAR, _next(schedule, now)
    start = schedule.at if schedule is not None else None
    held = task.window is not None or task.edge is not None
    return (FAR, start or now) if held else (start, None)


def say_waiting(after: Iterable[JobDependency]) -> str:
    """Return what the job waits for, for example: waits until prepare succeeds."""
    return f"waits until {listed([f'{each.job} {say_end(each.on)}' for each in after], 'and')}"


def say_end(on: StartCondition) -> str:
    return _ENDS[on]


# Accounts


def explain_bar(job: JobRecord, account: Account | None) -> str:
    """Return why the job's account may start no work now, or "" if it may. `account` is the stored
    account with the name of the job's account. A later account with this name does not count,
    because it may belong to another person.
    """
    if not job.account:
        return ""
    if account is None or account.created_at > job.since:
        return f"the account {job.account} was removed"
    return "" if account.disabled_at is None else f"the account {job.account} is disabled"


def bar_job(job: JobRecord, why: str, now: datetime) -> RowChanges:
    """Hold the job, because its account may start no work. A repeating job is held until its next
    run, and any other job for a short time. Only the first of these holds is recorded as an event.
    """
    schedule = job.task.schedule
    if schedule is not None and schedule.cron is not None:
        upcoming = _next(schedule, now)
        reason = f"no run starts, because {why}; {say_next(upcoming)}"
    else:
        upcoming, reason = now + _BARRED, f"the job does not start, because {why}"
    held = replace(job, not_before=FAR, held_until=upcoming, reason=reason, barred=True)
    events = () if job.barred else (make_event(job, now, "account", reason),)
    return RowChanges(job=held, events=events)


# Schedules


class ScheduledRun(Struct, frozen=True, kw_only=True):
    """A run that is due. If several servers create the same run, the run has the same `run_id` on
    each of them.
    """

    task: TaskSpec
    run_id: str


def find_run(job: JobRecord, schedule: JobSchedule, now: datetime) -> ScheduledRun:
    """Return the run of the schedule that is due now."""
    due = job.held_until or now
    task = replace(job.task, schedule=None, name=_run_name(job, schedule, due))
    return ScheduledRun(task=task, run_id=make_run_id(job.id, due))


def hold_schedule(
    job: JobRecord, schedule: JobSchedule, run_id: str | None, text: str, now: datetime
) -> RowChanges:
    """Hold the repeating job until its next run; `run_id` is the ID of the run that starts now, or
    None.
    """
    upcoming = _next(schedule, now)
    reason = say_next(upcoming)
    last_run = run_id or job.last_run
    held = replace(job, held_until=upcoming, last_run=last_run, reason=reason, barred=False)
    event = make_event(job, now, "schedule", f"{text}; {reason}")
    return RowChanges(job=held, events=(event,))


def say_left_out(job: JobRecord, running: JobRecord, now: datetime) -> str:
    """Return the reason why a due run does not start."""
    due = job.held_until or now
    return (
        f"the run of {due:%Y-%m-%d %H:%M} UTC is skipped: {running.name} is still {running.phase}"
    )


def say_next(upcoming: datetime) -> str:
    """Return the text that tells users when the next run starts."""
    return f"next run at {upcoming:%Y-%m-%d %H:%M} UTC"


def make_run_id(job_id: str, due: datetime) -> str:
    """Return the ID of a run, which depends only on the job and the due time. Run IDs sort by due
    time."""
    millis = (due - EPOCH) // timedelta(milliseconds=1)
    digest = hashlib.sha256(f"{job_id} {due.isoformat()}".encode()).digest()
    return spell_id((millis << 30) | (int.from_bytes(digest[:4], "big") >> 2))


def spell_id(value: int) -> str:
    """Encode 80 bits as 16 characters, which sort in the same order as the numbers."""
    return "".join(ALPHABET[(value >> shift) & 31] for shift in range(75, -5, -5))


# Windows


def find_window(job: JobRecord, now: datetime) -> TimeInterval | None:
    """Return the time window that is open now or opens next. The result is None if the job does not
    wait for a window."""
    window, deadline = job.task.window, deadline_of(job)
    if window is None or (deadline is not None and now >= deadline):
        return None
    return find_interval(window, ZoneInfo(window.time_zone), now)


def hold_window(
    job: JobRecord, interval: TimeInterval, prices: Prices, now: datetime
) -> RowChanges:
    """Add the job to the queue, or hold it until its start or until prices are checked again. A new
    start time is recorded as an event.
    """
    start, deadline = choose_start(interval, now, prices), deadline_of(job)
    if start.at is None:
        return release_job(job, start.reason, now)
    look = start.at if deadline is None else min(start.at, deadline)
    held = replace(job, held_until=look, reason=start.reason, barred=False)
    news = job.held_until != look
    event = make_event(job, now, "window", start.reason)
    return RowChanges(job=held, events=(event,) if news else ())


def release_job(job: JobRecord, reason: str, now: datetime) -> RowChanges:
    """Add a held job to the queue."""
    freed = replace(job, not_before=None, held_until=None, reason=reason, barred=False)
    return RowChanges(job=freed, events=(make_event(job, now, "window", reason),))


def _run_name(job: JobRecord, schedule: JobSchedule, due: datetime) -> str:
    local = due.astimezone(ZoneInfo(schedule.time_zone))
    return f"{job.name[:48]}-{local:%Y%m%d-%H%M}"


def _next(schedule: JobSchedule, after: datetime) -> datetime:
    """Return the first start time of the schedule after `after`. Raise ValueError if no day ever
    matches the cron line.
    """
    found = next_time(parse_cron(schedule.cron or ""), ZoneInfo(schedule.time_zone), after)
    if found is None:
        raise ValueError(f"no day ever matches {schedule.cron!r}")
    return found
