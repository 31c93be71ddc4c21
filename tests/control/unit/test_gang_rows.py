"""Reads and writes of a gang's ranks that travel together."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

from tests.contract.store_suite import make_attempt, make_job, make_node

from cavvy.control.unit_of_work import GangReads, GangWrites
from cavvy.store.base import AtomicWrite, JobReading, RowNotFound, StaleVersion
from cavvy.store.sql import Store


class SlowStore:
    """Notes the gangs that each write releases, which stand for any rows here. Each write takes a
    turn of the loop; a write that releases `stale` fails."""

    def __init__(self) -> None:
        self.writes: list[list[str]] = []
        self.hangs = False

    async def commit(self, changes: AtomicWrite) -> None:
        await asyncio.sleep(1e6 if self.hangs else 0)
        if "stale" in changes.release:
            raise StaleVersion("another one was faster")
        self.writes.append([*changes.release])


def run(test: Callable[[SlowStore, GangWrites], Awaitable[None]]) -> None:
    async def in_loop() -> None:
        store = SlowStore()
        await test(store, GangWrites(cast(Store, store)))

    asyncio.run(in_loop())


def change(row: str) -> AtomicWrite:
    return AtomicWrite(release=[row])


class CountedReads:
    """A gang g of four ranks, and the ranks that each read asked for."""

    def __init__(self) -> None:
        self.reads: list[list[int] | None] = []

    async def read_gang(self, gang: str, ranks: list[int] | None = None) -> JobReading:
        self.reads.append(ranks)
        await asyncio.sleep(0)
        if gang != "g":
            raise RowNotFound(gang)
        job = make_job("j")
        attempt = make_attempt(job)
        found = [make_node(attempt, each) for each in range(4) if ranks is None or each in ranks]
        return JobReading(job=job, attempts=[attempt], nodes={attempt.id: found})


def test_requests_of_one_moment_share_a_read_that_begins_after_them() -> None:
    async def test() -> None:
        store = CountedReads()
        reads = GangReads(cast(Store, store))

        async def ask(*asked: tuple[str, int | None]) -> list[object]:
            told = await asyncio.gather(
                *(reads.read(*each) for each in asked), return_exceptions=True
            )
            return [
                type(each) if isinstance(each, BaseException) else [node.rank for node in each[2]]
                for each in told
            ]

        assert await ask(("g", 1), ("g", 3), ("h", 0), ("g", 9)) == [
            [1],
            [3],
            RowNotFound,
            RowNotFound,
        ]
        assert store.reads == [[1, 3, 9], [0]]
        assert await ask(("g", 1), ("g", None)) == [[1], [0, 1, 2, 3]]
        assert store.reads[2:] == [None]
        first = asyncio.create_task(reads.read("g", 0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # its read has begun
        assert await ask(("g", 2)) == [[2]]
        await first
        assert store.reads[3:] == [[0], [2]]

    asyncio.run(test())


def test_writes_that_wait_for_another_of_their_gang_travel_together() -> None:
    async def test(store: SlowStore, writes: GangWrites) -> None:
        async def report(row: str, later: int) -> None:
            for _ in range(later):
                await asyncio.sleep(0)
            await writes.commit("g", change(row))

        await asyncio.gather(report("a", 0), *(report(row, 2) for row in "bcd"))
        await asyncio.gather(writes.commit("g", change("e")), writes.commit("h", change("f")))
        assert store.writes == [["a"], ["b", "c", "d"], ["e"], ["f"]]

    run(test)


def test_a_write_that_fails_takes_no_other_with_it() -> None:
    async def test(store: SlowStore, writes: GangWrites) -> None:
        told = await asyncio.gather(
            *(writes.commit("g", change(row)) for row in ("a", "stale", "b")),
            return_exceptions=True,
        )
        assert [type(each) for each in told] == [type(None), StaleVersion, type(None)]
        assert store.writes == [["a"], ["b"]]
        await writes.commit("g", change("c"))
        assert store.writes[-1] == ["c"]

    run(test)


def test_callers_that_leave_and_a_server_that_stops_leave_nothing_behind() -> None:
    async def test(store: SlowStore, writes: GangWrites) -> None:
        gone = asyncio.create_task(writes.commit("g", change("a")))
        stays = asyncio.create_task(writes.commit("g", change("b")))
        await asyncio.sleep(0)
        gone.cancel()
        await stays
        assert store.writes == [["a", "b"]]
        store.hangs = True
        waits = [asyncio.create_task(writes.commit("g", change(row))) for row in "cd"]
        for closed in (False, True):  # also before the write has begun
            await asyncio.sleep(0)
            if closed:
                await writes.close()
        await asyncio.gather(*waits, return_exceptions=True)
        assert all(each.cancelled() for each in waits)
        store.hangs = False
        await writes.commit("g", change("e"))
        assert store.writes[-1] == ["e"]

    run(test)
