"""Watches the running work for progress, checkpoints, resource use and idleness."""

from __future__ import annotations

import json
import os
import stat
import struct
import time

from ..disk import open_own, walk_files
from ..outbox import time_text
from .means import UsageMeans

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .checkpoint_upload import FileEntry
    from .usage import UsageMeter

    Say = Callable[..., None]

MARK = b"CAVVY_PROGRESS "
LONGEST_LINE = 65536  # maximum bytes of a progress line
LONGEST_TEXT = 1000  # maximum characters of one value
MOST_VALUES = 100
TELEMETRY_S = 10.0
CHECKPOINT_S = 3.0
# minimum seconds of a write whose rate is measured; the rate of a shorter write is useless
SHORTEST_S = 0.02
IDLE_CPU_PERCENT = 1.0  # percent of one CPU; work that uses less counts as waiting
IDLE_GPU_PERCENT = 1.0
# GPU use below which a node reports how long its GPUs have been idle, if the task sets no limit
LOW_GPU_PERCENT = 5.0
WARN_S = 300.0  # seconds from the warning until idle work is ended; at most half of the idle limit
_AT_FDCWD, _NO_FOLLOW, _STATX_BTIME = -100, 0x100, 0x800  # linux/fcntl.h, linux/stat.h
_REALTIME_COARSE = 5  # linux/time.h; the time module does not name this clock


class ProgressScanner:
    """Finds progress values in the task's output, or in the progress file that the task may write
    instead."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen = 0
        self._line = b""

    def feed(self, data: bytes) -> dict[str, object]:
        """Return the newest value of each name that is reported in these bytes of the output, or {}
        if no value is reported."""
        if MARK not in data and not self._line:
            tail = data.rfind(b"\n") + 1
            self._line = data[tail:] if _may_begin(data[tail:]) else b""
            return {}
        *lines, rest = (self._line + data).split(b"\n")
        self._line = rest if _may_begin(rest) else b""
        found: dict[str, object] = {}
        for line in lines:
            if line.startswith(MARK):
                found.update(parse_progress(line[len(MARK) :]))
        return found

    def look(self) -> dict[str, object]:
        """Return the values in the progress file, or {} if the file has not changed since the last
        call."""
        try:
            found = os.lstat(self._path)
            changed = found.st_mtime_ns
            if changed == self._seen or not stat.S_ISREG(found.st_mode):
                return {}
            self._seen = changed
            with open(self._path, "rb", opener=open_own) as file:
                lines = file.read(LONGEST_LINE).strip().splitlines()
        except OSError:
            return {}
        return parse_progress(lines[-1]) if lines else {}


class CheckpointWatcher:
    """Detects new checkpoints: a checkpoint is new when files of the folder have changed since the
    last checkpoint and then stayed unchanged between two checks. The object must be created before
    the work starts.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._told = self._last = measure(folder)
        self._began_ns = watch_start_ns(self._told[0] > 0)

    def look(self, *, last: bool = False) -> dict[str, object]:
        """Return the fields of a `checkpoint` message, or {} if there is no new checkpoint. Pass
        `last` when the work has ended and writes no more.
        """
        found = measure(self._folder)
        still, self._last = found == self._last or last, found
        if not still or found == self._told or not found[0]:
            return {}
        from .checkpoint_upload import (
            list_folder,
        )  # this import takes long, and work without checkpoints does not need it

        sent, seconds = written(
            self._folder, list_folder(self._folder), self._told[2], self._began_ns
        )
        self._told = found
        files, size, newest = found
        fields: dict[str, object] = {
            "files": files,
            "bytes": size,
            "newest_at": time_text(newest / 1e9),
        }
        if seconds >= SHORTEST_S:
            fields.update(sent=sent, seconds=round(seconds, 3), cost_s=round(seconds, 3))
        return fields


