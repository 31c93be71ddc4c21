"""Keeps answers that change slowly, so that a page that updates itself does not request them each
time.
"""

import time
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, TypeVar, cast

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
