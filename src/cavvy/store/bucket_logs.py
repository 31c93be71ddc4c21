"""Stores the logs of ranks as objects of a bucket, so that servers without a shared folder can
append to and read the same log.

A log is a set of pieces. The object `PROJECT/JOB/ATTEMPT.RANK/START-SIZE-MICROS-PAIRS` contains
SIZE bytes of the log, which begin at the offset START. PAIRS pairs follow: each is an offset, and
the time at which the bytes at this offset arrived. MICROS is the time of the first pair. If a piece
has only one pair, the pair is not stored in the object, because START and MICROS in the object's
name already contain the pair. An encrypted piece has a name that ends with `.sealed`. Two servers
never write different bytes at the same offset, so servers need no lock, and their pieces may
overlap. Many small pieces are replaced by one large piece. The methods block on requests to the
bucket.
"""

import re
import struct
import tempfile
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from threading import Lock
from zlib import crc32

from cavvy.domain.values import Struct
from cavvy.store.base import RowNotFound, StoreUnusable
from cavvy.store.bucket_folder import BucketFolder
from cavvy.store.encrypted_files.blocks import BLOBS, create_encrypted, open_encrypted
from cavvy.store.encrypted_files.data_keys import FileKeys
from cavvy.store.logs import LIMIT, NAME, LogSlice, gap_line
from cavvy.store.objects.threads import StorageThreads

_PAIR = struct.Struct("<QQ")  # offset in bytes, time in microseconds since 1970
_APART_S = 0.5  # minimum seconds between two pairs of a large piece
_SMALL = 1 << 19  # maximum bytes of a piece that is combined with others
_MANY = 64  # number of small pieces that are combined into one
_KNOWN = 4096  # maximum number of logs whose pieces are cached
_READ_BYTES = 32 << 20  # maximum bytes of cached pieces
_LOCKS = 64
_THREADS = 64  # each request to the bucket keeps a thread waiting
_HEAD = 10  # the first tenth of a log is kept when it exceeds its limit
_PIECE = re.compile(r"(\d{20})-(\d{10})-(\d{17})-(\d{6})(\.sealed)?")
_SUFFIX = ".sealed"


class LogPiece(Struct, frozen=True, kw_only=True):
    """An object with a part of a log."""

    start: int
    size: int
    micros: int
    pairs: int
    sealed: bool

    @property
    def end(self) -> int:
        return self.start + self.size

    @property
    def name(self) -> str:
        text = f"{self.start:020}-{self.size:010}-{self.micros:017}-{self.pairs:06}"
        return text + (_SUFFIX if self.sealed else "")


class BucketLogTimes(Struct, frozen=True, kw_only=True):
    """The times at which the bytes of a log arrived, with the same interface as `LogTimes`."""

    logs: "BucketLogs"
    log: str  # the log's name

    def since(self, start_s: float) -> int | None:
        """See `LogTimes.since`."""
        return next((at for at, micros in self._pairs(0) if micros / 1e6 >= start_s), None)

    def between(self, start: int, end: int, limit: int) -> list[tuple[int, float]]:
        """See `LogTimes.between`."""
        found: list[tuple[int, float]] = []
        for at, micros in self._pairs(start):
            if at >= end or len(found) >= limit:
                break
            if at <= start:
                found.clear()  # a later pair is nearer to the start
            found.append((at, micros / 1e6))
        return found

    def _pairs(self, start: int) -> Iterator[tuple[int, int]]:
        """Yield the pairs of offset and time of all pieces that end after `start`, in the order of
        their offsets.
        """
        for piece in cover(self.logs.pieces(self.log)):
            if piece.end > start:
                yield from self.logs.pairs(self.log, piece)


