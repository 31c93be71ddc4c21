"""Sends requests to web servers with a time limit, and reads objects from web servers."""

import email.utils
import http.client
import socket
import ssl
import urllib.error
import urllib.request
import xml.etree.ElementTree as Xml
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http.client import HTTPMessage
from typing import IO, Any, ClassVar
from urllib.parse import urlsplit
from urllib.request import OpenerDirector

from cavvy.domain.targets import EVERY, AddressKind, find_kind, is_allowed
from cavvy.domain.values import Struct, field
from cavvy.store.objects.base import (
    ObjectDenied,
    ObjectInfo,
    ObjectMissing,
    ObjectTryAgain,
    SignedRequest,
)
from cavvy.timed_replies import connect_timed

TIMEOUT_S = 30.0  # maximum seconds without any byte of an answer
_ANSWER_S = 300.0  # maximum seconds until an answer is complete, even if it arrives byte by byte
_OWN_S = 300  # how many seconds the server's own signed requests are valid
_MOST = 1 << 26  # maximum bytes of an answer, which is kept in memory


class WebAnswer(Struct, frozen=True, kw_only=True):
    """A web server's answer. An answer with a status such as 404 is also returned as this object,
    not raised as an error.
    """

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)  # header names in lower case


def ask(
    method: str,
    url: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    targets: str = EVERY,
) -> WebAnswer:
    """Send a request. `targets` are the private targets that may be called. Raises ObjectTryAgain
    if no response arrives, and ObjectDenied for a target that may not be called.
    """
    check_host(url, targets)
    request = urllib.request.Request(url, data=body, method=method, headers=dict(headers or {}))
    if body is not None:
        request.add_unredirected_header(
            "Content-Type", request.get_header("Content-type", "application/octet-stream")
        )
    try:
        opener = make_opener(CheckedRedirects(targets), targets=targets)
        with opener.open(request, timeout=TIMEOUT_S) as reply:
            return _answer(reply.status, reply, dict(reply.headers))
    except urllib.error.HTTPError as error:
        with error:
            return _answer(error.code, error, dict(error.headers))
    except (urllib.error.URLError, OSError, http.client.HTTPException, ssl.SSLError) as error:
        reason = getattr(error, "reason", None) or error
        raise ObjectTryAgain(f"{request.host} does not answer: {reason}") from error


def check_host(url: str, targets: str = EVERY) -> None:
    """Raise ObjectDenied for hosts that the server must not call for users: a cloud's metadata
    service, which gives credentials to this machine, and private addresses that are not in
    `targets`. The text is the same whether or not a program answers there.

    The check is needed because users choose the URLs and receive the content of the responses.
    """
    parts = urlsplit(url)
    try:
        list_allowed(parts.hostname or "", parts.port or 443, targets)
    except (OSError, ValueError):
        return  # the request itself will report the error later


