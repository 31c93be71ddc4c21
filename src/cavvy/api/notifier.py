"""Wakes long polls of users and agents when a job changes. If a wake-up is lost, the request is
answered when its poll times out.
"""

import asyncio
import math
from collections.abc import Iterable

from cavvy.control.share import WorkShare
from cavvy.store.channel import ServerSignal, SignalKind


class ChangeNotifier:
    """Wakes the requests that wait for a key. A key is a job's ID, a gang's name or a log's name.
    Code that changes a job, gang or log must call `wake` with its key.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self.closed = False
        self._others: WorkShare | None = None

    def share_with(self, others: WorkShare) -> None:
        """Also wake requests on other servers, and wake this server's requests when another server
        signals a change.
        """
        self._others = others
        others.on_signal = self._receive

    def wake(self, *keys: str) -> None:
        self._wake(keys)
        if self._others is not None:
            for key in keys:
                self._others.send(SignalKind.WAKE, key)

    def _receive(self, signal: ServerSignal) -> None:
        if signal.kind is SignalKind.WAKE:
            self._wake([signal.key])

    def _wake(self, keys: Iterable[str]) -> None:
        for key in keys:
            for future in self._waiting.pop(key, ()):
                if not future.done():
                    future.set_result(None)

    def listen(self, keys: Iterable[str], limit_s: float = math.inf) -> "ChangeListener":
        """Create a listener for these keys, whose waits together take at most `limit_s`. Enter the
        listener before you read the state; otherwise the listener could miss a change between the
        read and the wait.
        """
        return ChangeListener(self, tuple(keys), limit_s)

    def close(self) -> None:
        """Wake all listeners. The server calls this method when it stops."""
        self.closed = True
        self._wake(list(self._waiting))

    def _add(self, keys: Iterable[str], future: "asyncio.Future[None]") -> None:
        for key in keys:
            self._waiting.setdefault(key, set()).add(future)

    def _drop(self, keys: Iterable[str], future: "asyncio.Future[None]") -> None:
        for key in keys:
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.discard(future)
                if not waiting:
                    del self._waiting[key]


class ChangeListener:
    """Waits for changes on behalf of one request. Use a ChangeListener as a context manager.

    Frequent changes that are of no interest to the request do not extend its limit.
    """

    def __init__(self, watch: ChangeNotifier, keys: tuple[str, ...], limit_s: float) -> None:
        self._watch, self._keys = watch, keys
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + limit_s
        self._future: asyncio.Future[None] = self._loop.create_future()

    def __enter__(self) -> "ChangeListener":
        self._watch._add(self._keys, self._future)
        return self

    def __exit__(self, *_: object) -> None:
        self._watch._drop(self._keys, self._future)

    @property
    def left_s(self) -> float:
        return self._until - self._loop.time()

    async def wait(self, seconds: float = math.inf) -> bool:
        """Wait for a change. Returns False if no change happened within `seconds` or before the
        listener's limit, or if the server stops.
        """
        seconds = min(seconds, self.left_s)
        if self._watch.closed or seconds <= 0:
            return False
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(self._future)  # it stays for the next wait
        except TimeoutError:
            return False
        self._watch._drop(self._keys, self._future)
        self._future = self._loop.create_future()
        self._watch._add(self._keys, self._future)
        return not self._watch.closed
