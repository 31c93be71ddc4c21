"""Writes HAProxy's configuration for a set of services. The configuration is written once; replicas
are added and removed over the runtime API.

Each service is a backend whose only fixed server is the gateway, as a backup: HAProxy uses the
gateway while no replica is available. Requests of services with keys, rates, path prefixes, a
canary or routing by cache are always passed to the gateway, because HAProxy cannot handle these
features. Requests that must stay in a place are always passed to the gateway.

In a file of its own, a ring, HAProxy lists the requests that it has completed, for the time after
HAProxy is killed. HAProxy maps the file into its memory, so the operating system keeps what a
killed HAProxy has written, and a line takes no system call. The file is read once its HAProxy has
ended; until then, HAProxy's statistics are complete.
"""

import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from stat import S_ISREG

from cavvy.capabilities.serving.gateway.config import GatewayLimits, ReplicaAddress, ServiceRoute
from cavvy.capabilities.serving.gateway.heads import CLAIMS, REFUSED
from cavvy.capabilities.serving.gateway.own_answers import SILENT, AnswerCode, write_body
from cavvy.capabilities.serving.gateway.own_values import ENCODED, OWN_COOKIE, OwnValues
from cavvy.domain.values import Struct, replace

HOLD = "hold"
RING_VARIABLE = "CAVVY_HAPROXY_REQUESTS"  # the path of the ring's file, which each process has
_TUNNEL_S = 3600.0
_HOLD_S = 86_400.0
_HARD_STOP = "10m"  # seconds in which a process that was replaced may finish its requests
_IDEMPOTENT = "GET HEAD PUT DELETE OPTIONS TRACE"
# the condition for requests that may be sent again
_REPEATABLE = f"{{ method {_IDEMPOTENT} }} or {{ req.hdr(idempotency-key) -m found }}"
_WITHOUT_BODY = "GET HEAD DELETE OPTIONS TRACE"
# request fields that replicas do not get from clients, also with `_` in place of `-`
_DROPPED = (
    "keep-alive",
    "proxy-connection",
    "te",
    *(each.decode().replace("*", "[^,]*") for each in CLAIMS),
    "x-request-id",
)
# fields of requests that only the gateway can handle; HAProxy cannot limit a body without a length
_HELD = ("prefer", "cavvy-residency", "transfer-encoding", "origin")
_OTHER_SITE = (
    "{ req.hdr(sec-fetch-site) -m found } !{ req.hdr(sec-fetch-site) -m str none same-origin }"
)
_GRPC = "{ req.hdr(content-type) -m reg ^application/grpc($|[+;]) }"
_GRPC_SENT = "{ res.hdr(grpc-status) 12 } !{ res.hdr(content-type) -m found }"
_NO_GRPC = "services of Cavvy get requests of HTTP/1.1, so gRPC is not supported"
_CLIENT = "sess.client"  # the client's address as text
_LOST = "X-Cavvy-Lost"  # marks HAProxy's own 503, which becomes a 502
_ERRORS = {  # HAProxy's own answers, except to requests that are not valid HTTP
    400: (AnswerCode.BAD_REQUEST, "the request is not valid HTTP"),
    408: (AnswerCode.SLOW, "the request took too long to arrive"),
    413: (AnswerCode.TOO_LARGE, "the body of the request is too large"),
    500: (AnswerCode.LOST, "HAProxy cannot pass the request on"),
    502: (AnswerCode.INVALID, "the response of the replica is not valid HTTP, or is missing"),
    503: (AnswerCode.LOST, "no replica accepted the request"),
    504: (SILENT.code, SILENT.message),
}


class HaproxyListener(Struct, frozen=True, kw_only=True):
    """The address at which HAProxy listens, and the address of the gateway."""

    host: str
    port: int
    socket: Path  # of the runtime API
    gateway_host: str
    gateway_port: int
    certificate: Path | None = None  # certificate and key in one PEM file: TLS
    http2: bool = True  # with TLS
    # parts of Cavvy's own values; the gateway handles requests that contain one
    signs: tuple[bytes, ...] = OwnValues().signs
    certificates: Path | None = None  # a folder with the certificates of single host names


def name_backend(service: str) -> str:
    return f"svc-{service}"


def name_keeping(service: str) -> str:
    """Return the variable of HAProxy that says whether all replicas of the service keep unused
    connections open."""
    return f"proc.keep_{service.replace('-', '_')}"


