"""Services: programs that answer requests on one or more replicas. The module `spec` reads a
`ServiceSpec` from a file.
"""

import re
from datetime import timedelta
from enum import StrEnum

from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct


class TargetKind(StrEnum):
    """The value from which the number of replicas is computed."""

    # the share of requests on time that the service requires
    QUEUE_WAIT = "queue_wait"
    # the number of requests that one replica processes at once
    CONCURRENCY = "concurrency"
    # the requests per second of one replica
    RATE = "rate"
    # the mean share of time in which the GPUs of the replicas are busy
    GPU_UTILISATION = "gpu_utilisation"
    # the mean of a number that the replicas report
    METRIC = "metric"


class ReplicaTarget(Struct, frozen=True, kw_only=True):
    """The target of the autoscaler. `value` is in the unit of the kind: requests, requests per
    second, a share from 0 to 1, or the unit of the metric. For `QUEUE_WAIT`, the value is the wait
    in seconds. `metric` names the metric.
    """

    kind: TargetKind = TargetKind.QUEUE_WAIT
    value: float = 10.0
    metric: str | None = None


class ReplicaCount(Struct, frozen=True, kw_only=True):
    """The minimum and maximum number of replicas, the target that determines the number, and the
    time without a request after which the service is scaled down to `least`.
    """

    least: int = 0
    most: int = 1
    target: ReplicaTarget = ReplicaTarget()
    idle: timedelta = timedelta(minutes=5)


class ReadinessProbe(Struct, frozen=True, kw_only=True):
    """The probe of a replica: a GET of `path`, or a POST if there is a `body`, must be answered
    with a status from 200 to 399 within `timeout`. A replica is probed at the interval `every`. The
    first answer must arrive within `start` after the replica's start. The replica is unhealthy
    after `failures` failures in a row. With `any_status`, every HTTP response counts as an answer.
    `headers` are pairs of name and value.
    """

    path: str = "/"
    every: timedelta = timedelta(seconds=10)
    timeout: timedelta = timedelta(seconds=5)
    start: timedelta = timedelta(minutes=20)
    failures: int = 3
    any_status: bool = False
    headers: tuple[tuple[str, str], ...] = ()
    body: str | None = None


class ServiceTimeouts(Struct, frozen=True, kw_only=True):
    """Three time limits for a request: the wait until a replica takes it, the wait until its answer
    begins, and any later pause without data in either direction. After the wait `fallback`, a
    request goes to one of the service's fallbacks.
    """

    queue: timedelta = timedelta(minutes=10)
    fallback: timedelta = timedelta(seconds=20)
    response: timedelta = timedelta(minutes=5)
    silence: timedelta = timedelta(minutes=5)


class RateScope(StrEnum):
    """The group of requests that share one rate limit."""

    CLIENT = "client"  # each key, or each address if the service needs no key
    ADDRESS = "address"
    HEADER = "header"  # each value of a header
    SERVICE = "service"  # all requests together


class RequestRate(Struct, frozen=True, kw_only=True):
    """A rate limit for the requests to paths below `prefix`: at most `requests` in the time `per`,
    and at most `burst` at the same moment.
    """

    requests: float
    per: timedelta = timedelta(seconds=1)
    burst: int = 1
    each: RateScope = RateScope.CLIENT
    header: str | None = None
    prefix: str = ""

    @property
    def per_s(self) -> float:
        return self.requests / self.per.total_seconds()


class RequestLimits(Struct, frozen=True, kw_only=True):
    """The maximum size of a request's body, and the maximum number of requests that wait for a
    replica.
    """

    body_mib: int = 1024
    waiting: int = 10_000


class RoutingKind(StrEnum):
    """What decides which replica gets a request."""

    CACHE = "cache"  # what the replica's cache holds of the prompt, and its load
    LOAD = "load"
    SESSION = "session"  # the header X-Session-Id, or the client's key
    HEADER = "header"


class RoutingRule(Struct, frozen=True, kw_only=True):
    """The rule by which the gateway chooses the replica for a request. `header` is the name of the
    header for HEADER. `cache_tokens` is the number of tokens of prompts that the cache of a replica
    holds; None: not known. With `events`, replicas publish changes of their caches on a port.
    """

    by: RoutingKind = RoutingKind.CACHE
    header: str | None = None
    cache_tokens: int | None = None
    events: bool = False


class FallbackApi(Struct, frozen=True, kw_only=True):
    """An API in OpenAI's format. `model` is its name of the model, and `secret` the secret of the
    project with its key. `prices` are micro-dollars for a million tokens of prompts and of
    completions; None: not known.
    """

    url: str = "https://api.openai.com/v1"
    model: str
    secret: str | None = None
    prices: tuple[int, int] | None = None

    @property
    def host(self) -> str:
        return self.url.split("/")[2]


