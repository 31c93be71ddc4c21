"""Runs calls in separate threads. Calls to storages have a time limit, so a storage that accepts a
request and never responds does not block the server. A request to a storage that works is delayed
only while every thread waits for other storages that do not respond. A request that is not answered
within LIMIT_S seconds fails. The error says whether the storage did not answer, or whether all
threads were busy.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Thread
from typing import ParamSpec, TypeVar

from cavvy.store.objects.base import ObjectTryAgain

LIMIT_S = 45.0  # less than the minute that an agent waits for an answer
COUNT = 32

P = ParamSpec("P")
T = TypeVar("T")


class StorageThreads:
    """Threads for calls to storages. Calls that use another StorageThreads object do not wait for
    these threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._threads = count, ThreadPoolExecutor(count, name)

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the call in a thread and return its result. Raises the call's errors. Raises
        ObjectTryAgain after LIMIT_S seconds; a call that has started then continues in its thread.
        """
        begun = False

        def run() -> T:
            nonlocal begun
            begun = True
            return call(*args, **kwargs)

        try:
            async with asyncio.timeout(LIMIT_S):
                return await self.run_to_its_end(run)
        except TimeoutError as error:
            if not begun:
                told = (
                    f"the request was not sent within {LIMIT_S:g} s: {self._count} requests are "
                    "waiting for storages that do not answer"
                )
                raise ObjectTryAgain(told) from error
            raise ObjectTryAgain(f"the storage did not answer within {LIMIT_S:g} s") from error

    async def run_to_its_end(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do the same as `run`, but wait without a time limit until the call ends. Each request
        that the call sends has its own limit.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, partial(call, *args, **kwargs)
        )


def start_apart(call: Callable[[], T], name: str) -> "Future[T]":
    """Run the call in a thread of its own, which does not delay the end of the process. The result
    or the error of the call is that of the returned future.
    """
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised again by `result()`
            found.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return found


_ALL = StorageThreads(COUNT, "storage")
in_thread, in_thread_to_its_end = _ALL.run, _ALL.run_to_its_end
