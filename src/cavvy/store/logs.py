"""Stores the logs of ranks as files. Data is appended at a given offset. If a log exceeds its size
limit, its first tenth and its newest part are kept.

The file `ATTEMPT.RANK.log` contains the first bytes of a log. If the log grows beyond one tenth of
its size limit, or if bytes of it are missing, all later bytes are in segments, which are files
`ATTEMPT.RANK.log.OFFSET`. Offsets count all bytes ever written, so the offset of a byte never
changes. If bytes between two files are missing, they were dropped, and readers get a line that
reports the gap. If the files of a project are encrypted, the segments of its logs have names that
end with `.sealed`. All methods block on disk I/O. Files are not flushed with fsync: stored bytes
are kept when this process ends, but the newest bytes can be lost in a system crash.
"""

import errno
import os
import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Lock
from typing import ClassVar

from cavvy.domain.values import Struct, replace
from cavvy.store.base import RowNotFound, StoreFull, StoreUnusable
from cavvy.store.encrypted_files.blocks import (
    LOGS,
    EncryptedFile,
    FileKey,
    create_encrypted,
    open_encrypted,
)
from cavvy.store.encrypted_files.data_keys import FileKeys
from cavvy.store.encrypted_files.streams import PlainFile
from cavvy.store.locks import FileLocks

_PAIR = struct.Struct("<QQ")  # offset in bytes, time in microseconds since 1970
_APART_S = 0.5  # minimum seconds between two pairs


def note_arrival(path: Path, offset: int, now_s: float) -> None:
    """Append a pair. If the disk is full, the pair is not stored,
    which only makes the times less precise."""
    with suppress(OSError):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, _PAIR.pack(offset, round(now_s * 1e6)))
        finally:
            os.close(file)


def is_due(last_s: float, now_s: float) -> bool:
    """Return whether enough time has passed since the last stored pair to store another pair."""
    return now_s - last_s >= _APART_S


