"""The routes for what the nodes of a job measured, and its program reported, over time, and for the
traffic of a service."""

from asyncio import to_thread
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import Query
from pydantic import AwareDatetime

from cavvy.api.app_state import AppState
from cavvy.api.errors import ApiProblem
from cavvy.api.routes.jobs import JobPath, ProjectPath, find_job
from cavvy.api.routes.services import ServicePath
from cavvy.api.routes.services import router as service_router
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path
from cavvy.client import wire
from cavvy.domain.accounts import Permission
from cavvy.domain.figures import FigureColumns, choose_step, summarize_blocks
from cavvy.store.base import RowNotFound

router = RouteGroup("jobs", prefix="/v1")
Since = Annotated[AwareDatetime | None, Query(description="By default, a day before `until`.")]
Points = Annotated[int, Query(ge=2, le=1500, description="The most values of a series.")]
_USUAL = timedelta(days=1)
_LONGEST = timedelta(days=32)
_USUAL_RANKS, _MOST_RANKS = 8, 64
_USUAL_NAMES = 16
# Figures times ranks times days; a day of a figure takes about 2 ms of CPU time.
_MOST_READ = 2000
_MINUTE_S = 60
_FIRST_YEAR = 1971


@router.get(
    "/projects/{project}/jobs/{name}/figures",
    rule=in_path(Permission.VIEW),
    errors=("job-not-found", "invalid-request"),
)
async def figures(
    app_state: AppState,
    project: ProjectPath,
    name: JobPath,
    attempt: Annotated[
        int | None, Query(ge=1, description="Only this attempt; by default, all attempts.")
    ] = None,
    rank: Annotated[
        list[int] | None,
        Query(
            max_length=_MOST_RANKS,
            description=f"Only these ranks; by default, the first {_USUAL_RANKS}.",
        ),
    ] = None,
    figure: Annotated[
        list[str] | None,
        Query(max_length=64, description="Only figures with these names; by default, all."),
    ] = None,
    since: Since = None,
    until: Annotated[
        AwareDatetime | None,
        Query(description="By default, the end of the job, or now."),
    ] = None,
    points: Points = 300,
) -> wire.JobFigures:
    """Get what the job's nodes measured and its program reported, over time."""
    _check_years(since, until)
    job = await find_job(app_state, project, name)
    end = until or (job.ended_at or app_state.now()) + timedelta(minutes=1)
    numbers = {each.id: each.number for each in await app_state.store.attempts(job.id)}
    chosen = [each for each, number in numbers.items() if attempt in (None, number)]
    known = await app_state.store.figures.ranks(chosen)
    ranks = sorted({each for _, each in known} & set(rank if rank else range(_USUAL_RANKS)))
    begin = since or max(end - _USUAL, job.submitted_at)
    _check_size(begin, end, len(ranks), len(figure or ()) or _USUAL_NAMES)
    steps = _divide(begin, end, points)
    series: list[wire.SeriesView] = []
    for attempt_id, number in sorted(known, key=lambda pair: (numbers[pair[0]], pair[1])):
        if number in ranks:
            blocks = await app_state.store.figures.list(
                attempt_id, number, since=begin, until=end, names=figure or ()
            )
            found = await to_thread(summarize_blocks, blocks, *steps)
            series += _list_series(numbers[attempt_id], number, found)
    return _answer(steps, series)


@service_router.get(
    "/projects/{project}/services/{name}/figures",
    rule=in_path(Permission.VIEW),
    errors=("invalid-request",),
    when={RowNotFound: "service-not-found"},
)
async def service_figures(
    app_state: AppState,
    project: ProjectPath,
    name: ServicePath,
    since: Since = None,
    until: Annotated[AwareDatetime | None, Query(description="By default, now.")] = None,
    points: Points = 300,
) -> wire.JobFigures:
    """Get the traffic, queue and replicas of a service over time."""
    _check_years(since, until)
    service = await app_state.store.services.get(project, name)
    end = until or app_state.now() + timedelta(minutes=1)
    begin = since or max(end - _USUAL, service.created_at)
    _check_size(begin, end, 1, _USUAL_NAMES)
    steps = _divide(begin, end, points)
    blocks = await app_state.store.figures.list(service.id, 0, since=begin, until=end)
    found = await to_thread(summarize_blocks, blocks, *steps)
    return _answer(steps, _list_series(0, 0, found))


def _check_years(*times: datetime | None) -> None:
    if any(each is not None and not _FIRST_YEAR <= each.year < 9999 for each in times):
        raise ApiProblem("invalid-request", f"expected times in the years {_FIRST_YEAR} to 9998")


def _divide(begin: datetime, end: datetime, points: int) -> tuple[int, int, int]:
    """Return the first minute, the minutes of a step, and how many steps there are."""
    step = choose_step((end - begin) // timedelta(minutes=1) + 1, points)
    start = int(begin.timestamp()) // _MINUTE_S // step * step
    return start, step, max(0, int(end.timestamp()) // _MINUTE_S - start) // step + 1


def _list_series(
    attempt: int, rank: int, found: Mapping[str, FigureColumns]
) -> Sequence[wire.SeriesView]:
    return [
        _make_series(attempt, rank, name, columns)
        for name, columns in sorted(found.items())
        if any(each == each for each in columns.mean)
    ]


def _answer(steps: tuple[int, int, int], series: Sequence[wire.SeriesView]) -> wire.JobFigures:
    start, step, _ = steps
    return wire.JobFigures(
        start=datetime.fromtimestamp(start * _MINUTE_S, UTC),
        step_s=step * _MINUTE_S,
        series=[*series],
    )


def _check_size(begin: datetime, end: datetime, ranks: int, names: int) -> None:
    if not begin < end <= begin + _LONGEST:
        raise ApiProblem(
            "invalid-request", f"`since` must be at most {_LONGEST.days} days before `until`"
        )
    days = (end - begin) / timedelta(days=1) + 1
    if ranks * names * days > _MOST_READ:
        raise ApiProblem(
            "invalid-request",
            f"{names} figures of {ranks} ranks in {days:.0f} days are too many",
            "request fewer ranks or figures, or a shorter period",
        )


def _make_series(attempt: int, rank: int, name: str, columns: FigureColumns) -> wire.SeriesView:
    low, mean, high = (
        [float(f"{each:.6g}") if each == each else None for each in values]
        for values in (columns.low, columns.mean, columns.high)
    )
    return wire.SeriesView(attempt=attempt, rank=rank, name=name, low=low, mean=mean, high=high)
