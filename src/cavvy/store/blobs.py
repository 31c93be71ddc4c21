"""Stores blobs as files named by the SHA-256 of their bytes, or as chunks (`chunks.py`). The
snapshots of working folders consist of blobs. All methods block on disk I/O.
"""

import errno
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta
from functools import lru_cache, partial
from hashlib import sha256
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from msgspec import MsgspecError, Struct
from msgspec.json import Decoder

from cavvy.store.base import HashMismatch, RowNotFound, StoreFull, StoreUnusable
from cavvy.store.bucket_folder import AT_ONCE, BucketFolder
from cavvy.store.chunks import (
    OF_CHUNK,
    OF_LIST,
    FileChunk,
    divide,
    encode_list,
    open_chunks,
    read_list,
)
from cavvy.store.encrypted_files.data_keys import FileKeys
from cavvy.store.encrypted_files.streams import (
    BlobFiles,
    OpenFile,
    ends_with,
    is_encrypted,
    make_blob_files,
)
from cavvy.store.keys import flush_path

# number of manifests whose lists of files are cached; a list of 100,000 files takes 10 MB of memory
_FOLDERS = 8
# number of files that are flushed at the same time; the file system's journal can then write them
# together
_SYNCS = 8
_AT_ONCE = 1 << 20  # bytes that are read at once
_TOGETHER = 1 << 25  # bytes of chunks that are written together
_ASIDE = ".aside"  # end of the name of a file that may be about to be removed
_COPIES = timedelta(days=1)  # time for which the copy of a blob in a bucket is kept without use
_HASH = re.compile(r"[0-9a-f]{64}")
_PROJECT = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_log = logging.getLogger(__name__)


