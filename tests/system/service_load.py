"""Requests to a service while something happens to it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

from tests.serving.system.test_serve import call


@contextmanager
def under_load(url: str, callers: int, pause_s: float) -> Iterator[list[int]]:
    """Call the service meanwhile, with `pause_s` between the calls of each caller. The list has the
    status of each answer; it is complete at the end.
    """
    ended = Event()
    codes: list[int] = []

    def go_on() -> None:
        while not ended.wait(pause_s):
            codes.append(call(url))

    with ThreadPoolExecutor(callers) as pool:
        running = [pool.submit(go_on) for _ in range(callers)]
        try:
            yield codes
        finally:
            ended.set()
        for each in running:
            each.result()
