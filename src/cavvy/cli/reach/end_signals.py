"""Lets a command clean up when SIGTERM or SIGHUP ends it."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """On SIGHUP and SIGTERM, raise SystemExit instead of ending at once, so that a command ends
    what it has started and deletes its temporary files.
    """
    numbers = (signal.SIGHUP, signal.SIGTERM)
    handlers = {number: signal.getsignal(number) for number in numbers}
    # `nohup` ignores SIGHUP; a handler that is None belongs to a C library
    heard = {n: each for n, each in handlers.items() if each not in (signal.SIG_IGN, None)}
    for number in heard:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number, handler in heard.items():
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
