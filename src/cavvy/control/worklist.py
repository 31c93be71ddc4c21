"""The keys to reconcile, and the time at which each key is due. A hint contains no data: its only
effect is that a key is due earlier.

A key in progress is not returned again until `finish` is called for this key. If a hint arrives
while its key is in progress, the key is due again as soon as `finish` has been called.
"""

import asyncio
import heapq
from collections.abc import Callable
from datetime import datetime, timedelta

QUEUE = "queue"  # the key of the reconciler that places waiting jobs
_CALLS = "calls:"  # the start of the key of a service's queue of calls


class Worklist:
    """Decides which key (such as a job ID) is processed next. `now` is a function that returns the
    current time.
    """

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now
        self._due: dict[str, datetime] = {}
        self._heap: list[tuple[datetime, int, str]] = []
        # counts added keys, so that keys due at the same time are taken in the order of arrival
        self._count = 0
        self._busy: dict[
            str, datetime | None
        ] = {}  # earliest due time that was requested for each key in progress
        self._changed = asyncio.Event()

    def hint(self, key: str, after: timedelta = timedelta(0)) -> None:
        """Make `key` due after the time `after`, unless the key is already due earlier."""
        self.add(key, self._now() + after)

    def add(self, key: str, due: datetime) -> None:
        """Make `key` due at the time `due`, unless the key is already due earlier."""
        if key in self._busy:
            asked = self._busy[key]
            self._busy[key] = due if asked is None else min(asked, due)
        elif key not in self._due or due < self._due[key]:
            self._due[key] = due
            self._count += 1
            heapq.heappush(self._heap, (due, self._count, key))
            self._changed.set()

    def next_due(self) -> datetime | None:
        """Return when the next key that is not in progress is due, or None."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)  # skip an entry that was replaced by one with an earlier time
        return self._heap[0][0] if self._heap else None

    def take(self) -> str | None:
        """Mark the next due key as in progress and return it, or return None if no key is due."""
        due = self.next_due()
        if due is None or due > self._now():
            return None
        _, _, key = heapq.heappop(self._heap)
        del self._due[key]
        self._busy[key] = None
        return key

    def finish(self, key: str, again: timedelta | None) -> None:
        """Mark `key` as no longer in progress. The key becomes due after the time `again`, or
        earlier if a hint arrived while the key was in progress. If `again` is None, only a hint
        makes the key due.
        """
        asked = self._busy.pop(key)
        if asked is not None:
            self.add(key, asked)
        if again is not None:
            self.hint(key, again)
        self._changed.set()

    @property
    def planned(self) -> int:
        """The number of keys that are on the list or in progress."""
        return len(self._due) + len(self._busy)

    async def wait(self) -> None:
        """Wait until a key is due or the worklist changes."""
        self._changed.clear()
        due = self.next_due()
        left = None if due is None else (due - self._now()).total_seconds()
        if left is not None and left <= 0:
            return
        try:
            async with asyncio.timeout(left):
                await self._changed.wait()
        except TimeoutError:
            return


def calls_key(service_key: str) -> str:
    """Return the worklist's key of the service's queue."""
    return f"{_CALLS}{service_key}"


def is_calls_key(key: str) -> bool:
    return key.startswith(_CALLS)


def service_of_calls(key: str) -> str:
    """Return a service's key in the worklist, given the key of the service's queue of calls."""
    return key.removeprefix(_CALLS)