class LogTimes(Struct, frozen=True, kw_only=True):
    """The recorded pairs of a log. The list is empty if the log was stored without times."""

    path: Path

    def since(self, start_s: float) -> int | None:
        """Return the offset of the first byte that arrived at the given time or later, accurate to
        half a second.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        pairs = _PAIR.iter_unpack(data[: len(data) // _PAIR.size * _PAIR.size])
        return next((offset for offset, micros in pairs if micros / 1e6 >= start_s), None)

    def between(self, start: int, end: int, limit: int) -> list[tuple[int, float]]:
        """Return the first `limit` pairs for the bytes from `start` to `end`. Each pair is an
        offset in the log and the time in seconds since 1970. The method reads only the returned
        pairs and the pairs that a binary search needs.
        """
        try:
            file = self.path.open("rb", buffering=0)
        except FileNotFoundError:
            return []
        with file:
            number = file.fileno()

            def read(first: int, count: int) -> list[tuple[int, int]]:
                data = os.pread(number, count * _PAIR.size, first * _PAIR.size)
                return list(_PAIR.iter_unpack(data[: len(data) // _PAIR.size * _PAIR.size]))

            known = range(os.fstat(number).st_size // _PAIR.size)
            first = bisect_right(known, start, key=lambda i: read(i, 1)[0][0])
            pairs = read(max(0, first - 1), limit)
        return [(offset, micros / 1e6) for offset, micros in pairs if offset < end]


SEALED = ".sealed"  # the end of the name of an encrypted file


class LogSegment(Struct):
    """A file of a log, the offset of its first byte, and the number of its bytes."""

    base: Path  # the name of the log's first plain file, from which all names are made
    start: int
    size: int = 0
    sealed: bool = False

    @property
    def end(self) -> int:
        return self.start + self.size

    @property
    def path(self) -> Path:
        if self.start == 0 and not self.sealed:
            return self.base
        return self.base.with_name(
            f"{self.base.name}.{self.start:020}{SEALED if self.sealed else ''}"
        )


class SegmentFiles:
    """Reads and writes the files of one project. `current` returns the key for new files, and
    `find` returns the key that the header of a file names. `current` and `find` are None if all
    files are plain.
    """

    def __init__(
        self,
        *,
        encrypts: bool = False,
        current: Callable[[], FileKey] | None = None,
        find: Callable[[bytes], FileKey] | None = None,
    ) -> None:
        self.encrypts = encrypts
        self._current, self._find = current, find

    def create(self, segment: LogSegment) -> None:
        """Create the file without any bytes. Raises OSError, StoreUnusable, StoreFull."""
        key = self._current() if segment.sealed and self._current else None
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC
        fd = os.open(segment.path, flags, 0o600)
        try:
            if key is not None:
                create_encrypted(fd, LOGS, key, _bound(segment))
        finally:
            os.close(fd)

    def read(self, segment: LogSegment, at: int, length: int) -> bytes:
        """Return at most `length` bytes from the position `at` in the file. Raises OSError,
        StoreUnusable.
        """
        fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return self._open(fd, segment).read(at, length)
        finally:
            os.close(fd)

    def append(self, segment: LogSegment, data: bytes) -> None:
        """Append all bytes or none. Raises FileNotFoundError, OSError, StoreUnusable."""
        fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            try:
                self._open(fd, segment).append(data)
            except OSError:
                if not segment.sealed:
                    os.ftruncate(fd, segment.size)
                raise
        finally:
            os.close(fd)
        segment.size += len(data)

    def _open(self, fd: int, segment: LogSegment) -> PlainFile | EncryptedFile:
        if not segment.sealed:
            return PlainFile(fd)
        if self._find is None:
            raise StoreUnusable(f"{segment.path} is encrypted, and the server has no keys of files")
        return open_encrypted(fd, LOGS, self._find, _bound(segment))


def find_segment_size(stored: int, *, sealed: bool) -> int:
    """Return the number of bytes of the log in a file of `stored` bytes."""
    return LOGS.size(stored) if sealed else stored


def _bound(segment: LogSegment) -> str:
    return f"logs/{segment.base.parent.name}/{segment.path.name}"


LIMIT = 1 << 30  # maximum bytes of one rank's log on disk
_PART = 10  # the first file and each segment have at most 1/10 of the limit
# maximum number of segments of one log; needed because a sender that often loses bytes creates many
# short segments
_FILES = 64
_KNOWN = (
    4096  # number of logs whose state is cached; the state of other logs is read from their folder
)
_BLOCK = 65536  # block size in bytes for reading backwards from the end
# names of projects or jobs that can be used as names of folders
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_FILE = re.compile(r"(\d+)\.(\d+)\.log(?:\.(\d{20})(\.sealed)?)?")
_PLAIN = SegmentFiles()


class LogSlice(Struct, frozen=True, kw_only=True):
    """Some bytes of a log, and the offset at which the next read must continue. `dropped` is the
    number of lost bytes; if it is not 0, `data` is a line that reports the loss.
    """

    data: bytes
    next: int
    dropped: int = 0


class _Log(Struct):
    """The files of one log, sorted by the offset at which each file begins. New bytes are appended
    to the last file.
    """

    base: Path
    segments: list[LogSegment]
    noted_s: float = 0.0  # time of the last recorded arrival

    @property
    def end(self) -> int:
        return self.segments[-1].end if self.segments else 0


class LogStore:
    """A folder with the logs of jobs. Several threads of one process may write and read logs. Other
    processes may only read the logs, unless the folder is `shared`. In a shared folder, a writer
    takes a lock, reads the folder again, and then writes.
    """

    threads: ClassVar[None] = None  # any thread may call it

    def __init__(
        self,
        root: Path,
        *,
        limit: int = LIMIT,
        shared: bool = False,
        keys: FileKeys | None = None,
    ) -> None:
        self._root = root
        self._keys = keys
        self._locks = FileLocks(root / ".locks") if shared else None
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
        now_s: float | None = None,
    ) -> int:
        """Append `data`, which begins at `offset` and arrived at `now_s` (seconds since 1970).
        Return the offset that is expected next.

        Bytes that are already stored are ignored. If bytes before `offset` are missing, nothing is
        written, and the offset of the first missing byte is returned. `lost` is the number of
        missing bytes that the sender can no longer send; these bytes are skipped. Raises StoreFull,
        in which case nothing is written.
        """
        base = self._base(project, job_id, attempt, rank)
        with self._writing(base):
            try:
                log = self._known(base)
                end = log.end
                expected = self._append(log, offset, data, lost)
                if now_s is not None and log.end > end and is_due(log.noted_s, now_s):
                    log.noted_s = now_s
                    note_arrival(_times_path(base), max(end, offset), now_s)
                return expected
            except FileNotFoundError:  # the folder was deleted, so request all bytes again
                del self._logs[base]
                return self._known(base).end

    def encrypts(self, project: str) -> bool:
        """Return whether the project's new logs are encrypted."""
        return self._keys is not None and self._keys.of(project).encrypts

    def is_quick(self, project: str) -> bool:
        """Return whether this process already has all keys that `append` needs."""
        return self._keys is None or self._keys.of(project).ready

    def size(self, project: str, job_id: str, attempt: int, rank: int) -> int:
        """Return the offset of the log's end, or 0 if no log exists."""
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
        """Return at most `limit` bytes from `offset` on, or none at the end of the log. If bytes
        are missing at `offset`, return a line that reports the gap.
        """
        while True:
            log = self._seen(project, job_id, attempt, rank)
            if offset >= log.end:
                return LogSlice(data=b"", next=offset)
            i = bisect_right(log.segments, offset, key=lambda each: each.start) - 1
            if i < 0 or offset >= log.segments[i].end:
                following = log.segments[i + 1].start
                dropped = following - offset
                return LogSlice(data=gap_line(dropped), next=following, dropped=dropped)
            segment = log.segments[i]
            with suppress(FileNotFoundError):  # the segment was dropped meanwhile, so try again
                size = min(limit, segment.end - offset)
                data = self._files(log).read(segment, offset - segment.start, size)
                return LogSlice(data=data, next=offset + len(data))
            with self._lock:
                self._logs.pop(log.base, None)

    def times(self, project: str, job_id: str, attempt: int, rank: int) -> LogTimes:
        """Return the times at which the bytes of the log arrived."""
        return LogTimes(path=_times_path(self._base(project, job_id, attempt, rank)))

    def tail(self, project: str, job_id: str, attempt: int, rank: int, lines: int) -> LogSlice:
        """Return the last `lines` lines. `next` is the offset at which to continue. The last line
        may be incomplete.
        """
        log = self._seen(project, job_id, attempt, rank)
        if lines <= 0:
            return LogSlice(data=b"", next=log.end)
        blocks: list[bytes] = []
        wanted = lines  # number of newlines to find before the first wanted line
        for block in _backwards(log, self._files(log)):
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
        """Return the attempt and the rank of each of the job's logs, sorted."""
        found = set()
        for path in self._folder(project, job_id).glob("*.log*"):
            if match := _FILE.fullmatch(path.name):
                found.add((int(match[1]), int(match[2])))
        return sorted(found)

    def remove(self, project: str, job_id: str) -> None:
        """Delete all logs of a job, if they exist."""
        folder = self._folder(project, job_id)
        with self._writing(folder / "all"):
            for base in [base for base in self._logs if base.parent == folder]:
                del self._logs[base]
            for path in list(folder.glob("*")):
                path.unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                folder.rmdir()

    def _folder(self, project: str, job_id: str) -> Path:
        for name in (project, job_id):
            if not NAME.fullmatch(name):
                raise RowNotFound(
                    f"invalid name {name!r}: names may contain only letters, digits and . _ -"
                )
        return self._root / project / job_id

    def _base(self, project: str, job_id: str, attempt: int, rank: int) -> Path:
        return self._folder(project, job_id) / f"{attempt}.{rank}.log"

    def _seen(self, project: str, job_id: str, attempt: int, rank: int) -> _Log:
        """Return a copy of the log's state for a reader, because a writer may change the state
        during the read.
        """
        with self._lock:
            log = self._known(self._base(project, job_id, attempt, rank))
            return _Log(log.base, [replace(each) for each in log.segments])

    @contextmanager
    def _writing(self, base: Path) -> Iterator[None]:
        """Keep other threads from using any log, and other processes from writing a log of this
        job.
        """
        with self._locks.hold(str(base.parent)) if self._locks else nullcontext(), self._lock:
            yield

    def _known(self, base: Path) -> _Log:
        log = self._logs.pop(base, None)
        if log is not None and self._locks is not None:
            log = replace(_look(base), noted_s=log.noted_s)
        if log is None:
            if len(self._logs) >= _KNOWN:
                del self._logs[next(iter(self._logs))]
            log = _look(base)
        # move the log to the end of the cache, which is sorted by last use
        self._logs[base] = log
        return log

    def _append(self, log: _Log, offset: int, data: bytes, lost: int) -> int:
        end = log.end
        if offset > end:
            if offset - lost > end:
                return end
            self._start(log, offset)
            end = offset
        fresh, files = data[end - offset :], self._files(log)
        while fresh:
            last = log.segments[-1] if log.segments else None
            if last is None or last.size >= self._part or last.sealed != files.encrypts:
                last = self._start(log, log.end)
            room = self._part - last.size
            try:
                files.append(last, fresh[:room])
            except StoreUnusable:
                # the end of the file cannot be decrypted, so it stays as it is
                if last.size == 0:
                    raise
                self._start(log, log.end)
                continue
            except FileNotFoundError:
                raise
            except OSError as error:
                raise _told(error, last.path) from error
            fresh = fresh[room:]
        return log.end

    def _start(self, log: _Log, start: int) -> LogSegment:
        """Start a new file. If the log is at its limit, drop its oldest segments. Raises
        StoreFull.
        """
        files = self._files(log)
        segment = LogSegment(log.base, start, sealed=files.encrypts)
        try:
            if not log.segments:
                segment.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.create(segment)
        except OSError as error:
            raise _told(error, segment.path) from error
        if log.segments and log.segments[-1].path == segment.path:  # the last segment had no bytes
            del log.segments[-1]
        log.segments.append(segment)
        while len(log.segments) > 2 and (
            sum(each.size for each in log.segments) + self._part > self._limit
            or len(log.segments) > _FILES
        ):
            oldest = 1 if log.segments[0].start == 0 else 0
            log.segments.pop(oldest).path.unlink(missing_ok=True)
        return segment

    def _files(self, log: _Log) -> SegmentFiles:
        """Return the object that reads and writes the files of the log's project."""
        if self._keys is None:
            return _PLAIN
        keys = self._keys.of(log.base.parent.parent.name)
        return SegmentFiles(encrypts=keys.encrypts, current=keys.current, find=keys.find)


