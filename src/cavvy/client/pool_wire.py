"""Request and response types of the routes for pools, and the client functions for them."""

from collections.abc import Sequence
from datetime import datetime

from cavvy.client.client import ApiClient
from cavvy.client.paths import project_path, query, segment
from cavvy.client.wire import Answer, Ask


class PoolAsk(Ask, frozen=True, kw_only=True):
    """The text of a pool's file. `path` is the file's name, for messages. `consent` allows nodes
    that cost money."""

    text: str
    path: str = "pool.yaml"
    user: str = ""
    consent: bool = False


class PoolView(Answer, frozen=True, kw_only=True):
    """A pool. `state` is open, closed or stopped; a closed pool opens at `opens_at`.

    `nodes` counts its nodes, of which `idle` have no work, `starting` are not ready yet, and
    `leaving` are being removed. `rate_micros_per_hour` is the price of all of them, and
    `spent_micros` what they have cost so far. `problem` states why no node can be started now, or
    why a node of the minimum could not be started. `text` is the pool's file. `join` is set if the
    nodes belong to another cluster.
    """

    name: str
    project: str
    user: str
    state: str
    opens_at: datetime | None
    min: int
    max: int
    nodes: int
    idle: int
    starting: int
    leaving: int
    running_jobs: int
    waiting_jobs: int
    idle_s: float
    spot_share: float
    hours: str
    rate_micros_per_hour: int
    spent_micros: int
    problem: str
    text: str
    join: str = ""


class PoolShapeView(Answer, frozen=True, kw_only=True):
    """What every node that the pool can have now has at least. `gpu` is "" without GPUs. Amounts
    are 0 if neither the pool's file nor an offer tells them. `labels` are those of a node of
    Kubernetes. `rate_micros_per_hour` is the lowest
    price of a node."""

    cpus: int
    memory_mib: int
    gpus: int
    gpu: str
    architecture: str
    labels: dict[str, str]
    rate_micros_per_hour: int


class ClusterNodesAsk(Ask, frozen=True, kw_only=True):
    """The names of nodes that another cluster orders or releases."""

    nodes: list[str]


class ClusterNodeView(Answer, frozen=True, kw_only=True):
    """A node that another cluster has ordered from a pool. `state` is waiting, starting, running,
    leaving or ended, and `reason` explains it. `offer` is "" while no machine was found."""

    name: str
    provider_id: str
    job: str
    state: str
    reason: str
    offer: str
    rate_micros_per_hour: int


def list_pools(client: ApiClient, project: str | None = None) -> list[PoolView]:
    """Return the pools of a project or, if `project` is None, of all projects."""
    return client.ask(f"/v1/pools{query(project=project)}", list[PoolView])


def read_pool(client: ApiClient, project: str, name: str) -> PoolView:
    """Return one pool. Raises ApiError."""
    return client.ask(_path(project, name), PoolView)


def apply_pool(client: ApiClient, project: str, ask: PoolAsk) -> PoolView:
    """Create the pool that the file describes, or change it. Raises ApiError."""
    return client.ask(f"{project_path(project)}/pools", PoolView, ask)


def delete_pool(client: ApiClient, project: str, name: str) -> None:
    """Remove a pool without unfinished jobs. Raises ApiError."""
    client.call("DELETE", _path(project, name))


def read_shape(client: ApiClient, project: str, name: str) -> PoolShapeView:
    """Return what every node of the pool has at least. Raises ApiError."""
    return client.ask(f"{_path(project, name)}/shape", PoolShapeView)


def list_cluster_nodes(client: ApiClient, project: str, name: str) -> list[ClusterNodeView]:
    """Return the nodes that another cluster has ordered from the pool. Raises ApiError."""
    return client.ask(f"{_path(project, name)}/nodes", list[ClusterNodeView])


def order_nodes(
    client: ApiClient, project: str, name: str, nodes: Sequence[str]
) -> list[ClusterNodeView]:
    """Start these nodes for another cluster, and return all nodes that it has. Raises ApiError."""
    ask = ClusterNodesAsk(nodes=list(nodes))
    return client.ask(f"{_path(project, name)}/nodes", list[ClusterNodeView], ask)


def release_nodes(
    client: ApiClient, project: str, name: str, nodes: Sequence[str]
) -> list[ClusterNodeView]:
    """Give these nodes back, and return the nodes that are left. Raises ApiError."""
    ask = ClusterNodesAsk(nodes=list(nodes))
    return client.ask(f"{_path(project, name)}/nodes/release", list[ClusterNodeView], ask)


def _path(project: str, name: str) -> str:
    return f"{project_path(project)}/pools/{segment('pool', name)}"
