"""A small client of REST APIs: JSON or text over HTTPS with a bearer token or a signature. Errors
become `CloudFault`s.

Each call runs in a thread and has a time limit, even if the reply arrives byte by byte. A call that
only reads is repeated after a lost reply, the status 429 or a server error. If a reply with the
status 429 states a time to wait, the client waits for that time. The client does not repeat calls
that change resources, because the launcher must first check whether a call without a reply took
effect.
"""

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from cavvy.http_client import HttpClient, HttpReply, NoReply, is_same_server
from cavvy.providers.recording import CallRecorder
from cavvy.providers.vm.cloud import CloudFault

Json = Any  # a parsed reply; only the cloud's own package reads its fields
ReadError = Callable[[Json], tuple[str, str]]  # parsed error reply -> the error's code and message
# (method, URL, body) -> the headers that sign the request
Sign = Callable[[str, str, bytes | None], Mapping[str, str]]
# (parsed body, headers of the reply, with names in lower case) -> the result of the call
ReadReply = Callable[[Json, Mapping[str, str]], Json]
# a body that is not text is sent as JSON
Body = Mapping[str, Any] | str | None
# (a page, the headers of its reply) -> the path or URL of the next page; None after the last page
ReadNext = Callable[[Json, Mapping[str, str]], str | None]

_CALL_S = 30.0  # maximum time in seconds without any byte of the reply
_REPLY_S = 60.0  # maximum time in seconds until the reply is complete
_MOST_BYTES = 1 << 28  # of a reply; some lists of machine types have tens of MB
_ATTEMPTS = 3
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0
# longer waits that a reply requests are cut to this; no known rate limit lasts longer
_LONGEST_LIMIT_S = 3600.0
_MOST_PAGES = 500
_HEADERS = {"Content-Type": "application/json", "Accept": "application/json"}

# records the calls that are made in the current context
RECORDER: ContextVar[CallRecorder | None] = ContextVar("RECORDER", default=None)