class WorkMonitor:
    """Watches the work's progress, checkpoints, resource use and idleness. The caller must call
    `tick` about once a second, and `wrote` with each piece of output.
    """

    def __init__(
        self,
        say: Say,
        usage: UsageMeter,
        *,
        progress: str,
        checkpoints: CheckpointWatcher | None,
        idle_s: float | None,
        idle_gpu_percent: float = 0,
        connected: Callable[[], bool] = bool,
    ) -> None:
        self._say = say
        self._connected = connected  # returns whether a user has a session on this node
        self._warned = False  # whether the user was warned since the work was last busy
        self._progress = ProgressScanner(progress)
        self._checkpoints = checkpoints
        self.usage = usage
        self.gpus: dict[str, float] = {}
        # the memory limit in MiB that the agent enforces; 0 if the kernel enforces it or if there
        # is none
        self.memory_mib = 0
        self._idle_s = idle_s
        self._idle_gpu_percent = idle_gpu_percent
        self._means = UsageMeans()
        # when the GPUs were last busy, or could not be measured
        self._gpu_busy_at = time.monotonic()
        self._busy_at = self._checkpoints_at = self._looked_at = time.monotonic()
        self._told_at = 0.0
        self._began_at = self._looked_at

    def wrote(self, data: bytes) -> None:
        self._busy_at = time.monotonic()
        self._tell(self._progress.feed(data))

    def tick(self) -> str:
        """Report what has changed. If the work has been idle for too long, return the reason to end
        it."""
        now = time.monotonic()
        self._tell(self._progress.look())
        if self._checkpoints and now - self._checkpoints_at >= CHECKPOINT_S:
            self._checkpoints_at = now
            self._tell_checkpoint()
        often = 1.0 if self.memory_mib else min(TELEMETRY_S, (self._idle_s or TELEMETRY_S) / 4)
        if now - self._looked_at >= often:
            self._measure(now)
        return "" if self._idle_s is None else self._check_idle(now, self._idle_s)

    def _check_idle(self, now: float, limit: float) -> str:
        """Warn before the idle limit is reached. Once the idle limit is reached, return the reason
        to end the work.
        """
        if self._connected():
            self._busy_at = now
        idle, what = now - self._busy_at, "no output, no CPU use and no connection"
        ahead = min(WARN_S, limit / 2)
        if self._idle_gpu_percent and "gpu_percent" in self.gpus:
            idle, what = now - self._gpu_busy_at, f"GPU use below {self._idle_gpu_percent:g} %"
            ahead = limit / 2
        if idle > limit:
            return f"{what} for {limit:g} s"
        late = idle > limit - ahead
        if late and not self._warned:
            left = f"the work will be stopped in {limit - idle:.0f} s"
            self._say("event", name="idle", text=f"{what} for {idle:.0f} s: {left}")
        self._warned = late
        return ""

    @property
    def too_large(self) -> bool:
        """Whether the work uses more memory than allowed."""
        return 0 < self.memory_mib < self.usage.memory_mib

    def end(self) -> None:
        """Check progress and checkpoints a last time after the work has ended."""
        self._tell(self._progress.look())
        self._tell_checkpoint(last=True)

    def _measure(self, now: float) -> None:
        self._looked_at = now
        self.usage.look()
        if (
            not self.usage.known
            or self.usage.cpu_percent >= IDLE_CPU_PERCENT
            or self.gpus.get("gpu_percent", 0) >= IDLE_GPU_PERCENT
        ):
            self._busy_at = now
        if self.gpus.get("gpu_percent", 100) >= (self._idle_gpu_percent or LOW_GPU_PERCENT):
            self._gpu_busy_at = now
        if now - self._told_at >= TELEMETRY_S - 0.5:
            since, self._told_at = max(self._told_at, self._began_at), now
            values = {
                name: getattr(self.usage, name)
                for name in ("cpu_percent", "memory_mib", "memory_peak_mib")
            }
            values.update(self.gpus)
            if self._gpu_busy_at < now:
                values["gpu_idle_s"] = round(now - self._gpu_busy_at)
            self._say("telemetry", values=dict(values, **self._means.add(values, now - since)))

    def _tell(self, values: dict[str, object]) -> None:
        if values:
            self._say("progress", values=values)

    def _tell_checkpoint(self, *, last: bool = False) -> None:
        found = self._checkpoints.look(last=last) if self._checkpoints else {}
        if found:
            self._say("checkpoint", **found)


