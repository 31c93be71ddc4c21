"""The keys to reconcile, the time at which each key is due, and the driver that reconciles them: it
takes a due key, reconciles it, and returns it to the worklist. The loop is the same in production
and in simulated time. A hint contains no data: its only effect is that a key is due earlier.

A key in progress is not returned again until `finish` is called for this key. If a hint arrives
while its key is in progress, the key is due again as soon as `finish` has been called.
"""

import asyncio
import heapq
import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Protocol

from cavvy.control.clock import ControlClock

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


FIRST_PAUSE = timedelta(
    seconds=1
)  # delay after a key's first failure; doubles with each consecutive failure
LONGEST_PAUSE = timedelta(minutes=2)
WIDTH = 16  # the number of keys that one driver reconciles at a time
_RESTS = 6  # rounds of a busy event loop between the starts of two passes
_log = logging.getLogger(__name__)


class Reconciler(Protocol):
    """Moves the subject of a key, such as a job, one step closer to its wanted state."""

    async def reconcile(self, key: str) -> timedelta | None:
        """Reconcile the key once; return the time until the next pass, or None if the key
        waits for a hint."""


class ReconcilerDriver:
    """Reconciles the keys of a worklist, up to `width` different keys at a time.

    Each reconciliation of a key is called a pass. Passes share the event loop with users' requests;
    `width` limits how many passes can delay a request. If a pass raises an error, the error is
    logged and the pass is retried with growing delays, while other passes continue.
    """

    def __init__(
        self, reconciler: Reconciler, worklist: Worklist, clock: ControlClock, *, width: int = WIDTH
    ) -> None:
        self._reconciler, self._worklist, self._clock = reconciler, worklist, clock
        self._slots = asyncio.Semaphore(width)
        self._failures: dict[str, int] = {}

    async def run(self) -> None:
        """Reconcile due keys until this task is cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._slots.acquire()
                while (key := self._worklist.take()) is None:
                    await self._worklist.wait()
                group.create_task(self._pass(key))
                # while the event loop is busy, fewer passes begin, so that requests take less long
                for _ in range(_RESTS):
                    if not await self._clock.rest():
                        break

    async def _pass(self, key: str) -> None:
        again: timedelta | None = None
        try:
            again = await self._reconciler.reconcile(key)
            self._failures.pop(key, None)
        except Exception as error:  # noqa: BLE001 - one key's error must not end the loop
            again = self._pause(key)
            _log.error(
                "pass failed", exc_info=error, extra={"key": key, "again_s": again.total_seconds()}
            )
        finally:
            self._slots.release()
            self._worklist.finish(key, again)

    def _pause(self, key: str) -> timedelta:
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        return min(LONGEST_PAUSE, FIRST_PAUSE * (1 << min(failures, 10)))


class SeparateDrivers:
    """Drives two worklists: one for the keys for which `is_slow` returns true, and one for all
    other keys. `hinted` is called with each key of which someone says that it must be reconciled.
    The work for a slow key sends a request to a server that a user chose, such as the
    receiver of a webhook, and waits for the answer. The work for other keys, such as jobs and
    budgets, never waits for the work of a slow key.
    """

    def __init__(
        self,
        reconciler: Reconciler,
        clock: ControlClock,
        is_slow: Callable[[str], bool],
        hinted: Callable[[str], None],
    ) -> None:
        self._is_slow, self._hinted = is_slow, hinted
        self._usual, self._slow = Worklist(clock.now), Worklist(clock.now)
        self._drivers = [
            ReconcilerDriver(reconciler, each, clock) for each in (self._usual, self._slow)
        ]

    def hint(self, key: str, after: timedelta = timedelta(0)) -> None:
        """Make `key` due after the time `after`, unless the key is already due earlier."""
        self._hinted(key)
        (self._slow if self._is_slow(key) else self._usual).hint(key, after)

    async def run(self) -> None:
        """Reconcile due keys until this task is cancelled."""
        async with asyncio.TaskGroup() as group:
            for driver in self._drivers:
                group.create_task(driver.run())
