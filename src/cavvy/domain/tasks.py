"""The task: the work that a user wants to run. The spec module parses it from a file; all other
modules use it.
"""

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from math import ceil

from cavvy.domain.units import HourlyRate, Money

Scalar = str | int | float | bool
DEFAULT_CPUS = 1.0  # CPUs that each node of a task without a size holds on a shared host
URL_SCHEMES = (
    "s3",
    "gs",
    "az",
    "sftp",
    "https",
    "http",
)  # schemes for inputs; outputs support all but the last two


class SpotPolicy(StrEnum):
    """Whether a task may run on preemptible capacity."""

    NEVER = "never"
    AUTO = "auto"
    ONLY = "only"


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorNeed:
    """One acceptable choice of accelerators on each node; `name` is None for any accelerator.

    Counts are per node, and memory is per accelerator in MiB; all bounds are inclusive. A memory
    bound of None means no limit. `part` is the minimum part of each accelerator; a node with a
    fraction of an accelerator fits only if `part` is at most this fraction.
    """

    name: str | None = None
    count_min: int = 1
    count_max: int | None = None  # None if the count must be exactly `count_min`
    memory_min_mib: int | None = None
    memory_max_mib: int | None = None
    part: float = 1.0


class Fabric(StrEnum):
    """A network over which nodes exchange data without their CPUs. Only `RDMA` is a group: a
    request for it accepts every other member.
    """

    RDMA = "rdma"
    EFA = "efa"  # AWS Elastic Fabric Adapter
    INFINIBAND = "infiniband"
    ROCE = "roce"  # RDMA over Ethernet, such as OCI's cluster networks
    TCPX = "tcpx"  # Google's GPUDirect-TCPX and TCPXO


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkNeed:
    """Requirements on a node's network. On clouds, also the user's own network resources, by the
    provider's ids or names.

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
        """Whether the user names something that a provider without networks does not have."""
        return (
            bool(self.vpc or self.subnet or self.security_groups or self.key)
            or self.public_ip is not None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCheck:
    """Requirements that each node must meet at boot, before the work starts. A node that fails them
    is released and avoided.
    """

    share: float = 0.6  # minimum share of the data sheet's values that each accelerator must reach
    link_mbps: int | None = (
        None  # minimum speed between two nodes; None for `share` of `network.min_mbps`
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderOptions:
    """A task's options for one provider, in that provider's own terms; other providers ignore
    them.
    """

    provider: str
    values: str  # a JSON object with a value for each option


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
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
    regions: tuple[str, ...] = ()  # region names or areas such as eu, us, asia
    network: NetworkNeed | None = None
    max_rate: HourlyRate | None = None  # maximum price of one node
    check: NodeCheck | None = None
    options: tuple[ProviderOptions, ...] = ()
    any_of: tuple[
        "Resources", ...
    ] = ()  # all alternatives including this one; () if there is only this one
    ordered: bool = False  # prefer the first available alternative, not the cheapest

    def least_memory_mib(self, cpus: float) -> int:
        """The minimum memory of a node with that many CPUs."""
        return max(self.memory_min_mib or 0, ceil((self.memory_per_cpu_mib or 0) * cpus))

    def uses_accelerators(self, shared: bool) -> bool:
        """Whether a task computes on the accelerators of its node. A task that requests no
        accelerators computes on them only if it names an instance type and does not share the node.
        """
        return bool(self.accelerators) or (self.instance is not None and not shared)

    @property
    def choices(self) -> tuple["Resources", ...]:
        """All acceptable alternatives, each with the whole list in `any_of`."""
        return tuple(
            replace(each, any_of=self.any_of, ordered=self.ordered) for each in self.any_of
        ) or (self,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workdir:
    """The folder that every attempt runs in: a local folder frozen at submit, or a git URL at a
    commit.
    """

    path: str | None = None
    git: str | None = None
    commit: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One input or output: copy `source` to `target`.

    One end is a path relative to the working folder. The other end is an absolute path on the node,
    or a URL with one of URL_SCHEMES.
    """

    source: str
    target: str
    stream: bool = False  # for an input from a URL: the work reads the input once, from a pipe
    every: timedelta | None = (
        None  # interval for sending an output to a URL; it is sent again after work of any outcome
    )
    size_mib: int | None = None  # the size of all files together; None if unknown
    region: str | None = None  # the region of the URL's bucket; None if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBuild:
    """The user's own Dockerfile, from which a node with a container engine builds the image.

    `path` is a folder in the frozen working folder, or "." for all of it; `dockerfile` is relative
    to `path`.
    """

    path: str
    dockerfile: str = "Dockerfile"
    target: str = ""
    args: dict[str, str] = field(default_factory=dict)


