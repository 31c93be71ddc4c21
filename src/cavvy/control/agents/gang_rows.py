"""Joins the reads and the writes of a gang's agents, which often report at the same moment: what is
asked for at once is read at once, and while one write is under way, the next ones of its gang
gather, and are then written together.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

from cavvy.control.unit_of_work import join_rows
from cavvy.domain.jobs import Attempt, JobRecord, Node
from cavvy.store.base import AtomicWrite, JobReading, RowNotFound, StoreError
from cavvy.store.sql import Store


class GangReads:
    """Reads gangs. Requests of one turn of the event loop share a read, which begins after them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # the ranks that are asked for, None for all, and the read of them, by gang
        self._asked: dict[str, tuple[set[int | None], asyncio.Task[JobReading]]] = {}

    async def read(self, gang: str, rank: int | None) -> tuple[Attempt, JobRecord, list[Node]]:
        """Return the gang's attempt, its job, and all nodes or the node with this rank. Raises
        RowNotFound."""
        if gang not in self._asked:
            ranks: set[int | None] = set()
            self._asked[gang] = ranks, asyncio.create_task(self._read(gang, ranks))
        ranks, task = self._asked[gang]
        ranks.add(rank)
        found = await asyncio.shield(task)
        [attempt] = found.attempts
        nodes = found.nodes[attempt.id]
        if rank is not None:
            nodes = [each for each in nodes if each.rank == rank]
            if not nodes:
                raise RowNotFound(f"attempt {attempt.id} has no rank {rank}")
        return attempt, found.job, [*nodes]

    async def _read(self, gang: str, ranks: set[int | None]) -> JobReading:
        del self._asked[gang]
        if None in ranks:
            return await self._store.read_gang(gang)
        return await self._store.read_gang(gang, [each for each in ranks if each is not None])


_Waiting = list[tuple[AtomicWrite, asyncio.Future[None]]]


class GangWrites:
    """Commits changes of one rank each, each of them or none of it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # the writes of each gang that writes: those that are under way, and then those that gather
        self._waiting: dict[str, _Waiting] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def commit(self, gang: str, changes: AtomicWrite) -> None:
        """Do the same as `Store.commit`, perhaps together with changes of other ranks."""
        done = asyncio.get_running_loop().create_future()
        waiting = self._waiting.get(gang)
        if waiting is None:
            waiting = self._waiting[gang] = [(changes, done)]
            task = asyncio.create_task(self._write_all(gang, waiting))
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, gang, waiting))
        else:
            waiting.append((changes, done))
        await done

    async def close(self) -> None:
        """Wait for no more writes. Their callers get no answer, as if the server had crashed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _write_all(self, gang: str, waiting: _Waiting) -> None:
        while batch := waiting[:]:
            await self._write(batch)
            del waiting[: len(batch)]
        del self._waiting[gang]

    def _ended(self, gang: str, waiting: _Waiting, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        for _, done in waiting:  # it was cancelled
            self._waiting.pop(gang, None)
            done.cancel()

    async def _write(self, batch: _Waiting) -> None:
        try:
            await self._store.commit(join_rows([changes for changes, _ in batch]))
        except StoreError as error:
            if len(batch) > 1:  # one of them may be stale, or have values that cannot be stored
                for each in batch:
                    await self._write([each])
                return
            _settle(batch, error)
        except Exception as error:  # noqa: BLE001  the callers get the error
            _settle(batch, error)
        else:
            _settle(batch, None)


def _settle(
    batch: Sequence[tuple[AtomicWrite, asyncio.Future[None]]], error: Exception | None
) -> None:
    for _, done in batch:
        if done.done():  # the caller was cancelled meanwhile
            continue
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
