"""What is sent about the nodes that other clusters order from pools."""

from collections.abc import Sequence

from cavvy.client.client import ApiClient
from cavvy.client.paths import project_path, segment
from cavvy.client.wire import Answer, Ask


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
