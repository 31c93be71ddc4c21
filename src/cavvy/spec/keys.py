"""The sections of a task as typed dictionaries, for editors and type checkers. A test compares
their keys with the fields that the parser accepts. `spec/fields/task.py` has the keys of a task.

Calling one of the types returns a dict: `Resources(gpu="A100:8")` equals `{"gpu": "A100:8"}`.
Fields for numbers and switches also accept strings, because a string may contain an expression such
as `${{ params.nodes }}`.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from os import PathLike
from typing import Literal, NotRequired, Required, TypedDict

Scalar = str | int | float | bool
Label = str | int | float
Whole = int | str
Number = float | str
Switch = bool | str
Size = str | int | float  # such as "64GB"; a number without a unit is in GiB
# such as "90s" or "2h"; a number without a unit is in seconds
Length = str | int | float | timedelta
Moment = str | datetime  # must have a time zone
Dollars = str | int | float | Decimal
LocalPath = str | PathLike[str]


class Param(TypedDict, total=False):
    """A parameter with a type and limits."""

    type: Literal["int", "float", "str", "bool"]
    default: Scalar
    min: float
    max: float
    choices: Sequence[Scalar]
    help: str


class Accelerator(TypedDict, total=False):
    """The accelerators of each node, for requests that cannot be written as one string."""

    name: str | Sequence[str]
    count: str | int
    memory: Size
    share: Size
    isolation: Literal["none", "required"]


class Disk(TypedDict, total=False):
    """The disk of each node."""

    size: Size
    type: str


class Network(TypedDict, total=False):
    """The network of each node."""

    min: str
    fabric: Literal["rdma", "efa", "infiniband", "roce", "tcpx"]
    vpc: str
    subnet: str
    security_groups: str | Sequence[str]
    key: str
    public_ip: Switch


class NodeTest(TypedDict, total=False):
    """The check that each node must pass before the work starts."""

    share: Number
    link: str


class ResourceChoice(TypedDict, total=False):
    """One of several alternatives in `any_of` or `ordered`."""

    instance: str
    gpu: str | Accelerator | Sequence[str | Accelerator]
    accelerator: str | Accelerator | Sequence[str | Accelerator]
    cpu: str | int | float
    memory: Size
    disk: Size | Disk
    spot: Literal["never", "auto", "only"]
    providers: str | Sequence[str]
    regions: str | Sequence[str]
    network: str | Network
    max_price: Dollars
    check: Switch | NodeTest
    options: Mapping[str, Mapping[str, object]]


class Resources(ResourceChoice, total=False):
    """The requirements for each node."""

    any_of: Sequence[ResourceChoice]
    ordered: Sequence[ResourceChoice]


class Image(TypedDict, total=False):
    """The container image in which the work runs."""

    name: str
    build: LocalPath
    dockerfile: str
    target: Label
    args: Mapping[str, Scalar]
    login: str


class GitWorkdir(TypedDict):
    """A commit of a Git repository as the working folder."""

    git: str
    commit: NotRequired[str]


class Setup(TypedDict):
    """Commands that run before the work, and the files that they need."""

    run: str
    uses: NotRequired[Sequence[str]]


class Input(TypedDict):
    """Files that are copied to or mounted on each node before the work starts."""

    source: LocalPath
    target: str
    mode: NotRequired[Literal["copy", "stream", "mount", "cached"]]
    writable: NotRequired[Switch]
    size: NotRequired[Size]
    region: NotRequired[str]


class Output(TypedDict):
    """Files that are copied from the nodes after the work has succeeded."""

    source: str
    target: LocalPath
    every: NotRequired[Length]
    size: NotRequired[Size]
    region: NotRequired[str]


class VolumeMount(TypedDict, total=False):
    """Files that are kept independently of the node's own disk."""

    name: Label
    host: LocalPath
    nfs: str
    folder: LocalPath
    path: Required[str]
    read_only: Switch
    size: Size
    type: str
    keep: Switch
    options: str


class Topology(TypedDict, total=False):
    """Which nodes are close to each other."""

    same: str
    prefer: str
    slice: Whole


class Group(TypedDict):
    """The group of jobs with which a job starts together."""

    name: str
    helper: NotRequired[Switch]
    linger: NotRequired[Length]


