"""Request and response types of the routes for pools, and the client functions for them."""

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


def _path(project: str, name: str) -> str:
    return f"{project_path(project)}/pools/{segment('pool', name)}"
