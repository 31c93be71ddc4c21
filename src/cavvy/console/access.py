"""Decides who may see the pages, and keeps other sites and injected text from using them. A browser
that has signed in sends a cookie, and each cookie belongs to the connections of one user. Requests
that no page of the console makes are refused.

People can also sign in at an identity provider that the server trusts, by the device flow: the
browser shows a code, and waits until the person has confirmed it at the provider. Nothing is
registered at the provider besides what `cavvy login` uses.
"""

import hmac
import ipaddress
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from ipaddress import ip_address, ip_network
from secrets import token_urlsafe
from threading import Lock, Thread
from typing import Protocol
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cavvy.client import ApiClient, ApiError
from cavvy.client.account_wire import AccountClient, SignInWay, list_ways, sign_in
from cavvy.client.device_flow import sign_in_by_device
from cavvy.console.memory import PAGE_S, ClientPool
from cavvy.domain.targets import host_name, is_host, is_loopback_name

SESSION_S = 12 * 3600  # seconds after the last page after which a browser must sign in again
_MOST_SESSIONS = 10_000  # the session that was unused for the longest time ends first
_MOST_EACH = 50  # sessions of one account, so that one user cannot end the sessions of others
_MOST_REASONS = 1000  # ended sessions whose reason is remembered
_TOKEN = re.compile(r"[!-~]{1,1000}")  # other characters would change the request to the server
_UNUSED = f"You were signed out, because no page was open for {SESSION_S // 3600} hours."
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_CLOSED = "06"  # the state TIME_WAIT, in which the kernel no longer knows the user


class SignInRefused(Exception):
    """Raised if a browser may not sign in. The text says why."""


class Access(Protocol):
    """Signs in browsers."""

    shared: bool  # whether each user signs in with an own token
    # opens a connection without a token, with which people sign in at an identity provider
    connect: Callable[[], ApiClient] | None

    def sign_in(self, secret: str) -> str:
        """Return the cookie for a browser that presents the secret. Raises SignInRefused, ApiError
        if the server refuses the secret or does not answer.
        """

    def find(self, cookie: str) -> ClientPool | None:
        """Return the connections of the user whose browser sends this cookie."""

    def sign_out(self, cookie: str, reason: str = "") -> None:
        """End a session. `reason` is what its browser shows when the user signs in again."""

    def take_reason(self, cookie: str) -> str:
        """Return once why the session of this cookie ended, or ""."""

    def close(self) -> None: ...


class OneUser:
    """The console of the user who started it. The address that the command prints contains the
    secret, because other users of the machine can reach the port, too.
    """

    shared = False
    connect: Callable[[], ApiClient] | None = None

    def __init__(self, client: ApiClient) -> None:
        self.secret = token_urlsafe(24)
        self._cookie = token_urlsafe(24)
        self._clients = ClientPool(client)

    def sign_in(self, secret: str) -> str:
        if not _equal(_read_key(secret), self.secret):
            raise SignInRefused("The address is not the one that `cavvy console` printed.")
        return self._cookie

    def find(self, cookie: str) -> ClientPool | None:
        return self._clients if _equal(cookie, self._cookie) else None

    def sign_out(self, cookie: str, reason: str = "") -> None:
        """Replace the cookie, so that every browser must sign in again."""
        if _equal(cookie, self._cookie):
            self._cookie = token_urlsafe(24)

    def take_reason(self, cookie: str) -> str:
        return ""

    def close(self) -> None:
        self._clients.close()


def _read_key(text: str) -> str:
    """Return the key of an address that the command prints, or the text if it is none."""
    try:
        keys = parse_qs(urlsplit(text).query).get("key")
    except ValueError:
        return text
    return keys[0] if keys else text


@dataclass
class _Session:
    account: str | None  # None for the owner of an embedded server
    clients: ClientPool
    used: float = field(default_factory=lambda: time.monotonic())


