"""Routes of arrays of jobs. Arrays are submitted and listed with the other jobs, and each of their
jobs can be used by its own name."""

from collections import Counter
from collections.abc import Sequence

from starlette.requests import Request

from cavvy.api.app_state import AppState
from cavvy.api.errors import ApiProblem
from cavvy.api.routes import views
from cavvy.api.routes.jobs import CursorQuery, JobPath, LimitQuery, ProjectPath, named
from cavvy.api.routes.submission import count_new
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path, in_query, principal_of, say_who_stopped
from cavvy.client import array_wire, wire
from cavvy.control.decide.requests import RETRIED
from cavvy.control.job_service import TooLate
from cavvy.control.running_costs import read_unwritten
from cavvy.domain.accounts import Permission
from cavvy.domain.arrays import StoredArray, choose_values
from cavvy.domain.jobs import JOB_ENDS
from cavvy.domain.units import Money
from cavvy.domain.values import replace
from cavvy.store.base import ProjectFilter, RowNotFound

router = RouteGroup("jobs", "/v1")


@router.get("/arrays", rule=in_query(Permission.VIEW))
async def list_all(
    app_state: AppState,
    projects: ProjectFilter,
    cursor: CursorQuery = None,
    limit: LimitQuery = 50,
) -> wire.JobPage:
    """List arrays and groups, newest first."""
    found = await app_state.store.arrays.list(projects, cursor, limit + 1)
    rows = [views.array_row(each) for each in await _count_to_now(app_state, found[:limit])]
    return wire.JobPage(jobs=rows, cursor=rows[-1].id if len(found) > limit else None)


@router.get(
    "/projects/{project}/arrays/{name}", rule=in_path(Permission.VIEW), errors=("job-not-found",)
)
async def get(app_state: AppState, project: ProjectPath, name: JobPath) -> array_wire.ArrayDetail:
    """Get an array or a group with its jobs."""
    array = await _find(app_state, project, name)
    members = await app_state.store.arrays.members(array.id)
    task = (await app_state.store.job(members[0].job.id)).task if members else None
    sweep = () if task is None else task.sweep
    points = {each.job.id: each.index for each in members}
    if task is not None and task.search is not None:
        points = await app_state.store.arrays.list_points(array.id)
    more = await read_unwritten(app_state.store, project, app_state.now())
    spent = {each.job.id: each.job.spent + more.get(each.job.id, Money()) for each in members}
    array = replace(array, spent_micros=sum(each.micros for each in spent.values()))
    jobs = [
        array_wire.ArrayMemberView(
            index=each.index,
            id=each.job.id,
            name=each.job.name,
            phase=each.job.phase,
            reason=each.job.reason,
            attempt=each.job.attempt,
            exit_code=each.job.exit_code,
            placement=each.job.place,
            since=each.job.since,
            ended_at=each.job.ended_at,
            spent_micros=spent[each.job.id].micros,
            params={}
            if each.job.id not in points
            else {
                one.name: one.values[at] for one, at in choose_values(sweep, points[each.job.id])
            },
            progress=each.progress,
            early=each.early,
        )
        for each in members
    ]
    return array_wire.ArrayDetail(
        array=views.array_row(array),
        parallel=array.parallel,
        group=array.started is not None,
        best="" if task is None else task.best,
        jobs=jobs,
    )


@router.post(
    "/projects/{project}/arrays/{name}/stop",
    rule=in_path(Permission.RUN),
    errors=("job-not-found",),
)
async def stop(
    request: Request, app_state: AppState, project: ProjectPath, name: JobPath, ask: wire.StopAsk
) -> wire.JobListing:
    """Stop all jobs of an array."""
    array = await _find(app_state, project, name)
    jobs, reason = app_state.control_plane.jobs, ask.reason or say_who_stopped(request)
    return views.array_row(await jobs.stop_array(project, array.id, reason))


@router.post(
    "/projects/{project}/arrays/{name}/retry",
    rule=in_path(Permission.RUN),
    errors=("job-not-found", "project-archived", "policy-refused"),
)
async def retry(
    request: Request, app_state: AppState, project: ProjectPath, name: JobPath
) -> wire.JobListing:
    """Queue all failed and stopped jobs of an array again."""
    await app_state.store.archive.check(project)
    array = await _find(app_state, project, name)
    account = principal_of(request).account or ""
    jobs = app_state.control_plane.jobs
    members = await app_state.store.arrays.members(array.id)
    new = sum(each.job.phase in RETRIED for each in members)
    policies = await app_state.store.policies_of(project)
    async with count_new(app_state, policies, array.user, new, what="retry"):
        return views.array_row(await jobs.retry_array(project, array.id, account))


@router.delete(
    "/projects/{project}/arrays/{name}",
    rule=in_path(Permission.RUN),
    errors=("job-not-found", "job-not-ended", "conflict"),
)
async def remove(app_state: AppState, project: ProjectPath, name: JobPath) -> wire.JobRemoved:
    """Delete all jobs of an array, which must have ended; their bills stay."""
    array = await _find(app_state, project, name)
    try:
        removed = await app_state.control_plane.jobs.remove_array(project, array.id)
    except TooLate as error:
        hint = f"stop the array with `cavvy stop {named(array)}`, then remove it"
        raise ApiProblem("job-not-ended", str(error), hint) from error
    return wire.JobRemoved(freed_bytes=removed.bytes, kept=removed.kept)


async def _count_to_now(
    app_state: AppState, arrays: Sequence[StoredArray]
) -> Sequence[StoredArray]:
    """Return the arrays with what their running jobs have cost by now."""
    running = sorted({each.project for each in arrays if each.counts.keys() - JOB_ENDS})
    more = await read_unwritten(app_state.store, running, app_state.now())
    added = Counter[str]()
    for job in await app_state.store.find_jobs(list(more)):
        if job.array_id is not None:
            added[job.array_id] += more[job.id].micros
    return [replace(each, spent_micros=each.spent_micros + added[each.id]) for each in arrays]


async def _find(app_state: AppState, project: str, name: str) -> StoredArray:
    try:
        return await app_state.store.arrays.find(project, name)
    except RowNotFound as error:
        raise ApiProblem("job-not-found", str(error)) from error
