"""The calls that this program has started and does not wait for. If their app cannot be loaded, a
program that waits for what they would do, such as an item of a queue, would wait for ever.

This file also runs on nodes, so it imports only the standard library and files that do.
"""

import sys
import threading
from collections.abc import Callable

from cavvy.capabilities.functions.errors import AppBroken

_MOST = 100  # failures that are remembered
_lock = threading.Lock()
_failures: list[str] = []
_told: set[str] = set()
_looks: list[Callable[[], None]] = []  # each notes failures that the server knows
_open = 0  # calls without a result


def begin() -> None:
    """Count a call that was started."""
    global _open
    with _lock:
        _open += 1


def end(function: str, kind: str, text: str) -> None:
    """Note how a call has ended. `kind` is "" for one with a result."""
    global _open
    with _lock:
        _open = max(_open - 1, 0)
    if kind == "AppBroken":
        note(f"{function} cannot run: {text}")


def note(text: str) -> None:
    """Note that calls of an app cannot run, and say so, once."""
    with _lock:
        new = text not in _told
        _told.add(text)
        if len(_failures) < _MOST:
            _failures.append(text)
    if new:
        sys.stderr.write(f"cavvy: {text}\n")


def ask_with(look: Callable[[], None]) -> None:
    """Let `look` ask the server for failures, before `check` raises them."""
    if look not in _looks:
        _looks.append(look)


def is_watched() -> bool:
    """Return whether this program has started calls whose end it does not know."""
    return bool(_open or _looks)


def check() -> None:
    """Raise AppBroken if calls that this program has started cannot run. It is raised once."""
    for look in list(_looks):
        look()
    with _lock:
        failed, _failures[:] = _failures[:], []
    if failed:
        raise AppBroken(
            failed[0], "what the calls of this program would do does not happen: mend the app"
        )
