"""Keys that are due for reconciliation. Events only move a key forward in time; they carry no data.

A key in progress is not handed out again until it is `finish`ed; a hint in the meantime is kept for
then.
"""

import asyncio
import heapq
from collections.abc import Callable
from datetime import datetime, timedelta


class Worklist:
    """Decides which key is next. `now` gives the time; `wait` returns when something may have
    become due.
    """

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now
        self._due: dict[str, datetime] = {}
        self._heap: list[tuple[datetime, int, str]] = []
        self._count = 0  # equal times are served in the order of arrival
        self._busy: dict[
            str, datetime | None
        ] = {}  # key -> the earliest look requested while it was in progress
        self._changed = asyncio.Event()

    def hint(self, key: str, after: timedelta = timedelta(0)) -> None:
        """Look at `key` in `after`, or sooner if a sooner look is already planned."""
        self.add(key, self._now() + after)

    def add(self, key: str, due: datetime) -> None:
        """Look at `key` at `due`, or sooner if a sooner look is already planned."""
        if key in self._busy:
            asked = self._busy[key]
            self._busy[key] = due if asked is None else min(asked, due)
        elif key not in self._due or due < self._due[key]:
            self._due[key] = due
            self._count += 1
            heapq.heappush(self._heap, (due, self._count, key))
            self._changed.set()

    def next_due(self) -> datetime | None:
        """When the earliest key that is not being worked on is due."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)  # superseded by a sooner look
        return self._heap[0][0] if self._heap else None

    def take(self) -> str | None:
        """The next key that is due now, marked as in progress; None if none is due."""
        due = self.next_due()
        if due is None or due > self._now():
            return None
        _, _, key = heapq.heappop(self._heap)
        del self._due[key]
        self._busy[key] = None
        return key

    def finish(self, key: str, again: timedelta | None) -> None:
        """`key` is no longer in progress; look again in `again`, or when it was hinted at
        meanwhile.
        """
        asked = self._busy.pop(key)
        if asked is not None:
            self.add(key, asked)
        if again is not None:
            self.hint(key, again)
        self._changed.set()

    @property
    def planned(self) -> int:
        """How many keys are on the list or in progress."""
        return len(self._due) + len(self._busy)

    async def wait(self) -> None:
        """Return when a key is due, or as soon as the list changes."""
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
