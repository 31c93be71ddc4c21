"""Stores the files and the batches of OpenAI's API in a folder, so that they survive a restart of
the gateway.

`ID.json` describes a file or a batch, `ID.data` is the content of a file, and `ID.output` and
`ID.errors` are the results of a batch that runs. A batch needs no other record of its progress:
each line of its results starts with the number of its request. A line that a kill has cut off is
removed, and its request is sent again.
"""

import fcntl
import logging
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from cavvy.capabilities.serving.gateway.call_store import open_new, write_whole
from cavvy.domain.values import Struct

LINE_MAX = 16 << 20  # bytes of one request of a batch
_log = logging.getLogger(__name__)
_FREE = 0.05  # of the disk, which uploads leave to everything else
_OWN = 0.25  # of the disk, which the files of an owner may use
_CHUNK = 1 << 17  # bytes of requests that are read at once
_NUMBER = re.compile(rb'\{"id":"batch_req_[0-9a-f]+_([0-9a-f]+)",')


class BatchState(StrEnum):
    """The state of a batch, as OpenAI names it."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


OPEN_STATES = (
    *(BatchState.VALIDATING, BatchState.IN_PROGRESS),
    *(BatchState.FINALIZING, BatchState.CANCELLING),
)


class StoredFile(Struct, frozen=True, kw_only=True):
    """A file. `owners` are the keys that may use it, as `ModelRoutes.name_owners` writes them.
    Times are in seconds since 1970.
    """

    id: str
    owners: tuple[str, ...]
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None


class BatchProblem(Struct, frozen=True, kw_only=True):
    """What is wrong with the input of a batch, in OpenAI's format. Lines are counted from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class StoredBatch(Struct, kw_only=True):
    """A batch. `completed` and `failed` are the requests whose results are stored."""

    id: str
    owners: tuple[str, ...]
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    state: BatchState = BatchState.VALIDATING
    metadata: dict[str, str] | None = None
    changed_at: dict[str, int] = msgspec.field(default_factory=dict)  # when each state began
    problems: tuple[BatchProblem, ...] = ()
    total: int = 0
    completed: int = 0
    failed: int = 0
    has_output: bool = False
    has_errors: bool = False
    stop: BatchState | None = None  # EXPIRED or CANCELLED, if it ends before all lines are sent
    forget_at: int | None = None  # when the batch itself is removed

    @property
    def output_id(self) -> str:
        return f"file-{self.id[6:]}o"

    @property
    def errors_id(self) -> str:
        return f"file-{self.id[6:]}e"


S = TypeVar("S", StoredFile, StoredBatch)


class LongLine(Exception):
    """Raised if a line of a file has more than LINE_MAX bytes."""