class FallbackRule(Struct, frozen=True, kw_only=True):
    """Where requests go that the service cannot answer in time: to the service `service` of the
    same project, or to an API. `model` replaces the model in requests to the other service.
    """

    service: str = ""
    model: str = ""
    api: FallbackApi | None = None


class EdgeRule(Struct, frozen=True, kw_only=True):
    """Devices at the edge that are a part of the service: those of `site` ("" for all), which serve
    `model`. Requests that a device cannot answer go to the service, with the key in the project's
    secret `secret`, if one is named. Devices keep requests whose answers are less certain than
    `below`, and those that are unlike earlier ones.
    """

    site: str = ""
    model: str
    secret: str | None = None
    below: float | None = None

    def overlaps(self, other: "EdgeRule") -> bool:
        """Return whether a device may be one of both rules."""
        sites = {self.site, other.site}
        return self.model == other.model and (len(sites) == 1 or "" in sites)


class AdapterRule(Struct, frozen=True, kw_only=True):
    """The LoRA adapters of a service's base model: for each name, the source that the engine gets.
    The engine determines the calls that load adapters. A replica holds `slots` at the same time.
    """

    engine: str
    sources: dict[str, str]
    slots: int


class BatchRule(Struct, frozen=True, kw_only=True):
    """The rule by which the gateway joins requests into batches. A batch has at most `most`
    instances. While a replica is free, a batch waits at most the time `wait` for further requests.
    `input` and `output` are the keys of the arrays in the JSON bodies of requests and responses.
    """

    most: int = 16
    wait: timedelta = timedelta(milliseconds=10)
    input: str = "instances"
    output: str = "predictions"


# the share of time in which enough replicas on spot should be ready, unless the service states one
DEFAULT_AVAILABILITY = 0.995


class LatencyGoal(Struct, frozen=True, kw_only=True):
    """An objective: the share `share` of all answers is not above `limit`."""

    share: float = 0.95
    limit: timedelta

    @property
    def limit_s(self) -> float:
        return self.limit.total_seconds()


class ServiceLevel(Struct, frozen=True, kw_only=True):
    """The service level: 95 of 100 requests are answered within `p95`, and `availability` is the
    share of answered requests. Replicas on spot are complemented so that enough replicas are ready
    for the same share of time. A value of None means that there is no target.

    `ttft` limits the time from a request to the first token of a language model's answer, and
    `token_gap` the mean time between two tokens of an answer. The autoscaler keeps both.
    """

    p95: timedelta | None = None
    availability: float | None = None
    ttft: LatencyGoal | None = None
    token_gap: LatencyGoal | None = None


class UpdateStrategy(StrEnum):
    """The method by which a new revision replaces the serving revision."""

    ROLLING = "rolling"  # the new replicas replace the old ones one by one, as they become ready
    # the new revision first gets a part of the requests, and then all of them if it is not worse
    CANARY = "canary"
    # the new revision gets all requests at once, when all its replicas are ready
    BLUE_GREEN = "blue-green"


class ServiceUpdate(Struct, frozen=True, kw_only=True):
    """The settings for replacing the serving revision with a new revision. A canary gets `weight`
    percent of the requests. If there is not enough evidence against the canary, the canary takes
    over after it has answered `requests` requests or after the time `within`.
    """

    strategy: UpdateStrategy = UpdateStrategy.ROLLING
    weight: int = 10
    requests: int = 2000
    within: timedelta = timedelta(hours=1)


class QueueTerms(Struct, frozen=True, kw_only=True):
    """The settings for sending queued calls. A call is sent `attempts` times at most. The pause
    after the first failure is `backoff`; it doubles with each failure. Results are stored for the
    time `keep`. `at_once` limits the calls that are sent at the same time. If it is 0, the limit is
    twice the number of requests that all replicas can process at the same time. If the gateway
    joins requests, full batches are assumed. The queue accepts no more calls when it contains
    `waiting` calls.
    """

    attempts: int = 5
    backoff: timedelta = timedelta(seconds=10)
    keep: timedelta = timedelta(days=7)
    at_once: int = 0
    waiting: int = 100_000


class EventTrigger(Struct, frozen=True, kw_only=True):
    """A source of calls. Each object below the URL `bucket` causes one call of `path`; the objects
    are listed at the interval `every`.
    """

    bucket: str
    path: str = "/"
    every: timedelta = timedelta(seconds=30)


class CronTrigger(Struct, frozen=True, kw_only=True):
    """A source of calls: calls `path` with `body` at the times of the cron line, in the time zone
    `time_zone`.
    """

    cron: str
    time_zone: str = "UTC"
    path: str = "/"
    body: str = ""


