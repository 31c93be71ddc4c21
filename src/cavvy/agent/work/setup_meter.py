"""Measures how much a setup has written, and tells the jobs that wait for the same setup.

The job whose turn it is has a file `turn` in the setup's folder, which names the job. Its agent
updates the file; the agents of the jobs that wait read it.
"""

from __future__ import annotations

import json
import os
import time

from ..disk import open_own, write_whole
from .reaper import descendants

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..config import AgentConfig

EVERY_S = 2.0
STALE_S = 60.0  # after so many seconds without an update, what a file says is not passed on
MIB = 1 << 20
_LONGEST = 4096  # bytes of a file


def take_turn(kept: str, config: AgentConfig) -> None:
    """Note in the setup's folder whose turn it is."""
    write_whole(_path(kept), json.dumps({"gang": config.gang, "rank": config.rank}))


def end_turn(kept: str) -> None:
    """Remove the note, because the setup has ended."""
    try:
        os.unlink(_path(kept))
    except FileNotFoundError:
        return


class SetupMeter:
    """Reports, as telemetry, the MiB that a setup has written so far (`setup_written_mib`). If
    another job runs it, also for how many seconds (`setup_other_s`). `kept` is the setup's folder,
    or "" for the setup of a container. `root` is the process below which the setup runs.
    """

    def __init__(self, say: Callable[..., None], config: AgentConfig, kept: str, root: int) -> None:
        self._say, self._config, self._kept, self._root = say, config, kept, root
        self._began_at = self._looked_at = time.monotonic()
        self._told: dict[str, float] = {}

    def tick(self) -> None:
        """Measure if it is time. To be called about once a second."""
        now = time.monotonic()
        if now - self._looked_at < EVERY_S:
            return
        self._looked_at = now
        found = self._look(now)
        if found and found != self._told:
            self._told = found
            self._say("telemetry", values=found)

    def _look(self, now: float) -> dict[str, float]:
        turn = _read_turn(self._kept) if self._kept else {}
        own = {"gang": self._config.gang, "rank": self._config.rank}
        if turn and any(turn.get(name) != value for name, value in own.items()):
            known = {"setup_other_s": turn.get("seconds"), "setup_written_mib": turn.get("mib")}
            return {
                name: float(value)
                for name, value in known.items()
                if isinstance(value, int | float) and 0 <= value < 1 << 40
            }
        written = round(count_written(self._root) / MIB, 1)
        if turn:
            own.update(seconds=round(now - self._began_at), mib=written)
            try:
                write_whole(_path(self._kept), json.dumps(own))
            except OSError:  # the disk is full, of which the setup itself will tell
                return {}
        return {"setup_written_mib": written}


def count_written(root: int) -> int:
    """Return how many bytes the process `root` and all processes below it have written, with those
    that have ended: the kernel adds their counters to their parents'. 0 without /proc.
    """
    return sum(_read_written(pid) for pid in (root, *descendants(root)))


def _read_written(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            lines = dict(line.split(b": ", 1) for line in file.read().splitlines())
        return int(lines[b"write_bytes"])
    except (OSError, ValueError, KeyError):
        return 0


def _read_turn(kept: str) -> dict[str, object]:
    """Return what the file says. Returns {} if there is none, or if it is old."""
    try:
        if time.time() - os.lstat(_path(kept)).st_mtime > STALE_S:
            return {}
        with open(_path(kept), "rb", opener=open_own) as file:
            found = json.loads(file.read(_LONGEST))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _path(kept: str) -> str:
    return kept + "/turn"
