"""Routes for what brokers count of their calls: they tell it through the agent of their node, and
users read it.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from math import ceil
from typing import Annotated, NamedTuple

from fastapi import Query
from msgspec.json import decode
from starlette.requests import Request

from cavvy.api.app_state import AppState
from cavvy.api.errors import ApiProblem
from cavvy.api.routes.agents import GangQuery, RankQuery, enter_attempt
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import GANG, in_path, in_query
from cavvy.api.wire import read
from cavvy.capabilities.functions.counts.rows import (
    HOUR,
    MINUTE,
    TEN_MINUTES,
    AppCounts,
    AppKey,
    StepCounts,
    read_times,
)
from cavvy.capabilities.functions.counts.wire import (
    MOST_REPORT,
    AppFigures,
    AppSummary,
    BriefCall,
    CountsAsk,
    DirectCall,
    FunctionFigures,
    RecentCall,
)
from cavvy.capabilities.functions.dispatcher import find_calls
from cavvy.capabilities.functions.frames import clean
from cavvy.capabilities.functions.on_node.counts import time_of
from cavvy.capabilities.functions.routes import NamePath
from cavvy.capabilities.functions.rows import FunctionRows, StoredPart
from cavvy.capabilities.functions.wire import AppPartAsk
from cavvy.domain.accounts import Permission
from cavvy.store.base import ProjectFilter

router = RouteGroup("apps", prefix="/v1")
agent_router = RouteGroup("agent", prefix="/agent/v1/asks/apps")
APP_TAG = "cavvy-app"  # of the jobs of apps, with the name
_HOUR = timedelta(hours=1)
_STEPS = {MINUTE: 1.5, TEN_MINUTES: 26.0}  # the longest periods, in hours, that these rows show
_MOST_STEPS, _LEAST_STEPS = 72, 10  # of the period of figures
_MOST_HOURS = 744.0
_NOTHING = AppCounts(0, 0, 0)
_SHARES = (0.5, 0.99)


@agent_router.post("/report", rule=GANG, ask=CountsAsk)
async def report(request: Request, gang: GangQuery, rank: RankQuery) -> None:
    """Tell what the functions of the job do."""
    app_state, attempt = await enter_attempt(request, gang, rank)
    told = await read(request, CountsAsk, MOST_REPORT)
    job = await app_state.store.job(attempt.job_id)
    if not (app := job.task.tags.get(APP_TAG, "")):
        raise ApiProblem("invalid-request", f"the job {job.id} runs no app")
    await find_calls(app_state).counts.put(job.project, app[:50], job.id, told, app_state.now())


@router.get("/apps", rule=in_query(Permission.VIEW))
async def list_all(app_state: AppState, projects: ProjectFilter) -> list[AppSummary]:
    """List the apps that are deployed or run, with what they do now."""
    rows, now = find_calls(app_state).counts, app_state.now()
    gauges = await rows.list_gauges(projects, now)
    counts = await rows.count(projects, now - _HOUR)
    deployed: dict[AppKey, list[StoredPart]] = {}
    for part in await FunctionRows(*app_state.store.database).list_all(projects):
        deployed.setdefault((part.project, part.app), []).append(part)
    return [
        _summarize(key, deployed.get(key, ()), gauges.get(key, ()), counts.get(key, _NOTHING))
        for key in sorted({*deployed, *gauges})
    ]


@router.get(
    "/projects/{project}/apps/{name}/figures",
    rule=in_path(Permission.VIEW),
    errors=("app-not-found",),
)
async def read_figures(
    app_state: AppState,
    project: ProjectPath,
    name: NamePath,
    hours: Annotated[float, Query(gt=0, le=_MOST_HOURS)] = 1.0,
    traces: bool = False,
) -> AppFigures:
    """Get how often the functions of an app were called, how long this took, and the newest calls
    that the server has not kept, with tracebacks if `traces` is set."""
    rows, now = find_calls(app_state).counts, app_state.now()
    step = next((each for each, most in _STEPS.items() if hours <= most), HOUR)
    gauges = (await rows.list_gauges(project, now, name)).get((project, name), ())
    steps = await rows.list_steps(project, name, step, now - timedelta(hours=hours))
    kept = await rows.count_kept(project, name, hours, now)
    if not gauges and not steps:
        parts = await FunctionRows(*app_state.store.database).parts(project, name)
        if not parts:
            raise ApiProblem("app-not-found", f"project {project} has no app {name}")
    running = [told for _, told in gauges if told is not None]
    functions = sorted(
        {each.function for each in steps}
        | {function for told in running for function in told.gauges}
        | {function for _, function in kept}
    )
    grid = TimeGrid.make([each.begin_s for each in steps], step, now)
    return AppFigures(
        begin=datetime.fromtimestamp(grid.begin_s, UTC),
        step_s=grid.step_s,
        workers=sum(each.workers for each in running),
        jobs=_list_busy(gauges),
        functions=[
            _measure(
                function,
                [each for each in steps if each.function == function],
                running,
                kept.get((name, function), _NOTHING),
                grid,
            )
            for function in functions
        ],
        recent=_list_recent(await rows.list_recent(project, name, traces=traces)),
    )


class TimeGrid(NamedTuple):
    """The steps of a period, which begins `begin_s` seconds after 1970."""

    begin_s: float
    step_s: float
    steps: int

    @classmethod
    def make(cls, begins: Iterable[int], step: int, now: datetime) -> "TimeGrid":
        """Return at most 72 steps, each of some of the rows of this length, from the first row
        until now; at least 10, so that a few minutes are no whole picture."""
        now_s = now.timestamp()
        first_s = min([*begins, now_s - _LEAST_STEPS * step])
        step_s = float(max(1, ceil((now_s - first_s) / step / _MOST_STEPS)) * step)
        begin_s = first_s // step_s * step_s
        return cls(begin_s, step_s, max(1, ceil((now_s - begin_s) / step_s)))

    def find(self, begin_s: int) -> int:
        """Return the number of the step in which a row begins."""
        return min(max(int((begin_s - self.begin_s) // self.step_s), 0), self.steps - 1)


def find_times(buckets: Mapping[int, int], shares: Sequence[float]) -> list[float | None]:
    """Return the times that these shares of the calls did not exceed, or None without calls. The
    shares rise."""
    total, seen, at = sum(buckets.values()), 0, -1
    ordered = sorted(buckets)
    found: list[float | None] = []
    for share in shares:
        while at + 1 < len(ordered) and seen < total * share - 1e-9:
            at += 1
            seen += buckets[ordered[at]]
        found.append(time_of(ordered[at]) if total else None)
    return found


def _summarize(
    key: AppKey,
    parts: Sequence[StoredPart],
    gauges: Sequence[tuple[str, CountsAsk | None]],
    counts: AppCounts,
) -> AppSummary:
    documents = [decode(each.document, type=AppPartAsk) for each in parts]
    functions = [each.name for document in documents for each in document.functions]
    running = [told for _, told in gauges if told is not None]
    waits, runs, kept = _sum_gauges(each for told in running for each in told.gauges.values())
    return AppSummary(
        project=key[0],
        name=key[1],
        revision=parts[0].revision if parts else "",
        user=parts[0].user if parts else "",
        deployed_at=parts[0].updated_at if parts else None,
        functions=functions or sorted({name for told in running for name in told.gauges}),
        jobs=_list_busy(gauges),
        workers=sum(each.workers for each in running),
        waiting=waits + max(0, counts.waiting - kept),
        running=runs,
        done=counts.done,
        failed=counts.failed,
    )


def _list_busy(gauges: Sequence[tuple[str, CountsAsk | None]]) -> list[str]:
    """Return the jobs that have a process or calls; one that ends tells that it has none."""
    return [
        job
        for job, told in gauges
        if told is not None and (told.workers or any(map(any, told.gauges.values())))
    ]


def _sum_gauges(gauges: Iterable[tuple[int, int, int]]) -> tuple[int, int, int]:
    sums = [0, 0, 0]
    for each in gauges:
        for place, number in enumerate(each):
            sums[place] += number
    return sums[0], sums[1], sums[2]


def _measure(
    function: str,
    steps: Sequence[StepCounts],
    running: Sequence[CountsAsk],
    kept: AppCounts,
    grid: TimeGrid,
) -> FunctionFigures:
    """Return the figures of a function."""
    told = (each.gauges[function] for each in running if function in each.gauges)
    waits, runs, runs_kept = _sum_gauges(told)
    rows: list[list[str]] = [[] for _ in range(grid.steps)]
    for each in steps:
        rows[grid.find(each.begin_s)].append(each.times)
    times = [_add_up(tuple(texts)) for texts in rows]
    whole: dict[int, int] = {}
    for step in times:
        for bucket, count in step.counts.items():
            whole[bucket] = whole.get(bucket, 0) + count
    half, most = find_times(whole, _SHARES)
    return FunctionFigures(
        name=function,
        waiting=waits + max(0, kept.waiting - runs_kept),
        running=runs,
        done=sum(each.done for each in steps) + kept.done,
        failed=sum(each.failed for each in steps) + kept.failed,
        ran=(half, most),
        ran_p50=[each.ran[0] for each in times],
        ran_p99=[each.ran[1] for each in times],
        took_p50=[each.took[0] for each in times],
        took_p99=[each.took[1] for each in times],
    )


class _StepTimes(NamedTuple):
    """The times of the calls of a step: those that the half and 99 of 100 did not exceed, and how
    many ran for the time of each bucket."""

    ran: Sequence[float | None]
    took: Sequence[float | None]
    counts: Mapping[int, int]


@lru_cache(maxsize=1024)  # only the newest steps of a page change from one look to the next
def _add_up(texts: Sequence[str]) -> _StepTimes:
    """Return the times of the rows of a step."""
    ran: dict[int, int] = {}
    took: dict[int, int] = {}
    for times in map(read_times, texts):
        add_times(ran, times.ran)
        add_times(took, times.took)
    return _StepTimes(find_times(ran, _SHARES), find_times(took, _SHARES), ran)


def add_times(sums: dict[int, int], times: Sequence[int]) -> None:
    """Add counts, each behind its bucket, to those of the same buckets."""
    for at in range(0, len(times), 2):
        sums[times[at]] = sums.get(times[at], 0) + times[at + 1]


def _list_recent(calls: Sequence[tuple[str, str, BriefCall]]) -> list[RecentCall]:
    found = [
        RecentCall(
            function=function,
            job=job,
            state=each.state,
            ended_at=datetime.fromtimestamp(each.ended_s, UTC),
            ran_s=each.ran_s,
            took_s=each.took_s,
            type=clean(each.type),
            text=clean(each.text),
            trace=clean(each.trace) if isinstance(each, DirectCall) else "",
        )
        for function, job, each in calls
        if each.ended_s < _LATEST_S
    ]
    return sorted(found, key=lambda each: each.ended_at, reverse=True)


_LATEST_S = 1e11  # seconds since 1970, of a clock that is wrong
