"""The task: a description of the work that a user wants to run. The module `spec` reads tasks from
files; all other modules use the tasks.
"""

import dataclasses
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from math import ceil
from typing import Any

from cavvy.domain.elastic import NodeRange
from cavvy.domain.services import (
    ReadinessProbe,
    ReplicaCount,
    ReplicaRole,
    RouterApi,
    ServiceSpec,
)
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import Struct, field, replace

Scalar = str | int | float | bool
# CPUs that each node of a task holds on a shared host if the task requests no size
DEFAULT_CPUS = 1.0
LABEL_PATTERN = r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,251}[A-Za-z0-9])?"  # of labels of nodes
URL_SCHEMES = (
    "s3",
    "gs",
    "az",
    "sftp",
    "hf",
    "https",
    "http",
)  # schemes of URLs for inputs; outputs support all of them except the last three


class NotifyTarget(StrEnum):
    """Which processes of the work get SIGTERM before the work must end."""

    HANDLERS = "handlers"  # the programs that handle it, but not what serves them
    MAIN = "main"  # what the commands of `run` have started directly
    ALL = "all"


class SpotPolicy(StrEnum):
    """Whether a task may run on preemptible capacity."""

    NEVER = "never"
    AUTO = "auto"
    ONLY = "only"


class AcceleratorNeed(Struct, frozen=True, kw_only=True):
    """One acceptable choice of accelerators on each node; `name` is None for any accelerator.

    Counts are per node, and memory is per accelerator in MiB; all bounds are inclusive. If a memory
    bound is None, there is no limit. `part` is the minimum part of each accelerator: a node that
    has only a fraction of an accelerator fits if `part` is at most this fraction. With `share_mib`,
    the need is this much memory of one accelerator, and `part` is the smallest part that can have
    this memory. `isolated` means that the part must be protected from the work that uses the rest
    of the accelerator.
    """

    name: str | None = None
    count_min: int = 1
    count_max: int | None = None  # None if the count must be exactly `count_min`
    memory_min_mib: int | None = None
    memory_max_mib: int | None = None
    part: float = 1.0
    share_mib: int | None = None
    isolated: bool = False


class Fabric(StrEnum):
    """A network over which nodes exchange data without using their CPUs. A task that requests
    `RDMA` accepts a node with any `Fabric`.
    """

    RDMA = "rdma"
    EFA = "efa"  # AWS Elastic Fabric Adapter
    INFINIBAND = "infiniband"
    ROCE = "roce"  # RDMA over Ethernet, such as OCI's cluster networks
    TCPX = "tcpx"  # Google's GPUDirect-TCPX and TCPXO


class NetworkNeed(Struct, frozen=True, kw_only=True):
    """Requirements on a node's network. For a cloud, the fields also select network resources of
    the user's account by the IDs or names that the provider uses.

    If the user names no resource (None or ()), the provider creates the minimum that it needs.
    """

    min_mbps: int | None = None
    fabric: Fabric | None = None
    vpc: str | None = None
    subnet: str | None = None
    security_groups: tuple[str, ...] = ()
    key: str | None = None  # a key pair that the provider knows
    public_ip: bool | None = (
        None  # whether a node gets a public address; None for the network's default
    )

    @property
    def named(self) -> bool:
        """Whether the user names a network resource, which a provider without networks does not
        have."""
        return (
            bool(self.vpc or self.subnet or self.security_groups or self.key)
            or self.public_ip is not None
        )


class NodeCheck(Struct, frozen=True, kw_only=True):
    """Requirements that each node must meet at boot, before the work starts. If a node fails the
    check, the node is released and its offer is avoided for a while.
    """

    share: float = 0.6  # minimum share of the data-sheet values that each accelerator must reach
    link_mbps: int | None = (
        None  # minimum speed between two nodes; None for `share` of `network.min_mbps`
    )