def is_direct(service: ServiceRoute) -> bool:
    """Return whether HAProxy can pass the requests of the service to replicas without the
    gateway."""
    by_body = service.reads_body
    guarded = service.keyed or service.keys or service.rates
    by_gateway = guarded or by_body or service.canary or service.price_header or service.closed
    counted = service.batch or service.models  # in batches, or by tokens
    needs_gateway = by_gateway or counted or service.fallbacks
    return bool(service.hosts) and not (service.prefix or needs_gateway)


def list_direct(addresses: Iterable[ReplicaAddress]) -> tuple[ReplicaAddress, ...]:
    """Return the replicas to which HAProxy passes requests without the gateway. If some replicas
    are nearer than others, the result is empty, and the gateway handles the requests. HAProxy
    cannot prefer the near replicas. Even with weights, HAProxy would send requests to an idle far
    replica while near replicas have room. HAProxy uses backup servers only when no other server
    runs.
    """
    found = tuple(addresses)
    if len({each.tier for each in found}) > 1:
        return ()
    return tuple(replace(each, tier=0) for each in found)


def write_configuration(
    listener: HaproxyListener, services: tuple[ServiceRoute, ...], limits: GatewayLimits
) -> str:
    direct = [service for service in services if is_direct(service)]
    parts = [
        _write_global(listener, limits),
        _write_frontend(listener, direct, limits),
        _write_hold(listener),
        *(_write_backend(listener, service) for service in direct),
    ]
    return "\n".join(parts)


def _write_time(seconds: float) -> str:
    return f"{math.ceil(seconds * 1000)}ms"  # HAProxy accepts no fractions


def _write_global(listener: HaproxyListener, limits: GatewayLimits) -> str:
    errors = "".join(
        f"    http-error status {status} content-type application/json lf-string "
        f"'{write_body(status, code, message, '%[unique-id]').decode()}'"
        f"{f' hdr {_LOST} 1' if status == 503 else ''}\n"
        for status, (code, message) in _ERRORS.items()
    )
    return f"""\
global
    stats socket {listener.socket} mode 600 level admin expose-fd listeners
    hard-stop-after {_HARD_STOP}
    tune.bufsize {limits.head_bytes}
    tune.http.maxhdr {limits.headers}

.if defined({RING_VARIABLE})
ring requests
    format raw
    size {RING_BYTES}
    backing-file "${{{RING_VARIABLE}}}"
.endif

defaults
    mode http
    option http-keep-alive
    option abortonclose
    option http-no-delay
    option redispatch 1
    retries 1
    retry-on conn-failure empty-response
    unique-id-format %pid-%Ts-%rt
    timeout connect 5s
    timeout http-request {_write_time(limits.head_s)}
    timeout http-keep-alive {_write_time(limits.idle_s)}
    timeout client {_write_time(limits.stall_s)}
    timeout server {_write_time(limits.stall_s)}
{errors}"""


def _write_frontend(
    listener: HaproxyListener, direct: list[ServiceRoute], limits: GatewayLimits
) -> str:
    more = listener.certificates
    hosts = f" crt {more}" if more is not None and any(more.glob("*.pem")) else ""
    first = listener.certificate
    protocols = "h2,http/1.1" if listener.http2 else "http/1.1"
    tls = f" ssl crt {first}{hosts} alpn {protocols}" if first else ""
    lines = [
        "frontend clients",
        f"    bind {listener.host}:{listener.port}{tls}",
        f"    maxconn {limits.connections}",
        f".if defined({RING_VARIABLE})",
        "    log ring@requests format raw local0",
        f'    log-format "{RING_LINE}"',
        ".endif",
        # written once for a connection, not for each of its requests
        f"    tcp-request session set-var-fmt({_CLIENT}) %[src]",
        "    unique-id-header X-Request-Id",
        *_write_own_rules(listener),
        *_write_rare_rules(limits),
        "    http-after-response set-header X-Request-Id %ID",
        "    http-after-response allow unless { status 503 }",
        f"    http-after-response set-status 502 if {{ res.hdr({_LOST}) -m found }}",
        f"    http-after-response del-header {_LOST}",
        f"    use_backend {HOLD} if {{ var(txn.held) -m bool }}",
    ]
    # clients almost always write a host as it is configured, which takes less time to compare
    for read in ("", ",host_only,lower"):
        for service in direct:
            names = [host.lower() for host in service.hosts]
            names += [] if read else [f"{name}:{listener.port}" for name in names]
            lines.append(
                f"    use_backend {name_backend(service.name)} if "
                f"{{ req.hdr(host){read} -m str {' '.join(names)} }}"
            )
    return "\n".join([*lines, f"    default_backend {HOLD}", ""])


