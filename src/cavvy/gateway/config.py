"""The gateway's configuration file and the values that its control socket takes.

The control plane writes both. Times are in seconds, sizes in bytes. Unknown fields are refused.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from cavvy.domain.values import Struct

Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Host = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.:-]+$", max_length=255)]
HeaderName = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9-]+$", max_length=100)]
PathPrefix = Annotated[str, msgspec.Meta(pattern=r"^(/[A-Za-z0-9._~-]+)*$")]


class GatewayConfigError(ValueError):
    """Raised if the file or the value cannot be used; the text says where the fault is and what was
    expected."""


class ReplicaAddress(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica that is ready to take requests."""

    id: Name
    host: Host
    port: Port
    concurrency: Count | None = None  # None: as the service says
    rate_micros: Annotated[int, msgspec.Meta(ge=0)] = 0  # its price per hour
    canary: bool = False  # it is of the revision that gets the service's canary share


class Affinity(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests with the same key go to the same replica while it has room."""

    by: Literal["header", "prefix"]
    header: HeaderName = "x-session-id"  # by header: its value is the key
    prefix_bytes: Count = 1024  # by prefix: so many first bytes of the body are the key
    load_factor: Annotated[float, msgspec.Meta(ge=1)] = 1.25  # of the mean load of the replicas


class ClientKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key that permits calls to the service. Keys are random, so a plain hash is enough to
    protect them."""

    id: str
    sha256: Digest
    per_s: Seconds | None = None  # None: no limit of the rate
    burst: Count = 1
    expires_at: float | None = None  # seconds since 1970


class RateLimit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The number of requests per second that are permitted, and the number `burst` that may arrive
    at once."""

    per_s: Annotated[float, msgspec.Meta(gt=0)]
    burst: Count = 1
    # what is counted apart; a client is its key, or its address if the service needs no key
    each: Literal["client", "address", "header", "service"] = "client"
    header: HeaderName = "x-forwarded-for"  # with each: header
    prefix: PathPrefix = ""  # of the paths that are counted, as the replica sees them


class CanaryShare(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The percentage of the requests that are sent to canary replicas while these have room.
    Counting starts again with each revision.
    """

    revision: int
    percent: Annotated[int, msgspec.Meta(ge=1, le=99)]


class BatchTerms(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests with JSON bodies may be sent to a replica as one; see `joined_bodies.py`."""

    max: Annotated[int, msgspec.Meta(ge=2, le=256)] = 16  # instances of a batch
    wait_s: Annotated[float, msgspec.Meta(ge=0)] = 0.01  # for others while a replica is free
    input: Annotated[str, msgspec.Meta(min_length=1)] = "instances"  # the array in a request
    output: Annotated[str, msgspec.Meta(min_length=1)] = "predictions"  # in a response


class ServiceRoute(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A service: the requests that belong to it, and how these requests are passed on."""

    name: Name
    hosts: tuple[Host, ...] = ()  # none: every host name
    prefix: PathPrefix = ""
    strip_prefix: bool = True
    concurrency: Count = 32  # requests at a time for each replica
    queue_max: Count = 10_000  # requests that wait
    wait_s: Seconds = 600  # a request waits so long for a replica
    late_s: Seconds | None = None  # a request that waited longer counts as late; None: none does
    slow_s: Seconds | None = None  # an answer that took longer counts as slow; None: none does
    closed: str = ""  # why the service takes no requests; "" if it does
    price_header: bool = False  # responses say what their request has cost
    response_s: Seconds = 600  # a replica may take so long until its response begins
    silence_s: Seconds | None = None  # without a byte in either direction after that; None: any
    cold_start_s: Seconds | None = None  # an estimate until the gateway has measured one
    affinity: Affinity | None = None
    batch: BatchTerms | None = None
    canary: CanaryShare | None = None
    models: tuple[str, ...] = ()  # names by which /v1/chat/completions and its like select it
    keys: tuple[ClientKey, ...] = ()
    keyed: bool = False  # requests need a key, even if there is none; always true with keys
    rates: tuple[RateLimit, ...] = ()
    body_max: Count = 1 << 30
    deferred_max: Count = 1000  # results of `Prefer: respond-async` that are kept
    deferred_bytes: Count = 16 << 20  # of such a request's body, and of its result
    deferred_ttl_s: Seconds = 86_400


class GatewayLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits for each client connection and for all connections together."""

    head_bytes: Count = 16_384  # HAProxy copies as much for each request that it may repeat
    headers: Count = 128
    head_s: Seconds = 10  # from the first byte of a head to its last
    body_idle_s: Seconds = 30  # between two pieces of a body
    idle_s: Seconds = 75  # between two requests
    stall_s: Seconds = 60  # a client may leave its responses unread so long
    connections: Count = 20_000
    hold_bytes: Count = 262_144  # of a body that waits for a replica
    replay_bytes: Count = 1 << 20  # of a body that is kept for a second try


class TlsFiles(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    certificate: str
    key: str
    folder: str = ""  # with HOST.pem for single host names


class GatewayConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Host = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0  # 0: any free one
    control: str  # the path of the control socket
    state: str  # the folder of deferred results
    reuse_port: bool = False  # other gateways of this machine may listen on the same port
    alone_s: Seconds | None = None  # it ends after so long without a link to its control socket
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
    """Raise GatewayConfigError if two services have a name or a route in common, or if one joins
    requests that affinity would separate."""
    seen: dict[tuple[str, str], str] = {}
    names = set()
    for service in services:
        if service.name in names:
            raise GatewayConfigError(f"service {service.name}: two services have this name")
        names.add(service.name)
        if service.batch is not None and service.affinity is not None:
            raise GatewayConfigError(
                f"service {service.name}: it has both batch and affinity; delete one of them"
            )
        for host in service.hosts or ("",):
            other = seen.setdefault((host.lower(), service.prefix), service.name)
            if other != service.name:
                raise GatewayConfigError(
                    f"service {service.name}: {other} has the same host {host or '*'} and prefix "
                    f"{service.prefix or '/'}; give one of them another"
                )
