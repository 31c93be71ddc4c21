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
from cavvy.api.routes.submission import check_pool, list_pool_offers
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path, in_query, name_user, principal_of
from cavvy.client import pool_wire as wire
from cavvy.control.decide.node_pools import make_node_labels, make_provider_id
from cavvy.control.decide.requests import is_stopping
from cavvy.control.node_pools import ClusterNodeStatus, NotOfCluster, PoolInUse, PoolStatus
from cavvy.domain.accounts import Permission
from cavvy.domain.jobs import JOB_ENDS, AttemptPhase, JobPhase
from cavvy.domain.node_pools import MOST_NODES, NodePool
from cavvy.domain.values import replace
from cavvy.spec.fields.kinds import WrongValue, check_slug
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


@router.get(
    "/projects/{project}/pools/{name}/shape",
    rule=in_path(Permission.VIEW),
    when={RowNotFound: "pool-not-found"},
)
async def get_shape(
    app_state: AppState, project: ProjectPath, name: PoolPath
) -> wire.PoolShapeView:
    """Get what each node that the pool can have now has at least."""
    pool = await app_state.store.node_pools.get(project, name)
    need = pool.resources.choices[0]
    wanted = need.accelerators[0] if need.accelerators else None
    offers = await list_pool_offers(app_state, pool, app_state.now())
    return wire.PoolShapeView(
        cpus=int(min((each.vcpus for each in offers), default=need.cpus_min or 0)),
        memory_mib=min((each.memory_mib for each in offers), default=need.memory_min_mib or 0),
        gpus=min(
            (each.accelerator_count for each in offers),
            default=wanted.count_min if wanted else 0,
        ),
        gpu=next((each.accelerator or "" for each in offers), (wanted and wanted.name) or ""),
        architecture=next((each.architecture for each in offers), ""),
        labels=dict(make_node_labels(pool)),
        rate_micros_per_hour=min((each.rate.micros_per_hour for each in offers), default=0),
    )


@router.get(
    "/projects/{project}/pools/{name}/nodes",
    rule=in_path(Permission.VIEW),
    when={RowNotFound: "pool-not-found"},
)
async def list_nodes(
    app_state: AppState, project: ProjectPath, name: PoolPath
) -> list[wire.ClusterNodeView]:
    """List the nodes that another cluster has ordered from the pool."""
    pool = await app_state.store.node_pools.get(project, name)
    nodes = await app_state.control_plane.node_pools.list_nodes(pool)
    return [_view_node(pool, each) for each in nodes]


@router.post(
    "/projects/{project}/pools/{name}/nodes",
    rule=in_path(Permission.OPERATE),
    when={RowNotFound: "pool-not-found", NotOfCluster: "pool-unfit"},
)
async def order_nodes(
    app_state: AppState, project: ProjectPath, name: PoolPath, ask: wire.ClusterNodesAsk
) -> list[wire.ClusterNodeView]:
    """Start nodes, which another cluster names, and return all nodes that it has ordered."""
    await app_state.store.archive.check(project)
    if len(ask.nodes) > MOST_NODES:
        raise ApiProblem("invalid-request", f"{len(ask.nodes):,} nodes are too many")
    for each in ask.nodes:
        _check_node(each)
    await app_state.control_plane.node_pools.order_nodes(project, name, ask.nodes)
    return await list_nodes(app_state, project, name)


@router.post(
    "/projects/{project}/pools/{name}/nodes/release",
    rule=in_path(Permission.OPERATE),
    when={RowNotFound: "pool-not-found"},
)
async def release_nodes(
    app_state: AppState, project: ProjectPath, name: PoolPath, ask: wire.ClusterNodesAsk
) -> list[wire.ClusterNodeView]:
    """Give nodes of another cluster back, and return the nodes that are left."""
    await app_state.control_plane.node_pools.release_nodes(project, name, ask.nodes)
    return await list_nodes(app_state, project, name)


def _check_node(name: str) -> None:
    try:
        check_slug(name)
    except WrongValue as error:
        raise ApiProblem("invalid-request", f"the name of a node: {error}") from error


def _view_node(pool: NodePool, status: ClusterNodeStatus) -> wire.ClusterNodeView:
    node, job, attempt = status.node, status.job, status.attempt
    open_ = attempt is not None and attempt.phase is not AttemptPhase.ENDED
    if node.problem or (job is not None and job.phase in JOB_ENDS):
        state = "ended"
    elif job is not None and is_stopping(job):
        state = "leaving"
    elif job is None or not open_:
        state = "waiting"
    else:
        state = "running" if job.phase is JobPhase.RUNNING else "starting"
    return wire.ClusterNodeView(
        name=node.name,
        provider_id=make_provider_id(pool, node.name),
        job=job.name if job else "",
        state=state,
        reason=node.problem or (job.reason if job else ""),
        offer=attempt.offer.key if attempt is not None and open_ else "",
        rate_micros_per_hour=attempt.offer.rate.micros_per_hour if attempt and open_ else 0,
    )


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