class ProviderOptions(Struct, frozen=True, kw_only=True):
    """A task's options for one provider, with the provider's own names; other providers ignore
    them.
    """

    provider: str
    values: str  # a JSON object with a value for each option


class ResourceSpec(Struct, frozen=True, kw_only=True):
    """Requirements that each node must meet. Empty tuples and None mean no constraint."""

    instance: str | None = None
    accelerators: tuple[
        AcceleratorNeed, ...
    ] = ()  # acceptable alternatives; () if no accelerator is needed
    cpus_min: float | None = None
    cpus_max: float | None = None
    memory_min_mib: int | None = None
    memory_max_mib: int | None = None
    memory_per_cpu_mib: int | None = None  # minimum memory for each CPU that the node has
    disk_gib: int | None = None
    disk_type: str | None = None
    spot: SpotPolicy = SpotPolicy.NEVER
    providers: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()  # names of regions, or areas such as eu, us or asia
    network: NetworkNeed | None = None
    max_rate: HourlyRate | None = None  # maximum price of one node
    check: NodeCheck | None = None
    options: tuple[ProviderOptions, ...] = ()
    any_of: tuple[
        "ResourceSpec", ...
    ] = ()  # all alternatives, including this one; () if there are no others
    ordered: bool = False  # prefer the first available alternative, not the cheapest
    # names of fields whose values the task does not state: they are the defaults of the tool for
    # which the file was written, and apply only to nodes that are rented
    implied: tuple[str, ...] = ()

    def stated(self) -> "ResourceSpec":
        """Return only the requirements that the task states. They apply to the user's own
        machines.
        """
        if not self.implied:
            return self
        left_out: dict[str, Any] = dict.fromkeys(self.implied)
        return replace(self, **left_out, implied=())

    def least_memory_mib(self, cpus: float) -> int:
        """Return the minimum memory of a node with `cpus` CPUs."""
        return max(self.memory_min_mib or 0, ceil((self.memory_per_cpu_mib or 0) * cpus))

    def uses_accelerators(self, shared: bool) -> bool:
        """Return whether a task uses the accelerators of its node. A task that requests no
        accelerators uses the node's accelerators only if the task names an instance type and does
        not share the node.
        """
        return bool(self.accelerators) or (self.instance is not None and not shared)

    @property
    def choices(self) -> tuple["ResourceSpec", ...]:
        """All acceptable alternatives. The field `any_of` of each alternative contains all
        alternatives."""
        return tuple(
            replace(each, any_of=self.any_of, ordered=self.ordered) for each in self.any_of
        ) or (self,)


class TopologyNeed(Struct, frozen=True, kw_only=True):
    """Which nodes of a gang must or should be close to each other. Nodes that have the same value
    of a label, such as `rack: r1`, are close to each other.

    `same` is the label of which all nodes must have the same value, and `prefer` the label of which
    they have the same value if possible. With `slice`, each group of `slice` neighbours in rank
    must have the same value, and different groups may have different ones; without `same`, this
    applies to `prefer`.
    """

    same: str | None = None
    prefer: str | None = None
    slice: int | None = None


class Workdir(Struct, frozen=True, kw_only=True):
    """The folder in which every attempt runs: a snapshot of a local folder, taken at submission, or
    a commit of a Git repository.
    """

    path: str | None = None
    git: str | None = None
    commit: str | None = None


class MountMode(StrEnum):
    """How the bucket of an input is mounted on the node."""

    MOUNT = "mount"  # data is fetched when the work reads it, and is not kept
    CACHED = "cached"  # the node's disk keeps what the work reads, and what it writes


