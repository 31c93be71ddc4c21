"""Runs calls to storages in their own threads with a time limit.

A storage that accepts a request and never answers blocks no other part of the server; requests to
other storages wait only if all of these threads wait for silent storages, and then fail with that
reason.
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
    """Return the call's result. Raises the call's errors, and ObjectTryAgain after LIMIT_S; a
    started call continues.
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
                f"the request was not sent within {LIMIT_S:g} s: {COUNT} requests are waiting for "
                "storages that do not answer"
            )
            raise ObjectTryAgain(told) from error
        raise ObjectTryAgain(f"the storage did not answer within {LIMIT_S:g} s") from error


async def in_thread_to_its_end(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like `in_thread`, for calls that must end before the next step: each of their requests has
    its own time limit.
    """
    return await asyncio.get_running_loop().run_in_executor(
        _THREADS, partial(call, *args, **kwargs)
    )
