"""Signs in people at an identity provider that the server trusts, by the device flow: the browser
shows a code, and waits until the person has confirmed it at the provider. Nothing is registered at
the provider besides what `cavvy login` uses.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from secrets import token_urlsafe
from threading import Lock, Thread

from cavvy.client import ApiClient, ApiError
from cavvy.client.account_wire import SignInWay, list_ways, sign_in
from cavvy.client.device_flow import sign_in_by_device

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