class BucketLogs:
    """The logs of all jobs, in a folder of a bucket. The class has the interface of `LogStore`.
    Several threads may use a BucketLogs object. Requests use `threads`, so that an unresponsive
    bucket does not delay other work.
    """

    def __init__(
        self, folder: BucketFolder, *, limit: int = LIMIT, keys: FileKeys | None = None
    ) -> None:
        self._folder, self._limit, self._keys = folder, limit, keys
        self.threads = StorageThreads(_THREADS, "bucket-logs")
        self._logs: OrderedDict[str, list[LogPiece]] = OrderedDict()
        self._read: OrderedDict[str, bytes] = OrderedDict()
        self._read_bytes = 0
        self._lock = Lock()  # guards both caches
        self._writing = [Lock() for _ in range(_LOCKS)]

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
        """See `LogStore.append`. When the call returns, the bytes are in the bucket."""
        log = _name(project, job_id, attempt, rank)
        with self._writing[crc32(log.encode()) % _LOCKS]:
            pieces = self._cached(log)
            if pieces is None or offset > _end(pieces):
                pieces = self.pieces(log)  # another server may have written
            end = _end(pieces)
            if offset > end and offset - lost > end:
                return end
            start = max(end, offset)
            fresh = data[start - offset :]
            if not fresh:
                return end
            micros = round((now_s or 0.0) * 1e6)
            piece = self._put(log, start, fresh, ((start, micros),))
            pieces = self._tidy(log, [*pieces, piece])
            self._remember(log, pieces)
            return piece.end

    def encrypts(self, project: str) -> bool:
        """Return whether the project's new logs are encrypted."""
        return self._keys is not None and self._keys.of(project).encrypts

    def is_quick(self, project: str) -> bool:
        """Return False, because each call of `append` sends a request to the bucket and waits for
        the answer.
        """
        return False

    def size(self, project: str, job_id: str, attempt: int, rank: int) -> int:
        """Return the offset of the log's end, or 0 if no log exists."""
        return _end(self.pieces(_name(project, job_id, attempt, rank)))

    def read(
        self,
        project: str,
        job_id: str,
        attempt: int,
        rank: int,
        offset: int = 0,
        limit: int = 1 << 20,
    ) -> LogSlice:
        """See `LogStore.read`."""
        log = _name(project, job_id, attempt, rank)
        pieces = self._cached(log)
        if pieces is None or offset >= _end(pieces):
            pieces = self.pieces(log)
        while True:
            if offset >= _end(pieces):
                return LogSlice(data=b"", next=offset)
            known = cover(pieces)
            i = bisect_right(known, offset, key=lambda each: each.start) - 1
            if i < 0 or offset >= known[i].end:
                following = known[i + 1].start
                dropped = following - offset
                return LogSlice(data=gap_line(dropped), next=following, dropped=dropped)
            body = self._body(log, known[i])
            if body is not None:
                at = offset - known[i].start
                data = body[at : min(known[i].size, at + limit)]
                return LogSlice(data=data, next=offset + len(data))
            pieces = self.pieces(log)  # another server has replaced or dropped the piece

    def times(self, project: str, job_id: str, attempt: int, rank: int) -> BucketLogTimes:
        """Return the times at which the bytes of the log arrived."""
        return BucketLogTimes(logs=self, log=_name(project, job_id, attempt, rank))

    def remove(self, project: str, job_id: str) -> None:
        """Delete all logs of a job, if they exist."""
        folder = _folder(project, job_id)
        with self._lock:
            for log in [log for log in self._logs if log.startswith(folder)]:
                del self._logs[log]
        self._folder.delete_all(folder)

    def pieces(self, log: str) -> list[LogPiece]:
        """List the pieces of a log in the bucket, sorted by their starts."""
        found = []
        for each in self._folder.list(f"{log}/"):
            if match := _PIECE.fullmatch(each.key.rpartition("/")[2]):
                start, size, micros, pairs = (int(match[number]) for number in range(1, 5))
                sealed = match[5] is not None
                found.append(
                    LogPiece(start=start, size=size, micros=micros, pairs=pairs, sealed=sealed)
                )
        found.sort(key=lambda each: (each.start, each.end))
        self._remember(log, found)
        return found

    def pairs(self, log: str, piece: LogPiece) -> Sequence[tuple[int, int]]:
        """Return the offsets in a piece, and the times in microseconds at which the bytes at these
        offsets arrived.
        """
        if piece.pairs == 1:
            return ((piece.start, piece.micros),)
        body = self._body(log, piece)
        return () if body is None else list(_PAIR.iter_unpack(body[piece.size :]))

    def _tidy(self, log: str, pieces: list[LogPiece]) -> list[LogPiece]:
        """Combine the last pieces if many of them are small. If the log exceeds its limit, drop
        its oldest pieces, except the pieces of its first tenth.
        """
        small = _find_small(pieces)
        if len(small) >= _MANY:
            made = self._combine(log, small)
            pieces = self.pieces(log) if made is None else [*pieces[: -len(small)], made]
        stored, dropped = sum(each.size for each in pieces), []
        for each in pieces[:-1]:
            if stored <= self._limit:
                break
            if each.start >= self._limit // _HEAD:
                dropped.append(each)
                stored -= each.size
        if dropped:
            self._folder.delete(*(f"{log}/{each.name}" for each in dropped))
            pieces = [each for each in pieces if each not in dropped]
        return pieces

    def _combine(self, log: str, small: Sequence[LogPiece]) -> LogPiece | None:
        """Replace consecutive pieces with one piece. Returns None if another server has already
        replaced some of the pieces.
        """
        start, end, noted = small[0].start, small[0].start, -1.0
        parts, pairs = list[bytes](), list[tuple[int, int]]()
        for piece in cover(small):
            if (body := self._body(log, piece)) is None:
                return None
            parts.append(body[end - piece.start : piece.size])
            for at, micros in self.pairs(log, piece):
                if at >= end and micros / 1e6 - noted >= _APART_S:
                    pairs.append((at, micros))
                    noted = micros / 1e6
            end = piece.end
        made = self._put(log, start, b"".join(parts), pairs or ((start, small[0].micros),))
        self._folder.delete(*(f"{log}/{each.name}" for each in small if each != made))
        return made

    def _put(self, log: str, start: int, data: bytes, pairs: Sequence[tuple[int, int]]) -> LogPiece:
        piece = LogPiece(
            start=start,
            size=len(data),
            micros=pairs[0][1],
            pairs=len(pairs),
            sealed=self.encrypts(log.partition("/")[0]),
        )
        body = data if len(pairs) == 1 else data + b"".join(_PAIR.pack(*pair) for pair in pairs)
        name = f"{log}/{piece.name}"
        self._folder.put(name, self._seal(log, piece, body) if piece.sealed else body)
        self._keep(name, body)
        return piece

    def _body(self, log: str, piece: LogPiece) -> bytes | None:
        """Return the content of a piece of the log, or None if the piece does not exist. Raises
        StoreUnusable.
        """
        name = f"{log}/{piece.name}"
        with self._lock:
            if (known := self._read.get(name)) is not None:
                self._read.move_to_end(name)
                return known
        data = self._folder.get(name)
        if data is None:
            return None
        body = self._unseal(log, piece, data) if piece.sealed else data
        self._keep(name, body)
        return body

    def _seal(self, log: str, piece: LogPiece, body: bytes) -> bytes:
        assert self._keys is not None
        key = self._keys.of(log.partition("/")[0]).current()
        with tempfile.TemporaryFile(buffering=0) as file:
            create_encrypted(file.fileno(), BLOBS, key, _bound(log, piece)).append(body)
            file.seek(0)
            return file.read()

    def _unseal(self, log: str, piece: LogPiece, data: bytes) -> bytes:
        if self._keys is None:
            raise StoreUnusable(f"the log {log} is encrypted, and the server has no keys of files")
        find = self._keys.of(log.partition("/")[0]).find
        with tempfile.TemporaryFile(buffering=0) as file:
            file.write(data)
            return open_encrypted(file.fileno(), BLOBS, find, _bound(log, piece)).read(0, len(data))

    def _cached(self, log: str) -> list[LogPiece] | None:
        with self._lock:
            return self._logs.get(log)

    def _remember(self, log: str, pieces: list[LogPiece]) -> None:
        with self._lock:
            self._logs[log] = pieces
            self._logs.move_to_end(log)
            if len(self._logs) > _KNOWN:
                self._logs.popitem(last=False)

    def _keep(self, name: str, body: bytes) -> None:
        with self._lock:
            self._read_bytes += len(body) - len(self._read.pop(name, b""))
            self._read[name] = body
            while self._read_bytes > _READ_BYTES:
                self._read_bytes -= len(self._read.popitem(last=False)[1])