def _times_path(base: Path) -> Path:
    return base.with_suffix(".times")


def _look(base: Path) -> _Log:
    """Read the log's state from its folder. If a process was killed during a write, the bytes that
    it had already written count as part of the log.
    """
    found: list[LogSegment] = []
    with suppress(FileNotFoundError):
        for entry in os.scandir(base.parent):
            match = _FILE.fullmatch(entry.name)
            if match and entry.name.startswith(base.name):
                with suppress(FileNotFoundError):
                    sealed = match[4] is not None
                    size = find_segment_size(entry.stat().st_size, sealed=sealed)
                    found.append(LogSegment(base, int(match[3] or 0), size, sealed))
    return _Log(base, sorted(found, key=lambda each: (each.start, each.end)))


def _backwards(log: _Log, files: SegmentFiles) -> Iterator[bytes]:
    """Yield the log's bytes in blocks, beginning with the last block. Each gap is replaced by a
    line that reports the gap.
    """
    following = log.end
    for segment in reversed(log.segments):
        if segment.end < following:
            yield gap_line(following - segment.end)
        with suppress(FileNotFoundError):
            for at in range((segment.size - 1) // _BLOCK * _BLOCK, -1, -_BLOCK):
                yield files.read(segment, at, min(_BLOCK, segment.size - at))
        following = segment.start
    if following > 0:
        yield gap_line(following)


def gap_line(dropped: int) -> bytes:
    """Return the line that readers get in place of dropped bytes."""
    return b"\n[cavvy: %d bytes of the log were dropped here: it passed its limit]\n" % dropped


def _told(error: OSError, path: Path) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(
            f"no space to write {path}; the bytes were not stored: free some disk space"
        )
    return error
