"""Routes for other clusters, which order nodes from pools."""

from cavvy.api.app_state import AppState
from cavvy.api.errors import ApiProblem
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.routes.pools import PoolPath
from cavvy.api.routes.submission import list_pool_offers
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path
from cavvy.capabilities.clusters import wire
from cavvy.control.decide.node_pools import make_node_labels, make_provider_id
from cavvy.control.decide.requests import is_stopping
from cavvy.control.node_pools import ClusterNodeStatus, NotOfCluster
from cavvy.domain.accounts import Permission
from cavvy.domain.jobs import JOB_ENDS, AttemptPhase, JobPhase
from cavvy.domain.node_pools import MOST_NODES, NodePool
from cavvy.spec.fields.kinds import WrongValue, check_slug
from cavvy.store.base import RowNotFound

router = RouteGroup("pools", prefix="/v1")


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
