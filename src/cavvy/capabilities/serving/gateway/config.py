"""The gateway's configuration file, and the values that its control socket accepts. The control
plane writes the file and sends the values. Times are in seconds, sizes in bytes. Unknown fields are
refused.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from cavvy.domain.targets import is_web_address
from cavvy.domain.values import Struct

Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Host = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.:-]+$", max_length=255)]
Place = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=100)]
HeaderName = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9-]+$", max_length=100)]
Origin = Annotated[
    str, msgspec.Meta(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[a-z0-9.\[\]:_-]+)$", max_length=300)
]
PathPrefix = Annotated[str, msgspec.Meta(pattern=r"^(/[A-Za-z0-9._~-]+)*$")]
ApiUrl = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^(https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?"
        r"(/[A-Za-z0-9._~-]+)*)?$",
        max_length=500,
    ),
]


USUAL_PROJECT = "default"  # the project whose models need neither a key nor a project in the URL


class GatewayConfigError(ValueError):
    """Raised if the file or the value cannot be used. The text says where the fault is and what was
    expected.
    """


# A replica is known to keep unused connections open if it has kept one for this long. Programs
# usually close them after 5 s (uvicorn, Node.js) or more, some after 2 s (gunicorn).
KEPT_S = 4.0


class ReplicaAddress(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica that is ready for requests."""

    id: Name
    host: Host
    port: Port
    concurrency: Count | None = None  # None: the service's setting applies
    events_port: Port | None = None  # where its engine publishes key-value events with ZeroMQ
    rate_micros: Annotated[int, msgspec.Meta(ge=0)] = 0  # the price of the replica per hour
    canary: bool = False  # whether it belongs to the revision that gets the service's canary share
    # requests are sent to replicas of the lowest tier that has room; see `balancing.py`
    tier: Annotated[int, msgspec.Meta(ge=0, le=15)] = 0
    places: tuple[str, ...] = ()  # the replica's region, country and area, as far as they are known
    keeps: bool = False  # whether it is known to keep unused connections open for `KEPT_S`