def written(folder: str, entries: list[FileEntry], since: int, watched: int) -> tuple[int, float]:
    """Return the size in bytes of the files that changed after `since`, and the seconds needed to
    write them.

    The time runs from the creation of the first file to the last change of any file. If a file's
    creation time is unknown, the time of the file's last change is used instead. Files created
    before `watched` belong to earlier attempts. `since` and `watched` are in ns since the epoch.
    """
    fresh = [entry for entry in entries if entry.mtime_ns > since and not entry.link]
    if not fresh:
        return 0, 0.0
    first = min(fresh, key=lambda entry: entry.mtime_ns)
    began = born_ns(os.path.join(folder, first.path))
    if (
        began is None or not max(since, watched) <= began <= first.mtime_ns
    ):  # an old file that was overwritten at an unknown time
        began = first.mtime_ns
    ended = min(
        max(entry.mtime_ns for entry in fresh), time.time_ns()
    )  # a file's time may lie in the future
    return sum(entry.size for entry in fresh), max(0, ended - began) / 1e9


def watch_start_ns(has_files: bool) -> int:
    """Return the creation time from which files are new, in ns since the epoch, for a folder that
    was listed just now and that has files or none.

    The kernel may date a new file with a coarse clock, which is up to 10 ms behind `time.time_ns`.
    If the folder has files, the exact time is returned, because they were restored just now: a file
    that the work creates in the next 10 ms is then taken for a restored one.
    """
    return time.time_ns() if has_files else time.clock_gettime_ns(_REALTIME_COARSE)


def born_ns(path: str) -> int | None:
    """Return when the file was created, in ns since the epoch, or None if the file system does not
    record it. Calls statx(2) through the C library, because Python's standard library does not
    offer it.
    """
    try:
        from ctypes import CDLL, c_uint, create_string_buffer

        found = create_string_buffer(256)
        if CDLL(None).statx(_AT_FDCWD, os.fsencode(path), _NO_FOLLOW, c_uint(_STATX_BTIME), found):
            return None
    except (ImportError, OSError, AttributeError):  # Python without statx, or an old C library
        return None
    if not struct.unpack_from("=I", found, 0)[0] & _STATX_BTIME:
        return None
    seconds, nanoseconds = struct.unpack_from("=qI", found, 80)
    return int(seconds * 1_000_000_000 + nanoseconds)


def parse_progress(text: bytes) -> dict[str, object]:
    """Return the values of a JSON object, keyed by name. Only numbers, strings, true and false are
    returned; true and false are returned as 1 and 0. Returns {} if the text is not a JSON
    object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    values = [
        (name, int(value) if isinstance(value, bool) else value)
        for name, value in found.items()
        if _is_value(value)
    ]
    return dict(values[:MOST_VALUES])


def measure(folder: str) -> tuple[int, int, int]:
    """Return the number of files, their total size in bytes, and the time of the newest change (ns
    since the epoch)."""
    files = size = newest = 0
    for _, seen, _ in walk_files(folder):
        files, size, newest = files + 1, size + seen.st_size, max(newest, seen.st_mtime_ns)
    return files, size, newest


def _is_value(value: object) -> bool:
    if isinstance(value, float):
        return value - value == 0  # JSON has neither infinity nor NaN
    if isinstance(value, str):
        return len(value) <= LONGEST_TEXT
    return isinstance(value, int) and abs(value) < 1 << 63


def _may_begin(line: bytes) -> bool:
    """Return whether an incomplete line can become a progress line."""
    return (
        bool(line) and len(line) < LONGEST_LINE and (line.startswith(MARK) or MARK.startswith(line))
    )
