"""The queue by project, the pools of machines, and the jobs that repeat."""

from collections.abc import Sequence
from datetime import datetime
from functools import partial

import msgspec
from starlette.requests import Request

from cavvy.client import ApiClient
from cavvy.client.pool_wire import list_pools
from cavvy.client.queue_wire import read_shares
from cavvy.client.wire import JobDetail
from cavvy.console.memory import Memory
from cavvy.console.pages.page import Page, memory_of, try_part

_MOST = 500  # waiting jobs among which those that repeat are found


class ScheduleRow(msgspec.Struct, frozen=True, kw_only=True):
    """A job that repeats, and when its next run starts."""

    job: JobDetail
    cron: str
    time_zone: str


def make(client: ApiClient, request: Request, now: datetime) -> Page:
    memory = memory_of(request)
    return Page(
        "Queue",
        "queue.html",
        {
            "shares": try_part(lambda: read_shares(client)),
            "pools": try_part(lambda: list_pools(client)).value or [],
            "schedules": memory.recall("schedules", lambda: _list_schedules(client, memory), 10.0),
        },
    )


def _list_schedules(client: ApiClient, memory: Memory) -> Sequence[ScheduleRow]:
    """Return the jobs that repeat, the next one first. Their tasks, which do not change, may have
    been read before.
    """
    found: list[ScheduleRow] = []
    for row in client.jobs(phases=("queued",), limit=_MOST).jobs:
        if not row.held:
            continue
        read = partial(client.job, row.project, row.id)
        job = memory.recall(("held", row.id, row.since), read)
        schedule = msgspec.json.decode(job.task).get("schedule") or {}
        if cron := schedule.get("cron"):
            zone = schedule.get("time_zone", "UTC")
            found.append(ScheduleRow(job=job, cron=cron, time_zone=zone))
    return sorted(found, key=lambda each: (each.job.not_before is None, str(each.job.not_before)))