class RoutingTerms(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What decides which replica gets a request, if it is not the load alone. By cache: what the
    replica's cache holds of the prompt; see `cache_routing.py`. By header or session: requests with
    the same value go to the same replica while it has room.
    """

    by: Literal["cache", "header", "session"]
    # by header: its value is the key. By session, requests without it are told apart by their key
    header: HeaderName = "x-session-id"
    # maximum load, as a multiple of the mean load of the replicas
    load_factor: Annotated[float, msgspec.Meta(ge=1)] = 1.25
    # by cache: the tokens that a replica's cache holds; None: what its engine tells, or a million
    cache_tokens: Count | None = None
    shared: bool = False  # by cache: gateways of other servers have the same replicas


AdapterApi = Literal["vllm", "sglang", "llama.cpp", "tgi"]


class AdapterTerms(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The LoRA adapters of a service: their sources by their names. `slots` is how many a replica
    holds at the same time, for engines that load adapters on demand; see `adapters.py`."""

    api: AdapterApi
    sources: dict[str, str]
    slots: Count = 8
    load_s: Seconds = 300  # maximum seconds until an adapter is loaded


class ClientKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key that permits calls to the service. Keys are random, so a plain hash is enough to
    protect them."""

    id: str
    sha256: Digest
    per_s: Seconds | None = None  # None: no rate limit
    burst: Count = 1
    tokens_per_min: Count | None = None  # of language models; None: no limit
    micros_per_day: Count | None = None  # micro-dollars of replicas' time, in a day in UTC
    # the key's part of a language model's tokens while requests wait, relative to other keys
    weight: Annotated[float, msgspec.Meta(ge=0.01, le=100)] = 1.0
    priority: Annotated[int, msgspec.Meta(ge=0, le=2)] = 1  # 2: its requests start first
    expires_at: float | None = None  # seconds since 1970
    residency: Place | None = None  # the place that its requests must not leave


class RateLimit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The permitted number of requests per second, and the number `burst` of requests that may
    arrive at the same moment.
    """

    per_s: Annotated[float, msgspec.Meta(gt=0)]
    burst: Count = 1
    # what is limited separately; a client is identified by its key, or by its address if the
    # service needs no key
    each: Literal["client", "address", "header", "service"] = "client"
    header: HeaderName = "x-forwarded-for"  # with each: header
    prefix: PathPrefix = ""  # prefix of the limited paths, as the replica sees them


class CanaryShare(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The percentage of the requests that are sent to canary replicas while these replicas have
    room. The gateway starts new counts for each revision.
    """

    revision: int
    percent: Annotated[int, msgspec.Meta(ge=1, le=99)]


class FallbackTarget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where requests go that the service's own replicas cannot answer in time: another service of
    this gateway, or an API in OpenAI's format; see `fallbacks.py`.
    """

    id: Name  # of an API: the name under which its tokens are counted
    label: Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,255}$")]  # what the response says
    service: Name | None = None  # the other service; None: an API
    stays: bool = False  # whether the other service's replicas run only in this service's places
    url: ApiUrl = ""  # of the API, without the `/` at its end
    model: Annotated[str, msgspec.Meta(pattern=r"^[!-~]{0,200}$")] = ""  # replaces the request's
    # the name under which the control socket gives the API's key, or "" if it may be used without
    credential: str = ""
    # micro-dollars for a million tokens of prompts and of completions; None: not known
    prices: tuple[int, int] | None = None


class BatchTerms(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The terms under which requests with JSON bodies may be joined and sent to a replica as one
    request; see `joined_bodies.py`."""

    max: Annotated[int, msgspec.Meta(ge=2, le=256)] = 16  # instances of a batch
    wait_s: Annotated[float, msgspec.Meta(ge=0)] = 0.01  # for others while a replica is free
    input: Annotated[str, msgspec.Meta(min_length=1)] = "instances"  # the array in a request
    output: Annotated[str, msgspec.Meta(min_length=1)] = "predictions"  # in a response


class ServiceRoute(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A service: the requests that belong to it, and how these requests are passed on."""

    name: Name
    # the name within its project, for metrics; "": `name`
    label: Annotated[str, msgspec.Meta(max_length=200)] = ""
    hosts: tuple[Host, ...] = ()  # none: every host name
    prefix: PathPrefix = ""
    strip_prefix: bool = True
    concurrency: Count = 32  # maximum requests in flight for each replica
    queue_max: Count = 10_000  # requests that wait
    wait_s: Seconds = 600  # seconds for which a request may wait for a replica
    # why replicas end before they are ready, several in a row; "" if they do not
    failing: str = ""
    failing_s: Seconds = 20  # for which a request waits meanwhile, if no replica is ready
    # requests in flight at the maximum number of replicas; None: not known
    slots_max: Count | None = None
    # a request that waited longer counts as late; None: no request counts as late
    late_s: Seconds | None = None
    # a response that took longer counts as slow; None: no response counts as slow
    slow_s: Seconds | None = None
    # the objectives for the first token of an answer and for the mean time between tokens
    ttft_s: float | None = None
    token_gap_s: float | None = None
    closed: str = ""  # why the service refuses requests; "" if it accepts them
    price_header: bool = False  # whether responses contain the cost of their request
    response_s: Seconds = 600  # maximum seconds until a replica's response begins
    # maximum seconds without a byte in either direction after that; None: no limit
    silence_s: Seconds | None = None
    # an estimate that is used until the gateway has measured a cold start
    cold_start_s: Seconds | None = None
    routing: RoutingTerms | None = None  # None: by load
    # tried in this order if the service is overloaded, cold or fails
    fallbacks: tuple[FallbackTarget, ...] = ()
    fallback_s: Seconds = 20  # for which a request may wait before it goes to a fallback
    adapters: AdapterTerms | None = None  # their names are among `models`, after the base model's
    batch: BatchTerms | None = None
    canary: CanaryShare | None = None
    project: Name = USUAL_PROJECT  # the names of models are unique only within a project
    # model names by which /v1/chat/completions and similar routes select the service
    models: tuple[str, ...] = ()
    # the places in which its replicas may be; requests that must stay elsewhere are refused. None:
    # any place
    places: tuple[str, ...] | None = None
    # sets of places, as `place_loads.write_places` writes them, for which no replica can start
    # because the service has its maximum number
    full_places: tuple[str, ...] = ()
    keys: tuple[ClientKey, ...] = ()
    # whether requests need a key, even if no key exists; always true if keys exist
    keyed: bool = False
    rates: tuple[RateLimit, ...] = ()
    # origins whose pages may call the service, such as `https://app.example`, or `*`. None are
    # named: the service's own pages, or pages of any origin if requests need a key
    origins: tuple[Origin, ...] = ()
    body_max: Count = 1 << 30
    deferred_max: Count = 1000  # maximum number of stored results of `Prefer: respond-async`
    # maximum bytes of the body of such a request, and of its result
    deferred_bytes: Count = 16 << 20
    deferred_ttl_s: Seconds = 86_400

    @property
    def reads_body(self) -> bool:
        """Whether the replica depends on the beginning of the body."""
        by_cache = self.routing is not None and self.routing.by == "cache"
        return by_cache or self.adapters is not None

    @property
    def removed_prefix(self) -> str:
        """The beginning of each path that replicas do not get."""
        return self.prefix if self.strip_prefix else ""


class GatewayLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits for each client connection and for all connections together."""

    head_bytes: Count = 16_384  # HAProxy copies this many bytes for each request that it may repeat
    headers: Count = 128
    head_s: Seconds = 10  # seconds from the first byte of a head to its last
    body_idle_s: Seconds = 30  # seconds between two pieces of a body
    idle_s: Seconds = 75  # between two requests
    stall_s: Seconds = 60  # seconds for which a client may leave its responses unread
    connections: Count = 20_000
    hold_bytes: Count = 262_144  # bytes of a body that waits for a replica
    model_bytes: Count = 16 << 20  # bytes of a body whose first `hold_bytes` do not name its model
    replay_bytes: Count = 1 << 20  # bytes of a body that is kept for a second try


class TlsFiles(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    certificate: str
    key: str
    folder: str = ""  # folder with HOST.pem for single host names


class MetricsListener(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the gateway answers with its metrics, and the file with the token that their readers
    state."""

    host: Host
    port: Port
    token_file: str = ""
    tls: TlsFiles | None = None


class OwnerToken(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the gateway needs to recognise the owner's token, but not to use it."""

    start: Annotated[str, msgspec.Meta(min_length=8, max_length=8)]  # its first characters
    length: Count
    sha256: Digest


class GatewayConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Host = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0  # 0: any free one
    control: str  # the path of the control socket
    state: str  # the folder of deferred results
    # the file in which the numbers of requests outlive the process; "": they end with it
    counts: str = ""
    reuse_port: bool = False  # other gateways of this machine may listen on the same port
    # a proxy passes the requests on, and states each client's address and protocol, and the
    # request's ID; all programs that can connect to the gateway can state these values
    behind_proxy: bool = False
    # the host names in the gateway's URLs, besides those of services and of this machine
    names: tuple[str, ...] = ()
    # whether services without host names are served under all other host names, too; always so if
    # `host` is not a loopback address. On a loopback address, a web site that lets its name point
    # to this machine could otherwise use the services through a browser.
    any_name: bool = False
    owner: OwnerToken | None = None  # programs do not get this token
    metrics: MetricsListener | None = None  # None: they are not served
    # the gateway exits after this many seconds without a line on its control socket
    alone_s: Seconds | None = None
    tls: TlsFiles | None = None
    services: tuple[ServiceRoute, ...] = ()
    limits: GatewayLimits = msgspec.field(default_factory=GatewayLimits)


def read_config(path: Path) -> GatewayConfig:
    """Raises GatewayConfigError."""
    try:
        config = msgspec.json.decode(path.read_bytes(), type=GatewayConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise GatewayConfigError(f"{path}: {error}; see docs/concepts/gateway.md") from error
    check_routes(config.services)
    return config


def check_routes(services: tuple[ServiceRoute, ...]) -> None:
    """Raise GatewayConfigError if two services have a name or a route in common, or if a service
    has both batches and routing by another rule than load."""
    seen: dict[tuple[str, str], str] = {}
    names = set()
    for service in services:
        if service.name in names:
            raise GatewayConfigError(f"service {service.name}: two services have this name")
        names.add(service.name)
        if service.batch is not None and service.routing is not None:
            raise GatewayConfigError(
                f"service {service.name}: `batch` and `routing` exclude each other; remove one"
            )
        for each in service.fallbacks:
            if each.service is None and not is_web_address(each.url):
                raise GatewayConfigError(
                    f"service {service.name}: the fallback {each.label} has neither a service nor "
                    "a URL; add one of them"
                )
        for host in service.hosts or ("",):
            other = seen.setdefault((host.lower(), service.prefix), service.name)
            if other != service.name:
                raise GatewayConfigError(
                    f"service {service.name}: {other} has the same host {host or '*'} and prefix "
                    f"{service.prefix or '/'}; change the host or the prefix of one service"
                )
