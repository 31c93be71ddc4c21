"""Sends requests to storages, and reads objects from web servers."""

import email.utils
import xml.etree.ElementTree as Xml
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import ClassVar

from cavvy.domain.targets import EVERY
from cavvy.domain.values import Struct
from cavvy.http_client import (
    HttpClient,
    HttpReply,
    InvalidRequest,
    NoReply,
    ReplyTooLong,
    TargetDenied,
)
from cavvy.store.objects.base import (
    ObjectDenied,
    ObjectInfo,
    ObjectMissing,
    ObjectTryAgain,
    SignedRequest,
)

_MOST_XML = 8 << 20  # bytes; a page of 1000 objects with long names has about 5 MiB
_OWN_S = 300  # how many seconds the server's own signed requests are valid


def ask(
    method: str,
    url: str,
    body: bytes | None = None,
    headers: Mapping[str, str] = MappingProxyType({}),
    targets: str = EVERY,
) -> HttpReply:
    """Send a request to a storage, and follow redirects of requests that read. `targets` are the
    private targets that may be called. Raises ObjectTryAgain if no reply arrives, and ObjectDenied
    for a target that may not be called.
    """
    try:
        return HttpClient(targets=targets, redirects=True).send(method, url, body, headers)
    except TargetDenied as error:
        raise ObjectDenied(str(error)) from error
    except (InvalidRequest, ReplyTooLong) as error:
        raise ObjectDenied(f"{_name_host(url)}: {error}") from error
    except NoReply as error:
        raise ObjectTryAgain(f"{_name_host(url)} does not answer: {error}") from error


def _name_host(url: str) -> str:
    """Return the host and the port of a URL: the rest may be secret."""
    return url.partition("://")[2].partition("/")[0].rpartition("@")[2]


def check(answer: HttpReply, what: str) -> HttpReply:
    """Return the answer if its status is below 300; otherwise raise ObjectMissing, ObjectDenied or
    ObjectTryAgain.
    """
    if answer.status < 300:
        return answer
    reason = f"{what}: {reason_of(answer)}"
    if answer.status in (404, 410):
        raise ObjectMissing(reason)
    if answer.is_passing:
        raise ObjectTryAgain(reason)
    raise ObjectDenied(reason)


def reason_of(answer: HttpReply) -> str:
    """Return the response's status and, if it has one, its error code. The response's text is
    omitted, because it may contain signed data.
    """
    text = answer.body[:4096].decode("utf-8", "replace")
    _, begin, rest = text.partition("<Code>")
    code = rest.partition("</Code>")[0] if begin else answer.headers.get("x-ms-error-code", "")
    return f"status {answer.status}" + (f" ({code[:80]})" if code else "")


def found_of(key: str, answer: HttpReply) -> ObjectInfo:
    """Return the object's properties, read from the headers of the response to a HEAD request."""
    headers = answer.headers
    size = headers.get("content-length", "")
    changed = headers.get("last-modified")
    with parsing(key):
        return ObjectInfo(
            key=key,
            size=int(size) if size.isdigit() else None,
            tag=headers.get("etag", ""),
            changed_at=email.utils.parsedate_to_datetime(changed) if changed else None,
        )


@contextmanager
def parsing(what: str) -> Iterator[None]:
    """Raise ObjectTryAgain for an answer that cannot be parsed: users choose the storages."""
    try:
        yield
    except (ValueError, TypeError, LookupError, OverflowError, Xml.ParseError) as error:
        raise ObjectTryAgain(f"{what}: the answer cannot be read: {error!s:.200}") from error


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
        headers = make_range(offset, length)
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
        where = f"the {what} {self.name}"
        return self._parse(check(self._ask("GET", "", query), where), where)

    def _parse(self, answer: HttpReply, what: str) -> Xml.Element:
        if len(answer.body) > _MOST_XML:  # parsed XML needs many times the memory of its text
            raise ObjectDenied(f"{what}: the answer is larger than {_MOST_XML >> 20} MiB")
        with parsing(what):
            return Xml.fromstring(answer.body)

    def _ask(
        self,
        method: str,
        key: str,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> HttpReply:
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
        headers = make_range(offset, length)
        answer = ask("GET", self._url(key), headers=headers, targets=self.targets)
        check(answer, self._url(key))
        if headers and answer.status == 200:
            return answer.body[offset:] if length is None else answer.body[offset : offset + length]
        return answer.body

    def sign_get(self, key: str, expires_s: int) -> SignedRequest:
        return SignedRequest(method="GET", url=self._url(key))

    def _url(self, key: str) -> str:
        return f"{self.root}/{key}"


def make_range(offset: int, length: int | None) -> Mapping[str, str]:
    """Return the header that asks for a part of an object."""
    end = "" if length is None else str(offset + length - 1)
    return {"Range": f"bytes={offset}-{end}"} if offset or length is not None else {}