class FileStore:
    """The folder. All methods block, except that `files` and `batches` are in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: int | None = None
        self.files: dict[str, StoredFile] = {}
        # by the ID of a file that arrives: its owners, and the bytes that are here
        self.uploads: dict[str, tuple[Sequence[str], int]] = {}
        self.batches: dict[str, StoredBatch] = {}

    def open(self) -> bool:
        """Load what is stored; return False if another gateway still uses the folder."""
        if self._lock is not None:
            return True
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        try:
            self._load()
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        return True

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _load(self) -> None:
        for path in sorted(self._folder.iterdir()):
            if path.suffix == ".new":
                with suppress(OSError):
                    path.unlink()
            elif path.suffix == ".json":
                self._load_one(path)
        for path in self._folder.glob("*.data"):  # of an upload that was not complete
            if not path.with_suffix(".json").exists():
                with suppress(OSError):
                    path.unlink()

    def _load_one(self, path: Path) -> None:
        """Load a file or a batch. One that is damaged, or of another version of Cavvy, stays as it
        is; the others are not affected.
        """
        try:
            data = path.read_bytes()
            if path.name.startswith("file-"):
                _hold(self.files, path, msgspec.json.decode(data, type=StoredFile))
            else:
                _hold(self.batches, path, msgspec.json.decode(data, type=StoredBatch))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            _log.error("%s cannot be read: %s", path, error)

    # files

    def has_room(self, size: int) -> bool:
        """Return whether enough of the disk is free after an upload of so many bytes."""
        disk = shutil.disk_usage(self._folder)
        return disk.free - size > disk.total * _FREE

    def may_own(self, owners: Sequence[str], size: int) -> bool:
        """Return whether the files of an owner may have so many bytes more. What arrives counts."""
        held = ((f.owners, f.bytes) for f in self.files.values())
        known = chain(held, self.uploads.values())
        owned = sum(count for names, count in known if not set(owners).isdisjoint(names))
        return owned + size <= shutil.disk_usage(self._folder).total * _OWN

    def begin_upload(self, file_id: str) -> BinaryIO:
        return open_new(self._path(file_id, "upload.new"))

    def finish_upload(self, file: StoredFile, content: BinaryIO) -> None:
        content.flush()
        os.fsync(content.fileno())
        content.close()
        self._path(file.id, "upload.new").rename(self._path(file.id, "data"))
        self._write(file.id, file)

    def drop_upload(self, file_id: str, content: BinaryIO) -> None:
        content.close()
        self._path(file_id, "upload.new").unlink(missing_ok=True)

    def open_file(self, file_id: str) -> BinaryIO:
        return self._path(file_id, "data").open("rb", buffering=1 << 20)

    def remove(self, name: str) -> None:
        """Remove a file or a batch."""
        for kind in ("json", "data", "output", "errors"):
            self._path(name, kind).unlink(missing_ok=True)

    # batches

    def write_batch(self, batch: StoredBatch) -> None:
        self._write(batch.id, batch)

    def resume(self, batch: StoredBatch) -> bytearray:
        """Return which requests have a result, and count the results."""
        done = bytearray(batch.total)
        batch.completed = _resume(self._path(batch.id, "output"), done)
        batch.failed = _resume(self._path(batch.id, "errors"), done)
        return done

    def open_results(self, batch: StoredBatch) -> tuple[BinaryIO, BinaryIO]:
        output = self._path(batch.id, "output").open("ab", buffering=0)
        return output, self._path(batch.id, "errors").open("ab", buffering=0)

    def finish_results(self, batch: StoredBatch, now: int, keep_s: int) -> Sequence[StoredFile]:
        """Turn the results of a batch into files. The method may be repeated."""
        made = []
        for kind, file_id in (("output", batch.output_id), ("errors", batch.errors_id)):
            path, data = self._path(batch.id, kind), self._path(file_id, "data")
            if path.exists() and path.stat().st_size:
                _sync(path)
                path.rename(data)
            path.unlink(missing_ok=True)
            if not data.exists():
                continue
            file = StoredFile(
                id=file_id,
                owners=batch.owners,
                filename=f"{batch.id}_{kind}.jsonl",
                purpose="batch_output",
                bytes=data.stat().st_size,
                created_at=now,
                expires_at=now + keep_s,
            )
            self._write(file_id, file)
            made.append(file)
        return made

    def _path(self, name: str, kind: str) -> Path:
        return self._folder / f"{name}.{kind}"

    def _write(self, name: str, value: StoredFile | StoredBatch) -> None:
        write_whole(self._path(name, "json"), msgspec.json.encode(value))


def _hold(held: dict[str, S], path: Path, found: S) -> None:
    if found.id != path.stem:
        raise msgspec.DecodeError(f"it describes {found.id!r}")
    held[found.id] = found


def read_lines(file: BinaryIO) -> list[bytes]:
    """Return the next lines of a file; [] at its end. Raises LongLine."""
    lines, size = [], 0
    while size < _CHUNK and (line := file.readline(LINE_MAX + 1)):
        if len(line) > LINE_MAX:
            raise LongLine
        lines.append(line)
        size += len(line)
    return lines


def _resume(path: Path, done: bytearray) -> int:
    """Mark the requests whose results are in a file, remove what follows the last whole result, and
    return the number of results.
    """
    count = size = 0
    with suppress(FileNotFoundError), path.open("r+b") as file:
        for line in file:
            found = _NUMBER.match(line)
            number = int(found[1], 16) if found else len(done)
            if number >= len(done) or done[number] or not line.endswith(b"}\n"):
                break
            done[number] = 1
            count += 1
            size += len(line)
        file.truncate(size)
    return count


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
