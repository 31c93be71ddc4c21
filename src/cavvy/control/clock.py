"""The clock of the control plane, real or simulated. No other module reads the current time."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from selectors import SelectorKey, SelectSelector
from time import monotonic, thread_time
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
_IDLE_S = 0.001  # one round of an event loop takes less CPU time if there is no other work
# Times in seconds are floats, so a wake-up may come early by up to this much.
_SLACK = timedelta(microseconds=1)


class ControlClock(Protocol):
    """Returns the current time, and waits until a given time."""

    def now(self) -> datetime:
        """Return the current time as an aware datetime in UTC."""

    async def sleep_until(self, when: datetime) -> None:
        """Wait until `when` or shortly after; return immediately if `when` has passed."""

    async def rest(self) -> bool:
        """Let all other ready tasks run once, so that, for example, requests are answered between
        two steps. Return whether they needed so long that more work would delay them."""


def read_machine_time() -> datetime:
    """Return the time that the machine's own clock shows, even if the clock was set back."""
    return datetime.now(UTC)


class WallClock:
    """The machine's own clock, except that this clock never goes back.

    If the machine's clock is set back, this clock runs at half speed until both clocks agree. If it
    stood still, work that is due would wait until the machine's clock shows the former time again.
    """

    def __init__(
        self,
        read_time: Callable[[], datetime] = read_machine_time,
        read_elapsed: Callable[[], float] = monotonic,
    ) -> None:
        self._read_time = read_time
        self._read_elapsed = read_elapsed  # seconds, which no change of the machine's clock affects
        # the last time that both clocks agreed on, and the elapsed seconds at that time
        self._agreed = read_time(), read_elapsed()

    def now(self) -> datetime:
        time, elapsed = self._read_time(), self._read_elapsed()
        since, at = self._agreed
        earliest = since + timedelta(seconds=(elapsed - at) / 2)
        if time < earliest:
            return earliest
        self._agreed = time, elapsed
        return time

    async def sleep_until(self, when: datetime) -> None:
        # at half speed, the first sleep ends early
        while (left := when - self.now()) > timedelta(0):  # noqa: ASYNC110
            await asyncio.sleep((left + _SLACK).total_seconds())

    async def rest(self) -> bool:
        began = thread_time()  # a machine that does other work does not count
        await asyncio.sleep(0)
        return thread_time() - began > _IDLE_S


class VirtualClock:
    """A clock for `run_virtual`, whose time advances only while every task is waiting."""

    def __init__(self, start: datetime) -> None:
        self._start = start
        self._at, self._now = 0.0, start  # the time of the event loop when it was asked last

    def now(self) -> datetime:
        at = asyncio.get_running_loop().time()
        if at != self._at:
            self._at, self._now = at, self._start + timedelta(seconds=at)
        return self._now

    async def sleep_until(self, when: datetime) -> None:
        # sleep may end one rounding error early
        while (left := when - self.now()) > timedelta(0):  # noqa: ASYNC110
            await asyncio.sleep((left + _SLACK).total_seconds())

    async def rest(self) -> bool:
        await asyncio.sleep(0)
        return False


class VirtualDeadlock(RuntimeError):
    """Raised if every task is waiting and no timer is set that could wake a task."""


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on an event loop whose time jumps to the next timer as soon as no task is ready.

    Code that waits through asyncio (sleeps, timeouts) runs unchanged and in the same order each
    time. Threads, sockets and processes are not supported. Raises VirtualDeadlock instead of
    hanging.
    """
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)


class _JumpingSelector(SelectSelector):
    """A selector that never blocks: it advances the virtual time instead."""

    elapsed = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        if timeout is None:
            raise VirtualDeadlock("all tasks are waiting, but no timer is set")
        if timeout > 0:  # always advance, even if the step is smaller than a float can represent
            self.elapsed = max(self.elapsed + timeout, math.nextafter(self.elapsed, math.inf))
        return []


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._clock_resolution = 1e-6  # a timer due within a float's rounding error counts as due

    def time(self) -> float:
        return self._jumping.elapsed
