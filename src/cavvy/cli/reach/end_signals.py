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
    # `nohup` ignores SIGHUP
    defaults = [each for each in numbers if signal.getsignal(each) is signal.SIG_DFL]
    for number in defaults:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in defaults:
            signal.signal(number, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