class Transfer(Struct, frozen=True, kw_only=True):
    """One input or output, which is copied from `source` to `target`.

    An input's target and an output's source are paths that are relative to the working folder or
    absolute. An input's source and an output's target are absolute paths on the node, or URLs with
    one of URL_SCHEMES.
    """

    source: str
    target: str
    # for an input from a URL: whether the work reads the data from a pipe, which is possible only
    # once
    stream: bool = False
    mount: MountMode | None = None  # for an input from a bucket: None copies the data
    writable: bool = False  # for a mounted input: whether the work may change the bucket
    every: timedelta | None = (
        # how often an output is sent to a URL while the work runs; it is sent again when the work
        # has ended, even if it failed
        None
    )
    size_mib: int | None = None  # the size of all files together; None if unknown
    region: str | None = None  # the region of the URL's bucket; None if unknown


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImageBuild:
    """The user's own Dockerfile, from which a node with a container engine builds the image.

    `path` is a folder in the working folder, or "." for the whole working folder. `dockerfile` is
    relative to `path`.
    """

    path: str
    dockerfile: str = "Dockerfile"
    target: str = ""
    args: dict[str, str] = dataclasses.field(default_factory=dict)


class VolumeKind(StrEnum):
    """The kind of storage of a volume."""

    NAMED = "named"  # a volume of the provider, such as a cloud disk or a Kubernetes claim
    HOST = "host"  # an existing folder of the node
    NFS = "nfs"
    FOLDER = "folder"  # a part of the working folder, which is also visible at another path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """Files that are kept independently of jobs. Each node sees the files under `path`, which is
    absolute or in the working folder.

    `source` depends on the kind: the volume's name, a folder of the node, SERVER:/EXPORT, or a path
    in the working folder. `size_gib` and `type` apply to a named volume, which is created if it
    does not exist. If `size_gib` is None and `type` is "", an existing volume of any size or type
    is accepted.
    """

    kind: VolumeKind
    source: str
    path: str  # always absolute for a named volume
    read_only: bool = False
    size_gib: int | None = None
    type: str = ""  # the provider's name of a disk type or storage class
    # False if the volume is created for each attempt and deleted with the attempt
    keep: bool = True
    options: str = ""  # mount options, for NFS


class CheckpointPolicy(Struct, frozen=True, kw_only=True):
    """A folder whose content is kept between attempts, and the interval at which the task writes
    checkpoints to it.
    """

    path: str
    every: timedelta | None = None
    # URL (s3, gs or az) of a bucket that stores the checkpoints instead of the server
    storage: str | None = None
    region: str | None = None  # the region of this bucket; None if unknown
    size_mib: int | None = None  # expected size of one checkpoint
    step: timedelta | None = (
        None  # expected duration of one step of the work; a checkpoint can be saved after each step
    )
    # Cavvy chooses `every` from the cost of a checkpoint and the rate at which nodes are lost.
    auto: bool = False


class JobLimits(Struct, frozen=True, kw_only=True):
    """The limits at which Cavvy must stop the job. `deadline_after` is counted from the
    submission."""

    deadline: datetime | None = None
    deadline_after: timedelta | None = None
    duration: timedelta | None = None  # running time of all attempts together
    budget: Money | None = None
    idle: timedelta | None = None  # time without output or CPU use
    # if above 0, `idle` is time with a GPU use below this percentage, even with busy CPUs
    idle_gpu_percent: float = 0
    stuck: timedelta | None = None  # time without progress of any rank
    unattended: timedelta = timedelta(
        hours=6
    )  # how long a node may continue to work without contact with the control plane (the lease)


class RetryPolicy(Struct, frozen=True, kw_only=True):
    """How often a job is retried at most after each kind of failure. None means without limit.

    `exit_codes` lists the exit codes to retry; () means any non-zero code. `delay` doubles with
    each retry after the same kind of failure, up to an hour.
    """

    preemption: int | None = None
    node: int | None = 3
    exit: int | None = 0
    exit_codes: tuple[int, ...] = ()
    delay: timedelta = timedelta(0)
    # on how many offers the job starts at the same time; the gang that is ready first gets the work
    parallel: int = 1


class LossPolicy(StrEnum):
    """What happens to the other nodes of a gang when it loses a node."""

    REPAIR = "repair"  # they are kept, and only the lost node is replaced
    RESTART = "restart"  # they are released, and the job gets a new gang


class JobSchedule(Struct, frozen=True, kw_only=True):
    """The start of a job: at one time, or repeatedly according to a cron line in a time zone.
    Exactly one of `at` and `cron` is set.
    """

    at: datetime | None = None
    cron: str | None = None
    time_zone: str = "UTC"


class WindowSpan(Struct, frozen=True, kw_only=True):
    """A period on some days of the week (0 is Monday). If `end_minute` is not greater than
    `start_minute`, the period ends on the next day.
    """

    days: tuple[int, ...]
    start_minute: int
    end_minute: int  # minutes since midnight, at most 1440


class StartWindow(Struct, frozen=True, kw_only=True):
    """The times at which a job may start. Cavvy chooses the cheapest time within the periods
    `spans`. `text` is the window as the task file states it.
    """

    spans: tuple[WindowSpan, ...]
    time_zone: str = "UTC"
    text: str = ""


class Workload(Struct, frozen=True, kw_only=True):
    """The amount of work, from which a plan computes how long the work takes.

    The amount of work is stated by `flops`, `samples` or `duration`. `flops` is the total number of
    floating-point operations of the whole job, at `precision`. For `flops`, the plan assumes that
    the speed of a node is its peak speed times `efficiency`. `samples` is the total number of
    samples. `rates` contains the samples per second that were measured on one node; the keys are
    names of accelerators, or "cpu". `duration` is the time of the whole job, with the task's number
    of nodes and the accelerators `measured_on` on each node.
    """

    flops: float | None = None
    precision: str = "bf16"
    efficiency: float = 0.4
    samples: float | None = None
    rates: dict[str, float] = field(default_factory=dict)
    # The factor by which jobs may take longer than `rates` of accelerators state. Plans compare
    # limits with the longer time.
    margin: float = 1.0
    profile: str | None = (
        # path of a work profile, relative to the task file, which contains the rates that are
        # missing in `rates`
        None
    )
    duration: timedelta | None = None
    # The accelerators of a node, such as "A100-80GB:8", or "cpu:16". None means that `duration`
    # applies to every node that fits the task.
    measured_on: str | None = None


class Delivery(StrEnum):
    """The events that a webhook can report."""

    FINISH = "finish"
    FAILURE = "failure"
    BUDGET = "budget"


class WebhookTarget(Struct, frozen=True, kw_only=True):
    """The URL to which a JSON message is posted when the job ends, fails or reaches its budget."""

    url: str
    on: tuple[Delivery, ...] = tuple(Delivery)


class StartCondition(StrEnum):
    """How an earlier job must end, so that a later job starts."""

    SUCCESS = "success"
    FAILURE = "failure"
    ANY = "any"


class JobDependency(Struct, frozen=True):
    """An earlier job, or array of jobs, that a job waits for. `job` is its name or ID as written,
    and `id` its ID, or "" if it has not been looked up.
    """

    job: str
    on: StartCondition = StartCondition.SUCCESS
    id: str = ""


class JobGroup(Struct, frozen=True, kw_only=True):
    """The group to which a job belongs: jobs that start together and know each other's addresses.

    A helper, such as a server for the other jobs, ends `linger` after the last job that is not a
    helper.
    """

    name: str
    helper: bool = False
    linger: timedelta = timedelta(0)
    # whether the job was added to a group that existed already; no other job waits for its nodes
    joins: bool = False


class Objection(Struct, frozen=True):
    """The reason why a provider or an offer cannot run a task, no matter how much capacity is
    free.
    """

    field: str  # the key in the task file that must change, with dots, such as resources.cpu
    reason: str

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}"


class IndexRange(Struct, frozen=True):
    """The indices from `first` to at most `last`, each `step` above the one before."""

    first: int
    last: int
    step: int = 1

    @property
    def indices(self) -> range:
        return range(self.first, self.last + 1, self.step)


class SweptParam(Struct, frozen=True):
    """The values of one parameter in a sweep, and their texts as the user wrote them."""

    name: str
    values: tuple[Scalar, ...]
    texts: tuple[str, ...]


class EarlyStop(Struct, frozen=True, kw_only=True):
    """How jobs of a sweep are stopped early, by successive halving: of the jobs that have reached
    `min_steps`, times a power of `reduction`, only the best one of `reduction` go on.

    `metric` is the name of the value that decides, and `highest` whether its maximum is the best.
    `step` is the name under which the program reports its steps, or "" for the usual names.
    """

    metric: str
    highest: bool = False
    min_steps: int = 1
    reduction: int = 4
    step: str = ""


class SweepSearch(Struct, frozen=True, kw_only=True):
    """How the values of each job of a sweep are chosen when it starts, by the tree-structured
    Parzen estimator (TPE). `metric` and `highest` are those of the sweep, as in `EarlyStop`; equal
    results and an equal `seed` give equal choices.
    """

    metric: str
    highest: bool = False
    seed: int = 0


class ReplicaGroup(Struct, frozen=True, kw_only=True):
    """Replicas of a service that have the same role, and their own number and nodes. Values of None
    are those of the task. `router` matters only for the role ROUTER.
    """

    name: str
    role: ReplicaRole
    replicas: ReplicaCount = ReplicaCount(least=1, most=1)
    router: RouterApi = RouterApi.SGLANG
    run: str | None = None
    setup: str | None = None
    resources: ResourceSpec | None = None
    nodes: int | None = None
    image: str | None = None
    image_signers: tuple[str, ...] = ()  # see the field of the task
    concurrency: int | None = None
    probe: ReadinessProbe | None = None
    # the port at which prefill replicas wait for decode replicas; None: CAVVY_BOOTSTRAP_PORT
    bootstrap_port: int | None = None


# Shares of the devices of a rollout that have the new model after each wave. The first wave is one
# device, as long as there are fewer than 100.
WAVES = (0.0, 0.01, 0.1, 1.0)
MOST_WAVES = 20


class EdgeStep(Struct, frozen=True, kw_only=True):
    """What the server does with a model of devices as the work of a job, which has no node. One of
    `publish`, `deploy` and `collect` is set.

    `publish` names a job of `after`, whose newest checkpoint becomes the next version of `model`.
    `deploy` is MODEL, MODEL@NUMBER or MODEL@LABEL; without a number or label, it is the version
    that an earlier step of the same graph has published, or the newest one. The other attributes
    are those of a rollout. `collect` is a model: the job ends when devices have sent so many
    `samples` since its submission. Files of the model, or all samples, come to the path `into` in
    the working folders of the jobs that wait for this one.
    """

    publish: str = ""
    model: str = ""
    main: str = ""
    residency: str = ""
    deploy: str = ""
    site: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    waves: tuple[float, ...] = ()
    soak: timedelta = timedelta(minutes=10)
    below: float | None = None
    collect: str = ""
    samples: int = 1
    into: str = ""


def find_wrong_waves(waves: Sequence[float]) -> str:
    """Return why these cannot be the waves of a rollout, or ""."""
    given = list(waves)
    right = sorted(given) == given and given[-1:] == [1] and given[0] >= 0
    if not given or (right and len(given) <= MOST_WAVES):
        return ""
    return f"`waves` is {given}; expected up to {MOST_WAVES} growing shares that end with 1"


class StatedNeeds(Struct, frozen=True, kw_only=True):
    """What a task of a pool states itself of the fields that the pool's file completes."""

    resources: ResourceSpec
    image: str | None
    image_login: str | None
    topology: TopologyNeed | None


