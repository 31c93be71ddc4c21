"""That this machine will be taken away: a signal, or the file that Remuda's agent writes."""

import json
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

AGAIN = 75  # EX_TEMPFAIL: "saved, run me again", as the agent understands it
SIGNALS = ("SIGTERM", "SIGUSR1")


@dataclass(frozen=True, slots=True)
class Notice:
    source: str
    deadline: float | None  # on the monotonic clock; None where nobody said


class Notices:
    """Listens until closed. A question costs a microsecond or two; nothing happens in the signal handler itself."""

    def __init__(self) -> None:
        self._heard: Notice | None = None
        self._path = os.environ.get("REMUDA_NOTICE_FILE", "")
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name) for name in SIGNALS if hasattr(signal, name)):
                self._before[number] = signal.signal(number, self._hear)

    def pending(self) -> Notice | None:
        """The notice, once there is one; with the time that is left, where the agent wrote it."""
        if self._path and os.path.exists(self._path):
            self._heard = Notice("remuda", _read_deadline(self._path))
            self._path = ""
        return self._heard

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def _hear(self, number: int, frame: object) -> None:
        if self._heard is None:
            self._heard = Notice(signal.Signals(number).name, None)


def _read_deadline(path: str) -> float | None:
    try:
        seconds = json.loads(Path(path).read_text())["seconds"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return monotonic() + float(seconds) if isinstance(seconds, int | float) else None
