"""Receives preemption notices: signals, or the file that Cavvy's agent writes."""

import json
import os
import signal
import threading
from datetime import datetime
from pathlib import Path
from time import time
from typing import Any

AGAIN = 75  # EX_TEMPFAIL; this exit code means "saved, run me again" to the agent
SIGNALS = ("SIGTERM", "SIGUSR1")


class PreemptionNotices:
    """Listens for preemption notices until `close` is called. Checking for a notice takes one or
    two microseconds. The signal handler only records the signal.
    """

    def __init__(self) -> None:
        self._heard = ""
        self._path = os.environ.get("CAVVY_NOTICE_FILE", "")
        self._advice = os.environ.get("CAVVY_ADVICE_FILE", "")
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name) for name in SIGNALS if hasattr(signal, name)):
                self._before[number] = signal.signal(number, self._hear)

    def pending(self) -> str:
        """Return the source of the notice (the name of a signal, or a path), or "" if no notice has
        arrived yet.
        """
        if not self._heard and self._path and os.path.exists(self._path):
            self._heard = self._path
        return self._heard

    def left_s(self) -> float | None:
        """Return the seconds until this machine is reclaimed, read from the agent's file; None if
        unknown.
        """
        try:
            said = json.loads(Path(self._path).read_text())["deadline"] if self._path else None
            return None if said is None else datetime.fromisoformat(said).timestamp() - time()
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def is_news(self) -> bool:
        """Return whether the agent has reported that this machine is at risk. Returns True only
        once, at the first call after the report.
        """
        if not self._advice or not os.path.exists(self._advice):
            return False
        self._advice = ""
        return True

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def _hear(self, number: int, frame: object) -> None:
        self._heard = self._heard or signal.Signals(number).name
