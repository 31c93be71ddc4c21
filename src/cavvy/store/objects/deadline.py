"""Makes several calls to storage services at the same time, with one time limit for all calls."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooSlow
from threading import Thread
from typing import TypeVar

from cavvy.store.objects.base import ObjectError, ObjectTryAgain

T = TypeVar("T")


def call_all(
    calls: Mapping[str, Callable[[], T]], patience_s: float
) -> Mapping[str, T | ObjectError]:
    """Make the calls, and return the result or the error of each call; block for at most
    `patience_s` seconds in total. A call that has no result within this time gets the result
    ObjectTryAgain. The call's thread continues, but does not delay the end of the process.
    """
    asked = {name: _start(call) for name, call in calls.items()}
    until = time.monotonic() + patience_s
    found: dict[str, T | ObjectError] = {}
    for name, answer in asked.items():
        left = max(0.0, until - time.monotonic())
        try:
            found[name] = answer.result(left)
        except TooSlow:
            found[name] = ObjectTryAgain(f"the storage did not answer within {patience_s:g} s")
        except ObjectError as error:
            found[name] = error
    return found


def _start(call: Callable[[], T]) -> "Future[T]":
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised again by the caller
            found.set_exception(error)

    Thread(target=run, name="storage-call", daemon=True).start()
    return found
