"""Shares connections to the server between the threads that make pages."""

from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, LifoQueue

from cavvy.client import ApiClient
from cavvy.console.memory import Memory

_KEPT = 8  # open connections that are kept for later pages


class ClientPool:
    """Lends connections of one user to one thread each. Others are opened like `first`. `memory`
    keeps the user's answers.
    """

    def __init__(self, first: ApiClient) -> None:
        self.memory = Memory()
        self._first = first
        self._free: LifoQueue[ApiClient] = LifoQueue(_KEPT)

    @contextmanager
    def lend(self) -> Iterator[ApiClient]:
        """Yield a client that no other thread uses meanwhile."""
        try:
            client = self._free.get_nowait()
        except Empty:
            client = self._first.sibling()
        try:
            yield client
        finally:
            if self._free.full():
                client.close()
            else:
                self._free.put(client)

    def close(self) -> None:
        while not self._free.empty():
            self._free.get_nowait().close()
        self._first.close()