class TaskSpec(Struct, frozen=True, kw_only=True):
    """One unit of work as its author describes it, after defaults and parameters were filled in."""

    name: str
    project: str = "default"
    run: str
    setup: str | None = None
    setup_uses: tuple[str, ...] | None = (
        None  # the paths in the working folder that the setup can see; None for all of them
    )
    tags: dict[str, str] = field(default_factory=dict)
    priority: int = 0  # -100 to 100; tasks with higher values go first
    params: dict[str, Scalar] = field(default_factory=dict)
    # If `array` or `sweep` is set, the task is submitted as an array of jobs. In `run` and `env`,
    # the expressions of swept parameters are then still to be replaced, see `make_member`.
    array: tuple[IndexRange, ...] = ()
    sweep: tuple[SweptParam, ...] = ()
    parallel: int | None = None  # how many jobs of the array run at once
    best: str = ""  # the metric by which the jobs are compared, with :min or :max
    stop_early: EarlyStop | None = None  # how jobs of the sweep are stopped before their end
    search: SweepSearch | None = None  # None if the sweep has a job for each combination of values
    trials: int | None = None  # the number of jobs of a sweep with `search`
    after: tuple[JobDependency, ...] = ()  # the jobs that end before the task starts
    group: JobGroup | None = None  # the jobs that start together with the task
    resources: ResourceSpec = ResourceSpec()
    nodes: int = 1
    # The numbers of nodes on which the task may run; None if only on `nodes`. While an elastic job
    # waits, `nodes` is the least of them; when it starts, `nodes` becomes the number that it got.
    elastic: NodeRange | None = None
    topology: TopologyNeed | None = None  # None if the nodes may be anywhere in one location
    encrypt: bool = False  # whether the traffic between the nodes is encrypted
    image: str | None = None
    image_build: ImageBuild | None = None  # how to build the image; cannot be combined with `image`
    # name of a secret with the login for the image's registry, in the form USER:PASSWORD
    image_login: str | None = None
    # fingerprints of the keys whose signature of the image the server has verified; no task file
    # can set them
    image_signers: tuple[str, ...] = ()
    workdir: Workdir | None = None
    env: dict[str, str] = field(default_factory=dict)
    # names of secrets; each secret's value is set as an environment variable with the secret's name
    secrets: tuple[str, ...] = ()
    inputs: tuple[Transfer, ...] = ()
    outputs: tuple[Transfer, ...] = ()
    volumes: tuple[Volume, ...] = ()
    checkpoint: CheckpointPolicy | None = None
    limits: JobLimits = JobLimits()
    retry: RetryPolicy = RetryPolicy()
    on_loss: LossPolicy = LossPolicy.REPAIR  # matters only to gangs of more than one node
    schedule: JobSchedule | None = None
    window: StartWindow | None = None
    work: Workload | None = None
    webhooks: tuple[WebhookTarget, ...] = ()
    grace: timedelta = timedelta(seconds=10)  # time between SIGTERM and SIGKILL
    notify: NotifyTarget = NotifyTarget.HANDLERS
    keep: timedelta = timedelta(
        0
    )  # how long the nodes are kept, and billed, for the project's next job
    # whether this is interactive work, which counts as successful when it ends because it is idle
    session: bool = False
    machine: str | None = None  # name of the machine that the task runs on, see `NamedMachine`
    pool: str | None = None  # name of the pool whose nodes the task uses, see `NodePool`
    stated: StatedNeeds | None = None  # None unless the file of its pool has completed the task
    service: ServiceSpec | None = None  # how the task answers requests; None for a job
    replica_groups: tuple[ReplicaGroup, ...] = ()  # () if all replicas of the service are equal
    edge: EdgeStep | None = None  # what the server does in place of a program

    @property
    def on_kept_nodes(self) -> bool:
        """Whether the nodes belong to a machine or a pool, which other work uses afterwards."""
        return self.machine is not None or self.pool is not None