def list_allowed(host: str, port: int, targets: str) -> list[str]:
    """Return the addresses of a host. Raises ObjectDenied if one of them may not be called, and
    OSError or ValueError if the host is not found.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(address[0]) for *_, address in found]
    for address in addresses:
        if is_allowed(targets, host, address, is_own):
            continue
        if find_kind(address) is AddressKind.METADATA:
            raise ObjectDenied(
                f"{host} is a link-local or metadata address, which the server does not call"
            )
        raise ObjectDenied(
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
    timeout: float | None,
    source_address: tuple[str, int] | None = None,
    *,
    targets: str,
) -> socket.socket:
    """Connect as `socket.create_connection` does, but only to addresses that are allowed: a second
    look at a host name may have another result. Raises ObjectDenied, OSError.
    """
    problem = OSError(f"{address[0]} has no address")
    for each in list_allowed(*address, targets):
        try:
            return socket.create_connection((each, address[1]), timeout, source_address)
        except OSError as error:
            problem = error
    raise problem


def check(answer: WebAnswer, what: str) -> WebAnswer:
    """Return the answer if its status is below 300; otherwise raise ObjectMissing, ObjectDenied or
    ObjectTryAgain.
    """
    if answer.status < 300:
        return answer
    reason = f"{what}: {reason_of(answer)}"
    if answer.status in (404, 410):
        raise ObjectMissing(reason)
    if answer.status in (408, 425, 429) or answer.status >= 500:
        raise ObjectTryAgain(reason)
    raise ObjectDenied(reason)


def reason_of(answer: WebAnswer) -> str:
    """Return the response's status and, if it has one, its error code. The response's text is
    omitted, because it may contain signed data.
    """
    text = answer.body[:4096].decode("utf-8", "replace")
    _, begin, rest = text.partition("<Code>")
    code = rest.partition("</Code>")[0] if begin else answer.headers.get("x-ms-error-code", "")
    return f"status {answer.status}" + (f" ({code[:80]})" if code else "")


def found_of(key: str, answer: WebAnswer) -> ObjectInfo:
    """Return the object's properties, read from the headers of the response to a HEAD request."""
    headers = answer.headers
    size = headers.get("content-length", "")
    changed = headers.get("last-modified")
    return ObjectInfo(
        key=key,
        size=int(size) if size.isdigit() else None,
        tag=headers.get("etag", ""),
        changed_at=email.utils.parsedate_to_datetime(changed) if changed else None,
    )


class SignedStorage(ABC):
    """Objects that are accessed by signed requests. This class contains the common code of S3
    buckets and Azure containers.

    Subclasses sign the requests. `headers` are sent with every request; `put_headers` are also sent
    with a request that sends a whole object. `targets` are the private targets that may be called.
    """

    targets: str = EVERY

    headers: ClassVar[Mapping[str, str]] = {}
    put_headers: ClassVar[Mapping[str, str]] = {}

    def __init__(self, name: str) -> None:
        self.name = name

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            return b""
        headers = _range(offset, length)
        return check(self._ask("GET", key, headers=headers), self._say(key)).body

    def put(self, key: str, data: bytes) -> None:
        check(self._ask("PUT", key, body=data, headers=self.put_headers), self._say(key))

    def delete(self, key: str) -> None:
        self._drop(key, {})

    def sign_get(self, key: str, expires_s: int) -> SignedRequest:
        url = self._sign("GET", key, {}, expires_s)
        return SignedRequest(method="GET", url=url, headers=self.headers)

    def _drop(self, key: str, query: Mapping[str, str]) -> None:
        answer = self._ask("DELETE", key, query)
        if answer.status != 404:
            check(answer, self._say(key))

    def _listed(self, query: Mapping[str, str], what: str) -> Xml.Element:
        answer = check(self._ask("GET", "", query), f"the {what} {self.name}")
        try:
            return Xml.fromstring(answer.body)
        except Xml.ParseError as error:
            raise ObjectTryAgain(f"the listing of the {what} {self.name} is not XML") from error

    def _ask(
        self,
        method: str,
        key: str,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> WebAnswer:
        url = self._sign(method, key, query or {}, _OWN_S)
        return ask(method, url, body, {**self.headers, **(headers or {})}, self.targets)

    @abstractmethod
    def _sign(self, method: str, key: str, query: Mapping[str, str], expires_s: int) -> str:
        """Return a URL that allows this request for a limited time."""

    def _say(self, key: str) -> str:
        return f"{self.name}/{key}"


class WebPages(Struct, frozen=True, kw_only=True):
    """The files on one web server. A key is the path of a file."""

    root: str  # https://host
    targets: str = EVERY  # the private targets that may be called

    def head(self, key: str) -> ObjectInfo | None:
        answer = ask("HEAD", self._url(key), targets=self.targets)
        if answer.status in (404, 410):
            return None
        if answer.status in (405, 501):  # the server does not support HEAD
            return ObjectInfo(key=key, size=None)
        return found_of(key, check(answer, self._url(key)))

    def list(
        self, prefix: str, after: str = "", limit: int = 1000
    ) -> tuple[Sequence[ObjectInfo], str]:
        return (), ""

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        headers = _range(offset, length)
        answer = ask("GET", self._url(key), headers=headers, targets=self.targets)
        check(answer, self._url(key))
        if headers and answer.status == 200:
            return answer.body[offset:] if length is None else answer.body[offset : offset + length]
        return answer.body

    def sign_get(self, key: str, expires_s: int) -> SignedRequest:
        return SignedRequest(method="GET", url=self._url(key))

    def _url(self, key: str) -> str:
        return f"{self.root}/{key}"


def _range(offset: int, length: int | None) -> Mapping[str, str]:
    end = "" if length is None else str(offset + length - 1)
    return {"Range": f"bytes={offset}-{end}"} if offset or length is not None else {}


def _answer(status: int, reply: IO[bytes], headers: Mapping[str, str]) -> WebAnswer:
    return WebAnswer(
        status=status,
        body=reply.read(_MOST),
        headers={name.lower(): value for name, value in headers.items()},
    )


class CheckedRedirects(urllib.request.HTTPRedirectHandler):
    """A handler that follows redirects to allowed hosts only, and from https only to https.
    Otherwise, any web server could make this server call programs without TLS on its own machine.
    `targets` are the private targets that may be called.
    """

    def __init__(self, targets: str = EVERY) -> None:
        self._targets = targets

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        try:
            self._check(req, newurl)
        except ObjectDenied:
            fp.close()
            raise
        return super().redirect_request(req, fp, code, msg, headers, newurl)

    def _check(self, req: urllib.request.Request, newurl: str) -> None:
        scheme = urlsplit(newurl).scheme
        if req.type == "https" and scheme != "https":
            raise ObjectDenied(f"{req.host} redirects to an address without https://")
        if scheme not in ("http", "https"):
            raise ObjectDenied(f"{req.host} redirects to an address without http:// or https://")
        check_host(newurl, self._targets)


class _CheckedHttp(urllib.request.HTTPHandler):
    def __init__(self, answer_s: float, targets: str) -> None:
        super().__init__()
        self._given = answer_s, targets

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_connect(http.client.HTTPConnection, req, *self._given), req)


