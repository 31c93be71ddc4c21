"""Signs in people at an identity provider that the server trusts, by the device flow: the browser
shows a code, and waits until the person has confirmed it at the provider. Nothing is registered at
the provider besides what `cavvy login` uses.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from secrets import token_urlsafe
from threading import Lock, Thread

from cavvy.client import ApiClient, ApiError
from cavvy.client.device_flow import sign_in_by_device
from cavvy.client.sign_in_wire import SignInWay, list_ways, sign_in

_KEPT_S = 60.0  # seconds for which the answer about the providers is kept
_MOST = 50  # people who sign in at a time
_LEFT_S = 30.0  # seconds after which a browser that asks no more has left


class SignInFull(Exception):
    """Raised if too many people sign in now."""


@dataclass
class PendingSignIn:
    """One sign-in. `url` and `code` are "" until the provider has answered, `token` until the
    person has confirmed the code, and `problem` says why the sign-in failed.
    """

    way: SignInWay
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

    def begin(self, name: str) -> str:
        """Start a sign-in, and return the ID by which only this browser finds it. Raises
        SignInFull, KeyError if there is no such provider.
        """
        way = {each.name: each for each in self.ways()}[name]
        self._forget_left()
        with self._lock:
            if len(self._pending) >= _MOST:
                raise SignInFull("Too many people sign in now. Try again in a minute.")
            key, pending = token_urlsafe(24), PendingSignIn(way)
            self._pending[key] = pending
        Thread(target=self._run, args=(pending,), daemon=True).start()
        return key

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

    def _forget_left(self) -> None:
        oldest = time.monotonic() - 2 * _LEFT_S
        with self._lock:
            left = [key for key, each in self._pending.items() if each.asked < oldest]
            for key in left:
                del self._pending[key]
