"""Logs of ranks as files, appended by offset; a log over its limit keeps its first tenth and its
newest rest.

A log is `ATTEMPT.RANK.log` (its bytes from 0 on) and, where it grew past its first tenth or lost
bytes, segments `ATTEMPT.RANK.log.OFFSET`. Offsets count all bytes ever written, so that they never
move. What lies between two files was dropped; readers get a line that says so. Methods block on the
disk. Bytes survive the end of this process, and reach the disk when the system writes them: no
fsync.
"""

import errno
import os
import re
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from cavvy.store.base import RowNotFound, StoreFull

LIMIT = 1 << 30  # bytes of one rank's log on disk
_PART = 10  # the head and each segment are a tenth of the limit
_FILES = 64  # of one log at most: a sender that loses bytes again and again makes short ones
_KNOWN = 4096  # logs whose end is remembered; others are looked up in their folder
_BLOCK = 65536  # bytes read at once from the end backwards
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # of a project or job that may be a folder
_FILE = re.compile(r"(\d+)\.(\d+)\.log(?:\.(\d{20}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSlice:
    """Some bytes of a log and the offset to read on from. `dropped` bytes were lost where `data`
    is a line on it.
    """

    data: bytes
    next: int
    dropped: int = 0


@dataclass(slots=True)
class _Log:
    """The files of one log, by where they begin; the last one grows."""

    base: Path
    starts: list[int]
    sizes: list[int]

    @property
    def end(self) -> int:
        return self.starts[-1] + self.sizes[-1] if self.starts else 0

    def path(self, start: int) -> Path:
        return self.base if start == 0 else self.base.with_name(f"{self.base.name}.{start:020}")


class LogStore:
    """A folder of logs. Safe to be used by several threads of one process; a second process may
    read.
    """

    def __init__(self, root: Path, *, limit: int = LIMIT) -> None:
        self._root = root
        self._part = max(1, limit // _PART)
        self._limit = limit
        self._logs: dict[Path, _Log] = {}
        self._lock = Lock()

    def append(
        self,
        project: str,
        job_id: str,
        attempt: int,
        rank: int,
        offset: int,
        data: bytes,
        lost: int = 0,
    ) -> int:
        """Add `data`, which begins at `offset`, and return the offset wanted next.

        Bytes that are here already are ignored. A gap is not written: the answer is where to go
        back to, unless the sender says that the `lost` bytes before `offset` are no more. Raises
        StoreFull with nothing torn.
        """
        base = self._base(project, job_id, attempt, rank)
        with self._lock:
            try:
                return self._append(self._known(base), offset, data, lost)
            except FileNotFoundError:  # the folder was deleted: ask for the lost part again
                del self._logs[base]
                return self._known(base).end

    def size(self, project: str, job_id: str, attempt: int, rank: int) -> int:
        """The offset at which the log ends now; 0 where there is none."""
        return self._seen(project, job_id, attempt, rank).end

    def read(
        self,
        project: str,
        job_id: str,
        attempt: int,
        rank: int,
        offset: int = 0,
        limit: int = 1 << 20,
    ) -> LogSlice:
        """At most `limit` bytes from `offset` on; no data at the end. A gap is answered with one
        line on it.
        """
        while True:
            log = self._seen(project, job_id, attempt, rank)
            if offset >= log.end:
                return LogSlice(data=b"", next=offset)
            i = bisect_right(log.starts, offset) - 1
            if i < 0 or offset >= log.starts[i] + log.sizes[i]:
                following = log.starts[i + 1]
                dropped = following - offset
                return LogSlice(data=_gap_line(dropped), next=following, dropped=dropped)
            size = min(limit, log.starts[i] + log.sizes[i] - offset)
            with suppress(FileNotFoundError):  # dropped between the look and the read: look again
                data = _read(log.path(log.starts[i]), offset - log.starts[i], size)
                return LogSlice(data=data, next=offset + len(data))
            with self._lock:
                self._logs.pop(log.base, None)

    def tail(self, project: str, job_id: str, attempt: int, rank: int, lines: int) -> LogSlice:
        """The last lines, read from the end backwards; `next` is where to follow on. A last line
        may be unfinished.
        """
        log = self._seen(project, job_id, attempt, rank)
        if lines <= 0:
            return LogSlice(data=b"", next=log.end)
        blocks: list[bytes] = []
        wanted = lines  # newlines to find before the first wanted line
        for block in _backwards(log):
            if not blocks and block.endswith(b"\n"):
                wanted += 1
            at = len(block)
            while wanted and (at := block.rfind(b"\n", 0, at)) >= 0:
                wanted -= 1
            if not wanted:
                blocks.append(block[at + 1 :])
                break
            blocks.append(block)
        return LogSlice(data=b"".join(reversed(blocks)), next=log.end)

    def ranks(self, project: str, job_id: str) -> list[tuple[int, int]]:
        """The (attempt, rank) of every log of a job, in order."""
        found = set()
        for path in self._folder(project, job_id).glob("*.log*"):
            if match := _FILE.fullmatch(path.name):
                found.add((int(match[1]), int(match[2])))
        return sorted(found)

    def remove(self, project: str, job_id: str) -> None:
        """Delete all logs of a job; none is no error."""
        folder = self._folder(project, job_id)
        with self._lock:
            for base in [base for base in self._logs if base.parent == folder]:
                del self._logs[base]
            for path in list(folder.glob("*")):
                path.unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                folder.rmdir()

    def _folder(self, project: str, job_id: str) -> Path:
        for name in (project, job_id):
            if not _NAME.fullmatch(name):
                raise RowNotFound(
                    f"no log of {name!r}: a project or job has letters, digits and . _ - only"
                )
        return self._root / project / job_id

    def _base(self, project: str, job_id: str, attempt: int, rank: int) -> Path:
        return self._folder(project, job_id) / f"{attempt}.{rank}.log"

    def _seen(self, project: str, job_id: str, attempt: int, rank: int) -> _Log:
        """A copy for a reader: a writer may go on meanwhile."""
        with self._lock:
            log = self._known(self._base(project, job_id, attempt, rank))
            return _Log(log.base, log.starts.copy(), log.sizes.copy())

    def _known(self, base: Path) -> _Log:
        log = self._logs.pop(base, None)
        if log is None:
            if len(self._logs) >= _KNOWN:
                del self._logs[next(iter(self._logs))]
            log = _look(base)
        self._logs[base] = log  # the newest is last
        return log

    def _append(self, log: _Log, offset: int, data: bytes, lost: int) -> int:
        end = log.end
        if offset > end:
            if offset - lost > end:
                return end
            self._start(log, offset)
            end = offset
        fresh = data[end - offset :]
        while fresh:
            if not log.starts or log.sizes[-1] >= self._part:
                self._start(log, log.end)
            room = self._part - log.sizes[-1]
            self._write(log, fresh[:room])
            fresh = fresh[room:]
        return log.end

    def _start(self, log: _Log, start: int) -> None:
        """Begin a new file, and drop the oldest segments where the log is at its limit. Raises
        StoreFull.
        """
        path = log.path(start)
        try:
            if not log.starts:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise _told(error, path) from error
        log.starts.append(start)
        log.sizes.append(0)
        while len(log.starts) > 2 and (
            sum(log.sizes) + self._part > self._limit or len(log.starts) > _FILES
        ):
            oldest = 1 if log.starts[0] == 0 else 0
            log.path(log.starts[oldest]).unlink(missing_ok=True)
            del log.starts[oldest], log.sizes[oldest]

    def _write(self, log: _Log, data: bytes) -> None:
        path, size = log.path(log.starts[-1]), log.sizes[-1]
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                written = 0
                while written < len(data):
                    written += os.pwrite(file, data[written:], size + written)
            except OSError:
                os.ftruncate(file, size)
                raise
            finally:
                os.close(file)
        except OSError as error:
            raise _told(error, path) from error
        log.sizes[-1] = size + len(data)


def _look(base: Path) -> _Log:
    """What is on the disk; bytes of a write that was cut short by the end of a process are as
    good as any.
    """
    found: list[tuple[int, int]] = []
    with suppress(FileNotFoundError):
        for entry in os.scandir(base.parent):
            match = _FILE.fullmatch(entry.name)
            if match and entry.name.startswith(base.name):
                with suppress(FileNotFoundError):
                    found.append((int(match[3] or 0), entry.stat().st_size))
    found.sort()
    return _Log(base, [start for start, _ in found], [size for _, size in found])


def _backwards(log: _Log) -> Iterator[bytes]:
    """The log's bytes in blocks, the last one first, with a line in the place of each gap."""
    following = log.end
    for start, size in zip(reversed(log.starts), reversed(log.sizes), strict=True):
        if start + size < following:
            yield _gap_line(following - start - size)
        with suppress(FileNotFoundError):
            for at in range((size - 1) // _BLOCK * _BLOCK, -1, -_BLOCK):
                yield _read(log.path(start), at, min(_BLOCK, size - at))
        following = start
    if following > 0:
        yield _gap_line(following)


def _read(path: Path, offset: int, size: int) -> bytes:
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        return file.read(size)


def _gap_line(dropped: int) -> bytes:
    return b"\n[cavvy: %d bytes of the log were dropped here: it passed its limit]\n" % dropped


def _told(error: OSError, path: Path) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(f"no room to write {path}; the bytes were not taken: free some disk space")
    return error
