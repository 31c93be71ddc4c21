"""The only place that knows what time it is, in production and where time is made up."""

import asyncio
import math
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from selectors import SelectorKey, SelectSelector
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
_SLACK = timedelta(microseconds=1)  # a float of seconds may round a wake-up down by less than this


class ControlClock(Protocol):
    """Tells the time and waits for it."""

    def now(self) -> datetime:
        """Aware UTC."""

    async def sleep_until(self, when: datetime) -> None:
        """Return at `when` or soon after; at once if it has passed."""

    async def rest(self) -> None:
        """Let everything else that is ready run once, so that requests are answered between two
        steps.
        """


class WallClock:
    """The machine's own clock."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    async def sleep_until(self, when: datetime) -> None:
        await asyncio.sleep(max(0.0, (when - self.now()).total_seconds()))

    async def rest(self) -> None:
        await asyncio.sleep(0)


class VirtualClock:
    """Time that passes only when everybody waits for it. To be used inside `run_virtual`."""

    def __init__(self, start: datetime) -> None:
        self._start = start

    def now(self) -> datetime:
        return self._start + timedelta(seconds=asyncio.get_running_loop().time())

    async def sleep_until(self, when: datetime) -> None:
        while (left := when - self.now()) > timedelta(0):  # noqa: ASYNC110 - one wake-up may come a rounding early
            await asyncio.sleep((left + _SLACK).total_seconds())

    async def rest(self) -> None:
        await asyncio.sleep(0)


class VirtualDeadlock(RuntimeError):
    """Everybody waits for something that no passing of time will bring."""


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on an event loop whose time jumps to the next timer as soon as nothing is ready.

    Everything that waits through asyncio (sleeps, timeouts, the driver itself) runs unchanged and
    in the same order each time. Threads, sockets and processes are not waited for. Raises
    VirtualDeadlock instead of hanging.
    """
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)


class _JumpingSelector(SelectSelector):
    """Never waits: where another would sleep it lets that time have passed."""

    elapsed = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        if timeout is None:
            raise VirtualDeadlock("every task waits, and no timer is set")
        if (
            timeout > 0
        ):  # always forward, also where the step is smaller than what a float can tell apart
            self.elapsed = max(self.elapsed + timeout, math.nextafter(self.elapsed, math.inf))
        return []


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._clock_resolution = 1e-6  # a timer that is due but for a float's rounding is due

    def time(self) -> float:
        return self._jumping.elapsed