class EachUser:
    """A console that several people share: each signs in with an own token of the server. `connect`
    returns a connection that uses a token.
    """

    shared = True

    def __init__(self, connect: Callable[[str], ApiClient]) -> None:
        self._connect = connect
        self.connect: Callable[[], ApiClient] | None = lambda: connect("")
        self._lock = Lock()
        self._sessions: dict[str, _Session] = {}  # least recently used first
        self._reasons: dict[str, str] = {}  # by the cookie of a session that ended

    def sign_in(self, secret: str) -> str:
        if not _TOKEN.fullmatch(secret):
            raise SignInRefused("This is not a token. `cavvy server token create` prints one.")
        client = self._connect(secret)
        client.until = time.monotonic() + PAGE_S
        try:
            account = AccountClient(client).whoami().account
        finally:
            client.close()  # it opens again when it is used
        cookie = token_urlsafe(24)
        with self._lock:
            self._sessions[cookie] = _Session(account, ClientPool(client))
            self._forget_old()
            own = [each for each, its in self._sessions.items() if its.account == account]
            for each in own[:-_MOST_EACH]:
                self._end(each, "You were signed out, because you signed in too often since.")
        return cookie

    def find(self, cookie: str) -> ClientPool | None:
        with self._lock:
            self._forget_old()
            found = self._sessions.pop(cookie, None)
            if found is None:
                return None
            found.used = time.monotonic()
            self._sessions[cookie] = found
            return found.clients

    def sign_out(self, cookie: str, reason: str = "") -> None:
        with self._lock:
            self._end(cookie, reason)

    def take_reason(self, cookie: str) -> str:
        with self._lock:
            return self._reasons.pop(cookie, "")

    def close(self) -> None:
        for cookie in list(self._sessions):
            self.sign_out(cookie)

    def _forget_old(self) -> None:
        oldest = time.monotonic() - SESSION_S
        while self._sessions:
            cookie = next(iter(self._sessions))
            if self._sessions[cookie].used < oldest:
                self._end(cookie, _UNUSED)
            elif len(self._sessions) > _MOST_SESSIONS:
                self._end(cookie, "You were signed out, because too many users signed in since.")
            else:
                return

    def _end(self, cookie: str, reason: str) -> None:
        found = self._sessions.pop(cookie, None)
        if found is None:
            return
        found.clients.close()
        if reason:
            self._reasons[cookie] = reason
        while len(self._reasons) > _MOST_REASONS:
            del self._reasons[next(iter(self._reasons))]


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def is_other_user(host: str, port: int, tables: tuple[str, ...] = _TABLES) -> bool:
    """Return whether the program with this end of a connection belongs to another user of this
    machine than us and root. Other users can see the address that opens the browser, because it is
    an argument of the browser's process. Returns False where only the kernel knows this, as on
    macOS.
    """
    try:
        ends = _write_ends(host, port)
    except ValueError:
        return False
    for table in tables:
        with suppress(OSError), open(table) as file:
            for line in file:
                fields = line.split()
                if len(fields) > 7 and fields[1] in ends and fields[3] != _CLOSED:
                    return int(fields[7]) not in (0, os.geteuid())
    return False


def _write_ends(host: str, port: int) -> set[str]:
    """Return the end as the kernel's tables write it, in words of the machine's byte order."""
    address = ipaddress.ip_address(host)
    forms = [address.packed]
    if address.version == 4:
        forms.append(b"\0" * 10 + b"\xff\xff" + address.packed)
    return {f"{_write_words(each)}:{port:04X}" for each in forms}


def _write_words(packed: bytes) -> str:
    words = (packed[at : at + 4] for at in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(each, sys.byteorder):08X}" for each in words)


