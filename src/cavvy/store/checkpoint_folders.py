"""The folders that keep the checkpoints of jobs: for each job, a writable folder for work on this
machine, and blobs for work on other machines.

`ROOT/PROJECT/JOB/` contains `checkpoint`, the writable folder; `attempt`, a file with the number of
the attempt that last used that folder; and `blobs`, the files of uploaded checkpoints. All methods
block on disk I/O.
"""

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import msgspec

from cavvy.agent.allowed_folders import check_regular, open_below, raise_error, walk_below
from cavvy.agent.work.sparse_files import (
    MOST_EXTENTS,
    find_extents,
    read_stored,
    restore_holes,
)
from cavvy.domain.checkpoints import CheckpointFile, RemovedCheckpoints
from cavvy.domain.values import replace
from cavvy.store.base import HashMismatch, RowNotFound, StoreFull
from cavvy.store.blobs import BlobStore
from cavvy.store.bucket_folder import BucketFolder
from cavvy.store.encrypted_files.data_keys import FileKeys
from cavvy.store.encrypted_files.streams import make_blob_files
from cavvy.store.locks import FileLocks, NamedLocks
from cavvy.trees import remove_tree, walk_tree

_CHUNK = 1 << 20
# maximum bytes of a path and of a name in it; even with the state folder's path in front, paths
# stay within the limits of Linux
_LONGEST_PATH, _LONGEST_PART = 2048, 255
_LARGEST = 1 << 50  # maximum bytes of one file
NEWEST_NS = 1 << 62  # ns since 1970; a file time after 2116 is the result of a wrong clock
_TRIES = 3  # tries to read a file that changes while it is read
_decode = msgspec.json.Decoder(dict[str, list[CheckpointFile]]).decode
NO_ATTEMPT = -1  # the attempt number returned for a folder that was never used


