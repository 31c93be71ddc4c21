"""How long tests wait for other processes: one generous limit for all of them.

A limit here ends a test that would wait for ever; no test expects to come near it, so that a
machine that is slow or busy with other things passes as well. What took how long is for benchmarks.
"""

import asyncio
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

PATIENCE_S = 120.0  # for anything that happens once a server runs
START_S = 240.0  # for a server to start and to serve
LONGEST_PAUSE_S = 0.5  # between two looks
PAUSE_S = 0.05


def pause_after(waited_s: float) -> float:
    """The pause until the next look, after a wait of this length. Looks take CPU time from what is
    waited for, and a wait that has been long may be a little longer.
    """
    return max(PAUSE_S, min(LONGEST_PAUSE_S / 2, waited_s / 40))


def wait_until(
    true: Callable[[], object],
    why: Callable[[], str] = str,
    seconds: float = PATIENCE_S,
    *,
    pause_s: float = 0.0,
) -> None:
    """Wait until a function returns something true; it is asked again after each pause.

    The pause is as long as the function takes, such as one that starts a command, so that what is
    waited for has the machine for half of the time. `pause_s` is the shortest pause instead of the
    usual one.
    """
    first = began = time.monotonic()
    while not true():
        waited, took = time.monotonic() - first, time.monotonic() - began
        if waited > seconds:
            line = traceback.extract_stack(limit=2)[0].line
            raise AssertionError(f"it did not happen within {seconds:.0f} s: {line}: {why()}")
        time.sleep(max(pause_s or pause_after(waited), min(LONGEST_PAUSE_S, took)))
        began = time.monotonic()


@asynccontextmanager
async def patience(seconds: float = PATIENCE_S) -> AsyncIterator[None]:
    """A block that has an end: around a loop that looks again and again."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise AssertionError(
            f"what the block waits for did not happen within {seconds:.0f} s"
        ) from error
