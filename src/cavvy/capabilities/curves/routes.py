"""Gives the curves of a job."""

from asyncio import to_thread
from typing import Annotated

from fastapi import Query
from msgspec import structs

from cavvy.api.app_state import AppState
from cavvy.api.errors import ApiProblem
from cavvy.api.routes.jobs import JobPath, ProjectPath, find_job
from cavvy.api.routes.logs import USUAL_RANKS, OneAttemptQuery, RanksQuery
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path
from cavvy.capabilities.curves.reduce import make_curves
from cavvy.capabilities.curves.rows import read_pieces, read_ranks
from cavvy.capabilities.curves.wire import MOST_JOBS, MOST_POINTS, Curve, JobCurves
from cavvy.domain.accounts import Permission

router = RouteGroup("jobs", prefix="/v1")
CurveQuery = Annotated[
    list[str] | None,
    Query(max_length=64, description="Only curves with these names; by default, all."),
]
PointsQuery = Annotated[int, Query(ge=2, le=MOST_POINTS, description="The most values of a curve.")]


@router.get(
    "/projects/{project}/jobs/{name}/curves",
    rule=in_path(Permission.VIEW),
    errors=("job-not-found", "invalid-request"),
)
async def curves(
    app_state: AppState,
    project: ProjectPath,
    name: JobPath,
    attempt: OneAttemptQuery = None,
    rank: RanksQuery = None,
    curve: CurveQuery = None,
    points: PointsQuery = 500,
) -> JobCurves:
    """Get what the job's program reported step by step."""
    job = await find_job(app_state, project, name)
    numbers = {each.id: each.number for each in await app_state.store.attempts(job.id)}
    chosen = [each for each, number in numbers.items() if attempt in (None, number)]
    read, _ = app_state.store.database
    found: list[Curve] = []
    for attempt_id, number in await read(read_ranks(chosen)):
        if number in (rank or range(USUAL_RANKS)):
            pieces = await read(read_pieces(attempt_id, number))
            asked = (numbers[attempt_id], number, frozenset(curve or ()), points)
            found += await to_thread(make_curves, pieces, *asked)
    return JobCurves(curves=sorted(found, key=order_of))


def order_of(curve: Curve) -> tuple[str, int, int, int]:
    return curve.name, curve.attempt, curve.rank, curve.process


@router.get("/projects/{project}/curves", rule=in_path(Permission.VIEW))
async def curves_of_jobs(
    app_state: AppState,
    project: ProjectPath,
    job: Annotated[list[str], Query(min_length=1, max_length=MOST_JOBS)],
    curve: CurveQuery = None,
    points: PointsQuery = 300,
) -> JobCurves:
    """Get what the programs of several jobs reported step by step: of the first rank of each."""
    read, _ = app_state.store.database
    found: list[Curve] = []
    for name in dict.fromkeys(job):
        try:
            known = await find_job(app_state, project, name)
        except ApiProblem:
            continue
        ids = [each.id for each in await app_state.store.attempts(known.id)]
        pieces = [piece for each in ids for piece in await read(read_pieces(each, 0))]
        asked = (known.attempt, 0, frozenset(curve or ()), points)
        made = await to_thread(make_curves, pieces, *asked)
        found += [structs.replace(each, job=known.name) for each in made]
    return JobCurves(curves=sorted(found, key=lambda each: (each.name, each.job)))
