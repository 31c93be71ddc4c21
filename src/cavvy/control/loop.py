"""Drives a reconciler: takes a due key from the worklist, reconciles it, and returns the key to the
worklist. The loop is the same in production and in simulated time.
"""

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

from cavvy.control.clock import ControlClock
from cavvy.control.worklist import Worklist

_FIRST_PAUSE = timedelta(
    seconds=1
)  # delay after a key's first failure; doubles with each consecutive failure
_LONGEST_PAUSE = timedelta(minutes=2)
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
        return min(_LONGEST_PAUSE, _FIRST_PAUSE * (1 << min(failures, 10)))


class SeparateDrivers:
    """Drives two worklists: one for the keys for which `is_slow` returns true, and one for all
    other keys. The work for a slow key sends a request to a server that a user chose, such as the
    receiver of a webhook, and waits for the answer. The work for other keys, such as jobs and
    budgets, never waits for the work of a slow key.
    """

    def __init__(
        self, reconciler: Reconciler, clock: ControlClock, is_slow: Callable[[str], bool]
    ) -> None:
        self._is_slow = is_slow
        self._usual, self._slow = Worklist(clock.now), Worklist(clock.now)
        self._drivers = [
            ReconcilerDriver(reconciler, each, clock) for each in (self._usual, self._slow)
        ]

    def hint(self, key: str, after: timedelta = timedelta(0)) -> None:
        """Make `key` due after the time `after`, unless the key is already due earlier."""
        (self._slow if self._is_slow(key) else self._usual).hint(key, after)

    async def run(self) -> None:
        """Reconcile due keys until this task is cancelled."""
        async with asyncio.TaskGroup() as group:
            for driver in self._drivers:
                group.create_task(driver.run())