class StopEarly(TypedDict, total=False):
    """How jobs of a sweep are stopped early."""

    min_steps: Whole
    reduction: Whole
    step: str


class Search(TypedDict, total=False):
    """How the values of the jobs of a sweep are chosen."""

    seed: Whole


class RowBatch(TypedDict):
    """The rows that a function or a command processes, in shards."""

    input: LocalPath
    output: LocalPath
    function: NotRequired[str]
    format: NotRequired[Literal["jsonl", "csv", "parquet", "webdataset", "images"]]
    rows: NotRequired[Whole]
    workers: NotRequired[Whole]
    region: NotRequired[str]


class Checkpoint(TypedDict):
    """A folder whose files are passed from one attempt to the next."""

    path: str
    every: NotRequired[Length]
    size: NotRequired[Size]
    step: NotRequired[Length]
    storage: NotRequired[str]
    region: NotRequired[str]


# The share of time below which GPUs count as idle, and the duration. A class could not have the key
# `for`.
IdleGpus = TypedDict("IdleGpus", {"gpu": Number | str, "for": Length}, total=False)


class Limits(TypedDict, total=False):
    """The limits at which Cavvy stops the job."""

    deadline: Moment | Length
    duration: Length
    budget: Dollars
    idle: Length | IdleGpus
    stuck: Length
    unattended: Length


class Retry(TypedDict, total=False):
    """The number of retries for each kind of failure."""

    preemption: Whole
    node: Whole
    exit: Whole
    exit_codes: Whole | Sequence[Whole]
    delay: Length
    parallel: Whole


class Schedule(TypedDict, total=False):
    """When the job starts."""

    at: Moment
    cron: str
    time_zone: str


class Work(TypedDict, total=False):
    """The amount of work, from which plans compute time and cost."""

    flops: Number
    precision: Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4"]
    efficiency: Number
    samples: Number
    rates: Mapping[str, Number]
    margin: Number
    duration: Length
    measured_on: str
    profile: LocalPath


class Webhook(TypedDict):
    """A URL to which events are posted."""

    url: str
    on: NotRequired[
        Literal["finish", "failure", "budget"] | Sequence[Literal["finish", "failure", "budget"]]
    ]


class ServiceTarget(TypedDict, total=False):
    """The load that each replica of a service should have."""

    queue_wait: Length
    concurrency: Number
    rate: Number
    gpu_utilisation: Number | str
    metric: str
    value: Number


class ServiceReplicas(TypedDict, total=False):
    """The number of replicas of a service."""

    min: Whole
    max: Whole
    target: ServiceTarget
    idle: Length


class ServiceModel(TypedDict):
    """A model that is optimised before it is served."""

    source: str
    optimise: NotRequired[str]
    samples: NotRequired[str]
    agree: NotRequired[Number]
    compare: NotRequired[str]


class ServiceProbe(TypedDict, total=False):
    """The probe that checks whether a replica of a service is ready."""

    path: str
    headers: Mapping[str, Label]
    body: str
    every: Length
    timeout: Length
    start: Length
    failures: Whole
    any_status: Switch


class ServiceTimeoutKeys(TypedDict, total=False):
    """The maximum waiting and response times of requests to a service."""

    queue: Length
    fallback: Length
    response: Length
    silence: Length


class ServiceRate(TypedDict):
    """A limit on the rate of requests to a service."""

    requests: Number
    per: NotRequired[Length]
    burst: NotRequired[Whole]
    each: NotRequired[str]
    header: NotRequired[str]
    prefix: NotRequired[str]


class ServiceLimits(TypedDict, total=False):
    """The maximum size of requests to a service, and the maximum number of waiting requests."""

    body: Size
    waiting: Whole


class ServiceBatch(TypedDict, total=False):
    """Settings for joining requests to a service into batches."""

    max: Whole
    wait: Length
    input: str
    output: str


class ServiceRouting(TypedDict, total=False):
    """What decides which replica of a service gets a request."""

    by: Literal["cache", "load", "session", "header"]
    header: str
    cache_tokens: Whole
    events: bool


class ServiceFallbackPrice(TypedDict):
    """The price of an API, in dollars for a million tokens."""

    input: Number
    output: Number


class ServiceFallbackApi(TypedDict):
    """An API in OpenAI's format that answers in place of a service."""

    base_url: NotRequired[str]
    model: str
    key: NotRequired[str]
    price: NotRequired[ServiceFallbackPrice]


