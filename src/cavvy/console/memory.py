"""Shares connections to the server between the threads that make pages, and keeps answers that
change slowly, so that a page that updates itself does not request them each time.
"""

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, TypeVar, cast

from cavvy.client import ApiClient, Unreachable
from cavvy.client.state import read_server, read_token, server_holds_lock

_T = TypeVar("_T")
KEPT_S = 60.0
_MOST = 300  # answers; the answer that was unused for the longest time is forgotten first


class Memory:
    """The answers to the requests of one user. Users never share a memory, because the server
    answers each user according to the user's roles.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._kept: dict[Hashable, tuple[float, object]] = {}  # least recently used first

    def recall(self, key: Hashable, fetch: Callable[[], _T], kept_s: float = KEPT_S) -> _T:
        """Return the answer that was kept under `key`, or fetch it. Errors are not kept."""
        with self._lock:
            found = self._kept.pop(key, None)
            if found is not None and self._clock() < found[0]:
                self._kept[key] = found
                return cast(_T, found[1])
        value = fetch()
        self.keep(key, value, kept_s)
        return value

    def find(self, key: Hashable) -> Any:
        """Return the answer that was kept under `key`, or None."""
        with self._lock:
            found = self._kept.get(key)
            return found[1] if found is not None and self._clock() < found[0] else None

    def keep(self, key: Hashable, value: object, kept_s: float = KEPT_S) -> None:
        now = self._clock()
        with self._lock:
            self._kept.pop(key, None)
            self._kept = {each: kept for each, kept in self._kept.items() if now < kept[0]}
            self._kept[key] = now + kept_s, value
            while len(self._kept) > _MOST:
                del self._kept[next(iter(self._kept))]


PAGE_S = 8.0  # seconds for which a page waits for the server
NOT_RUNNING = "server-not-running"  # the code of the error if the embedded server has ended
_KEPT = 2  # unused connections of one user that are kept for later pages


class ClientPool:
    """Lends connections of one user to one thread each. Others are opened like `first`. `memory`
    keeps the user's answers.
    """

    def __init__(self, first: ApiClient) -> None:
        self.memory = Memory()
        self._first = first
        self._lock = Lock()
        self._free: list[ApiClient] = []  # most recently used last
        self._is_open = True

    @contextmanager
    def lend(self) -> Iterator[ApiClient]:
        """Yield a client that no other thread uses meanwhile. Its requests must end in PAGE_S."""
        with self._lock:
            client = self._free.pop() if self._free else self._first.sibling()
        client.until = time.monotonic() + PAGE_S
        try:
            yield client
        finally:
            with self._lock:
                kept = self._is_open and len(self._free) < _KEPT
                if kept:
                    self._free.append(client)
            if not kept:
                client.close()

    def close(self) -> None:
        """Close all connections; those that are lent now, when they are returned."""
        with self._lock:
            self._is_open = False
            unused, self._free = self._free, []
        for client in (*unused, self._first):
            client.close()


def find_embedded(home: str) -> Callable[[], tuple[str, str]]:
    """Return a function that returns the address and the token of the embedded server, and raises
    Unreachable with the code NOT_RUNNING if none runs. Unlike commands, a page that updates itself
    must not start a server that the user has just stopped.
    """

    def find() -> tuple[str, str]:
        server = read_server(home)
        if server is None or not server_holds_lock(home):
            raise Unreachable(
                NOT_RUNNING,
                "No server is running.",
                "Load this page again to start the server, or run `cavvy server start`.",
            )
        return server.address, read_token(home)

    return find
