"""Joins the writes of a gang's agents, which often report at the same moment: while one write is
under way, the next ones of its gang gather, and are then written together.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

from cavvy.control.unit_of_work import join_rows
from cavvy.store.base import AtomicWrite, StoreError
from cavvy.store.sql import Store

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