class BlobStore:
    """A folder of blobs. Each blob is stored completely or not at all, even after a system
    crash."""

    def __init__(self, root: Path, files: BlobFiles | None = None) -> None:
        """`files` describes how the blobs below `root` are encrypted; without `files`, the blobs
        are plain."""
        self._root = root
        self._files = files or BlobFiles(root, None, "")
        self._folder_parts = lru_cache(_FOLDERS)(partial(_list_parts, self))

    def missing(self, hashes: Iterable[str]) -> list[str]:
        """Return which of the named blobs are not stored. Each missing name is returned once, in
        the given order. The file times of the stored blobs are set to now, so that a concurrent
        garbage collection keeps them.

        Raises HashMismatch if a name is not a SHA-256.
        """
        targets = {name: self._target(name) for name in hashes}
        absent = self._files.find_missing(list(targets.values()))
        return [
            name for name, path in targets.items() if path in absent and not self._has_chunks(name)
        ]

    def put(self, name: str, chunks: Iterable[bytes]) -> None:
        """Store the bytes whose SHA-256 in hexadecimal is `name`, unless they are stored already.
        Raises HashMismatch, StoreFull.
        """
        if not self.missing([name]):
            return
        with self.writer(name) as writer:
            for chunk in chunks:
                writer.write(chunk)

    def writer(self, name: str) -> "BlobWriter":
        """Return a context manager to which the bytes of a blob can be written in pieces. The blob
        is stored when the `with` block ends without an error.
        """
        return BlobWriter(self._files, self._target(name), name)

    def put_all(self, blobs: Mapping[str, bytes]) -> None:
        """Store many small blobs. The blobs are flushed to the disk together, so that storing many
        blobs takes little longer than storing a few blobs. After the call has returned, the blobs
        survive a system crash.

        All hashes are checked before anything is written. Raises HashMismatch, StoreFull; in that
        case, no blob is stored.
        """
        for name, data in blobs.items():
            _check(name, sha256(data).hexdigest())
        self._keep_all({self._target(name): blobs[name] for name in self.missing(blobs)})

    def _keep_all(self, files: Mapping[Path, bytes]) -> None:
        fresh = list(files)
        token = secrets.token_hex(4)
        parts = [path.with_name(f"{path.name}.{token}.part") for path in fresh]
        try:
            for part, (path, data) in zip(parts, files.items(), strict=True):
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with _create(part) as file:
                    self._files.create(file.fileno(), path).append(data)
            _sync_all(parts)
            with ThreadPoolExecutor(AT_ONCE, "keep") as pool:
                list(pool.map(self._files.keep, parts, fresh))
            _sync_all(list({path.parent for path in fresh}))
        except OSError as error:
            raise _told(error, fresh[0]) from error
        finally:
            for part in parts:
                part.unlink(missing_ok=True)

    def append(self, name: str, offset: int, data: bytes, size: int) -> int:
        """Store a part of a blob of `size` bytes. Returns the offset at which the next part must
        begin, or `size` if the blob is complete.

        Parts must arrive in order: a part that does not continue the stored parts is ignored. An
        unfinished blob is kept after this process ends, until garbage collection removes it. Raises
        HashMismatch (then send the blob again from the beginning), StoreFull.
        """
        path = self._target(name)
        if not self.missing([name]):
            return size
        part = path.with_name(f"{path.name}.part")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(
                os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b", 0
            ) as file:
                stored = self._resume(file, part, path)
                if stored is None:
                    return 0
                here = stored.size
                if offset <= here and offset + len(data) > here:
                    stored.append(data[here - offset :])
                    here = offset + len(data)
                if here < size:
                    return here
                _check_part(file, stored, part, name)
                self._files.keep(part, path)
                flush_path(path.parent)
        except OSError as error:
            raise _told(error, part) from error
        return size

    def _resume(self, file: FileIO, part: Path, path: Path) -> OpenFile | None:
        """Open the file of an unfinished blob, so that more parts can be appended. If the file is
        encrypted and a system crash has damaged it, so that no part can be appended, remove the
        file and return None. The sender then sends the blob from its start.
        """
        if not os.fstat(file.fileno()).st_size:
            return self._files.create(file.fileno(), path)
        try:
            return self._files.resume(file.fileno(), path)
        except StoreUnusable:
            part.unlink()
            return None

    def split(
        self,
        name: str,
        find_cuts: Callable[[BinaryIO], Sequence[int]],
        until: float = float("inf"),
    ) -> bool:
        """Store a blob as chunks, which begin at the offsets that `find_cuts` returns for the open
        file. Return whether it is stored so: a small one, one in a bucket, and one for which the
        time (`until` of the monotonic clock) did not suffice, stays whole.

        The whole file is removed when all chunks, and then their list, are on the disk. Until then,
        it is the one that is read. Raises StoreUnusable, StoreFull, OSError.
        """
        if self._files.bucket is not None:
            return False
        whole = self._stored(name)
        try:
            file = self._files.open(whole)
        except FileNotFoundError:
            return self._has_chunks(name)
        with file:
            places = list(divide(file.seek(0, os.SEEK_END), find_cuts(file)))
            if len(places) < 2:
                return False
            if not self._has_chunks(name):
                chunks = self._store_chunks(name, file, places, until)
                if not chunks:
                    return False
                self._keep_all({self._files.target(name, OF_LIST): encode_list(chunks)})
                if not self._has_chunks(name):
                    return False
        whole.unlink(missing_ok=True)
        return True

    def _store_chunks(
        self, name: str, file: BinaryIO, places: Iterable[tuple[int, int]], until: float
    ) -> Sequence[FileChunk]:
        """Store the chunks of a file, and return their list. It is empty if the time does not
        suffice, or if the file is not what its name says."""
        digest, chunks, size = sha256(), list[FileChunk](), 0
        together: dict[Path, bytes] = {}
        file.seek(0)
        for start, end in places:
            data = file.read(end - start)
            digest.update(data)
            chunk = FileChunk(sha256=sha256(data).hexdigest(), size=len(data))
            chunks.append(chunk)
            together[self._files.target(chunk.sha256, OF_CHUNK)] = data
            size += len(data)
            if size >= _TOGETHER:
                if time.monotonic() > until:
                    return []
                self._keep_missing(together)
                together, size = {}, 0
        if (found := digest.hexdigest()) != name:
            _log.warning("%s is damaged: its bytes have the hash %s", self._stored(name), found)
            return []
        self._keep_missing(together)
        return chunks

    def _keep_missing(self, files: Mapping[Path, bytes]) -> None:
        missing = self._files.find_missing(list(files))
        if missing:
            self._keep_all({path: files[path] for path in missing})

    def _has_chunks(self, name: str) -> bool:
        """Return whether a blob is stored as chunks, and set the times of its files to now."""
        if self._files.bucket is not None:
            return False
        path = self._files.target(name, OF_LIST)
        try:
            if self._files.find_missing([path]):
                return False
            chunks = read_list(self._files, path)
        except FileNotFoundError:
            return False
        except StoreUnusable as error:
            _log.warning("%s", error)
            return False
        return not self._files.find_missing(
            list({self._files.target(each.sha256, OF_CHUNK) for each in chunks})
        )

    def _read_list(self, name: str) -> Sequence[FileChunk]:
        """Return the chunks of a blob. Raises RowNotFound, StoreUnusable."""
        try:
            if self._files.bucket is None:
                return read_list(self._files, self._files.stored(name, OF_LIST))
        except FileNotFoundError:
            pass
        raise RowNotFound(f"no blob {name}") from None

    def open(self, name: str) -> BinaryIO:
        """Open the blob for reading. Raises RowNotFound. Reading raises StoreUnusable if a chunk of
        the blob is damaged."""
        try:
            return self._files.open(self._stored(name))
        except FileNotFoundError:
            return open_chunks(self._files, name, self._read_list(name))

    def path(self, name: str) -> Path | None:
        """Return the path of the blob's file, from which the blob can be sent, or None if the blob
        is encrypted or stored as chunks. Raises RowNotFound.
        """
        path = self._stored(name)
        if path.is_file():
            return None if is_encrypted(path) else path
        self._read_list(name)
        return None

    def read(self, name: str, limit: int) -> bytes | None:
        """Return the bytes of a blob. Returns None if the blob is missing or larger than `limit`
        bytes. Raises HashMismatch if `name` is not a SHA-256.
        """
        try:
            with self.open(name) as file:
                data = file.read(limit + 1)
        except RowNotFound:
            return None
        return data if len(data) <= limit else None

    def folder_parts(self, snapshot: str) -> frozenset[str]:
        """Return the names of the blobs in the snapshot of a working folder, including its
        manifest. If the manifest cannot be read, returns only the manifest's own name. Raises
        RowNotFound.
        """
        return self._folder_parts(snapshot)

    def sweep(self, wanted: Collection[str], *, older_than: datetime) -> int:
        """Remove the blobs that are not in `wanted`, and unfinished uploads, if they are older than
        `older_than`. Returns the number of bytes freed. If the blobs are in a bucket, also remove
        copies on this disk that were not used for a day.

        Because of the age limit, blobs that were uploaded for a job are kept even if the job's
        submission has not arrived yet.
        """
        freed, limit = 0, older_than.timestamp()
        found = [name for name in wanted if _HASH.fullmatch(name)]
        kept = frozenset[str]().union(*(self._files.names(name) for name in found))
        if self._files.bucket is not None:
            freed += self._files.bucket.sweep(kept, older_than=older_than)
            kept, limit = frozenset(), min(limit, (self._files.bucket.now() - _COPIES).timestamp())
        else:
            self.bring_back()
            try:
                kept |= self._list_chunks(found, limit)
            except StoreUnusable as error:
                _log.warning("unused files are kept: %s", error)
                return 0
        for path in self._root.glob("??/*"):
            if path.name in kept:
                continue
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < limit:
                    size = _remove_unused(path, limit)
                    freed += size if self._files.bucket is None else 0
        return freed

    def _list_chunks(self, wanted: Collection[str], limit: float) -> frozenset[str]:
        """Return the names of the files that a list of chunks needs which is wanted or was used
        since `limit`, and of the wanted lists. The other lists are removed, before any of their
        chunks is. Raises StoreUnusable."""
        lists = [path for path in self._root.glob("??/*") if ends_with(path, OF_LIST)]
        kept, named = set[str](), set[str]()
        if lists:
            kept |= set[str]().union(*(self._files.names(name, OF_LIST) for name in wanted))
        for path in lists:
            with suppress(FileNotFoundError):
                unused = path.name not in kept and path.stat().st_mtime < limit
                if not unused or not _remove_unused(path, limit):
                    named |= {each.sha256 for each in read_list(self._files, path)}
        return frozenset(kept.union(*(self._files.names(each, OF_CHUNK) for each in named)))

    def bring_back(self) -> None:
        """Bring back what a server moved aside that was killed before it removed it."""
        for aside in self._root.glob(f"??/*{_ASIDE}"):
            with suppress(FileNotFoundError):
                _put_back(aside, aside.with_name(aside.name.removesuffix(_ASIDE)))

    def _target(self, name: str) -> Path:
        _check_name(name)
        return self._files.target(name)

    def _stored(self, name: str) -> Path:
        _check_name(name)
        return self._files.stored(name)


