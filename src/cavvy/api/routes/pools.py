"""Routes for elastic pools: apply, list, show and remove pools."""

from asyncio import to_thread
from typing import Annotated

from fastapi import Path
from msgspec import structs
from starlette.requests import Request

from cavvy.api.app_state import AppState
from cavvy.api.audit import note_change
from cavvy.api.errors import ApiProblem
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.routes.submission import check_pool
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path, in_query, name_user, principal_of
from cavvy.client import pool_wire as wire
from cavvy.control.node_pools import PoolInUse, PoolStatus
from cavvy.domain.accounts import Permission
from cavvy.domain.jobs import AttemptPhase
from cavvy.domain.values import replace
from cavvy.spec.problems import SpecError
from cavvy.store.base import ProjectFilter, RowNotFound
from cavvy.task_files.pools import read_pool

router = RouteGroup("pools", prefix="/v1")
PoolPath = Annotated[str, Path(max_length=63)]
_STARTING = (AttemptPhase.LAUNCHING, AttemptPhase.BOOTING)


@router.get("/pools", rule=in_query(Permission.VIEW))
async def list_all(app_state: AppState, projects: ProjectFilter) -> list[wire.PoolView]:
    """List the pools."""
    return [_view(each) for each in await app_state.control_plane.node_pools.list(projects)]


@router.get(
    "/projects/{project}/pools/{name}",
    rule=in_path(Permission.VIEW),
    when={RowNotFound: "pool-not-found"},
)
async def get(app_state: AppState, project: ProjectPath, name: PoolPath) -> wire.PoolView:
    """Get one pool."""
    return _view(await app_state.control_plane.node_pools.get(project, name))


@router.post(
    "/projects/{project}/pools",
    rule=in_path(Permission.OPERATE),
    errors=("invalid-pool", "consent-needed"),
)
async def apply(
    request: Request, app_state: AppState, project: ProjectPath, ask: wire.PoolAsk
) -> wire.PoolView:
    """Create the pool that the file describes, or change the pool of this name."""
    try:
        async with app_state.parsing:
            pool = await to_thread(read_pool, ask.text, file=ask.path, project=project)
    except SpecError as error:
        raise ApiProblem("invalid-pool", str(error)) from error
    await app_state.store.archive.check(project)
    problem = await check_pool(app_state, pool, app_state.now(), consented=ask.consent)
    account, user = principal_of(request).account or "", name_user(request, ask.user)
    pool = replace(pool, user=user, account=account, consented=ask.consent)
    note_change(request, after={"pool": pool.name, "min": pool.min_nodes, "max": pool.max_nodes})
    pools = app_state.control_plane.node_pools
    stored = await pools.apply(pool)
    shown = _view(await pools.get(project, stored.name))
    return structs.replace(shown, problem=problem)


@router.delete(
    "/projects/{project}/pools/{name}",
    rule=in_path(Permission.OPERATE),
    when={RowNotFound: "pool-not-found", PoolInUse: "pool-in-use"},
)
async def delete(app_state: AppState, project: ProjectPath, name: PoolPath) -> None:
    """Remove a pool, whose idle nodes are then removed."""
    await app_state.control_plane.node_pools.remove(project, name)


def _view(status: PoolStatus) -> wire.PoolView:
    pool, gangs = status.pool, status.gangs
    leaving = sum(each.nodes for each in gangs if each.leaving)
    starting = [each for each in status.attempts if each.phase in _STARTING]
    rates = (each.offer.rate.times(each.nodes) for each in status.attempts)
    return wire.PoolView(
        name=pool.name,
        project=pool.project,
        user=pool.user,
        state="stopped" if pool.stopped else "open" if status.opens_at is None else "closed",
        opens_at=status.opens_at,
        min=pool.min_nodes,
        max=pool.max_nodes,
        nodes=sum(each.nodes for each in gangs),
        idle=sum(each.nodes for each in gangs if each.idle_since is not None),
        starting=sum(each.nodes for each in starting),
        leaving=leaving,
        running_jobs=status.running,
        waiting_jobs=status.waiting,
        idle_s=pool.idle.total_seconds(),
        spot_share=pool.spot_share,
        hours=pool.hours.text if pool.hours else "",
        rate_micros_per_hour=sum(each.micros_per_hour for each in rates),
        spent_micros=status.spent.micros,
        problem=pool.problem,
        text=pool.text,
        join=pool.join,
    )
