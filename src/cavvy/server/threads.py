"""The threads in which the server runs what would block its loop, and which of them do not end.

Python cannot end a thread: one that computes without an end keeps the process alive, and others
from working. So each call is noted, and named with its stack once it has taken too long.
"""

import concurrent.futures
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")

LIMIT_S = 120.0  # a call that takes longer is told
END_S = 10.0  # how long a server that stops waits for its calls
_FRAMES = 12  # of a stack in the log, the innermost
_log = logging.getLogger("cavvy.server")


class Call:
    """A call that a thread runs."""

    __slots__ = ("since", "thread", "told", "what")

    def __init__(self, what: str) -> None:
        self.what, self.told = what, False
        self.thread, self.since = threading.get_ident(), time.monotonic()

    def describe(self) -> str:
        """Return in which function of which line the call is, and for how long it has run."""
        lasted = time.monotonic() - self.since
        frame = sys._current_frames().get(self.thread)  # no other way to a stack
        stack = traceback.extract_stack(frame) if frame is not None else []
        at = f" at {stack[-1].filename}:{stack[-1].lineno} in {stack[-1].name}" if stack else ""
        return f"{self.what} has run for {lasted:.0f} s{at}"

    def list_stack(self) -> str:
        frame = sys._current_frames().get(self.thread)
        return "".join(traceback.format_stack(frame)[-_FRAMES:]) if frame is not None else ""


class WatchedThreads(concurrent.futures.ThreadPoolExecutor):
    """Threads for `asyncio.to_thread` that know what they run."""

    def __init__(self, most: int | None = None) -> None:
        super().__init__(most, "server")
        self._calls: dict[int, Call] = {}

    def submit(
        self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any
    ) -> concurrent.futures.Future[_T]:
        what = _name(fn, args)

        def run() -> _T:
            call = Call(what)
            self._calls[call.thread] = call
            try:
                return fn(*args, **kwargs)
            finally:
                del self._calls[call.thread]

        return super().submit(run)

    def list_long(self, limit_s: float) -> list[Call]:
        """Return the calls that have run for longer than this."""
        now = time.monotonic()
        return [each for each in [*self._calls.values()] if now - each.since > limit_s]

    def tell_long(self, limit_s: float) -> None:
        """Log each call that has run for longer than this, once, with its stack."""
        for call in self.list_long(limit_s):
            if not call.told:
                call.told = True
                _log.warning(
                    "a thread has not ended in time: %s",
                    call.describe(),
                    extra={"stack": call.list_stack()},
                )

    def end(self, limit_s: float) -> list[Call]:
        """Begin no more calls, wait for those that run, and return those that do not end."""
        self.shutdown(wait=False, cancel_futures=True)
        until = time.monotonic() + limit_s
        while self._calls and time.monotonic() < until:
            time.sleep(0.02)
        return [*self._calls.values()]


_pools: list[WatchedThreads] = []


def tell_long() -> None:
    """Log each call of the server's threads that has run for too long, once."""
    for pool in _pools:
        pool.tell_long(LIMIT_S)


def describe_long() -> list[str]:
    """Return the calls of the server's threads that have run for too long."""
    return [call.describe() for pool in _pools for call in pool.list_long(LIMIT_S)]


def end_threads() -> bool:
    """End the server's threads, and return whether they have ended. Those that run on are logged
    with their stacks."""
    left = [call for pool in _pools for call in pool.end(END_S)]
    for call in left:
        _log.error(
            "a thread does not end, and is killed with the process: %s",
            call.describe(),
            extra={"stack": call.list_stack()},
        )
    return not left


def open_threads(most: int | None = None) -> WatchedThreads:
    """Return new threads for the server."""
    made = WatchedThreads(most)
    _pools.append(made)
    return made


def _name(fn: Callable[..., object], args: tuple[object, ...]) -> str:
    """Return the name of what is called: `to_thread` passes it in a context."""
    called: Any = fn
    while (inner := getattr(called, "func", None)) is not None:
        args, called = (*called.args, *args), inner
    bound = getattr(called, "__self__", None)
    if getattr(called, "__name__", "") == "run" and type(bound).__name__ == "Context" and args:
        return _name(args[0], ()) if callable(args[0]) else "a call"
    return str(getattr(called, "__qualname__", called))


def exit_at_last(code: int) -> None:
    """End the process within END_S, even if Python waits for threads that others have started, such
    as those of a cloud's library. Each of them is told with its stack."""

    def wait() -> None:
        time.sleep(END_S)
        for each in threading.enumerate():
            if not each.daemon and each is not threading.main_thread():
                frame = sys._current_frames().get(each.ident or 0)
                stack = "".join(traceback.format_stack(frame)) if frame else ""
                text = "a thread does not end, and is killed with the process: %s"
                _log.warning(text, each.name, extra={"stack": stack})
        logging.shutdown()
        os._exit(code)

    threading.Thread(target=wait, daemon=True, name="exit").start()
