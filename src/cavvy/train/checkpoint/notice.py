"""Receives preemption notices (signals, or the file that Cavvy's agent writes), and ends or
restarts a process that has saved its state and must be run again.
"""

import json
import logging
import multiprocessing
import os
import signal
import stat
import sys
import threading
from datetime import datetime
from pathlib import Path
from time import time
from typing import Any

from cavvy.train.checkpoint.agent import tell_again
from cavvy.train.world import ATTEMPT, RankWorld

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


def run_again(world: RankWorld) -> None:
    """If torchrun started this process, run the program again in the same process. The process must
    not exit, because torchrun ends all ranks when one rank exits, and treats exit code 75 as a
    failure. The connections to other ranks are closed. When the restarted program joins the process
    group, it waits for the other ranks.

    Raises: SystemExit: torchrun did not start this process, or the script itself (not Cavvy) joined
    the process group. A group that the script joined cannot be joined again.
    """
    if not world.can_join_again:
        leave()
    for child in multiprocessing.active_children():
        child.terminate()
    os.environ[ATTEMPT] = str(int(os.environ.get(ATTEMPT, "0")) + 1)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    for number in map(int, os.listdir("/dev/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.set_inheritable(number, False)
        except OSError:
            continue  # This is the descriptor that listed the folder; it is already closed.
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def leave() -> None:
    """Exit with the exit code for "run me again". The function also notifies Cavvy's agent
    directly, because a launcher such as torchrun replaces this exit code with its own.

    Raises: SystemExit: always.
    """
    tell_again()
    raise SystemExit(AGAIN)
