"""Downloads an input from a storage service: many files at a time, and many parts of large files.

Files whose SHA-256 the storage states, such as the weights of models, stay in the machine's cache
and are not downloaded again by later jobs of the project. A cached file is a link to the same data:
its content is compared with its name before each use, which also reads it into memory.
"""

from __future__ import annotations

import hashlib
import os
import stat
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress

from ..allowed_folders import AllowedFolders, check_regular
from ..disk import name_part
from ..http_client import CHUNK, TransferClient
from ..work.cache import touch
from ..work.folder import inside
from ..work.trees import remove_below
from .transfer import (
    ObjectDownload,
    RangesRefused,
    TransferProgress,
    check_content,
    find_hash,
    save_anew,
    save_object,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from ..config import AgentConfig

    Entry = dict[str, object]

WORKERS = 8
RANGE = 64 * 1024 * 1024  # bytes of the parts of large files
RANGES = 8  # parts of large files at a time
# maximum files queued for the workers; while the queue is full, no more files are listed
PENDING = 256
CACHED = 16 * 1024 * 1024  # minimum bytes of a file that is kept in the cache


class InputFetcher:
    """Downloads the files of one input. `connect` opens a client for each thread."""

    def __init__(
        self,
        folders: AllowedFolders,
        cache: str,
        connect: Callable[[], TransferClient],
        meter: TransferProgress,
    ) -> None:
        self._folders, self._cache = folders, os.path.join(cache, "blobs")
        self._connect, self._meter = connect, meter
        self._ranges = ThreadPoolExecutor(RANGES)

    def bring(self, entry: Entry, path: str) -> None:
        """Raises TransferFailed, LeadsOutside, OSError."""
        if not has_content(path, entry):
            digest = self._find_digest(entry)
            if not (digest and self._take(digest, path)):
                self._download(entry, path)
                if digest:
                    self._keep(digest, path)
        self._meter.moved(0, 1)

    def close(self) -> None:
        self._ranges.shutdown()

    def _download(self, entry: Entry, path: str) -> None:
        size = entry["size"]
        if isinstance(size, int) and size > RANGE and isinstance(entry["signed"], dict):
            with suppress(RangesRefused):
                save_anew(
                    self._folders, path, lambda file: self._write_ranges(file, entry, size, path)
                )
                return
        download = open_input(self._connect(), entry, path, self._meter)
        save_object(self._folders, path, download, self._meter)

    def _write_ranges(self, file: int, entry: Entry, size: int, path: str) -> None:
        """Download the parts of a large file at the same time into an open file. The content is
        hashed while later parts arrive, from the memory that holds the file's pages. Raises
        TransferFailed, RangesRefused, OSError.
        """
        found = hashlib.new(find_hash(entry))
        os.truncate(file, size)
        spans = [(at, min(at + RANGE, size)) for at in range(0, size, RANGE)]

        def bring(span: tuple[int, int]) -> None:
            at = span[0]
            for data in open_input(self._connect(), entry, path, self._meter, span).read():
                left = memoryview(data)
                while left:  # a disk that is almost full takes a part of the bytes
                    written = os.pwrite(file, left, at)
                    left = left[written:]
                    at += written
                self._meter.moved(len(data))

        parts = [self._ranges.submit(bring, span) for span in spans]
        try:
            for number, (at, end) in enumerate(spans):
                parts[number].result()
                while at < end:
                    data = os.pread(file, min(CHUNK, end - at), at)
                    found.update(data)
                    at += len(data)
        finally:
            for part in parts:
                part.cancel()
            wait(parts)
        check_content(_name(entry, path), entry, found.hexdigest())

    def _find_digest(self, entry: Entry) -> str:
        """Return the name of a file in the cache, or "" if it is not kept there."""
        digest, size = str(entry.get("sha256") or ""), entry["size"]
        known = len(digest) == 64 and set(digest) <= set("0123456789abcdef")
        return digest if known and isinstance(size, int) and size >= CACHED else ""

    def _take(self, digest: str, path: str) -> bool:
        """Link a file of the cache to `path`; return whether the cache has it."""
        cached = os.path.join(self._cache, digest)
        if not touch(cached) or os.path.islink(cached):
            return False
        folder, name = self._folders.find(path, follow=False, make=True)
        part = name_part(name, ".cavvy-part")
        try:
            remove_below(folder, part)
            os.link(cached, part, dst_dir_fd=folder, follow_symlinks=False)
            if not _is_content(folder, part, digest):
                os.unlink(cached)  # work has changed it
                remove_below(folder, part)
                return False
            os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:  # the file systems differ, for example
            return False
        finally:
            os.close(folder)
        return True

    def _keep(self, digest: str, path: str) -> None:
        """Put a file into the cache, if the cache is on the same file system. The file can only be
        read from then on.
        """
        with suppress(OSError):
            os.makedirs(self._cache, mode=0o700, exist_ok=True)
            folder, name = self._folders.find(path, follow=False, make=False)
            try:
                file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
                try:
                    os.fchmod(file, stat.S_IMODE(os.fstat(file).st_mode) & 0o444)
                finally:
                    os.close(file)
                cached = os.path.join(self._cache, digest)
                os.link(name, cached, src_dir_fd=folder, follow_symlinks=False)
            finally:
                os.close(folder)


def _is_content(folder: int, name: str, digest: str) -> bool:
    """Return whether a name in a folder is a file with this SHA-256."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # it may be a pipe
    try:
        file = check_regular(os.open(name, flags, dir_fd=folder), name)
    except OSError:
        return False
    try:
        return read_hash(file, "sha256") == digest
    finally:
        os.close(file)


def fetch_input(
    config: AgentConfig,
    folders: AllowedFolders,
    index: int,
    source: str,
    target: str,
    tell: Callable[[str], None],
) -> None:
    """Download all files of the input at the URL `source` to `target`, which must be in `folders`.
    Raises TransferFailed, LeadsOutside, OSError."""
    meter = TransferProgress(f"input {source}", tell)

    def connect() -> TransferClient:
        return TransferClient(config, f"inputs/{index}", meter.waits)

    fetch_files(folders, config.cache, target, connect, meter)


def fetch_files(
    folders: AllowedFolders,
    cache: str,
    target: str,
    connect: Callable[[], TransferClient],
    meter: TransferProgress,
) -> None:
    """Download all files that a client lists. Raises TransferFailed, LeadsOutside, OSError."""
    fetcher, pool = InputFetcher(folders, cache, connect, meter), ThreadPoolExecutor(WORKERS)
    waiting: list[Future[None]] = []
    try:
        for entry in list_files(connect()):
            path = str(entry["path"])
            whole = inside(target, path) if path else target
            waiting.append(pool.submit(fetcher.bring, entry, whole))
            if len(waiting) >= PENDING:
                waiting.pop(0).result()
        wait(waiting, return_when=FIRST_EXCEPTION)
        for each in [each for each in waiting if each.done()]:
            each.result()
    except BaseException:
        meter.stop()
        raise
    finally:
        for each in waiting:
            each.cancel()
        pool.shutdown()
        fetcher.close()
    if not meter.files:
        os.makedirs(target, exist_ok=True)
    meter.end()


def list_files(transfers: TransferClient) -> Iterator[Entry]:
    """Yield all files of the input. Raises TransferFailed."""
    after = ""
    while True:
        page = transfers.read("GET", after=after)
        files = page["files"]
        assert isinstance(files, list)
        yield from files
        after = str(page["next"])
        if not after:
            return


def open_input(
    transfers: TransferClient,
    entry: Entry,
    path: str,
    meter: TransferProgress,
    span: tuple[int, int] | None = None,
) -> ObjectDownload:
    """Download one file of the input, or the bytes of it in `span`, to `path`."""
    return ObjectDownload(
        transfers,
        entry,
        _name(entry, path),
        meter.waits,
        sign=lambda: transfers.read("GET", "/signed", path=entry["path"]),
        span=span,
    )


def _name(entry: Entry, path: str) -> str:
    return str(entry["path"]) or os.path.basename(path)


def has_content(path: str, entry: Entry) -> bool:
    """Return whether the file at `path` already has the content of `entry`. The comparison uses the
    hash that storage services report. MD5 is sufficient, because the comparison protects no secret.
    """
    kind = find_hash(entry)
    if not entry[kind] or not os.path.isfile(path) or os.path.getsize(path) != entry["size"]:
        return False
    with open(path, "rb") as file:
        return read_hash(file.fileno(), kind) == entry[kind]


def read_hash(file: int, kind: str) -> str:
    """Return the hash of an open file's content."""
    found, at = hashlib.new(kind), 0
    while data := os.pread(file, CHUNK, at):
        found.update(data)
        at += len(data)
    return found.hexdigest()