class _CheckedHttps(urllib.request.HTTPSHandler):
    def __init__(self, answer_s: float, targets: str) -> None:
        super().__init__()
        self._given = answer_s, targets

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_connect(http.client.HTTPSConnection, req, *self._given), req)


def _connect(
    kind: type[http.client.HTTPConnection],
    req: urllib.request.Request,
    answer_s: float,
    targets: str,
) -> Callable[..., http.client.HTTPConnection]:
    timed = connect_timed(kind, answer_s)
    if req.has_proxy() or getattr(req, "_tunnel_host", None):
        return timed  # the environment names the proxy, and the proxy looks up the host itself

    def make(host: str, **options: Any) -> http.client.HTTPConnection:
        connection: Any = timed(host, **options)
        connection._create_connection = partial(connect_allowed, targets=targets)
        return connection  # type: ignore[no-any-return]  # http.client hides the attribute

    return make


def make_opener(
    redirects: urllib.request.HTTPRedirectHandler | type[urllib.request.HTTPRedirectHandler],
    answer_s: float = _ANSWER_S,
    targets: str = EVERY,
) -> OpenerDirector:
    """Return an opener for users' URLs that connects only to allowed addresses. `targets` are the
    private targets that may be called. If an answer is not complete after `answer_s` seconds,
    TimeoutError is raised, so that a slow server cannot occupy a thread forever.
    """
    return urllib.request.build_opener(
        redirects, _CheckedHttp(answer_s, targets), _CheckedHttps(answer_s, targets)
    )
