"""Work for which no request waits: tasks, and a thread for what blocks, such as files."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_log = logging.getLogger(__name__)


class BackgroundWork:
    """The tasks of one part of the gateway, and its thread. `failed` is logged with errors."""

    def __init__(self, name: str, failed: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    async def call(self, function: Callable[[], T]) -> T:
        """Call a function that blocks."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """Start a task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def submit(self, function: Callable[..., object], *values: object) -> None:
        """Let the thread call a function whose result does not matter."""
        self._thread.submit(function, *values)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error(self._failed, exc_info=task.exception())

    async def finish(self) -> None:
        """Wait until all tasks have ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._thread.shutdown()

    async def cancel(self) -> None:
        """End all tasks."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._thread.shutdown()
