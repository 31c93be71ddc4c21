"""Gives the curves of a job."""

from asyncio import to_thread
from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import Path, Query
from msgspec import structs
from starlette.responses import Response

from cavvy.api.app_state import AppState
from cavvy.api.errors import ApiProblem
from cavvy.api.routes.jobs import JobPath, ProjectPath, find_job
from cavvy.api.routes.logs import USUAL_RANKS, OneAttemptQuery, RanksQuery
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path
from cavvy.capabilities.curves.examples import (
    MEDIA_TYPES,
    TEXT,
    read_example,
    read_examples,
)
from cavvy.capabilities.curves.kept import KeptBriefs
from cavvy.capabilities.curves.keys import read_key
from cavvy.capabilities.curves.reduce import BRIEF_UP_TO, Piece, find_whole, make_curves
from cavvy.capabilities.curves.rows import (
    read_keys,
    read_params,
    read_pieces,
    read_pieces_of_jobs,
    read_ranks,
    read_whole,
)
from cavvy.capabilities.curves.wire import (
    MOST_JOBS,
    MOST_POINTS,
    Curve,
    CurveNames,
    Example,
    JobCurves,
    JobExamples,
    ParamsOfJobs,
    RunParams,
    Window,
)
from cavvy.domain.accounts import Permission
from cavvy.domain.jobs import JobRecord

router = RouteGroup("jobs", prefix="/v1")
_kept = KeptBriefs()
CurveQuery = Annotated[
    list[str] | None,
    Query(max_length=64, description="Only curves with these names; by default, all."),
]
ByQuery = Annotated[
    Literal["step", "time"],
    Query(description="What `from` and `to` are: steps, or milliseconds since 1970."),
]
BeginQuery = Annotated[float | None, Query(alias="from", description="Only values from here on.")]
EndQuery = Annotated[float | None, Query(alias="to", description="Only values up to here.")]
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
    by: ByQuery = "step",
    begin: BeginQuery = None,
    end: EndQuery = None,
) -> JobCurves:
    """Get what the job's program reported step by step."""
    job = await find_job(app_state, project, name)
    app_state.control_plane.agents.look_at(job.id, rank or range(USUAL_RANKS))
    numbers = {each.id: each.number for each in await app_state.store.attempts(job.id)}
    chosen = [each for each, number in numbers.items() if attempt in (None, number)]
    read, _ = app_state.store.database
    window = Window(by, begin, end)
    found: list[Curve] = []
    for attempt_id, number in await read(read_ranks(chosen)):
        if number in (rank or range(USUAL_RANKS)):
            key, asked = (attempt_id, number), (frozenset(curve or ()), points, window)
            found += await _read_rank(app_state, key, numbers[attempt_id], *asked)
    return JobCurves(curves=sorted(found, key=order_of))


@router.get(
    "/projects/{project}/jobs/{name}/curve-names",
    rule=in_path(Permission.VIEW),
    errors=("job-not-found",),
)
async def curve_names(app_state: AppState, project: ProjectPath, name: JobPath) -> CurveNames:
    """Get the names of what the job's program reported step by step."""
    job = await find_job(app_state, project, name)
    app_state.control_plane.agents.look_at(job.id, range(USUAL_RANKS))
    ids = [each.id for each in await app_state.store.attempts(job.id)]
    read, _ = app_state.store.database
    names = {read_key(key).name for key in await read(read_keys(ids, USUAL_RANKS, _kept))}
    return CurveNames(names=sorted(names - {""}))


@router.get(
    "/projects/{project}/jobs/{name}/examples",
    rule=in_path(Permission.VIEW),
    errors=("job-not-found",),
)
async def examples(app_state: AppState, project: ProjectPath, name: JobPath) -> JobExamples:
    """List the pictures, sound, texts, tables and histograms that the job's program reported."""
    job = await find_job(app_state, project, name)
    numbers = {each.id: each.number for each in await app_state.store.attempts(job.id)}
    read, _ = app_state.store.database
    found = await read(read_examples(numbers, USUAL_RANKS))
    return JobExamples(
        examples=[
            Example(
                id=f"{numbers[each.attempt_id]}-{each.rank}-{each.number}",
                name=each.name,
                kind="text" if each.kind == TEXT else each.kind.partition("/")[0],
                attempt=numbers[each.attempt_id],
                rank=each.rank,
                process=each.process,
                step=each.step,
                time_ms=int(each.at_ms),
                bytes=each.size,
            )
            for each in found
        ]
    )