class CheckpointFolders:
    """The checkpoint folders of all jobs. Jobs share no files, so each job's folder can be cleaned
    separately. If other servers use the folders too (`shared`), or the files are in a `bucket`,
    `locks` contains a lock for each job.
    """

    def __init__(
        self,
        root: Path,
        *,
        shared: bool = False,
        keys: FileKeys | None = None,
        bucket: BucketFolder | None = None,
        locks: NamedLocks | None = None,
    ) -> None:
        self.root = root
        self._keys, self._bucket = keys, bucket
        self.locks: NamedLocks | None = locks or (FileLocks(root / ".locks") if shared else None)

    def blobs(self, project: str, job_id: str) -> BlobStore:
        """Return the files of the job's uploaded checkpoints, and their manifests."""
        root, bucket = self._job(project, job_id) / "blobs", self._bucket
        if bucket is not None:
            bucket = bucket.below(project).below(job_id).below("blobs")
        files = make_blob_files(root, self._keys, project, f"storage/{job_id}", bucket)
        return BlobStore(root, files)

    def lends(self, project: str) -> bool:
        """Return whether work may write to a folder on this machine. The result is False if the
        project's files are encrypted or are in a bucket."""
        encrypts = self._keys is not None and self._keys.of(project).encrypts
        return self._bucket is None and not encrypts

    def last_user(self, project: str, job_id: str) -> int:
        """Return the number of the last attempt that was allowed to write to the folder, or
        NO_ATTEMPT if the folder was never used.
        """
        try:
            return int((self._job(project, job_id) / "attempt").read_text())
        except FileNotFoundError:
            folder = self._job(project, job_id) / "checkpoint"
            return 0 if folder.is_dir() and any(folder.iterdir()) else NO_ATTEMPT

    def lend(self, project: str, job_id: str, attempt: int) -> None:
        """Record that this attempt may write to the folder from now on."""
        job = self._job(project, job_id)
        try:
            job.mkdir(mode=0o700, parents=True, exist_ok=True)
            part = job / "attempt.part"
            with part.open("w") as file:
                file.write(str(attempt))
                file.flush()
                os.fsync(file.fileno())
            part.replace(job / "attempt")
        except OSError as error:
            raise _told(error, job) from error

    def keep(self, project: str, job_id: str, files: Sequence[CheckpointFile]) -> str:
        """Store the manifest of these files and return its hash. Raises StoreFull."""
        content = msgspec.json.encode({"files": sorted(files, key=lambda each: each.path)})
        name = hashlib.sha256(content).hexdigest()
        self.blobs(project, job_id).put(name, [content])
        return name

    def read(self, project: str, job_id: str, manifest: str) -> list[CheckpointFile]:
        """Return the files that a manifest names. Raises HashMismatch."""
        with _open(self.blobs(project, job_id), manifest) as file:
            try:
                return _decode(file.read())["files"]
            except (msgspec.MsgspecError, KeyError) as error:
                raise HashMismatch(
                    f"the checkpoint {manifest} of job {job_id} cannot be read: {error}"
                ) from error

    def take_in(self, project: str, job_id: str) -> list[CheckpointFile]:
        """Copy the files of the writable folder into blobs, and return the list of these files,
        which may be empty. Raises HashMismatch, StoreFull, OSError.
        """
        blobs = self.blobs(project, job_id)
        try:
            folder = os.open(
                self._job(project, job_id) / "checkpoint", os.O_RDONLY | os.O_DIRECTORY
            )
        except FileNotFoundError:
            return []
        try:
            return [_take(blobs, folder, path, link) for path, link in sorted(_walk(folder))]
        finally:
            os.close(folder)

    def lay_out(self, project: str, job_id: str, files: Iterable[CheckpointFile]) -> None:
        """Make the writable folder contain exactly these files. Files that an interrupted call has
        left behind are deleted first. Raises StoreFull.
        """
        job, blobs = self._job(project, job_id), self.blobs(project, job_id)
        fresh, old, folder = job / "checkpoint.new", job / "checkpoint.old", job / "checkpoint"
        try:
            for leftover in (fresh, old):
                if leftover.exists():
                    remove_tree(leftover)
            fresh.mkdir(mode=0o700, parents=True)
            for each in files:
                _put(blobs, each, fresh / each.path)
            if folder.exists():
                folder.rename(old)
            fresh.rename(folder)
            remove_tree(old, ignore_errors=True)
        except OSError as error:
            raise _told(error, job) from error

    def copy(
        self, project: str, job_id: str, files: Iterable[CheckpointFile], target: BlobStore
    ) -> list[CheckpointFile]:
        """Copy the contents of these files to another store, sparse files with their holes, and
        return the files as that store has them. Raises HashMismatch, StoreFull."""
        blobs = self.blobs(project, job_id)
        copied = [
            each if each.data is None else _copy_sparse(blobs, each, target) for each in files
        ]
        wanted = {each.sha256 for each in files if each.link is None and each.data is None}
        for name in target.missing(sorted(wanted)):
            with _open(blobs, name) as file:
                target.put(name, iter(partial(file.read, _CHUNK), b""))
        return copied

    def remove(self, project: str, job_id: str) -> RemovedCheckpoints:
        """Delete as much of the job's folder as possible. Other processes may be deleting files in
        the folder at the same time.
        """
        job, fault = self._job(project, job_id), ""
        held = _size_of(job) if self._bucket is None else 0
        try:
            if self._bucket is not None:
                held = self._bucket.below(project).below(job_id).delete_all("")
            while job.exists():
                with suppress(FileNotFoundError):
                    remove_tree(job)
        except OSError as error:
            fault = error.strerror or str(error)
        left = _size_of(job) if self._bucket is None else 0
        return RemovedCheckpoints(bytes=held - left, kept=fault)

    def _job(self, project: str, job_id: str) -> Path:
        return self.root / project / job_id


# an age limit that removes all unwanted blobs, because no new ones can arrive unnoticed
FOREVER = timedelta(days=36500)


def find_fault(files: Sequence[CheckpointFile]) -> str:
    """Return why these files cannot be stored within a folder, or "" if they can be stored. The
    files are checked because the sending node is not trusted.
    """
    for each in files:
        if fault := _fault_of(each):
            return f"{fault}: {each.path[:200]!r}"
    paths = sorted((each.path for each in files), key=lambda path: path.split("/"))
    for path, following in pairwise(paths):
        # in this order, a path that is below another path follows it directly
        if path == following:
            return f"the path {path!r} is listed twice"
        if following.startswith(f"{path}/"):
            return f"the path {following!r} is below a file or a link"
    return ""


def _fault_of(file: CheckpointFile) -> str:
    parts = file.path.split("/")
    if "\0" in file.path or {"", ".", ".."}.intersection(parts):
        return "the path is not a plain relative path"
    if len(file.path.encode()) > _LONGEST_PATH or any(
        len(x.encode()) > _LONGEST_PART for x in parts
    ):
        return "the path is too long"
    if file.link is not None and not (0 < len(file.link.encode()) < 4096 and "\0" not in file.link):
        return "the link has no valid target"
    if not (0 <= file.size <= _LARGEST and abs(file.mtime_ns) <= NEWEST_NS and file.mode >= 0):
        return "the size, mode or time is out of range"
    if file.data is not None and not _are_extents(file.data, file.size):
        return "the extents of the sparse file are not in order or out of range"
    return ""


