"""Runs work items for the event loop, one by one or in groups, in threads that each have their own
database connection."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from cavvy.domain.values import Struct
from cavvy.store.base import StoreError, StoreUnusable
from cavvy.store.drivers import DatabaseDriver, DatabaseSession, is_passing, translate

_T = TypeVar("_T")
Begin = Callable[[DatabaseSession], object]  # begins a transaction, or raises an error
_AT_ONCE = 50  # brief reads, after which other tasks of the event loop get their turn
_TRIES = 4  # tries of a transaction that conflicts with another one


class _Task(Struct, frozen=True):
    work: Callable[[DatabaseSession], Any]
    begin: Begin
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


_Outcome = tuple[_Task, Any, Exception | None]


class StoreWorkers:
    """Runs work items in `count` threads. If `group` is 0, all work items are reads; otherwise the
    items are writes, and up to `group` items share one transaction.

    Each item of a group has its own savepoint: if an item raises an error, only the item's own
    changes are undone.
    """

    def __init__(self, driver: DatabaseDriver, *, count: int, group: int = 0) -> None:
        self._driver = driver
        self._group = group
        self._queue: SimpleQueue[_Task | None] = SimpleQueue()
        self._closed = False
        self._brief: DatabaseSession | None = None
        self._at_once = 0  # brief reads since other tasks had their turn
        name = "store-write" if group else "store-read"
        self._threads = [
            Thread(target=self._serve, name=f"{name}-{i}", daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    async def do(
        self, work: Callable[[DatabaseSession], _T], begin: Begin = DatabaseSession.begin
    ) -> _T:
        """Run `work` in a thread and return its result. Work that has started is finished even if
        the caller is cancelled. `begin` begins the transaction of a write; writes that share
        transactions have no such function of their own.
        """
        if self._closed:
            raise StoreUnusable("the store is closed")
        loop = asyncio.get_running_loop()
        task = _Task(work, begin, loop.create_future(), loop)
        self._queue.put(task)
        result: _T = await task.future
        return result

    async def do_brief(self, work: Callable[[DatabaseSession], _T]) -> _T:
        """Run a read of few rows in the event loop if the database is a file of this machine that
        is read without waiting for writes, since another thread would need four times the CPU time
        of the read. Otherwise, and if the database refuses the read, like `do`.
        """
        self._at_once += 1
        if self._at_once >= _AT_ONCE:  # someone may read the nodes of thousands of jobs
            self._at_once = 0
            await asyncio.sleep(0)  # noqa: TID251
        if self._closed or not self._driver.reads_at_once:
            return await self.do(work)
        try:
            if self._brief is None:
                self._brief = self._driver.connect(readonly=True, waits=False)
            return work(self._brief)
        except StoreError:
            raise  # such as RowNotFound
        except Exception:  # noqa: BLE001  a thread can wait, and explains errors
            return await self.do(work)

    def close(self) -> None:
        """Finish the queued work, then end the threads. Blocks."""
        self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        if self._brief is not None:
            self._brief.close()
            self._brief = None

    def _serve(self) -> None:
        session: DatabaseSession | None = None
        while (task := self._queue.get()) is not None:
            tasks = [task, *self._more()]
            try:
                if session is None or session.broken:
                    session = self._driver.connect(readonly=not self._group)
                outcomes = self._do(session, tasks)
            except Exception as error:  # noqa: BLE001
                # the thread's loop must go on: the caller gets the error
                outcomes = [(each, None, error) for each in tasks]
            self._settle(outcomes)
        if session is not None:
            session.close()

    def _more(self) -> Sequence[_Task]:
        tasks: list[_Task] = []
        while len(tasks) < self._group - 1:
            try:
                task = self._queue.get_nowait()
            except Empty:
                break
            if task is None:  # None stops one thread, this one or another
                self._queue.put(None)
                break
            tasks.append(task)
        return tasks

    def _do(self, session: DatabaseSession, tasks: Sequence[_Task]) -> Sequence[_Outcome]:
        if self._group == 0:
            return [self._alone(session, task, read) for task in tasks]
        if len(tasks) == 1:
            return [self._alone(session, tasks[0], partial(write, begin=tasks[0].begin))]
        # Begin outside the try, so that a failed wait for the lock is not repeated for each item.
        session.begin()
        try:
            return _write_group(session, tasks)
        except Exception:  # noqa: BLE001
            # one item broke the transaction, so nothing is written: repeat each item alone
            session.rollback()
            return [self._alone(session, task, write) for task in tasks]

    def _alone(
        self,
        session: DatabaseSession,
        task: _Task,
        run: Callable[[DatabaseSession, Callable[[DatabaseSession], Any]], Any],
    ) -> _Outcome:
        for attempt in range(1, _TRIES + 1):
            try:
                return task, run(session, task.work), None
            except Exception as error:  # noqa: BLE001  the caller gets the error
                if attempt < _TRIES and is_passing(error):
                    continue
                return task, None, error
        raise AssertionError("unreachable")

    def _settle(self, outcomes: Sequence[_Outcome]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[_Outcome]] = defaultdict(list)
        for task, result, error in outcomes:
            by_loop[task.loop].append((task, result, error and translate(error, self._driver)))
        for loop, settled in by_loop.items():
            with suppress(RuntimeError):  # the loop is closed, so no caller waits for the result
                loop.call_soon_threadsafe(_resolve, settled)


def _resolve(outcomes: Sequence[_Outcome]) -> None:
    for task, result, error in outcomes:
        if task.future.done():  # the caller was cancelled meanwhile
            continue
        if error is None:
            task.future.set_result(result)
        else:
            task.future.set_exception(error)


def read(session: DatabaseSession, work: Callable[[DatabaseSession], _T]) -> _T:
    try:
        return work(session)
    except Exception:
        if not session.broken:
            raise
        return work(session.reopen())


def write(
    session: DatabaseSession,
    work: Callable[[DatabaseSession], _T],
    begin: Begin = DatabaseSession.begin,
) -> _T:
    """Run `work` in a transaction. If the connection turns out to be broken before the commit was
    sent, nothing was written: the work is repeated once, with a new connection.
    """
    for last in (False, True):
        sent = False
        try:
            begin(session)
            result = work(session)
            session.run_all(())
            sent = True
            session.commit()
        except BaseException:
            if last or sent or not session.broken:
                session.rollback()
                raise
            session.reopen()
        else:
            return result
    raise AssertionError("unreachable")


def _write_group(session: DatabaseSession, tasks: Sequence[_Task]) -> Sequence[_Outcome]:
    """Run all items in the open transaction, and commit."""
    outcomes: list[_Outcome] = []
    for task in tasks:
        session.run("SAVEPOINT work")
        try:
            outcomes.append((task, task.work(session), None))
        except Exception as error:  # noqa: BLE001  the caller gets the error
            session.run(
                "ROLLBACK TO work"
            )  # fails if the database has aborted the whole transaction
            outcomes.append((task, None, error))
        session.run("RELEASE work")
    session.commit()
    return outcomes