class VolumeKind(StrEnum):
    """Where the files of a volume are stored."""

    NAMED = "named"  # a volume of the provider, such as a cloud disk or a Kubernetes claim
    HOST = "host"  # an existing folder of the node
    NFS = "nfs"
    FOLDER = "folder"  # a part of the working folder, also mounted at another path


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """Files that outlive jobs. Each node sees them under `path`, which is absolute or within the
    working folder.

    `source` is, by kind, the volume's name, a folder of the node, SERVER:/EXPORT, or a path within
    the working folder. Size and type are for a named volume, which is created if it does not exist;
    None and "" accept an existing volume with any size or type.
    """

    kind: VolumeKind
    source: str
    path: str  # absolute for a named volume
    read_only: bool = False
    size_gib: int | None = None
    type: str = ""  # the provider's own name of a disk type or storage class
    keep: bool = True  # False if the volume is created for each attempt and removed with it
    options: str = ""  # mount options, for NFS


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """A folder that outlives attempts, and how often the task intends to write a checkpoint into
    it.
    """

    path: str
    every: timedelta | None = None
    # URL (s3, gs or az) of a bucket that keeps the checkpoints instead of the server
    storage: str | None = None
    size_mib: int | None = None  # expected size of one checkpoint
    step: timedelta | None = (
        None  # expected duration of one step of the work; a save is possible after each step
    )
    # Cavvy chooses `every` from a checkpoint's cost and the rate at which nodes are lost.
    auto: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits at which Cavvy must stop the job. `deadline_after` starts at the submission."""

    deadline: datetime | None = None
    deadline_after: timedelta | None = None
    duration: timedelta | None = None  # running time of all attempts together
    budget: Money | None = None
    idle: timedelta | None = None  # time without output or CPU use
    unattended: timedelta = timedelta(
        hours=6
    )  # how long a node works without contact with the control plane (the lease)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How often each kind of failure is retried; None means without limit.

    `exit_codes` lists the exit codes to retry; () means any non-zero code. `delay` doubles with
    each retry of a kind, up to an hour.
    """

    preemption: int | None = None
    node: int | None = 3
    exit: int | None = 0
    exit_codes: tuple[int, ...] = ()
    delay: timedelta = timedelta(0)
    parallel: int = 1  # number of offers tried at the same time; the first ready gang gets the work


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When to start: at one time, or by a cron line in a time zone. Exactly one of `at` and `cron`
    is set.
    """

    at: datetime | None = None
    cron: str | None = None
    time_zone: str = "UTC"


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSpan:
    """A period on some days of the week (0 is Monday). If its end is not later than its start, it
    ends on the next day.
    """

    days: tuple[int, ...]
    start_minute: int
    end_minute: int  # minutes of a day, at most 1440


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWindow:
    """When a job may start. Within these periods, Cavvy chooses the cheapest time. `text` is the
    text in the task file.
    """

    spans: tuple[WindowSpan, ...]
    time_zone: str = "UTC"
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The amount of work, so that a plan can state how long it takes.

    Either `flops` (total floating-point operations of the whole job, at `precision` and with the
    share `efficiency` of peak), or `samples` with `rates` (samples per second measured on one node,
    by the name of its accelerator, or "cpu"), or `duration` (of the whole job, on as many nodes as
    the task has, each with the accelerators `measured_on`).
    """

    flops: float | None = None
    precision: str = "bf16"
    efficiency: float = 0.4
    samples: float | None = None
    rates: dict[str, float] = field(default_factory=dict)
    profile: str | None = (
        None  # file of a work profile, relative to the task file, with the rates that `rates` lacks
    )
    duration: timedelta | None = None
    # A node's accelerators such as "A100-80GB:8", or "cpu:16". None means that the duration is
    # valid for every node that fits the task.
    measured_on: str | None = None


class Delivery(StrEnum):
    """The events that a webhook can report."""

    FINISH = "finish"
    FAILURE = "failure"
    BUDGET = "budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """The address to which a JSON event is posted when the job ends, fails or reaches its
    budget."""

    url: str
    on: tuple[Delivery, ...] = tuple(Delivery)


@dataclass(frozen=True, slots=True)
class Objection:
    """Why a provider or an offer cannot run a task, regardless of free capacity."""

    field: str  # the dotted key in the task file that must change
    reason: str

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One unit of work as described by its author, with defaults and parameters filled in."""

    name: str
    project: str = "default"
    run: str
    setup: str | None = None
    setup_uses: tuple[str, ...] | None = (
        None  # the part of the working folder that the setup can see; None for all of it
    )
    tags: dict[str, str] = field(default_factory=dict)
    priority: int = 0  # -100 to 100; tasks with higher values go first
    params: dict[str, Scalar] = field(default_factory=dict)
    resources: Resources = Resources()
    nodes: int = 1
    image: str | None = None
    image_build: ImageBuild | None = None  # how to build the image; cannot be combined with `image`
    image_login: str | None = None  # name of a secret: USER:PASSWORD for the image's registry
    workdir: Workdir | None = None
    env: dict[str, str] = field(default_factory=dict)
    # names of secrets; each value is set as an environment variable of the same name
    secrets: tuple[str, ...] = ()
    inputs: tuple[Transfer, ...] = ()
    outputs: tuple[Transfer, ...] = ()
    volumes: tuple[Volume, ...] = ()
    checkpoint: CheckpointPolicy | None = None
    limits: Limits = Limits()
    retry: Retry = Retry()
    schedule: Schedule | None = None
    window: StartWindow | None = None
    work: Workload | None = None
    webhooks: tuple[Webhook, ...] = ()
    grace: timedelta = timedelta(seconds=10)  # grace period between SIGTERM and SIGKILL
    keep: timedelta = timedelta(
        0
    )  # how long the nodes are kept, and billed, for the project's next job
    session: bool = False  # interactive work, which ends with success when it is idle
    machine: str | None = None  # name of the machine that the task runs on, see `NamedMachine`