_HEADERS = {
    # scripts, styles and requests only from this console; no frames around it
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; media-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

# pictures have their colours in a style of their own, and nothing else
_PICTURE = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; sandbox"


class SafeHeaders:
    """Adds the headers to each response. Browsers keep no pages, and check files for changes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                is_file = scope["path"].startswith("/static/")
                headers["Cache-Control"] = "no-cache" if is_file else "no-store"
                if is_file and scope["path"].endswith(".svg"):
                    headers["Content-Security-Policy"] = _PICTURE
            await send(message)

        await self._app(scope, receive, send_with_headers)


class OwnPages:
    """Refuses requests that pages of other sites make in the background, such as for images and
    scripts. Other ports of this host are other sites, too, but browsers send them the cookie.
    Another site may only lead to a page by a link.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if not is_host(headers.get("host", "")):
            refusal = "The request names no valid host."
            await PlainTextResponse(refusal, HTTPStatus.BAD_REQUEST)(scope, receive, send)
            return
        is_foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        wanted = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest"))
        if is_foreign and wanted != ("navigate", "document"):
            refusal = "Pages of other sites may not use the console."
            await PlainTextResponse(refusal, HTTPStatus.FORBIDDEN)(scope, receive, send)
            return
        await self._app(scope, receive, send)


class LocalNames:
    """Serves browsers that call this machine by a loopback name. A site on the internet can let its
    own name point to this machine, and its pages would then count as pages of the console.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "")
        if is_loopback_name(host_name(host)):
            await self._app(scope, receive, send)
            return
        refusal = (
            "This console serves only the browsers of one user. Open it as http://localhost with "
            "the port that `cavvy console` printed. `cavvy console --help` says how to use a "
            "browser of another machine, and how to serve several users."
        )
        answer = PlainTextResponse(refusal, HTTPStatus.MISDIRECTED_REQUEST)
        await answer(scope, receive, send)


_KEPT_S = 60.0  # seconds for which the answer about the providers is kept
_MOST = 50  # people who sign in at a time; one address cannot keep others from it
_MOST_THREADS = 2 * _MOST  # with those of sign-ins that had to make room
_LEFT_S = 30.0  # seconds after which a browser that asks no more has left


_FULL = "Too many people sign in now. Try again in a minute."


def _place_of(address: str) -> str:
    try:
        known = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    return str(ip_network(f"{known}/64", strict=False)) if known.version == 6 else address


class SignInFull(Exception):
    """Raised if too many people sign in now."""


@dataclass
class PendingSignIn:
    """One sign-in. `url` and `code` are "" until the provider has answered, `token` until the
    person has confirmed the code, and `problem` says why the sign-in failed. `place` is where the
    browser is: its IPv4 address, or the network of 64 bits of its IPv6 address.
    """

    way: SignInWay
    place: str = ""
    url: str = ""
    code: str = ""
    token: str = ""
    problem: str = ""
    asked: float = field(default_factory=time.monotonic)


class _Left(Exception):
    """Raised to end a sign-in whose browser has left."""


class DeviceSignIns:
    """The sign-ins that have not ended. `connect` returns a connection to the server without a
    token.
    """

    def __init__(self, connect: Callable[[], ApiClient]) -> None:
        self._connect = connect
        self._lock = Lock()
        self._ways: tuple[float, Sequence[SignInWay]] = (0.0, ())
        self._pending: dict[str, PendingSignIn] = {}
        self._threads = 0

    def ways(self) -> Sequence[SignInWay]:
        """Return the providers for people; none if the server does not answer."""
        until, found = self._ways
        if time.monotonic() < until:
            return found
        try:
            with self._connect() as client:
                client.until = time.monotonic() + _LEFT_S
                found = list_ways(client)
        except ApiError:
            found = ()
        self._ways = (time.monotonic() + _KEPT_S, found)
        return found

    def begin(self, name: str, address: str = "") -> str:
        """Start a sign-in of a browser with this IP address, and return the ID by which only this
        browser finds it. If there are too many, the oldest from the place with the most makes room.
        Raises SignInFull if this is the browser's own, KeyError if there is no such provider.
        """
        way = {each.name: each for each in self.ways()}[name]
        self._forget_left()
        with self._lock:
            place = _place_of(address)
            if len(self._pending) >= _MOST:
                self._make_room(place)
            if self._threads >= _MOST_THREADS:
                raise SignInFull(_FULL)
            key, pending = token_urlsafe(24), PendingSignIn(way, place)
            self._pending[key] = pending
            self._threads += 1
        Thread(target=self._run, args=(pending,), daemon=True).start()
        return key

    def _make_room(self, place: str) -> None:
        counts = Counter(each.place for each in self._pending.values())
        fullest, most = counts.most_common(1)[0]
        if counts[place] >= most:
            raise SignInFull(_FULL)
        oldest = next(key for key, each in self._pending.items() if each.place == fullest)
        self._pending.pop(oldest).asked = float("-inf")

    def find(self, key: str) -> PendingSignIn | None:
        """Return a sign-in. It is forgotten once it has ended."""
        with self._lock:
            pending = self._pending.get(key)
            if pending is None:
                return None
            pending.asked = time.monotonic()
            if pending.token or pending.problem:
                del self._pending[key]
            return pending

    def _run(self, pending: PendingSignIn) -> None:
        def show(url: str, code: str) -> None:
            pending.url, pending.code = url, code

        def wait(seconds: float) -> None:
            time.sleep(seconds)
            if time.monotonic() > pending.asked + _LEFT_S:
                raise _Left

        try:
            way = pending.way
            id_token = sign_in_by_device(way.issuer, way.client_id, show, wait)
            with self._connect() as client:
                pending.token = sign_in(client, id_token).token
        except ApiError as error:
            pending.problem = error.message
        except _Left:
            pending.problem = "The browser has left."
        finally:
            with self._lock:
                self._threads -= 1

    def _forget_left(self) -> None:
        oldest = time.monotonic() - 2 * _LEFT_S
        with self._lock:
            left = [key for key, each in self._pending.items() if each.asked < oldest]
            for key in left:
                del self._pending[key]
