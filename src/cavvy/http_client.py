"""The HTTP client with which the server calls other servers: clouds, storages, registries, issuers
and the receivers of webhooks.

A request has two time limits: one for a pause, and one until the whole reply has arrived, because a
reply that arrives byte by byte never pauses for long. Replies of every status are returned; an
error's body is empty if it cannot be read. A body has a maximum size, and is not decompressed.
Redirects are followed only for requests that read, and only if the caller asks for it. The client
never repeats a request; only the caller knows whether a repetition is safe. Proxies and
certificates of authorities are those of the environment: HTTP_PROXY, HTTPS_PROXY, NO_PROXY and
SSL_CERT_FILE.

A client with `targets` is for URLs that users choose, and connects only to addresses that these
private targets allow (ADR 0177). It connects to the address that it has checked.

* NoReply         no complete reply arrived, no request could be sent, or a reply is not JSON
  + InvalidRequest  the URL or a header cannot be sent
  + ReplyTooLong    the body is larger than the caller accepts
* TargetDenied    the server must not call this target for users
"""

import io
import json
import os
import socket
import ssl
import string
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from http.client import (
    CONTINUE,
    OK,
    SWITCHING_PROTOCOLS,
    BadStatusLine,
    HTTPConnection,
    HTTPException,
    HTTPResponse,
    HTTPSConnection,
    InvalidURL,
    UnknownProtocol,
)
from math import inf
from time import monotonic
from types import MappingProxyType
from typing import Any, BinaryIO
from urllib.error import URLError
from urllib.parse import quote, urljoin, urlsplit

from cavvy.domain.targets import AddressKind, find_kind, is_allowed
from cavvy.domain.values import Struct, field

IDLE_S = 30.0  # default for the maximum seconds without any byte of a reply
LIMIT_S = 300.0  # default for the maximum seconds until a reply is complete
MOST_BYTES = 1 << 26  # default for the maximum bytes of a body, which is kept in memory
_MOST_REDIRECTS = 10
_MOST_REASON = 200  # characters of a status line that are kept
_MOST_INTERIM = 10  # replies with a status below 200 before the reply itself
_REDIRECTS = (301, 302, 303, 307, 308)
_READS = ("GET", "HEAD")
_LATER = (408, 425, 429)
_NEVER = (501, 505)  # the server does not support the method or the version
_PART = 1 << 16
_TRUST_S = 600  # certificates of authorities are read again after this time
_PORTS = {"http": 80, "https": 443}

# Makes the connections to these hosts ("127.0.0.1:8080") in place of http.client. The provider
# contract's stand-ins answer in the client's own process that way. Only for clients without
# `targets`.
CONNECTIONS: dict[str, Callable[..., HTTPConnection]] = {}


class NoReply(Exception):
    """Raised if no usable reply arrived. The message is the reason, and contains no part of the
    request.
    """


class InvalidRequest(NoReply):
    """Raised if the URL or a header cannot be sent."""


class ReplyTooLong(NoReply):
    """Raised if the body of a reply is larger than the caller accepts."""


class TargetDenied(Exception):
    """Raised if the server must not call this target for users. The message is the same whether or
    not a program answers there.
    """