class ManifestEntry(Struct, frozen=True, kw_only=True):
    """A file or link in the snapshot of a working folder."""

    path: str
    sha256: str | None = None  # None if the entry is a link


class NotManifest(ValueError):
    """Raised if the blob is not a manifest that lists a folder's files."""


class FolderManifest(Struct, frozen=True, kw_only=True):
    """The list of the files in the snapshot of a working folder. The hash of the encoded list is
    the name of the snapshot.
    """

    files: list[ManifestEntry]

    @property
    def parts(self) -> frozenset[str]:
        """The names of the blobs of the folder's files, without the manifest itself."""
        return frozenset(entry.sha256 for entry in self.files if entry.sha256 is not None)


_decode_manifest = Decoder(FolderManifest).decode


def read_manifest(blobs: BlobStore, snapshot: str) -> FolderManifest:
    """Read a manifest. Raises RowNotFound. Raises NotManifest if the blob does
    not list files."""
    with blobs.open(snapshot) as file:
        try:
            return _decode_manifest(file.read())
        except (MsgspecError, ValueError, RecursionError) as error:
            raise NotManifest(str(error)) from error


def _list_parts(blobs: BlobStore, snapshot: str) -> frozenset[str]:
    try:
        return read_manifest(blobs, snapshot).parts | {snapshot}
    except NotManifest:
        return frozenset({snapshot})