def _write_own_rules(listener: HaproxyListener) -> list[str]:
    """Return the rules that pass requests to the gateway if they may contain values of Cavvy's
    own, such as a key of a service or the console's cookie: the gateway removes them.
    """
    words = "|".join(each.decode().replace("+", "[+]") for each in listener.signs)
    # a single search of each text: HAProxy writes all fields as one text for each condition
    own = f"(?i:cavvy)|{words}|{ENCODED}"
    found = " or ".join(f"{{ {where} -m reg {own} }}" for where in ("req.hdrs", "url"))
    return [f"    http-request set-var(txn.held) bool(true) if {found}"]


def _write_rare_rules(limits: GatewayLimits) -> list[str]:
    """Return the rules for fields that few requests have. A single search of all names detects
    whether a request has a rare field. A separate rule for each field would take more time.
    """
    dropped = "|".join(_DROPPED).replace("-", "[-_]")
    rare = "|".join((dropped, "expect", "sec-fetch-site", *_HELD))
    held = " or ".join(f"{{ req.hdr({name}) -m found }}" for name in _HELD)
    return [
        # HTTP/2 bodies need no Content-Length, and have no Transfer-Encoding
        f"    http-request set-var(txn.held) bool(true) if !{{ method {_WITHOUT_BODY} }} "
        "{ req.ver 2.0 } !{ req.hdr(content-length) -m found }",
        f"    http-request allow unless {{ req.hdr_names -m reg (?:^|,)(?:{rare})(?:,|$) }}",
        # clients of gRPC always send `te`
        f"    http-request set-var(txn.held) bool(true) if {_GRPC}",
        f"    http-request del-header ^(?:{dropped})$ -m reg",
        # this rule answers 100; without `at-least`, slow bodies would be refused with 408
        f"    http-request wait-for-body time {_write_time(limits.body_idle_s)} at-least 1 "
        "if { req.hdr(expect) -i 100-continue }",
        "    http-request del-header Expect",
        f"    http-request set-var(txn.held) bool(true) if {held}",
        f"    http-request set-var(txn.held) bool(true) if {_OTHER_SITE}",
    ]


def _write_limit(status: int, code: AnswerCode, message: str, condition: str) -> str:
    body = write_body(status, code, message, "%[unique-id]").decode()
    kind = "content-type application/json"
    return f"http-request return status {status} {kind} lf-string '{body}' if {{ {condition} }}"


def _write_hold(listener: HaproxyListener) -> str:
    """Return the backend for the gateway; the gateway itself limits the time of each request. The
    time for which a request may wait in the gateway for the first replica depends on the service.
    gRPC needs HTTP/2 and trailers up to the replica, so its requests are refused as gRPC requires:
    with a response that has no body (HAProxy writes no Content-Type into such responses).
    """
    forwarded = "\n    ".join(_write_forwarded_rules(listener))
    return f"""\
backend {HOLD}
    timeout server {_write_time(_HOLD_S)}
    timeout tunnel {_write_time(_HOLD_S)}
    http-request return status 200 hdr grpc-status 12 hdr grpc-message "{_NO_GRPC}" if {_GRPC}
    http-after-response set-header Content-Type application/grpc if {_GRPC_SENT}
    {forwarded}
    http-request disable-l7-retry unless {_REPEATABLE}
    server {HOLD} {listener.gateway_host}:{listener.gateway_port}
"""


def _write_forwarded_rules(listener: HaproxyListener) -> list[str]:
    """Return the rules that add X-Forwarded-For and X-Forwarded-Proto. Each backend contains the
    rules, because most requests skip the frontend's last rules.
    """
    scheme = "https" if listener.certificate else "http"
    return [
        f"http-request add-header X-Forwarded-For %[var({_CLIENT})]",
        f"http-request add-header X-Forwarded-Proto {scheme}",
    ]


