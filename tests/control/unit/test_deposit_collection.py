"""When the server gives up reading results from a bucket."""

import asyncio
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.control.unit.test_decide_attempts import T0, view

from cavvy.control.agents.deposits import DepositCollection, DepositDependencies, Deposits
from cavvy.control.clock import VirtualClock, run_virtual
from cavvy.store.base import AtomicWrite
from cavvy.store.objects.base import ObjectDenied, ObjectTryAgain

PATIENCE = timedelta(minutes=10)


class Reading:
    """A collection whose time passes only by `wait`."""

    def __init__(self) -> None:
        self.now = datetime(2030, 1, 1, tzinfo=UTC)
        self.found = DepositCollection(lambda: self.now)
        self.start()

    def start(self) -> None:
        self.found.wait()
        self.found.begin()

    def wait(self, minutes: float) -> None:
        self.now += timedelta(minutes=minutes)

    async def fail(self, error: Exception) -> None:
        async def work() -> None:
            raise error

        task = asyncio.create_task(work())
        await asyncio.wait([task])
        self.found.ended(task)
        self.start()

    @property
    def stuck(self) -> bool:
        return self.found.is_stuck(self.now, PATIENCE)


async def test_results_that_get_further_are_never_given_up() -> None:
    reading = Reading()
    for position in range(0, 50, 10):
        reading.wait(9)
        reading.found.read(0, position)
        assert not reading.stuck
        await reading.fail(ObjectTryAgain("no answer"))


async def test_two_interruptions_long_after_each_other_are_no_reason_to_give_up() -> None:
    reading = Reading()
    reading.found.read(0, 100)
    await reading.fail(ObjectTryAgain("no answer"))
    for position in (20, 40, 60, 80, 100):  # the piece is read again from its start
        reading.wait(9)
        reading.found.read(0, position)
    await reading.fail(ObjectTryAgain("no answer"))
    assert not reading.stuck


async def test_a_silent_bucket_is_given_up() -> None:
    reading = Reading()
    reading.found.read(0, 10)
    reading.wait(9)
    await reading.fail(ObjectTryAgain("no answer"))
    assert not reading.stuck
    reading.wait(1)
    assert reading.stuck


@pytest.mark.parametrize(("billed", "minutes"), [(True, 2), (False, 10)])
def test_a_silent_bucket_is_given_up_sooner_while_other_nodes_are_billed(
    billed: bool, minutes: int
) -> None:
    seen, written = view(ranks=2), list[AtomicWrite]()

    async def open_folder(*_: object) -> None:
        await asyncio.Event().wait()

    async def commit(write: AtomicWrite) -> None:
        written.append(write)

    async def read() -> timedelta:
        clock = VirtualClock(T0)
        plain: Any = SimpleNamespace(encrypts=lambda _: False)
        deposits = Deposits(
            cast(Any, SimpleNamespace(commit=commit)),
            clock,
            cast(Any, SimpleNamespace(open_folder=open_folder)),
            cast(Any, (None,) * 4),
            lambda _: None,
            DepositDependencies(url="s3://b/f", logs=plain, read=cast(Any, None)),
        )
        while deposits.collect(seen.job, seen.attempt, {0: None}, billed=billed):
            await asyncio.sleep(30)
        passed = clock.now() - T0
        await asyncio.sleep(0)
        await deposits.close()
        return passed

    assert run_virtual(read()) == timedelta(minutes=minutes)
    (event,) = written[0].events
    assert event.text.endswith("the bucket does not answer")


@pytest.mark.parametrize(
    ("error", "minutes"), [(ObjectTryAgain(""), 10), (ObjectDenied(""), 3), (ValueError(""), 10)]
)
async def test_what_fails_at_the_same_place_again_and_again_is_given_up(
    error: Exception, minutes: int
) -> None:
    reading, passed = Reading(), 0
    while not reading.stuck:
        reading.found.read(0, 10)
        await reading.fail(error)
        reading.wait(1)
        passed += 1
    assert passed == minutes


async def test_results_of_a_later_end_get_the_whole_time() -> None:
    reading = Reading()
    reading.found.settle({0: reading.now})
    reading.found.complete = True
    reading.wait(60)
    assert not reading.stuck
    reading.start()
    assert not reading.stuck


async def test_waiting_for_other_gangs_does_not_count() -> None:
    reading = Reading()
    reading.wait(9)
    await reading.fail(ObjectTryAgain("no answer"))
    reading.found.wait()
    reading.wait(60)
    assert not reading.stuck
    reading.found.begin()
    assert not reading.stuck
    reading.wait(1)
    assert reading.stuck


async def test_reading_ends_at_the_next_answer_after_a_stop() -> None:
    reading = Reading()
    reading.found.stop()
    with pytest.raises(ObjectTryAgain):
        reading.found.read(0, 10)


async def test_a_rank_that_was_heard_again_is_looked_up_again() -> None:
    reading = Reading()
    before = reading.now
    reading.found.settle({0: before, 1: before})
    assert reading.found.list_left({0: before, 1: before}) == frozenset()
    reading.wait(1)
    assert reading.found.list_left({0: before, 1: reading.now, 2: None}) == {1, 2}