def sweep_folders(blobs: BlobStore, snapshots: Collection[str], *, older_than: datetime) -> int:
    """Remove the blobs that are older than `older_than` and belong to no snapshot in `snapshots`.
    Returns the number of bytes freed.

    Removes nothing if the manifest of a snapshot cannot be read.
    """
    # what is no hash names nothing, and may not keep the files of all projects
    wanted = {name for name in snapshots if _HASH.fullmatch(name)}
    blobs.bring_back()  # the parts of a manifest that is aside would be removed
    for name in tuple(wanted):
        try:
            wanted |= read_manifest(blobs, name).parts
        except RowNotFound:
            continue  # without the manifest, the other blobs of this snapshot are useless
        except NotManifest:
            return 0
    return blobs.sweep(wanted, older_than=older_than)


class ProjectBlobs:
    """The blobs of working folders. Each project has its own store, so that a known hash gives no
    access to the files of another project.
    """

    def __init__(
        self, root: Path, keys: FileKeys | None = None, bucket: BucketFolder | None = None
    ) -> None:
        self._root, self._keys, self._bucket = root, keys, bucket
        self._stores: dict[str, BlobStore] = {}

    def of(self, project: str) -> BlobStore:
        """Return the store of a project. The name must be valid, because it becomes part of a
        path."""
        if not _PROJECT.fullmatch(project):
            raise RowNotFound(f"{project!r} cannot be the name of a project")
        if project not in self._stores:
            root = self._root / project
            bucket = None if self._bucket is None else self._bucket.below(project)
            files = make_blob_files(root, self._keys, project, "folders", bucket)
            self._stores[project] = BlobStore(root, files)
        return self._stores[project]

    def sweep(self, snapshots: Collection[str], *, older_than: datetime) -> int:
        """Call `sweep_folders` for each project. The method blocks on I/O."""
        names = set()
        with suppress(FileNotFoundError):
            names |= {path.name for path in self._root.iterdir() if path.is_dir()}
        if self._bucket is not None:
            names |= {each.key.partition("/")[0] for each in self._bucket.list()}
        found = [self.of(name) for name in sorted(names) if _PROJECT.fullmatch(name)]
        return sum(sweep_folders(each, snapshots, older_than=older_than) for each in found)