def _write_response_rules() -> list[str]:
    """Return the rules for fields of responses that would concern other services or the console, as
    `redirects.guard` treats them. A cookie that the program may not set becomes
    an empty one, which browsers ignore.
    """
    refused = b"|".join(REFUSED).decode().replace("-", "[-_]")
    own, domain = OWN_COOKIE.decode(), r"(?i:;[\t ]*domain[\t ]*(?:=[^;]*)?(?=;|$))"
    return [
        # most responses have no such field; a single search of all names takes less time
        f"http-response allow unless {{ res.hdr_names -m reg (?:^|,)(?:{refused}|set-cookie)"
        "(?:,|$) }",
        f"http-response del-header ^(?:{refused})$ -m reg",
        f"http-response replace-header Set-Cookie '^{own}.*' ';'",
        f"http-response replace-header Set-Cookie '^(.*?){domain}(.*)$' '\\1\\2'",
        f"http-response replace-header Set-Cookie '^.*{domain}.*$' ';'",
    ]


def _write_backend(listener: HaproxyListener, service: ServiceRoute) -> str:
    balance = "balance leastconn"
    if service.routing is not None:
        factor = round(service.routing.load_factor * 100)
        balance = (
            f"balance hdr({service.routing.header})\n    hash-type consistent\n"
            f"    hash-balance-factor {factor}"
        )
    responses = "\n    ".join(_write_response_rules())
    forwarded = "\n    ".join(_write_forwarded_rules(listener))
    waiting = service.queue_max
    # the gateway refuses bodies that are too large, and reads them so that clients get the response
    full = f"{waiting} requests are already waiting for a replica"
    # If a replica ends without an answer to a request on a used connection, HAProxy tells clients
    # of HTTP/2 that the request was not processed, which may be false.
    used = f"!{{ req.ver 2.0 }} {{ var({name_keeping(service.name)}) -m bool }}"
    # HAProxy has one timeout for the wait for a response and for the pauses of the response
    silence_s = service.silence_s or _TUNNEL_S
    return f"""\
backend {name_backend(service.name)}
    {_write_limit(429, AnswerCode.QUEUE_FULL, full, f"queue ge {waiting}")}
    {forwarded}
    http-request allow if {_REPEATABLE}
    http-request disable-l7-retry
    http-request set-header Connection close unless {used}
    {responses}
    {balance}
    use-server {HOLD} if {{ req.hdr_val(content-length) gt {service.body_max} }}
    http-reuse safe
    timeout server {_write_time(max(service.response_s, silence_s))}
    timeout queue {_write_time(service.wait_s)}
    timeout tunnel {_write_time(silence_s)}
    server {HOLD} {listener.gateway_host}:{listener.gateway_port} backup
"""


RING_BYTES = 8 << 20  # the lines of at least 80,000 requests
# what HAProxy writes for a request: the server, the end in microseconds since 1970, and the time
# that the request took in milliseconds, which is -1 if the client left before the response
RING_LINE = "%b/%s %[date(0,us)] %Ta"
_LINE = re.compile(rb"svc-([a-z0-9-]+)/([!-.0-~]+) (\d{16}) (-?\d{1,12})(?!\d)")


class EndedRequests(Struct, frozen=True, kw_only=True):
    """The completed requests of a server of HAProxy."""

    requests: int = 0
    active_s: float = 0.0


def make_ring(path: Path) -> None:
    """Create the file, with all its blocks: a write to a mapped file on a full disk would kill
    HAProxy. Raises OSError.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        try:
            file.write(bytes(RING_BYTES))
            file.flush()
        except OSError:
            path.unlink()
            raise


def load_ring(path: Path) -> bytes:
    """Return the contents of the file, but no more than HAProxy writes. What is no file, such as a
    pipe, counts as empty. Raises OSError, also for a link.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        return file.read(RING_BYTES) if S_ISREG(os.fstat(fd).st_mode) else b""


def read_ring(data: bytes, since: Callable[[str], int]) -> dict[tuple[str, str], EndedRequests]:
    """Return the requests that ended after the time that `since` returns for their service, in
    microseconds since 1970. The keys are the services and their servers.
    """
    found: dict[tuple[str, str], EndedRequests] = {}
    for line in _LINE.finditer(data):
        service, server = line[1].decode(), line[2].decode()
        if int(line[3]) > since(service):
            before = found.get((service, server), EndedRequests())
            found[service, server] = EndedRequests(
                requests=before.requests + 1,
                active_s=before.active_s + max(int(line[4]), 0) / 1000,
            )
    return found
