"""The task: the work that a user wants to run, parsed from a file by the spec module and used by
all others.
"""

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from math import ceil

from cavvy.domain.units import HourlyRate, Money

Scalar = str | int | float | bool
DEFAULT_CPUS = 1.0  # memory that a node of a task without a size holds on a shared host
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
    """One acceptable choice of accelerators on each node; `name` None is any accelerator.

    Counts are per node, inclusive. Memory is of each accelerator in MiB, inclusive, None is no
    limit.
    """

    name: str | None = None
    count_min: int = 1
    count_max: int | None = None  # None: exactly count_min
    memory_min_mib: int | None = None
    memory_max_mib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkNeed:
    """Requirements on a node's network and, on clouds, which network: the user's own resources, by
    the provider's ids or names.

    None and () if the user names none: the provider then creates the minimum that it needs.
    """

    min_mbps: int | None = None
    vpc: str | None = None
    subnet: str | None = None
    security_groups: tuple[str, ...] = ()
    key: str | None = None  # a key pair that the provider knows
    public_ip: bool | None = (
        None  # whether a node gets a public address; None: the network's default
    )

    @property
    def named(self) -> bool:
        """Whether it needs a network feature that a provider without networks cannot give."""
        return (
            bool(self.vpc or self.subnet or self.security_groups or self.key)
            or self.public_ip is not None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCheck:
    """Requirements that each node must meet at boot, before the work starts: a node that fails is
    released and avoided.
    """

    share: float = 0.6  # share of the data sheet's figures that each accelerator must reach
    link_mbps: int | None = (
        None  # speed between two nodes; None: that share of `network`, or only reported
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderOptions:
    """A task's options for one provider in that provider's own terms; others ignore them."""

    provider: str
    values: str  # a JSON object, by the option's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Requirements that each node must meet. Empty tuples and None mean no constraint."""

    instance: str | None = None
    accelerators: tuple[
        AcceleratorNeed, ...
    ] = ()  # alternatives, any of them is acceptable; () means none needed
    cpus_min: float | None = None
    cpus_max: float | None = None
    memory_min_mib: int | None = None
    memory_max_mib: int | None = None
    memory_per_cpu_mib: int | None = None  # minimum for each CPU of the node, however many it has
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
    ] = ()  # all alternatives including this one; () means only this one
    ordered: bool = False  # prefer the first available one, not the cheapest

    def least_memory_mib(self, cpus: float) -> int:
        """The minimum memory of a node with that many CPUs."""
        return max(self.memory_min_mib or 0, ceil((self.memory_per_cpu_mib or 0) * cpus))

    @property
    def choices(self) -> tuple["Resources", ...]:
        """Each acceptable alternative; each of them knows the others."""
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
    """One input or output: copy `source` to `target`. A node path is relative to the working
    folder.

    The other end is a full path of the node, or a URL of one of URL_SCHEMES.
    """

    source: str
    target: str
    stream: bool = False  # for an input from a URL: the work reads it once, from a pipe
    every: timedelta | None = (
        None  # for an output to a URL: also sent while the work runs, and at any outcome
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBuild:
    """The user's own Dockerfile, from which a node with a container engine makes the image.

    `path` is a folder of the frozen working folder, "." the whole of it; `dockerfile` is relative
    to that.
    """

    path: str
    dockerfile: str = "Dockerfile"
    target: str = ""
    args: dict[str, str] = field(default_factory=dict)


class VolumeKind(StrEnum):
    """The kind of storage of a volume's files."""

    NAMED = "named"  # a volume of the provider: a cloud disk, a Kubernetes claim
    HOST = "host"  # an existing folder of the node
    NFS = "nfs"
    FOLDER = "folder"  # a part of the working folder, also mounted at another path


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """Files that outlive jobs, seen by each node under `path`: a full path, or one within the
    working folder.

    `source` is the volume's name, the folder of the node, SERVER:/EXPORT, or a path within the
    working folder. Size and type apply to a named volume that is created if there is none of that
    name; None and "" accept the existing one.
    """

    kind: VolumeKind
    source: str
    path: str  # for a named volume always an absolute path
    read_only: bool = False
    size_gib: int | None = None
    type: str = ""  # the provider's own name of a disk type or storage class
    keep: bool = True  # False: created for each attempt, and removed with it
    options: str = ""  # mount options, for NFS


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """A folder that outlives an attempt, and how often the task intends to write it."""

    path: str
    every: timedelta | None = None
    storage: str | None = None  # a URL of s3, gs or az: kept in that bucket instead of the server
    size_mib: int | None = None  # size of one checkpoint, as its author expects
    step: timedelta | None = (
        None  # duration of one step of the work, after which it can save, as its author expects
    )
    # Cavvy chooses `every`, from a checkpoint's cost and how often nodes are lost
    auto: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits at which Cavvy must stop the job. `deadline_after` counts from the submission."""

    deadline: datetime | None = None
    deadline_after: timedelta | None = None
    duration: timedelta | None = None  # running time, over all attempts
    budget: Money | None = None
    idle: timedelta | None = None  # time without output or CPU use
    unattended: timedelta = timedelta(
        hours=6
    )  # the lease: how long a node works without contact to the control plane


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How often each kind of failure is retried; None is without limit.

    `exit_codes` () means any non-zero code. `delay` doubles with each try of a kind, up to an hour.
    """

    preemption: int | None = None
    node: int | None = 3
    exit: int | None = 0
    exit_codes: tuple[int, ...] = ()
    delay: timedelta = timedelta(0)
    parallel: int = 1  # offers tried at the same time; the first ready gang gets the work


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When to start: one time, or a cron line in a time zone. Exactly one of `at` and `cron` is
    set.
    """

    at: datetime | None = None
    cron: str | None = None
    time_zone: str = "UTC"


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSpan:
    """Days of the week (0 is Monday), from minute to minute; an end that is not later than the
    start is on the next day.
    """

    days: tuple[int, ...]
    start_minute: int
    end_minute: int  # minutes of a day, at most 1440


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWindow:
    """When a job may start; within these windows, it starts when it is cheapest. `text` is the
    author's original."""

    spans: tuple[WindowSpan, ...]
    time_zone: str = "UTC"
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The amount of work, so that a plan can state how long it takes.

    Either `flops` (total floating-point operations of the whole job, at `precision` with the share
    `efficiency` of peak), or `samples` with `rates` (samples per second measured on one node with
    the accelerator named, or "cpu").
    """

    flops: float | None = None
    precision: str = "bf16"
    efficiency: float = 0.4
    samples: float | None = None
    rates: dict[str, float] = field(default_factory=dict)
    profile: str | None = (
        None  # a work profile's file, beside the task file: it gives the rates that are not stated
    )


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

    field: str  # the dotted key to change in the task file
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
        None  # the part of the working folder that the setup sees; None: all of it
    )
    tags: dict[str, str] = field(default_factory=dict)
    priority: int = 0  # -100..100, higher goes first
    params: dict[str, Scalar] = field(default_factory=dict)
    resources: Resources = Resources()
    nodes: int = 1
    image: str | None = None
    image_build: ImageBuild | None = None  # builds the image; excludes `image`
    image_login: str | None = None  # the name of a secret, USER:PASSWORD for the image's registry
    workdir: Workdir | None = None
    env: dict[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()  # names; each becomes an environment variable of that name
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
    )  # how long its nodes are kept, and billed, for the project's next job
