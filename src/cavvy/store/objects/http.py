"""Sends requests to web servers with a time limit, and reads objects from web servers."""

import email.utils
import http.client
import ipaddress
import socket
import ssl
import urllib.error
import urllib.request
import xml.etree.ElementTree as Xml
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from http.client import HTTPMessage
from typing import IO, ClassVar
from urllib.parse import urlsplit
from urllib.request import OpenerDirector

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
# The addresses of metadata services that are not link-local: those of Azure, Alibaba Cloud and
# Oracle Cloud; over IPv6, those of EC2, EKS, Google Cloud, Oracle Cloud and Scaleway
_METADATA = {
    *("168.63.129.16", "100.100.100.200", "192.0.0.192"),
    *("fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "fd00:c1::a9fe:a9fe", "fd00:42::42"),
}
_MOST = 1 << 26  # maximum bytes of an answer, which is kept in memory


class WebAnswer(Struct, frozen=True, kw_only=True):
    """A web server's answer. An answer with a status such as 404 is also returned as this object,
    not raised as an error.
    """

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)  # header names in lower case


def ask(
    method: str, url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> WebAnswer:
    """Send a request. Raises ObjectTryAgain if no response arrives."""
    check_host(url)
    request = urllib.request.Request(url, data=body, method=method, headers=dict(headers or {}))
    if body is not None:
        request.add_unredirected_header(
            "Content-Type", request.get_header("Content-type", "application/octet-stream")
        )
    try:
        with _OPENER.open(request, timeout=TIMEOUT_S) as reply:
            return _answer(reply.status, reply, dict(reply.headers))
    except urllib.error.HTTPError as error:
        with error:
            return _answer(error.code, error, dict(error.headers))
    except (urllib.error.URLError, OSError, http.client.HTTPException, ssl.SSLError) as error:
        reason = getattr(error, "reason", None) or error
        raise ObjectTryAgain(f"{request.host} does not answer: {reason}") from error


def check_host(url: str) -> None:
    """Raise ObjectDenied for hosts that the server must not call for users, such as a cloud's
    metadata service, which gives credentials to this machine.

    The check is needed because users choose the URLs and receive the content of the responses.
    """
    parts = urlsplit(url)
    try:
        found = socket.getaddrinfo(parts.hostname or "", parts.port or 443, type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return  # the request itself will report the error later
    for *_, address in found:
        _check_address(parts.hostname or "", str(address[0]))


def _check_address(host: str, address: str) -> None:
    number = ipaddress.ip_address(address.partition("%")[0])
    number = getattr(number, "ipv4_mapped", None) or number
    if number.is_link_local or str(number) in _METADATA:
        raise ObjectDenied(
            f"{host} is a link-local or metadata address, which the server does not call"
        )


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
    with a request that sends a whole object.
    """

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
        return ask(method, url, body, {**self.headers, **(headers or {})})

    @abstractmethod
    def _sign(self, method: str, key: str, query: Mapping[str, str], expires_s: int) -> str:
        """Return a URL that allows this request for a limited time."""

    def _say(self, key: str) -> str:
        return f"{self.name}/{key}"


class WebPages(Struct, frozen=True, kw_only=True):
    """The files on one web server. A key is the path of a file."""

    root: str  # https://host

    def head(self, key: str) -> ObjectInfo | None:
        answer = ask("HEAD", self._url(key))
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
        answer = check(ask("GET", self._url(key), headers=headers), self._url(key))
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
    """

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        if req.type == "https" and urlsplit(newurl).scheme != "https":
            raise ObjectDenied(f"{req.host} redirects to an address without https://")
        check_host(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _CheckedConnection(http.client.HTTPConnection):
    """A connection that checks the server's address again, because the host name can resolve to a
    different address than in `check_host`.
    """

    def connect(self) -> None:
        super().connect()
        _check_address(self.host, str(self.sock.getpeername()[0]))


class _CheckedTlsConnection(http.client.HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        _check_address(self.host, str(self.sock.getpeername()[0]))


class _CheckedHttp(urllib.request.HTTPHandler):
    def __init__(self, answer_s: float) -> None:
        super().__init__()
        self._answer_s = answer_s

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(connect_timed(_CheckedConnection, self._answer_s), req)


class _CheckedHttps(urllib.request.HTTPSHandler):
    def __init__(self, answer_s: float) -> None:
        super().__init__()
        self._answer_s = answer_s

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(connect_timed(_CheckedTlsConnection, self._answer_s), req)


def make_opener(
    redirects: type[urllib.request.HTTPRedirectHandler], answer_s: float = _ANSWER_S
) -> OpenerDirector:
    """Return an opener for users' URLs that connects only to allowed addresses. If an answer is not
    complete after `answer_s` seconds, TimeoutError is raised, so that a slow server cannot occupy a
    thread forever.
    """
    return urllib.request.build_opener(redirects, _CheckedHttp(answer_s), _CheckedHttps(answer_s))


_OPENER = make_opener(CheckedRedirects)