def count_all(groups: Sequence[ReplicaGroup]) -> ReplicaCount:
    """Return the number of replicas of all groups together. The service can have none if this is
    so for each group except the router.
    """
    sleeps = can_sleep(groups)
    least = 0 if sleeps else sum(max(1, each.replicas.least) for each in groups)
    return ReplicaCount(least=least, most=sum(each.replicas.most for each in groups))


def can_sleep(groups: Sequence[ReplicaGroup]) -> bool:
    """Return whether the service has no replicas while it gets no requests."""
    return not any(each.replicas.least for each in groups if each.role is not ReplicaRole.ROUTER)


# the objectives that only replicas of another role can keep
_OTHERS_GOALS = {
    ReplicaRole.ROUTER: ("ttft", "token_gap"),
    ReplicaRole.PREFILL: ("token_gap",),
    ReplicaRole.DECODE: ("ttft",),
}
# of SGLang's router: answered also while the router has no workers
_ROUTER_PROBE = ReadinessProbe(path="/liveness")


def find_router(task: TaskSpec) -> ReplicaGroup | None:
    """Return the group of the routers. A service with routers has one such group, and its replicas
    must reach each other over a network.
    """
    return next((each for each in task.replica_groups if each.role is ReplicaRole.ROUTER), None)


def has_api(group: ReplicaGroup) -> bool:
    """Return whether Cavvy adds workers to the routers of this group."""
    return group.role is ReplicaRole.ROUTER and group.router is RouterApi.SGLANG


