"""Where calls to storages run: in threads of their own and for a bounded time.

A storage that takes a request and never answers holds up nothing else of the server; those who want
another storage wait only where all of these threads wait for silent ones, and are told so.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from cavvy.store.objects.base import ObjectTryAgain

LIMIT_S = 45.0  # less than the minute that an agent waits for an answer
COUNT = 32
_THREADS = ThreadPoolExecutor(COUNT, "storage")

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What the call returns. Raises what it raises, and ObjectTryAgain after LIMIT_S; a call that
    has begun goes on.
    """
    begun = False

    def run() -> T:
        nonlocal begun
        begun = True
        return call(*args, **kwargs)

    try:
        async with asyncio.timeout(LIMIT_S):
            return await in_thread_to_its_end(run)
    except TimeoutError as error:
        if not begun:
            told = (
                f"the storage was not asked for {LIMIT_S:g} s: {COUNT} requests wait for "
                "storages that do not answer"
            )
            raise ObjectTryAgain(told) from error
        raise ObjectTryAgain(
            f"the storage does not answer: nothing came for {LIMIT_S:g} s"
        ) from error


async def in_thread_to_its_end(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `in_thread`, for what must be over before the next thing begins: its own requests are
    bounded each.
    """
    return await asyncio.get_running_loop().run_in_executor(
        _THREADS, partial(call, *args, **kwargs)
    )