def _are_extents(extents: Sequence[tuple[int, int]], size: int) -> bool:
    ends = [0, *(start + length for start, length in extents)]
    ordered = all(
        start >= end and length > 0 for end, (start, length) in zip(ends, extents, strict=False)
    )
    return ordered and ends[-1] <= size and len(extents) <= MOST_EXTENTS


def _size_of(folder: Path) -> int:
    """Return the bytes of all files below the folder."""
    size = 0
    for parent, _, files in walk_tree(folder):
        for name in files:
            with suppress(OSError):
                size += os.lstat(os.path.join(parent, name)).st_size
    return size


def _walk(folder: int) -> Iterator[tuple[str, str]]:
    """Yield the path of each file and link below an open folder, with the target of the link (""
    for a file).
    """
    for path, entry, here in walk_below(folder, on_error=raise_error):
        if entry.is_symlink():
            yield path, os.readlink(entry.name, dir_fd=here)
        elif entry.is_file():
            yield path, ""


def _take(blobs: BlobStore, folder: int, path: str, link: str) -> CheckpointFile:
    if link:
        return CheckpointFile(path=path, link=link)
    for tries_left in reversed(range(_TRIES)):
        # a job that is still running may have replaced the file with a link or a pipe
        opened = open_below(folder, path, os.O_RDONLY | os.O_NONBLOCK)
        with open(check_regular(opened, path), "rb") as file:
            found = os.fstat(file.fileno())
            extents = find_extents(file.fileno(), found.st_size)
            name = _hash(_read_file(file, extents))
            try:
                blobs.put(name, _read_file(file, extents))
            except HashMismatch:
                if not tries_left:
                    raise
                continue
            if extents is None:
                found = os.fstat(file.fileno())
        return CheckpointFile(
            path=path,
            sha256=name,
            size=found.st_size,
            mode=stat.S_IMODE(found.st_mode),
            mtime_ns=max(-NEWEST_NS, min(found.st_mtime_ns, NEWEST_NS)),
            data=None if extents is None else tuple((start, size) for start, size in extents),
        )
    raise AssertionError("unreachable")


def _read_file(file: BinaryIO, extents: list[list[int]] | None) -> Iterator[bytes]:
    """Yield the content of a file as it is stored."""
    if extents is not None:
        return read_stored(file.fileno(), extents)
    file.seek(0)
    return iter(partial(file.read, _CHUNK), b"")


def _hash(pieces: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for data in pieces:
        found.update(data)
    return found.hexdigest()


def _copy_sparse(blobs: BlobStore, each: CheckpointFile, target: BlobStore) -> CheckpointFile:
    """Copy a sparse file with its holes, and return it as the target has it."""
    name = _hash(_read_whole(blobs, each))
    if target.missing([name]):
        target.put(name, _read_whole(blobs, each))
    return replace(each, sha256=name, data=None)


def _read_whole(blobs: BlobStore, each: CheckpointFile) -> Iterator[bytes]:
    """Yield the content of a sparse file with its holes."""
    at = 0
    with _open(blobs, each.sha256) as source:
        for start, length in (*(each.data or ()), (each.size, 0)):
            while at < start:
                yield bytes(min(_CHUNK, start - at))
                at += min(_CHUNK, start - at)
            while at < start + length:
                data = source.read(min(_CHUNK, start + length - at))
                if not data:
                    raise HashMismatch(f"the stored content of {each.path} is too short")
                yield data
                at += len(data)


def _put(blobs: BlobStore, each: CheckpointFile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if each.link is not None:
        path.symlink_to(each.link)
        return
    with _open(blobs, each.sha256) as source, path.open("xb") as target:
        shutil.copyfileobj(source, target, _CHUNK)
    if each.data is not None:
        restore_holes(str(path), each.data, each.size)
    path.chmod(each.mode & 0o777)
    os.utime(path, ns=(each.mtime_ns, each.mtime_ns))


def _open(blobs: BlobStore, name: str) -> BinaryIO:
    try:
        return blobs.open(name)
    except RowNotFound as error:
        raise HashMismatch(
            f"a part of a checkpoint, {name}, is missing in the state folder; restore it, or retry"
        ) from error


def _told(error: OSError, path: Path) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(f"no space for a checkpoint in {path}: free some disk space")
    return error
