"""Elastic pools: nodes that a project's jobs share and that are added and removed with the work."""

from collections.abc import Mapping
from datetime import datetime, timedelta

from cavvy.domain.tasks import ResourceSpec, StartWindow
from cavvy.domain.values import Struct, field

# How long a node without work stays if the pool does not say: the default of
# --scale-down-unneeded-time of the cluster autoscaler of Kubernetes.
USUAL_IDLE = timedelta(minutes=10)
MOST_NODES = 10_000  # as many as one job may have
MOST_LABELS = 16
POOL_TAG = "cavvy-pool"  # the tag of the jobs that start the nodes of a pool's minimum
# The tag of the jobs that are nodes of another cluster, with the name of the node.
CLUSTER_NODE_TAG = "cavvy-cluster-node"


class OrderedNode(Struct, frozen=True, kw_only=True):
    """A node that another cluster has ordered from a pool, and the job that runs `join` on it.
    `problem` states why the job has ended; the node stays listed until it is released or ordered
    again."""

    name: str
    job_id: str
    problem: str = ""


class NodePool(Struct, frozen=True, kw_only=True):
    """A pool: a name in a project, the nodes that it may have, and how many.

    Each gang that runs a job of the pool, or is kept after such a job, is part of the pool. The
    pool has at most `max_nodes` nodes, and at least `min_nodes` while it is open. `spot_share` is
    the highest fraction of spot nodes among the nodes that are not reserved. `hours` are the times
    at which the pool is open; None means always.

    If `join` is set, the pool has no jobs of users: its nodes belong to another cluster (Slurm or
    Kubernetes), which orders and releases them by name. Each node runs `join`, which may use the
    project's `secrets`, until it is released.

    All nodes of the pool have its `labels`, such as {"rack": "r1"}: a task whose `topology` names
    one of them finds nodes with the same value, and nodes of another cluster join with them.

    The other fields change while the pool works. `ordered` contains the IDs of jobs that start
    nodes of the minimum, `members` the nodes that the other cluster has ordered. `problem` states
    why the last of the jobs in `ordered` failed, and no other one is ordered before `retry_at`. A
    stopped pool starts nothing until it is applied again.
    """

    project: str
    name: str
    resources: ResourceSpec
    image: str | None = None  # the container image of jobs that name none
    image_login: str | None = None  # as in a task
    min_nodes: int = 0
    max_nodes: int
    idle: timedelta = USUAL_IDLE
    spot_share: float = 0.0
    hours: StartWindow | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    join: str = ""
    secrets: tuple[str, ...] = ()
    user: str = ""
    account: str = ""  # the account that applied the pool; "" for the owner of the server
    consented: bool = False  # the user agreed to pay for the pool's nodes
    text: str = ""  # the pool's file as it was applied
    ordered: tuple[str, ...] = ()
    members: tuple[OrderedNode, ...] = ()
    problem: str = ""
    retry_at: datetime | None = None
    stopped: bool = False
    version: int = 0