def _find_small(pieces: Sequence[LogPiece]) -> Sequence[LogPiece]:
    """Return the small pieces at the end of the log, from the last piece back to the first gap or
    large piece.
    """
    first = len(pieces)
    while first and pieces[first - 1].size < _SMALL:
        if first < len(pieces) and pieces[first - 1].end < pieces[first].start:
            break
        first -= 1
    return pieces[first:]


def cover(pieces: Sequence[LogPiece]) -> list[LogPiece]:
    """Return the pieces, sorted by their starts, except the pieces whose bytes are all contained in
    an earlier piece.
    """
    found: list[LogPiece] = []
    for piece in sorted(pieces, key=lambda each: (each.start, -each.size)):
        if not found or piece.end > found[-1].end:
            found.append(piece)
    return found


def _end(pieces: Sequence[LogPiece]) -> int:
    return max((each.end for each in pieces), default=0)


def _folder(project: str, job_id: str) -> str:
    for name in (project, job_id):
        if not NAME.fullmatch(name):
            raise RowNotFound(
                f"invalid name {name!r}: names may contain only letters, digits and . _ -"
            )
    return f"{project}/{job_id}/"


def _name(project: str, job_id: str, attempt: int, rank: int) -> str:
    return f"{_folder(project, job_id)}{attempt}.{rank}"


def _bound(log: str, piece: LogPiece) -> str:
    return f"logs/{log.partition('/')[2]}/{piece.name}"
