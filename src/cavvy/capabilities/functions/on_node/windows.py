"""Stores when calls have started, for limits with long time windows, so that the next broker of the
app counts them: after an idle time, a lost node or a new deploy. They lie in a dict of the project.
"""

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from zlib import crc32

from cavvy.capabilities.functions.on_node.waiting import Limit, LimitSlot
from cavvy.sdk.errors import CavvyError

SHORTEST_S = 10.0  # a window that is shorter is over before another broker takes calls
_STORE_S = 1.0  # between two requests; longer if one takes long
_SHARE = 20  # of the time, at most one part of so many is spent on requests
_LOAD_S, _LAST_S = 5.0, 2.0  # for which the broker waits before its first call, and at its end
_BUCKETS = 256  # entries of a limit, each with the windows of some keys


class StoredWindows:
    """The windows of an app's limits, which other brokers have stored and this one changes."""

    def __init__(self, limits: Mapping[str, Limit], values: Any) -> None:
        self._limits, self._values = limits, values
        self._lock = asyncio.Lock()

    @classmethod
    def open(cls, app: str, limits: Mapping[str, Limit]) -> "StoredWindows | None":
        """Return the windows; None if no limit has a long one, or if this is no job of a server."""
        long = any(each.per_s and each.per_s >= SHORTEST_S for each in limits.values())
        if not long or not os.environ.get("CAVVY_NOTICE"):
            return None
        # the modules of the callers, which most brokers do not need
        from cavvy.capabilities.functions.limits import name_windows
        from cavvy.capabilities.functions.state.objects import Dict

        return cls(limits, Dict(name_windows(app), trust=False))

    async def load(self) -> str:
        """Count the starts that were stored. Return why this failed, or ""."""
        try:
            async with asyncio.timeout(_LOAD_S):
                stored = await _run_apart(lambda: list(self._values.items()))
        except TimeoutError:
            return f"the server does not answer within {_LOAD_S:g} s"
        except CavvyError as error:
            return str(error)
        now, wall = time.monotonic(), time.time()
        for name, told in stored:
            limit = self._limits.get(str(name).rpartition("/")[0])
            if limit is not None and isinstance(told, dict):
                with suppress(AttributeError, TypeError, ValueError, OverflowError):
                    load_starts(limit, told, now, wall)
        return ""

    async def run(self) -> None:
        """Store what changes, until this task is cancelled."""
        while True:
            began = time.monotonic()
            await self.store()
            spent_s = time.monotonic() - began
            await asyncio.sleep(max(_STORE_S, _SHARE * spent_s))

    async def close(self) -> None:
        """Store the last changes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_S):
                await self.store()

    async def store(self) -> None:
        """Store what has changed since the last time. What the server refuses is stored later."""
        async with self._lock:
            await self._store()

    async def _store(self) -> None:
        entries: dict[str, Any] = {}
        taken: list[tuple[Limit, set[str]]] = []
        now, wall = time.monotonic(), time.time()
        for limit in self._limits.values():
            if limit.changed and limit.per_s is not None and limit.per_s >= SHORTEST_S:
                changed, limit.changed = limit.changed, set()
                taken.append((limit, changed))
                entries |= dump_starts(limit, {_choose(each) for each in changed}, now, wall)
            else:
                limit.changed.clear()
        if not entries:
            return
        try:
            await _run_apart(lambda: self._values.update(entries))
        except CavvyError:
            for limit, changed in taken:
                limit.changed |= changed


async def _run_apart(ask: Callable[[], Any]) -> Any:
    """Return what a request answers, in a thread that does not keep this program from its end."""
    loop = asyncio.get_running_loop()
    told: asyncio.Future[Any] = loop.create_future()

    def finish(value: Any, error: Exception | None) -> None:
        if told.cancelled():
            return
        if error is not None:
            told.set_exception(error)
        else:
            told.set_result(value)

    def run() -> None:
        value, problem = None, None
        try:
            value = ask()
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            problem = error
        with suppress(RuntimeError):  # the program has ended
            loop.call_soon_threadsafe(finish, value, problem)

    threading.Thread(target=run, daemon=True, name="limits").start()
    return await told


def dump_starts(limit: Limit, buckets: set[int], now: float, wall: float) -> dict[str, Any]:
    """Return the starts in the windows of the keys in these buckets, at times of the clock."""
    found: dict[str, Any] = {f"{limit.id}/{each}": {} for each in buckets}
    for key, slot in limit.slots.items():
        if (bucket := _choose(key)) in buckets:
            slot.expire(now)
            if slot.starts:
                found[f"{limit.id}/{bucket}"][key] = [
                    [round(first - now + wall, 3), round(last - now + wall, 3), count]
                    for first, last, count in slot.starts
                ]
    return found


def load_starts(limit: Limit, told: Mapping[str, Any], now: float, wall: float) -> None:
    """Count starts that `dump_starts` has written."""
    if limit.per_s is None:
        return
    for key, starts in told.items():
        older = [
            (min(first - wall, 0.0) + now, min(last - wall, 0.0) + now, int(count))
            for first, last, count in starts
        ]
        slot: LimitSlot | None = limit.find(str(key))
        if slot is None:
            return
        slot.starts = deque(sorted([*older, *slot.starts]))
        if slot.is_idle(now):
            del limit.slots[slot.key]


def _choose(key: str) -> int:
    return crc32(key.encode("utf-8", "replace")) % _BUCKETS
