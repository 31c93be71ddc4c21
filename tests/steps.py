"""Counts the lines that run, so that a loop without an end fails a test by its steps, not by time."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class EndlessLoop(AssertionError):
    """Raised in the code that has run more lines than permitted."""


@contextmanager
def limit_steps(most: int) -> Iterator[None]:
    """Let the code in the block run at most so many lines. Raises EndlessLoop."""
    steps = 0

    def count(frame: object, event: str, argument: object) -> object:
        nonlocal steps
        steps += 1
        if steps > most:
            raise EndlessLoop(f"more than {most:,} lines: a loop does not end")
        return count

    before = sys.gettrace()
    sys.settrace(count)  # type: ignore[arg-type]  # what it returns traces the lines, too
    try:
        yield
    finally:
        sys.settrace(before)