class WebhookSignature(StrEnum):
    """The form in which a sender signs its requests with a shared secret."""

    STANDARD = "standard"  # Standard Webhooks, version 1.0.0
    GITHUB = "github"
    STRIPE = "stripe"
    SLACK = "slack"


class WebhookTrigger(Struct, frozen=True, kw_only=True):
    """A source of calls: requests that another system sends, signed with the secret that `secret`
    names. Each delivery causes one call of `path`.
    """

    name: str
    secret: str
    signature: WebhookSignature = WebhookSignature.STANDARD
    path: str = "/"


class ServiceSpec(Struct, frozen=True, kw_only=True):
    """The settings of a service: how its task serves requests. By default, the task's program
    listens on the port that the variable PORT contains. If `fixed_port` is true, or if the program
    runs outside Cavvy, the program listens on `port`. Clients of OpenAI's API select the service by
    one of its `models`.

    `concurrency` is the number of requests that a replica can process at the same time. With
    `keys`, requests need one of the service's keys. Pages of `origins` may call the service; if it
    is empty, the service's own pages may call it or, with `keys`, all pages. A replica that is
    being stopped has the time `drain` to finish its requests. With `batch`, the gateway joins
    waiting requests into batches. `routing` chooses the replica of each request. Requests that the
    service cannot answer in time go to the first of its `fallbacks` that takes them. The devices
    of `edge` serve the same model, and send requests that they cannot answer. Replicas run in
    `regions`, and requests and replicas must not leave the area `residency`; () and None
    permit every place. `budget` limits the price of all replicas together. With `price_header`,
    responses state the cost of their requests.
    Without `strip_prefix`, the paths of requests begin with the path of the service.
    """

    port: int = 8000
    fixed_port: bool = False
    models: tuple[str, ...] = ()
    hosts: tuple[
        str, ...
    ] = ()  # the service's own host names; () if the gateway serves it under a path
    replicas: ReplicaCount = ReplicaCount()
    concurrency: int = 1
    probe: ReadinessProbe = ReadinessProbe()
    drain: timedelta = timedelta(minutes=2)
    timeouts: ServiceTimeouts = ServiceTimeouts()
    keys: bool = False
    origins: tuple[str, ...] = ()
    rates: tuple[RequestRate, ...] = ()
    limits: RequestLimits = RequestLimits()
    batch: BatchRule | None = None
    routing: RoutingRule | None = None  # None: by load
    fallbacks: tuple[FallbackRule, ...] = ()
    edge: tuple[EdgeRule, ...] = ()
    adapters: AdapterRule | None = None
    slo: ServiceLevel = ServiceLevel()
    regions: tuple[str, ...] = ()
    residency: str | None = None
    budget: HourlyRate | None = None
    price_header: bool = False
    strip_prefix: bool = True
    update: ServiceUpdate = ServiceUpdate()
    queue: QueueTerms = QueueTerms()
    events: tuple[EventTrigger, ...] = ()
    crons: tuple[CronTrigger, ...] = ()
    webhooks: tuple[WebhookTrigger, ...] = ()

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names by which requests select the service: its models, and then its adapters."""
        return (*self.models, *(() if self.adapters is None else self.adapters.sources))


class ReplicaRole(StrEnum):
    """What the replicas of a group do."""

    ROUTER = "router"  # gets the requests of the gateway, and sends them to the other groups
    PREFILL = "prefill"  # computes the key-value blocks of prompts
    DECODE = "decode"  # generates the answers
    WORKER = "worker"  # does both


class RouterApi(StrEnum):
    """How a router learns which workers exist."""

    SGLANG = "sglang"  # Cavvy adds and removes them through the API of SGLang's router
    LIST = "list"  # it is started with their addresses, and replaced when they change
    NONE = "none"  # the router and the workers find each other, without Cavvy


_DASHED = re.compile(r"([a-z0-9-]+)-([1-9][0-9]*)")
SERVICE_TAG = "service"  # for a replica's job: the name of its service


def is_replica(job_name: str) -> bool:
    """Return whether this is the name of a replica's job."""
    return "." in job_name


def read_dashed(name: str) -> str:
    """Return the name of the replica that users may also call SERVICE-NUMBER, or "" if `name` does
    not have this form."""
    found = _DASHED.fullmatch(name)
    return f"{found[1]}.{found[2]}" if found else ""


# The provider of the server's machine. Replicas there share the machine's ports with the gateway.
HERE = "local"


IN_FLIGHT = "http_requests_in_flight"
PER_SECOND = "http_requests_per_second"
GPU_PERCENT = "DCGM_FI_DEV_GPU_UTIL"  # of NVIDIA's DCGM exporter, from 0 to 100