def take_role(task: TaskSpec, group: ReplicaGroup) -> TaskSpec:
    """Return the task of the replicas of a group, as if the service consisted only of them."""
    assert task.service is not None
    stated: dict[str, Any] = {
        name: value
        for name in ("run", "setup", "resources", "nodes")
        if (value := getattr(group, name)) is not None
    }
    if group.resources is not None:
        stated["resources"] = _keep_regions(group.resources, task.resources)
    if group.image is not None:
        stated |= {
            "image": group.image,
            "image_build": None,
            "image_signers": group.image_signers,
        }
    if group.setup is not None:
        stated["setup_uses"] = None
    spec = replace(
        task.service,
        replicas=group.replicas,
        concurrency=group.concurrency or task.service.concurrency,
        slo=replace(task.service.slo, **dict.fromkeys(_OTHERS_GOALS.get(group.role, ()))),
        probe=group.probe or (_ROUTER_PROBE if has_api(group) else task.service.probe),
    )
    return replace(task, service=spec, **stated)


def _keep_regions(needs: ResourceSpec, of_task: ResourceSpec) -> ResourceSpec:
    """Return what a group needs, in the regions of its task if it names none."""
    theirs = [each.regions for each in of_task.choices]
    if not all(theirs) or any(each.regions for each in needs.choices):
        return needs
    regions = tuple(dict.fromkeys(name for names in theirs for name in names))
    choices = tuple(replace(each, regions=regions) for each in needs.any_of)
    return replace(needs, regions=regions, any_of=choices)


def list_missing(task: TaskSpec, known: Collection[str]) -> Sequence[str]:
    """Return the names of the task's secrets that are not in `known`."""
    return [name for name in list_secrets(task) if name not in known]


def list_secrets(task: TaskSpec) -> Sequence[str]:
    """Return the names of the secrets that the task needs, each once."""
    named = [*task.secrets, *([task.image_login] if task.image_login else [])]
    if task.service is not None:
        named += [each.secret for each in task.service.webhooks]
        apis = (each.api for each in task.service.fallbacks)
        named += [each.secret for each in apis if each is not None and each.secret]
        named += [each.secret for each in task.service.edge if each.secret]
    return list(dict.fromkeys(named))


def explain_missing(project: str, missing: Sequence[str]) -> tuple[str, str]:
    """Return the message about secrets that a project does not have, and the hint."""
    commands = "; ".join(f"cavvy secret set {name} -p {project}" for name in missing)
    return f"project {project} has no secret {', '.join(missing)}", f"set it with: {commands}"