@router.get(
    "/projects/{project}/jobs/{name}/examples/{example}",
    rule=in_path(Permission.VIEW),
    gives=True,
    errors=("job-not-found", "invalid-request"),
)
async def example(
    app_state: AppState,
    project: ProjectPath,
    name: JobPath,
    example: Annotated[str, Path(pattern=r"^\d{1,9}-\d{1,9}-\d{1,18}$")],
) -> Response:
    """Get the bytes of a picture or the like: tables and histograms are JSON."""
    job = await find_job(app_state, project, name)
    attempt, rank, number = map(int, example.split("-"))
    ids = {each.number: each.id for each in await app_state.store.attempts(job.id)}
    read, _ = app_state.store.database
    found = await read(read_example(ids.get(attempt, ""), rank, number))
    if found is None or found[0] not in MEDIA_TYPES:
        raise ApiProblem("invalid-request", f"the job has no example {example}; it may be removed")
    headers = {"X-Content-Type-Options": "nosniff", "Content-Disposition": "inline"}
    return Response(found[1], headers=headers, media_type=MEDIA_TYPES[found[0]])


async def _read_rank(
    app_state: AppState,
    key: tuple[str, int],
    attempt: int,
    names: frozenset[str],
    points: int,
    window: Window,
) -> Sequence[Curve]:
    """Return the curves of a rank of an attempt. Of long ones, brief versions are read, and what
    a small window needs of the rest."""
    read, _ = app_state.store.database
    pieces = await read(read_pieces(*key, _kept, briefly=points <= BRIEF_UP_TO))
    if needed := await to_thread(find_whole, pieces, names, window, points):
        whole = await read(read_whole(*key, needed))
        pieces = [each._replace(whole=whole.get(each.number, each.whole)) for each in pieces]
    return await to_thread(make_curves, pieces, attempt, key[1], names, points, window)


def order_of(curve: Curve) -> tuple[str, int, int, int]:
    return curve.name, curve.attempt, curve.rank, curve.process


@router.get("/projects/{project}/curves", rule=in_path(Permission.VIEW))
async def curves_of_jobs(
    app_state: AppState,
    project: ProjectPath,
    job: Annotated[list[str], Query(min_length=1, max_length=MOST_JOBS)],
    curve: CurveQuery = None,
    points: PointsQuery = 300,
    by: ByQuery = "step",
    begin: BeginQuery = None,
    end: EndQuery = None,
) -> JobCurves:
    """Get what the programs of several jobs reported step by step: of the first rank of each."""
    read, _ = app_state.store.database
    known = await _find_jobs(app_state, project, job)
    ids = [each.id for each in known]
    for job_id in ids:
        app_state.control_plane.agents.look_at(job_id, [0])
    pieces = await read(read_pieces_of_jobs(ids, briefly=points <= BRIEF_UP_TO))
    names, window = frozenset(curve or ()), Window(by, begin, end)

    def make() -> list[Curve]:
        found: list[Curve] = []
        for each in known:
            own = _number(pieces.get(each.id, ()))
            made = make_curves(own, each.attempt, 0, names, points, window)
            found += [structs.replace(curve, job=each.name) for curve in made]
        return sorted(found, key=lambda each: each.name)  # the jobs as asked

    return JobCurves(curves=await to_thread(make))


def _number(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Return the pieces of several attempts, which may have the same numbers, with new ones."""
    return [each._replace(number=number) for number, each in enumerate(pieces)]


async def _find_jobs(
    app_state: AppState, project: str, names: Sequence[str]
) -> Sequence[JobRecord]:
    """Return the jobs with these names or IDs, in this order; those that are gone are left out."""
    wanted = [*dict.fromkeys(names)]
    by_id = {each.id: each for each in await app_state.store.find_jobs(wanted)}
    found = []
    for name in wanted:
        known = by_id.get(name)
        if known is None or known.project != project:
            try:
                known = await find_job(app_state, project, name)
            except ApiProblem:
                continue
        found.append(known)
    return found


@router.get("/projects/{project}/curve-params", rule=in_path(Permission.VIEW))
async def curve_params(
    app_state: AppState,
    project: ProjectPath,
    job: Annotated[list[str], Query(min_length=1, max_length=MOST_JOBS)],
) -> ParamsOfJobs:
    """Get the parameters of several jobs: of their tasks, and those that programs reported."""
    read, _ = app_state.store.database
    known = await _find_jobs(app_state, project, job)
    reported = await read(read_params([each.id for each in known]))
    found = []
    for each in known:
        params = {name: str(value) for name, value in each.task.params.items()}
        found.append(RunParams(id=each.id, params={**reported.get(each.id, {}), **params}))
    return ParamsOfJobs(jobs=found)
