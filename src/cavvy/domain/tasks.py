"""The task: what a user wants to have run, as the spec module reads it from a file and everyone
else uses it.
"""

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from math import ceil

from cavvy.domain.units import HourlyRate, Money

Scalar = str | int | float | bool
DEFAULT_CPUS = 1.0  # held of a shared host by a node of a task that does not say
URL_SCHEMES = (
    "s3",
    "gs",
    "az",
    "sftp",
    "https",
    "http",
)  # of inputs; outputs go to all but the last two


class SpotPolicy(StrEnum):
    """Whether a task may run on capacity that can be taken away."""

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
    """What a node's network must be, and on clouds which: resources of the user's own, by the
    provider's ids or names.

    None and () where the user names nothing: the provider then makes the least that it needs.
    """

    min_mbps: int | None = None
    vpc: str | None = None
    subnet: str | None = None
    security_groups: tuple[str, ...] = ()
    key: str | None = None  # a key pair that the provider knows
    public_ip: bool | None = (
        None  # whether a node gets a public address; None: as the provider's network is set up
    )

    @property
    def named(self) -> bool:
        """Whether it names anything that a place without networks of its own cannot give."""
        return (
            bool(self.vpc or self.subnet or self.security_groups or self.key)
            or self.public_ip is not None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCheck:
    """What each node must show at its boot, before the work starts: a node that does not is
    given back and avoided.
    """

    share: float = 0.6  # of what its kind's data sheet says, that each accelerator must reach
    link_mbps: int | None = (
        None  # between two nodes; None: that share of `network`, else measured and only reported
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What each node must have. Empty tuples and None mean no constraint."""

    instance: str | None = None
    accelerators: tuple[
        AcceleratorNeed, ...
    ] = ()  # alternatives, any of them will do; () is none needed
    cpus_min: float | None = None
    cpus_max: float | None = None
    memory_min_mib: int | None = None
    memory_max_mib: int | None = None
    memory_per_cpu_mib: int | None = (
        None  # at least so much for each CPU that the node has, however many those are
    )
    disk_gib: int | None = None
    disk_type: str | None = None
    spot: SpotPolicy = SpotPolicy.NEVER
    providers: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()  # region names or areas such as eu, us, asia
    network: NetworkNeed | None = None
    max_rate: HourlyRate | None = None  # of one node
    check: NodeCheck | None = None
    any_of: tuple[
        "Resources", ...
    ] = ()  # all wishes of which one will do, this one among them; () is this one alone
    ordered: bool = False  # the first of them that can be had counts, not the cheapest

    def least_memory_mib(self, cpus: float) -> int:
        """The least memory of a node with that many CPUs."""
        return max(self.memory_min_mib or 0, ceil((self.memory_per_cpu_mib or 0) * cpus))

    @property
    def choices(self) -> tuple["Resources", ...]:
        """Each wish that will do, which knows the others."""
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
    stream: bool = False  # of an input from a URL: the work reads a pipe, once
    every: timedelta | None = (
        None  # of an output to a URL: sent while the work runs too, and however it ends
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
    """Where a volume's files lie."""

    NAMED = "named"  # a volume of the provider: a cloud's disk, a cluster's claim
    HOST = "host"  # a folder that the node has already
    NFS = "nfs"
    FOLDER = "folder"  # a part of the working folder, seen under a path of its own as well


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """Files that outlive jobs, seen by each node under `path`: a full path, or one within the
    working folder.

    `source` is the volume's name, the folder of the node, SERVER:/EXPORT, or a path within the
    working folder. Size and type are of a named volume that is to be made where there is none of
    that name; None and "" use the existing one as it is.
    """

    kind: VolumeKind
    source: str
    path: str  # of a named volume always a full one
    read_only: bool = False
    size_gib: int | None = None
    type: str = ""  # the provider's own name of a disk type or storage class
    keep: bool = True  # False: made anew for each attempt, and removed with it
    options: str = ""  # of mount, for NFS


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """A folder that outlives an attempt, and how often the task means to write it."""

    path: str
    every: timedelta | None = None
    storage: str | None = None  # a URL of s3, gs or az: kept in that bucket, not by the server
    size_mib: int | None = None  # of one checkpoint, as its author expects it
    step: timedelta | None = (
        None  # of one step of the work, after which it can save, as its author expects it
    )
    # `every` is chosen by Cavvy, from what a checkpoint costs and how often nodes are lost
    auto: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where Cavvy must stop. `deadline_after` is counted from the submission."""

    deadline: datetime | None = None
    deadline_after: timedelta | None = None
    duration: timedelta | None = None  # of running, over all attempts
    budget: Money | None = None
    idle: timedelta | None = None  # without output or CPU use
    unattended: timedelta = timedelta(
        hours=6
    )  # the lease: how long a node works without the control plane


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How often each kind of failure is tried again; None is without limit.

    `exit_codes` () is any non-zero code. `delay` doubles with each try of a kind, up to an hour.
    """

    preemption: int | None = None
    node: int | None = 3
    exit: int | None = 0
    exit_codes: tuple[int, ...] = ()
    delay: timedelta = timedelta(0)
    parallel: int = 1  # places that are tried at the same time; the first to be ready gets the work


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
    """Some days of the week, 0 is Monday, from minute to minute; an end that is not later is the
    next day's.
    """

    days: tuple[int, ...]
    start_minute: int
    end_minute: int  # at most 1440


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWindow:
    """When a job may start; within it, when it is cheapest. `text` is as its author wrote it."""

    spans: tuple[WindowSpan, ...]
    time_zone: str = "UTC"
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """How much there is to do, so that a plan can say how long it takes.

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
    """What a webhook reports."""

    FINISH = "finish"
    FAILURE = "failure"
    BUDGET = "budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """Where to POST a JSON event when the job ends, fails or runs into its budget."""

    url: str
    on: tuple[Delivery, ...] = tuple(Delivery)


@dataclass(frozen=True, slots=True)
class Objection:
    """Why a provider or an offer cannot run a task, whatever is free."""

    field: str  # the dotted key of the task file that would have to change
    reason: str

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One unit of work as its author described it, after defaults and parameters were filled in."""

    name: str
    project: str = "default"
    run: str
    setup: str | None = None
    setup_uses: tuple[str, ...] | None = (
        None  # all of the working folder that the setup sees; None: the whole of it
    )
    tags: dict[str, str] = field(default_factory=dict)
    priority: int = 0  # -100..100, higher goes first
    params: dict[str, Scalar] = field(default_factory=dict)
    resources: Resources = Resources()
    nodes: int = 1
    image: str | None = None
    image_build: ImageBuild | None = None  # instead of `image`
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
    grace: timedelta = timedelta(seconds=10)  # between SIGTERM and SIGKILL
    keep: timedelta = timedelta(
        0
    )  # how long its nodes are held, and paid, for the project's next job
