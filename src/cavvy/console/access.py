"""Decides who may see the pages. A browser that has signed in sends a cookie, and each cookie
belongs to the connections of one user.
"""

import hmac
import time
from collections.abc import Callable
from secrets import token_urlsafe
from threading import Lock
from typing import Protocol

from cavvy.client import ApiClient, ApiError
from cavvy.client.accounts import AccountClient
from cavvy.console.clients import ClientPool

SESSION_S = 12 * 3600  # seconds after the last page after which a browser must sign in again
_MOST_SESSIONS = 10_000  # the session that was unused for the longest time ends first


class SignInRefused(Exception):
    """Raised if a browser may not sign in. The text says why."""


class Access(Protocol):
    """Signs in browsers."""

    shared: bool  # whether each user signs in with an own token

    def sign_in(self, secret: str) -> str:
        """Return the cookie for a browser that presents the secret. Raises SignInRefused."""

    def find(self, cookie: str) -> ClientPool | None:
        """Return the connections of the user whose browser sends this cookie."""

    def sign_out(self, cookie: str) -> None: ...

    def close(self) -> None: ...


class OneUser:
    """The console of the user who started it. The address that the command prints contains the
    secret, because other users of the machine can reach the port, too.
    """

    shared = False

    def __init__(self, client: ApiClient) -> None:
        self.secret = token_urlsafe(24)
        self._cookie = token_urlsafe(24)
        self._clients = ClientPool(client)

    def sign_in(self, secret: str) -> str:
        if not _equal(secret, self.secret):
            raise SignInRefused("The address is not the one that `cavvy console` printed.")
        return self._cookie

    def find(self, cookie: str) -> ClientPool | None:
        return self._clients if _equal(cookie, self._cookie) else None

    def sign_out(self, cookie: str) -> None:
        """Replace the cookie, so that every browser must sign in again."""
        if _equal(cookie, self._cookie):
            self._cookie = token_urlsafe(24)

    def close(self) -> None:
        self._clients.close()


class EachUser:
    """A console that several people share: each signs in with an own token of the server. `connect`
    returns a connection that uses a token.
    """

    shared = True

    def __init__(self, connect: Callable[[str], ApiClient]) -> None:
        self._connect = connect
        self._lock = Lock()
        self._sessions: dict[str, tuple[ClientPool, float]] = {}  # least recently used first

    def sign_in(self, secret: str) -> str:
        client = self._connect(secret)
        try:
            AccountClient(client).whoami()
        except ApiError as error:
            client.close()
            raise SignInRefused(f"{error.message}. {error.hint}".strip()) from error
        cookie = token_urlsafe(24)
        with self._lock:
            self._sessions[cookie] = ClientPool(client), time.monotonic()
            self._forget_old()
        return cookie

    def find(self, cookie: str) -> ClientPool | None:
        with self._lock:
            self._forget_old()
            found = self._sessions.pop(cookie, None)
            if found is None:
                return None
            self._sessions[cookie] = found[0], time.monotonic()
            return found[0]

    def sign_out(self, cookie: str) -> None:
        with self._lock:
            found = self._sessions.pop(cookie, None)
        if found is not None:
            found[0].close()

    def close(self) -> None:
        for cookie in list(self._sessions):
            self.sign_out(cookie)

    def _forget_old(self) -> None:
        oldest = time.monotonic() - SESSION_S
        while self._sessions:
            cookie, (clients, used) = next(iter(self._sessions.items()))
            if used >= oldest and len(self._sessions) <= _MOST_SESSIONS:
                return
            del self._sessions[cookie]
            clients.close()


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())
