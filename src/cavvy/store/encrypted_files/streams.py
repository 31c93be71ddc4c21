"""Blobs as files: plain files, and encrypted files, whose names and contents reveal nothing without
the key. If the server's files are in a bucket, the files on the disk are copies of the bucket's
objects.
"""

import io
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from cavvy.store.bucket_folder import BucketFolder
from cavvy.store.encrypted_files.blocks import (
    BLOBS,
    create_encrypted,
    open_encrypted,
)
from cavvy.store.encrypted_files.data_keys import FileKeys, ProjectFileKeys

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_SUFFIX = ".sealed"
_AT_ONCE = 16 * BLOBS.plain  # bytes that are decrypted together
# An object in a bucket that is older than this counts as missing, so that it is sent again.
# Otherwise garbage collection might soon remove it: unlike the time of a file, the time of an
# object cannot be changed.
_FRESH = timedelta(days=3)


class OpenFile(Protocol):
    """An open file that can be read at any position and extended at its end. The methods raise
    OSError, StoreUnusable.
    """

    @property
    def size(self) -> int: ...
    def read(self, offset: int, length: int) -> bytes: ...
    def append(self, data: bytes) -> None: ...


class PlainFile:
    """An open file that is not encrypted."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self._fd, length, offset)

    def append(self, data: bytes) -> None:
        end, written = self.size, 0
        while written < len(data):
            written += os.pwrite(self._fd, data[written:], end + written)


class BlobFiles:
    """The files of one folder of blobs. `keys` are the keys of the folder's project; if `keys` is
    None, all files are plain. `label` distinguishes the folder from other folders. If `bucket` is
    set, the blobs are in the bucket, and the files on the disk are copies of the blobs.
    """

    def __init__(
        self,
        root: Path,
        keys: ProjectFileKeys | None,
        label: str,
        bucket: BucketFolder | None = None,
    ) -> None:
        self.root, self.bucket = root, bucket
        self._keys, self._label = keys, label

    def target(self, name: str, ending: str = "") -> Path:
        """Return the path where a new blob with this hash is stored, or what else belongs to it and
        has this `ending`. Raises StoreUnusable, StoreFull."""
        hidden = self._keys.hide(name) if self._keys and self._keys.encrypts else None
        return self._plain(name + ending) if hidden is None else self._sealed(hidden + ending)

    def stored(self, name: str, ending: str = "") -> Path:
        """Return the path of a stored blob, encrypted or plain. If a project's encryption is turned
        on or off, the project's older blobs are not changed. A blob that is only in the bucket is
        fetched. Raises StoreUnusable, StoreFull, OSError.
        """
        hidden = self._keys.hide(name) if self._keys else None
        if hidden is not None and self._fetch(sealed := self._sealed(hidden + ending)):
            return sealed
        plain = self._plain(name + ending)
        self._fetch(plain)
        return plain

    def names(self, name: str, ending: str = "") -> set[str]:
        """Return the possible file names of a blob: its plain name and, if the project has keys,
        its encrypted name. Raises StoreUnusable, StoreFull.
        """
        hidden = self._keys.hide(name) if self._keys else None
        plain = f"{name}{ending}"
        return {plain} if hidden is None else {plain, f"{hidden}{ending}{_SUFFIX}"}

    def find_missing(self, paths: Sequence[Path]) -> set[Path]:
        """Return the paths at which no blob is stored. For some time, garbage collection does not
        remove the blobs that were found. Raises StoreUnusable.
        """
        if self.bucket is None:
            return {path for path in paths if not _touch(path)}
        found = self.bucket.find_all([self.bucket.name_of(path) for path in paths])
        oldest = self.bucket.now() - _FRESH
        return {
            path
            for path, each in zip(paths, found, strict=True)
            if each is None or each.changed_at is None or each.changed_at < oldest
        }

    def keep(self, part: Path, path: Path) -> None:
        """Move the finished file `part` to `path`. If a bucket is configured, upload the file
        first, so that every blob that counts as stored is in the bucket. Raises StoreUnusable,
        OSError.
        """
        if self.bucket is not None:
            self.bucket.send(self.bucket.name_of(path), part)
        os.replace(part, path)

    def _fetch(self, path: Path) -> bool:
        if self.bucket is None:
            return path.exists()
        return _touch(path) or self.bucket.fetch(path)

    def create(self, fd: int, path: Path) -> OpenFile:
        """Return a new blob file for writing, on the descriptor `fd`. The blob will be stored at
        `path`. Raises StoreUnusable, StoreFull, OSError.
        """
        if not is_encrypted(path):
            return PlainFile(fd)
        assert self._keys is not None
        return create_encrypted(fd, BLOBS, self._keys.current(), self._bound(path))

    def resume(self, fd: int, path: Path) -> OpenFile:
        """Return an existing blob file for reading and appending, on the descriptor `fd`. The blob
        is or will be stored at `path`. Raises StoreUnusable, OSError.
        """
        if not is_encrypted(path):
            return PlainFile(fd)
        assert self._keys is not None
        return open_encrypted(fd, BLOBS, self._keys.find, self._bound(path))

    def open(self, path: Path) -> BinaryIO:
        """Open a stored blob for reading. Raises StoreUnusable, OSError."""
        file = path.open("rb")
        if not is_encrypted(path):
            return file
        try:
            decrypted = self.resume(file.fileno(), path)
            return io.BufferedReader(_DecryptedFile(file, decrypted), BLOBS.plain)
        except BaseException:
            file.close()
            raise

    def _plain(self, name: str) -> Path:
        return self.root / name[:2] / name

    def _sealed(self, hidden: str) -> Path:
        return self.root / hidden[:2] / f"{hidden}{_SUFFIX}"

    def _bound(self, path: Path) -> str:
        return f"{self._label}/{path.name}"


def is_encrypted(path: Path) -> bool:
    """Return whether the file of a blob is encrypted."""
    return path.name.endswith(_SUFFIX)


def ends_with(path: Path, ending: str) -> bool:
    """Return whether a file, encrypted or not, was stored with this ending."""
    return path.name.removesuffix(_SUFFIX).endswith(ending)


def make_blob_files(
    root: Path,
    keys: FileKeys | None,
    project: str,
    label: str,
    bucket: BucketFolder | None = None,
) -> BlobFiles:
    """Open a project's folder of blobs. The blobs are encrypted if the server has keys, and plain
    otherwise.
    """
    return BlobFiles(root, None if keys is None else keys.of(project), label, bucket)


def _touch(path: Path) -> bool:
    """Return whether the file exists. Set the file time to now, so that garbage collection keeps
    the file."""
    with suppress(FileNotFoundError):
        os.utime(path)
        return True
    return False


class _DecryptedFile(io.RawIOBase):
    """The plain bytes of an encrypted file, for BufferedReader."""

    def __init__(self, file: BinaryIO, decrypted: OpenFile) -> None:
        self._file, self._decrypted, self._at = file, decrypted, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        room = memoryview(buffer)
        data = self._decrypted.read(self._at, min(len(room), _AT_ONCE))
        room[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._decrypted.size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def close(self) -> None:
        self._file.close()
        super().close()