class HttpReply(Struct, frozen=True, kw_only=True):
    """A reply, of any status. The names of `headers` are in lower case."""

    status: int
    reason: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def is_passing(self) -> bool:
        """Whether a later attempt may have another result. The caller may repeat a request that
        only reads.
        """
        return self.status in _LATER or (self.status >= 500 and self.status not in _NEVER)

    def parse_json(self) -> Any:
        """Return the parsed body. Raises NoReply."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:  # the text of some errors quotes the body
            raise NoReply(f"the reply is not JSON ({type(error).__name__})") from error


class HttpClient:
    """Sends requests; each opens its own connection. `targets` are the private targets that may be
    called; without `targets`, the URLs are of an administrator or a cloud, and may have any
    address. `limit_s` includes all redirects. A body of more than `most_bytes` is an error; with 0,
    bodies are not read. `ca_file` contains the certificates of the only authorities to trust.
    """

    def __init__(
        self,
        *,
        targets: str | None = None,
        redirects: bool = False,
        idle_s: float = IDLE_S,
        limit_s: float = LIMIT_S,
        most_bytes: int = MOST_BYTES,
        ca_file: str | None = None,
    ) -> None:
        self._targets, self._redirects = targets, redirects
        self._idle_s, self._limit_s, self._most_bytes = idle_s, limit_s, most_bytes
        self._opener = urllib.request.OpenerDirector()
        self._opener.addheaders = [("User-Agent", "cavvy")]
        self._opener.add_handler(urllib.request.ProxyHandler())
        self._opener.add_handler(_Connections(targets, ca_file))

    def send(
        self,
        method: str,
        url: str,
        body: bytes | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
        *,
        limit_s: float | None = None,
        into: BinaryIO | None = None,
    ) -> HttpReply:
        """Send a request, and return the reply. `limit_s` replaces the client's own limit. The body
        of a successful reply is written to `into`, if given. The header `Authorization` is not sent
        to the targets of redirects. Raises NoReply, TargetDenied.
        """
        deadline = _Deadline(self._limit_s if limit_s is None else limit_s)
        for _ in range(_MOST_REDIRECTS if self._redirects and method in _READS else 0):
            reply = self._send(method, url, body, headers, deadline, into)
            if (following := _find_redirect(url, reply)) is None:
                return reply
            url = following
            headers = {name: headers[name] for name in headers if name != "Authorization"}
        return self._send(method, url, body, headers, deadline, into)

    def _send(
        self,
        method: str,
        url: str,
        body: bytes | None,
        headers: Mapping[str, str],
        deadline: "_Deadline",
        into: BinaryIO | None,
    ) -> HttpReply:
        kind = {} if body is None else {"Content-Type": "application/octet-stream"}
        try:
            if (parts := urlsplit(url)).scheme not in ("http", "https"):
                raise InvalidRequest("the address is not an http or https address")
            if self._targets is not None:
                check_host(url, self._targets)
            if "@" in parts.netloc:
                raise InvalidRequest("the address has a user name, which cannot be sent")
            request = _Request(url, body, {**kind, **headers}, method=method)
            request.deadline = deadline
            with self._opener.open(request, timeout=self._idle_s) as reply:
                return self._read(reply, into if reply.status < 300 else None)
        except (InvalidURL, ValueError) as error:  # the texts of these errors quote the request
            problem = type(error).__name__
            raise InvalidRequest(f"the address or a header is malformed: {problem}") from error
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, URLError) else error
            told = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
            if isinstance(reason, BadStatusLine | UnknownProtocol):  # quotes the reply
                told = _clean(told) or "the reply is not HTTP"
            raise NoReply(told) from error

    def _read(self, reply: HTTPResponse, into: BinaryIO | None) -> HttpReply:
        """Raises ReplyTooLong, OSError, HTTPException."""
        try:
            body = self._read_body(reply, into)
        except (ReplyTooLong, OSError, HTTPException):
            if reply.status < 300:
                raise
            body = b""
        headers = {name.lower(): value for name, value in reply.headers.items()}
        reason = _clean(reply.reason)
        return HttpReply(status=reply.status, reason=reason, headers=headers, body=body)

    def _read_body(self, reply: HTTPResponse, into: BinaryIO | None) -> bytes:
        """Return the body, or write it to `into`. Raises ReplyTooLong, OSError, HTTPException."""
        kept, size = io.BytesIO(), 0
        while self._most_bytes and (part := _read_part(reply)):
            size += len(part)
            if size > self._most_bytes:
                raise ReplyTooLong(f"the reply is longer than {self._most_bytes >> 20} MiB")
            (into or kept).write(part)
        if self._most_bytes and reply.length:
            total = size + reply.length
            raise ConnectionError(f"the server sent only {size:,} of {total:,} bytes")
        return kept.getvalue()


def _clean(line: str) -> str:
    """Return the printable part of a reply's first line, which may be shown in a terminal."""
    return "".join(filter(str.isprintable, line))[:_MOST_REASON]


def _read_part(reply: HTTPResponse) -> bytes:
    """Raises OSError, HTTPException."""
    try:
        return reply.read(_PART)
    except ValueError as error:  # a chunk of negative size
        raise HTTPException("the reply has a chunk without a valid size") from error


def check_host(url: str, targets: str) -> None:
    """Raise TargetDenied for a URL whose host has an address that the server must not call for
    users. A host that is not found passes: a proxy may know it, and a direct connection fails.
    """
    with suppress(OSError, ValueError):
        parts = urlsplit(url)
        list_allowed(parts.hostname or "", parts.port or 443, targets)


def list_allowed(host: str, port: int, targets: str) -> list[str]:
    """Return the addresses of a host. Raises TargetDenied if one of them may not be called: a
    cloud's metadata service, which gives credentials to this machine, or a private address that is
    not in `targets`. Raises OSError or ValueError if the host is not found.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(address[0]) for *_, address in found]
    for address in addresses:
        if is_allowed(targets, host, address, is_own):
            continue
        if find_kind(address) is AddressKind.METADATA:
            raise TargetDenied(
                f"{host} is a link-local or metadata address, which the server does not call"
            )
        raise TargetDenied(
            f"{host} is not a public address, and the server's setting server.private_targets "
            "does not list it"
        )
    return addresses


def is_own(address: str) -> bool:
    """Return whether an address is one of this machine: the system then uses it for both ends of a
    connection. Nothing is sent.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return bool(probe.getsockname()[0] == address)
    except OSError:  # no connection to the address is possible
        return False


def connect_allowed(
    address: tuple[str, int],
    timeout_s: float | None,
    *,
    targets: str | None,
    until: float = inf,
) -> socket.socket:
    """Connect to a host, but only to addresses that `targets` allow: a second look at a host name
    may have another result. Several addresses have one time limit, `until` on the monotonic clock.
    Raises TargetDenied, OSError.
    """
    host, port = address
    problem = OSError(f"{host} has no address")
    for each in [host] if targets is None else list_allowed(host, port, targets):
        left_s = until - monotonic()
        if left_s <= 0:
            raise TimeoutError(f"no connection to {host} in time")
        try:
            return socket.create_connection((each, port), min(left_s, timeout_s or left_s))
        except OSError as error:
            problem = error
    raise problem