class RestClient:
    """Calls one API. `read_key` returns the token, or "" if the API needs no token. `read_error`
    parses the body of an error reply. If `key_header` is set, this header contains the key;
    otherwise the key is sent as a bearer token. For an API with signed requests, `sign` is used
    instead of a key. `read_reply` builds a call's result from the reply's body and headers; by
    default, a call returns the body. An error with a code in `later` is treated like the status
    429.
    """

    def __init__(
        self,
        endpoint: str,
        read_key: Callable[[], str],
        read_error: ReadError,
        *,
        key_header: str = "",
        sign: Sign | None = None,
        read_reply: ReadReply = lambda told, _: told,
        later: Collection[str] = (),
    ) -> None:
        self._sign, self._read_reply, self._later = sign, read_reply, later
        self._endpoint = endpoint.rstrip("/")
        self._key_header = key_header
        self._read_key, self._read_error = read_key, read_error
        self._threads = ThreadPoolExecutor(8, "rest")  # this client's own threads
        self._http = HttpClient(idle_s=_CALL_S, limit_s=_REPLY_S, most_bytes=_MOST_BYTES)
        self._closed = threading.Event()
        # no call is made before this time (monotonic clock), because of a reply with the status 429
        self._limited_until = 0.0

    def close(self) -> None:
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def get(self, path: str) -> Json:
        """Send a GET request; repeat the request after a temporary failure. Raises CloudFault."""
        return await self._run(f"GET {path}", None, partial(self._read, path, {}))

    async def send(
        self,
        method: str,
        path: str,
        body: Body = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> Json:
        """Send a request that is not read-only, such as POST, PUT, PATCH or DELETE. A text body is
        sent as it is, with the type text/plain unless `headers` names another type. The client
        never repeats the request. Raises CloudFault.
        """
        what = f"{method} {path}"
        return await self._run(what, body, lambda: self._call(method, path, body, headers=headers))

    async def send_for_text(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> str:
        """Send a request as `send` does, but return the reply as plain text, such as an id. Raises
        CloudFault."""
        what = f"{method} {path}"
        return str(await self._run(what, body, lambda: self._call(method, path, body, _read_text)))

    async def pages(self, path: str, read_next: Callable[[Json], str | None]) -> list[Json]:
        """Return all pages of a list. `read_next` returns the path or URL of the next page, or None
        on the last page. Raises CloudFault.
        """
        return await self.pages_by_header(path, lambda page, _: read_next(page))

    async def pages_by_header(self, path: str, read_next: ReadNext) -> list[Json]:
        """Return all pages of a list, as `pages` does, for APIs whose headers tell whether another
        page follows. The names of the headers are in lower case. `next_link` reads the usual
        header, and `numbered_pages` reads lists with numbered pages. Raises CloudFault.
        """
        found: list[Json] = []
        following: str | None = path
        while following is not None:
            if len(found) == _MOST_PAGES:
                raise CloudFault(400, "too many pages", path)
            path, headers = self._path_of(following), dict[str, str]()
            found.append(await self._run(f"GET {path}", None, partial(self._read, path, headers)))
            following = read_next(found[-1], headers)
        return found

    async def numbered_pages(self, path: str, total: str = "x-total-count") -> list[Json]:
        """Return all pages of a list whose pages are numbered and whose header `total` contains the
        number of all items. In `path`, "{page}" stands for the number of a page. A page is an
        array, or an object whose first array contains the items. Raises CloudFault.
        """
        read, number = 0, 1

        def read_next(page: Json, headers: Mapping[str, str]) -> str | None:
            nonlocal read, number
            lists = [each for each in _values(page) if isinstance(each, list)]
            read, number = read + len(lists[0]), number + 1
            return path.format(page=number) if lists[0] and read < int(headers[total]) else None

        return await self.pages_by_header(path.format(page=1), read_next)

    def _path_of(self, page: str) -> str:
        """Return the path of a page, relative to the endpoint. Raises CloudFault if the page is on
        another server, because the token must not be sent there.
        """
        parts, own = urlsplit(page), urlsplit(self._endpoint)
        path = page
        if parts.scheme or parts.netloc:
            path = parts._replace(scheme="", netloc="").geturl()
            if not is_same_server(page, self._endpoint) or not path.startswith(f"{own.path}/"):
                raise CloudFault(400, "a page on another server", page)
            path = path.removeprefix(own.path)
        if not path.startswith("/"):
            raise CloudFault(400, "a page without a path", page)
        return path

    async def _run(self, what: str, body: object, call: Callable[[], Json]) -> Json:
        """Make the call in a thread, and record the call."""
        try:
            reply = await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except CloudFault as fault:
            told = {"status": fault.status, "code": fault.code, "reply": fault.message}
            self._record(what, body, told)
            raise
        self._record(what, body, {"status": 200, "reply": reply})
        return reply

    def _record(self, what: str, body: object, outcome: Mapping[str, object]) -> None:
        if recorder := RECORDER.get():
            writes = not what.startswith("GET ")
            recorder.add(what, body, outcome, writes=writes, root=self._endpoint)

    def _read(self, path: str, told_headers: dict[str, str]) -> Json:
        """Send a GET request, and store the headers of the reply in `told_headers`."""
        for attempt in range(_ATTEMPTS):
            self._await_limit()
            reply = None
            try:
                reply = self._ask("GET", path, None)
                result = self._result(reply)
                told_headers |= reply.headers
                return result
            except CloudFault as fault:
                again = fault.uncertain or fault.status == 429
                if not again or attempt == _ATTEMPTS - 1:
                    raise
            self._closed.wait(_pause(attempt, None if reply is None else _wish(reply)))
        raise AssertionError("unreachable")

    def _await_limit(self) -> None:
        """Wait as required by the last reply with the status 429. Raises CloudFault if the required
        wait is too long.
        """
        left = self._limited_until - time.monotonic()
        if left > _LONGEST_PAUSE_S:
            raise CloudFault(
                429, "too many requests", f"the API requires a wait of {left:.0f} s more"
            )
        self._closed.wait(max(0.0, left))

    def _call(
        self,
        method: str,
        path: str,
        body: Body,
        read: Callable[[bytes], Json] = json.loads,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> Json:
        return self._result(self._ask(method, path, body, headers), read)

    def _ask(
        self,
        method: str,
        path: str,
        body: Body,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> HttpReply:
        url, text = self._endpoint + path, isinstance(body, str)
        kind = {"Content-Type": "text/plain; charset=utf-8"} if text else {}
        data = None if body is None else str(body if text else json.dumps(body)).encode()
        headers = {**_HEADERS, **kind, **headers, **self._prove(method, url, data)}
        try:
            reply = self._http.send(method, url, data, headers)
        except NoReply as error:
            raise CloudFault(0, "no reply", str(error)) from error
        if reply.status == 429 and (wish := _wish(reply)) is not None:
            self._limited_until = time.monotonic() + min(wish, _LONGEST_LIMIT_S)
        return reply

    def _result(self, reply: HttpReply, read: Callable[[bytes], Json] = json.loads) -> Json:
        """Return the result of a call. Raises CloudFault."""
        if reply.status >= 300:
            raise self._fault(reply)
        try:
            return self._read_reply(read(reply.body) if reply.body else None, reply.headers)
        except (ValueError, RecursionError) as error:
            raise CloudFault(0, "no reply", type(error).__name__) from error

    def _prove(self, method: str, url: str, data: bytes | None) -> Mapping[str, str]:
        """Return the headers that authenticate the request."""
        if self._sign is not None:
            return self._sign(method, url, data)
        key = self._read_key()
        if not key:
            return {}
        return {self._key_header: key} if self._key_header else _bearer(key)

    def _fault(self, reply: HttpReply) -> CloudFault:
        try:
            code, message = self._read_error(json.loads(reply.body))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # unusual
            code, message = f"HTTP {reply.status}", ""
        status = 429 if code in self._later else reply.status
        return CloudFault(status, str(code), str(message)[:500])


def _wish(reply: HttpReply) -> float | None:
    """Return the seconds that the client should wait, as stated in a reply's headers, or None if
    the headers state no time.
    """
    told = reply.headers.get("retry-after", "")
    return float(told) if told.isdecimal() else None


def _pause(attempt: int, wish: float | None) -> float:
    """Return the seconds until the next attempt: the time that the server requested or, if the
    server requested no time, a pause that doubles with each attempt.
    """
    return min(_LONGEST_PAUSE_S, _PAUSE_S * 2**attempt if wish is None else wish)


def _bearer(token: str) -> Mapping[str, str]:
    return {"Authorization": f"Bearer {token}"}


def _read_text(content: bytes) -> str:
    """Decode a plain-text reply, and remove quotation marks around it."""
    return content.decode().strip().strip('"')


_LINK = re.compile(r"<([^>]*)>([^<]*)")
_NEXT = re.compile(r""";\s*rel\s*=\s*["']?[^;"']*\bnext\b""", re.IGNORECASE)


def next_link(_: Json, headers: Mapping[str, str]) -> str | None:
    """Return the next page from the header `Link` (RFC 8288), or None if it names no next page."""
    found = _LINK.findall(headers.get("link", ""))
    return next((url for url, parameters in found if _NEXT.search(parameters)), None)


def _values(page: Json) -> Collection[Json]:
    return page.values() if isinstance(page, dict) else [page]