class BlobWriter:
    """A blob that is being written. Nothing is stored if the `with` block ends with an exception,
    or if the hash of the bytes is not the blob's name.
    """

    def __init__(self, files: BlobFiles, path: Path, name: str) -> None:
        self._files = files
        self._path = path
        self._name = name
        self._hash = sha256()
        self._part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
        self._file: FileIO | None = None
        self._stored: OpenFile | None = None

    def __enter__(self) -> "BlobWriter":
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = _create(self._part)
            self._stored = self._files.create(self._file.fileno(), self._path)
        except BaseException as error:
            self._discard()
            if isinstance(error, OSError):
                raise _told(error, self._part) from error
            raise
        return self

    def write(self, data: bytes) -> None:
        """Append bytes to the blob. Raises StoreFull."""
        assert self._stored is not None, "a blob is written only inside its with block"
        self._hash.update(data)
        try:
            self._stored.append(data)
        except OSError as error:
            raise _told(error, self._part) from error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._file is not None
        try:
            if kind is None:
                self._finish(self._file)
        except OSError as failure:
            raise _told(failure, self._part) from failure
        finally:
            self._discard()

    def _discard(self) -> None:
        if self._file is not None:
            self._file.close()
        self._part.unlink(missing_ok=True)

    def _finish(self, file: FileIO) -> None:
        _check(self._name, self._hash.hexdigest())
        os.fsync(file.fileno())
        self._files.keep(self._part, self._path)
        flush_path(self._path.parent)


def _remove_unused(path: Path, limit: float) -> int:
    """Remove a file that was not used since `limit`, and return its size. A publication that
    uses the file at the same time sets its time before it is moved aside, so that it comes back, or
    does not find it, and stores it again. Raises FileNotFoundError."""
    aside = path.with_name(path.name + _ASIDE)
    path.rename(aside)
    status = aside.stat()
    if status.st_mtime >= limit:
        _put_back(aside, path)
        return 0
    aside.unlink()
    return status.st_size


def _put_back(aside: Path, path: Path) -> None:
    """Move a file back, unless it was stored again: a list that is older may name chunks that are
    not there any more. Raises FileNotFoundError, OSError."""
    with suppress(FileExistsError):
        os.link(aside, path)
    aside.unlink()


def _check_part(file: FileIO, stored: OpenFile, part: Path, name: str) -> None:
    """Check and flush the blob after all of its parts have arrived. If the hash is wrong, or a part
    cannot be read again, delete the parts and raise HashMismatch.
    """
    digest = sha256()
    try:
        for at in range(0, stored.size, _AT_ONCE):
            digest.update(stored.read(at, _AT_ONCE))
    except StoreUnusable as error:
        part.unlink()
        raise HashMismatch(f"a part of blob {name} is damaged: {error}; send it again") from error
    if digest.hexdigest() != name:
        part.unlink()
        raise HashMismatch(
            f"the bytes of blob {name} have the hash {digest.hexdigest()}; send them again"
        )
    os.fsync(file.fileno())


def _create(part: Path) -> FileIO:
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
    return FileIO(os.open(part, flags, 0o600), "r+b")


def _check_name(name: str) -> None:
    if not _HASH.fullmatch(name):
        raise HashMismatch(f"expected a SHA-256 in 64 lower-case hexadecimal digits, not {name!r}")


def _check(name: str, found: str) -> None:
    if found != name:
        raise HashMismatch(f"the bytes of blob {name} have the hash {found}; send them again")


def _sync_all(paths: Sequence[Path]) -> None:
    """Flush these files or folders to the disk. The function does not use syncfs, because syncfs
    would also wait for data of jobs on this machine.
    """
    with ThreadPoolExecutor(_SYNCS, "sync") as pool:
        for _ in pool.map(flush_path, paths):
            pass


def _told(error: OSError, path: Path) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(
            f"no space to write {path.parent}; nothing was stored: free some disk space"
        )
    return error
