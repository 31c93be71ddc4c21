"""The driver, the worklist and the clock, on virtual time."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest

from cavvy.control.clock import VirtualClock, VirtualDeadlock, WallClock, run_virtual
from cavvy.control.worklist import ReconcilerDriver, Worklist

START = datetime(2030, 1, 1, tzinfo=UTC)


class Passes:
    """Records every pass and does what the test wants in it."""

    def __init__(
        self, clock: VirtualClock, act: Callable[[str, int], Awaitable[timedelta | None]]
    ) -> None:
        self.log: list[tuple[float, str]] = []
        self._clock = clock
        self._act = act

    async def reconcile(self, key: str) -> timedelta | None:
        self.log.append(((self._clock.now() - START).total_seconds(), key))
        return await self._act(key, sum(1 for _, k in self.log if k == key))


def drive(
    act: Callable[[str, int], Awaitable[timedelta | None]],
    script: Callable[[Worklist, VirtualClock], Awaitable[None]],
    width: int = 4,
) -> list[tuple[float, str]]:
    """Run a driver while `script` plays; return when each key had its passes, to whole
    milliseconds.
    """

    async def main() -> list[tuple[float, str]]:
        clock = VirtualClock(START)
        worklist = Worklist(clock.now)
        passes = Passes(clock, act)
        task = asyncio.create_task(ReconcilerDriver(passes, worklist, clock, width=width).run())
        await script(worklist, clock)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return [(round(at, 3), key) for at, key in passes.log]

    return run_virtual(main())


async def after(clock: VirtualClock, seconds: float) -> None:
    await clock.sleep_until(clock.now() + timedelta(seconds=seconds))


def test_a_key_is_looked_at_when_it_is_due_and_a_hint_wakes_it_at_once() -> None:
    async def act(key: str, count: int) -> timedelta | None:
        return timedelta(seconds=100) if count < 3 else None

    async def script(worklist: Worklist, clock: VirtualClock) -> None:
        worklist.hint("a")
        await after(clock, 150)
        worklist.hint("a")
        await after(clock, 1000)

    assert drive(act, script) == [(0, "a"), (100, "a"), (150, "a")]


def test_one_pass_per_key_at_a_time_and_a_hint_meanwhile_is_kept() -> None:
    running = 0

    async def act(key: str, count: int) -> timedelta | None:
        nonlocal running
        assert running == 0
        running += 1
        await asyncio.sleep(10)
        running -= 1
        return None

    async def script(worklist: Worklist, clock: VirtualClock) -> None:
        worklist.hint("a")
        await after(clock, 1)
        worklist.hint("a")
        worklist.hint("a")
        await after(clock, 100)

    assert drive(act, script) == [(0, "a"), (10, "a")]


def test_only_so_many_passes_at_once() -> None:
    busy, most = 0, 0

    async def act(key: str, count: int) -> timedelta | None:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(1)
        busy -= 1
        return None

    async def script(worklist: Worklist, clock: VirtualClock) -> None:
        for number in range(10):
            worklist.hint(f"key{number}")
        await after(clock, 100)

    log = drive(act, script, width=3)
    assert len(log) == 10
    assert most == 3


def test_a_pass_that_raises_is_tried_later_and_later_and_stops_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def act(key: str, count: int) -> timedelta | None:
        if key == "bad" and count < 4:
            raise RuntimeError("a bug")
        return timedelta(seconds=5) if key == "good" else None

    async def script(worklist: Worklist, clock: VirtualClock) -> None:
        worklist.hint("bad")
        worklist.hint("good")
        await after(clock, 21)

    with caplog.at_level(logging.ERROR):
        log = drive(act, script)
    assert [at for at, key in log if key == "bad"] == [0, 1, 3, 7]
    assert [at for at, key in log if key == "good"] == [0, 5, 10, 15, 20]
    assert len(caplog.records) == 3


def test_requests_are_answered_between_two_passes() -> None:
    """A queue of keys that are all due does not keep the event loop to itself."""

    async def main() -> int:
        clock = VirtualClock(START)
        worklist = Worklist(clock.now)
        done: list[str] = []

        async def act(key: str, count: int) -> timedelta | None:
            done.append(key)
            return None

        for number in range(1000):
            worklist.hint(f"key{number}")
        task = asyncio.create_task(ReconcilerDriver(Passes(clock, act), worklist, clock).run())
        for _ in range(10):  # a request that needs ten turns of the event loop
            await asyncio.sleep(0)
        seen = len(done)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return seen

    assert run_virtual(main()) < 20


def test_equal_times_keep_the_order_of_arrival() -> None:
    async def act(key: str, count: int) -> timedelta | None:
        return None

    async def script(worklist: Worklist, clock: VirtualClock) -> None:
        for key in ("c", "a", "b"):
            worklist.add(key, START + timedelta(seconds=3))
        worklist.add("a", START + timedelta(seconds=9))  # later than planned: no change
        await after(clock, 20)

    assert drive(act, script) == [(3, "c"), (3, "a"), (3, "b")]


def test_virtual_time_is_exact_and_costs_nothing() -> None:
    async def main() -> datetime:
        clock = VirtualClock(START)
        await clock.sleep_until(START + timedelta(days=400, microseconds=1))
        return clock.now()

    late = run_virtual(main()) - START - timedelta(days=400)
    assert timedelta(microseconds=1) <= late < timedelta(milliseconds=1)


def test_a_wait_for_nothing_is_an_error_and_not_a_hang() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(VirtualDeadlock):
        run_virtual(main())


def test_the_wall_clock_tells_utc_and_waits() -> None:
    async def main() -> bool:
        clock = WallClock()
        until = clock.now() + timedelta(milliseconds=5)
        await clock.sleep_until(until)
        await clock.rest()
        return clock.now() >= until - timedelta(milliseconds=1) and clock.now().tzinfo is UTC

    assert asyncio.run(main())


def test_a_machines_clock_that_is_set_back_does_not_stop_the_wall_clock() -> None:
    ahead, elapsed = timedelta(0), 0.0
    clock = WallClock(lambda: START + timedelta(seconds=elapsed) + ahead, lambda: elapsed)
    listed = Worklist(clock.now)
    listed.hint("job", timedelta(seconds=30))
    ahead = timedelta(hours=-1)
    told = []
    for elapsed in (0.0, 30.0, 60.0, 3600.0, 7200.0, 7300.0):
        told.append((clock.now() - START).total_seconds())
        if elapsed == 60.0:
            assert listed.take() == "job"
    assert told == [0.0, 15.0, 30.0, 1800.0, 3600.0, 3700.0]
    ahead = timedelta(days=2)
    assert clock.now() == START + timedelta(days=2, seconds=7300)
