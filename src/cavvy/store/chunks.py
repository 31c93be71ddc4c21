"""Blobs that are stored as chunks, so that those which are equal in part share these parts. A list
names the chunks of a blob in their order, and each chunk is a file under its own SHA-256.
"""

import io
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import sha256
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

from msgspec import Meta, MsgspecError, Struct
from msgspec.json import Decoder, encode

from cavvy.store.base import StoreUnusable
from cavvy.store.encrypted_files.streams import BlobFiles

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# Bytes of a chunk at most. Files without known tensors share more with smaller chunks, but each
# chunk is a file to write and to flush: 48 MiB are 12.
CHUNK = 4 << 20
LEAST = 256 << 10  # bytes of a tensor from which on it has chunks of its own
OF_CHUNK, OF_LIST = ".chunk", ".chunks"  # ends of the names of files
_AT_ONCE = 1 << 20


class FileChunk(Struct, frozen=True, kw_only=True):
    """A part of a blob, and its size in bytes."""

    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    size: Annotated[int, Meta(gt=0, le=CHUNK)]


_decode = Decoder(list[FileChunk]).decode


def divide(size: int, cuts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each chunk of a file of `size` bytes. One begins at each of
    `cuts`, and none is larger than CHUNK."""
    ends = sorted({0, size, *(cut for cut in cuts if 0 < cut < size)})
    for first, last in pairwise(ends):
        for start in range(first, last, CHUNK):
            yield start, min(start + CHUNK, last)


def encode_list(chunks: Sequence[FileChunk]) -> bytes:
    return encode(chunks)


def read_list(files: BlobFiles, path: Path) -> Sequence[FileChunk]:
    """Read a list of chunks. Raises StoreUnusable, FileNotFoundError, OSError."""
    with files.open(path) as file:
        try:
            return _decode(file.read())
        except (MsgspecError, ValueError) as error:
            raise StoreUnusable(
                f"the list of chunks {path} is damaged ({error}): restore it from a backup, or "
                "remove it and publish its file again"
            ) from error


def open_chunks(files: BlobFiles, name: str, chunks: Sequence[FileChunk]) -> BinaryIO:
    """Open the blob `name`. Each chunk is checked before a byte of it is returned, and at most
    2 MiB of it are in memory. Reading raises StoreUnusable, OSError."""
    return io.BufferedReader(_ChunkedFile(files, name, chunks), _AT_ONCE)


class _ChunkedFile(io.RawIOBase):
    """The bytes of a blob's chunks, for BufferedReader."""

    def __init__(self, files: BlobFiles, name: str, chunks: Sequence[FileChunk]) -> None:
        self._files, self._name, self._chunks = files, name, chunks
        self._starts = [0, *accumulate(each.size for each in chunks)]
        self._at = 0
        self._file: BinaryIO | None = None  # the open chunk, and its number
        self._index = -1
        self._checked = bytearray(len(chunks))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        room = memoryview(buffer).cast("B")
        if not len(room) or self._at >= self._starts[-1]:
            return 0
        index = bisect_right(self._starts, self._at) - 1
        file = self._go_to(index)
        file.seek(self._at - self._starts[index])
        data = file.read(min(len(room), _AT_ONCE, self._starts[index + 1] - self._at))
        room[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._starts[-1]}[whence]
        self._at = max(0, start + offset)
        return self._at

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()

    def _go_to(self, index: int) -> BinaryIO:
        if self._file is not None and index == self._index:
            return self._file
        if self._file is not None:
            self._file.close()
            self._file = None
        chunk = self._chunks[index]
        path = self._files.stored(chunk.sha256, OF_CHUNK)
        try:
            file = self._files.open(path)
            if not self._checked[index]:
                self._check(file, chunk)
        except FileNotFoundError as error:
            names = " or ".join(sorted(self._files.names(chunk.sha256, OF_CHUNK)))
            raise StoreUnusable(
                f"chunk {index + 1} of {len(self._chunks)} of the file {self._name} is missing: "
                f"restore {names} below {self._files.root} from a backup, or publish the file again"
            ) from error
        except StoreUnusable as error:
            raise StoreUnusable(
                f"chunk {index + 1} of {len(self._chunks)} of the file {self._name} is damaged: "
                f"{error}; restore {path} from a backup, or remove it and publish the file again"
            ) from error
        self._file, self._index, self._checked[index] = file, index, True
        return file

    def _check(self, file: BinaryIO, chunk: FileChunk) -> None:
        digest, size = sha256(), 0
        try:
            for data in iter(partial(file.read, _AT_ONCE), b""):
                digest.update(data)
                size += len(data)
            if size != chunk.size or digest.hexdigest() != chunk.sha256:
                raise StoreUnusable(f"its {size} bytes have the hash {digest.hexdigest()}")
        except BaseException:
            file.close()
            raise