class ServiceFallback(TypedDict, total=False):
    """Another service, or an API, that answers in place of a service."""

    service: str
    model: str
    openai: ServiceFallbackApi


class ServiceGoal(TypedDict, total=False):
    """An objective for the times of a language model's tokens: one percentile and its limit."""

    p50: Length
    p90: Length
    p95: Length
    p99: Length


class ServiceSlo(TypedDict, total=False):
    """The service level that a service must reach."""

    p95: Length
    availability: Number | str
    ttft: ServiceGoal
    token_gap: ServiceGoal


class ServiceUpdateKeys(TypedDict, total=False):
    """Settings for replacing the old revision of a service by a new revision."""

    strategy: str
    weight: Number | str
    requests: Whole
    within: Length


class ServiceQueueKeys(TypedDict, total=False):
    """Settings for sending the queued calls of a service."""

    attempts: Whole
    backoff: Length
    keep: Length
    at_once: Whole
    waiting: Whole


class ServiceEvent(TypedDict):
    """A bucket, a schedule or a webhook that causes calls to a service."""

    bucket: NotRequired[str]
    every: NotRequired[Length]
    cron: NotRequired[str]
    time_zone: NotRequired[str]
    body: NotRequired[str]
    webhook: NotRequired[str]
    secret: NotRequired[str]
    signature: NotRequired[str]
    path: NotRequired[str]


class ServiceGroup(TypedDict):
    """Replicas of a service that have the same role."""

    role: NotRequired[Literal["router", "prefill", "decode", "worker"]]
    replicas: NotRequired[Whole | ServiceReplicas]
    router: NotRequired[Literal["sglang", "list", "none"]]
    resources: NotRequired[Resources]
    nodes: NotRequired[Whole]
    run: NotRequired[str]
    setup: NotRequired[str]
    image: NotRequired[str]
    concurrency: NotRequired[Whole]
    probe: NotRequired[str | ServiceProbe]


class EdgeWork(TypedDict, total=False):
    """What the server does with a model of devices in place of a program."""

    publish: str
    model: str
    main: str
    residency: str
    deploy: str
    site: str
    labels: Mapping[str, str]
    waves: Sequence[Number]
    soak: Length
    below: Number
    collect: str
    samples: Whole
    into: str


class ServiceEdge(TypedDict):
    """Devices at the edge that are a part of a service."""

    site: NotRequired[str]
    model: str
    key: NotRequired[str]
    below: NotRequired[Number | str]


class Service(TypedDict):
    """How a task answers requests, and on how many replicas."""

    port: NotRequired[Whole]
    engine: NotRequired[str]
    model: NotRequired[str | ServiceModel]
    options: NotRequired[Mapping[str, Scalar]]
    replicas: NotRequired[Whole | ServiceReplicas]
    groups: NotRequired[Mapping[str, ServiceGroup]]
    concurrency: NotRequired[Whole]
    probe: NotRequired[str | ServiceProbe]
    drain: NotRequired[Length]
    timeouts: NotRequired[ServiceTimeoutKeys]
    adapters: NotRequired[Mapping[str, str]]
    models: NotRequired[str | Sequence[str]]
    hosts: NotRequired[str | Sequence[str]]
    keys: NotRequired[Switch]
    origins: NotRequired[str | Sequence[str]]
    rate: NotRequired[Number | ServiceRate | Sequence[ServiceRate]]
    limits: NotRequired[ServiceLimits]
    batch: NotRequired[Whole | ServiceBatch]
    routing: NotRequired[Literal["cache", "load", "session", "header"] | ServiceRouting]
    fallback: NotRequired[str | ServiceFallback | Sequence[str | ServiceFallback]]
    edge: NotRequired[ServiceEdge | Sequence[ServiceEdge]]
    slo: NotRequired[ServiceSlo]
    regions: NotRequired[str | Sequence[str]]
    residency: NotRequired[str]
    budget: NotRequired[Dollars]
    price_header: NotRequired[Switch]
    strip_prefix: NotRequired[Switch]
    update: NotRequired[str | ServiceUpdateKeys]
    queue: NotRequired[ServiceQueueKeys]
    events: NotRequired[ServiceEvent | Sequence[ServiceEvent]]