def _find_redirect(url: str, reply: HttpReply) -> str | None:
    """Return the URL to which a reply redirects, or None. A redirect must not leave TLS: any web
    server could otherwise make this server call programs without TLS on its own machine. Raises
    TargetDenied.
    """
    place = reply.headers.get("location")
    if reply.status not in _REDIRECTS or not place:
        return None
    try:
        following = urljoin(url, quote(place, safe=string.punctuation, encoding="iso-8859-1"))
        scheme, host = urlsplit(following).scheme, urlsplit(url).netloc
    except ValueError:
        return None
    if url.lower().startswith("https:") and scheme != "https":
        raise TargetDenied(f"{host} redirects to an address without https://")
    if scheme not in ("http", "https"):
        raise TargetDenied(f"{host} redirects to an address without http:// or https://")
    return following


class _Deadline:
    """The time until which a reply must be complete."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self.until = limit_s, monotonic() + limit_s


class _Request(urllib.request.Request):
    deadline: _Deadline


class _Connections(urllib.request.AbstractHTTPHandler):
    """Opens the connections of one client."""

    def __init__(self, targets: str | None, ca_file: str | None) -> None:
        super().__init__()
        self._targets, self._ca_file = targets, ca_file

    def http_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(partial(self._connect, HTTPConnection, request), request)

    def https_open(self, request: urllib.request.Request) -> HTTPResponse:
        names = os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
        tls = _make_tls(self._ca_file, names, monotonic() // _TRUST_S)
        return self.do_open(partial(self._connect, HTTPSConnection, request), request, context=tls)

    http_request = https_request = urllib.request.AbstractHTTPHandler.do_request_

    def _connect(
        self, kind: type[HTTPConnection], request: Any, host: str, **options: Any
    ) -> HTTPConnection:
        # the environment names the proxy, and the proxy looks up the host itself
        proxied = request.has_proxy() or getattr(request, "_tunnel_host", None)
        targets, deadline = None if proxied else self._targets, request.deadline
        if targets is None and host in CONNECTIONS:
            return CONNECTIONS[host](host, **options)

        def dial(
            address: tuple[str, int], timeout_s: float | None, source: object
        ) -> socket.socket:
            return connect_allowed(address, timeout_s, targets=targets, until=deadline.until)

        connection: Any = kind(host, **options)  # http.client hides both attributes
        connection._create_connection = dial
        connection.response_class = partial(_TimedReply, deadline=deadline)
        return connection  # type: ignore[no-any-return]


@lru_cache(maxsize=8)
def _make_tls(ca_file: str | None, environment: object, when: float) -> ssl.SSLContext:
    """Reading the certificates of authorities takes about 20 ms."""
    context = ssl.create_default_context(cafile=ca_file)
    context.set_alpn_protocols(["http/1.1"])
    return context


class _TimedReply(HTTPResponse):
    """A reply that must be complete at its deadline. Interim replies before it, such as 103 (Early
    Hints), are skipped.
    """

    def __init__(
        self, sock: socket.socket, *args: Any, deadline: _Deadline, **options: Any
    ) -> None:
        super().__init__(sock, *args, **options)
        self.fp.close()
        self.fp = io.BufferedReader(_TimedStream(sock, deadline))
        self._interim = 0

    def _read_status(self) -> tuple[str, int, str]:
        version, status, reason = super()._read_status()  # type: ignore[misc]  # hidden
        if CONTINUE <= status < OK:
            self._interim += 1
            if status == SWITCHING_PROTOCOLS or self._interim > _MOST_INTERIM:
                raise BadStatusLine(f"{version} {status} {reason}")
            status = CONTINUE  # the only interim status that http.client skips
        return version, status, reason


class _TimedStream(io.RawIOBase):
    """The bytes of a reply. Raises TimeoutError after the deadline. The timeout of a socket cannot
    limit a reply, because it starts again after each received byte.
    """

    def __init__(self, sock: socket.socket, deadline: _Deadline) -> None:
        self._sock, self._raw = sock, sock.makefile("rb", buffering=0)
        self._deadline, self._idle_s = deadline, sock.gettimeout() or deadline.limit_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]  # one type
        left_s = self._deadline.until - monotonic()
        if left_s <= 0:
            raise TimeoutError(f"the reply was not complete after {self._deadline.limit_s:g} s")
        self._sock.settimeout(min(self._idle_s, left_s))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def is_same_server(url: str, other: str) -> bool:
    """Return whether both URLs have the same scheme, host and port. A URL without a port has the
    default port of its scheme, and the case of letters in a host name is ignored. For example,
    https://a.org:443/x and https://A.org/y are on the same server.
    """
    return _server(url) == _server(other)


def _server(url: str) -> tuple[str, str | None, int | None]:
    try:
        parts = urlsplit(url)
        return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)
    except ValueError:  # not a URL
        return url, None, None
