"""Stores sparse files without their holes: the stored content of such a file is the data between
the holes, one extent after another. An extent is the offset and the number of the bytes.
"""

from __future__ import annotations

import os

from .trees import find_data

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Extents = Sequence[Sequence[int]]

SHORTEST_HOLE = 1024 * 1024  # bytes; a file without such a hole is stored as it is
MOST_EXTENTS = 10_000
CHUNK = 1024 * 1024


def find_extents(file: int, size: int) -> list[list[int]] | None:
    """Return the extents of an open file of this size, or None if the file has no long hole.
    Shorter holes count as data. Raises OSError."""
    if os.fstat(file).st_blocks * 512 > size - SHORTEST_HOLE:
        return None
    found: list[list[int]] = []
    at = 0
    while at < size:
        start, end = find_data(file, at, size)
        end = min(end, size)
        if start >= size:
            break
        if start - at < SHORTEST_HOLE:
            start = at
        if found and sum(found[-1]) == start:
            found[-1][1] += end - start
        else:
            found.append([start, end - start])
        at = end
    stored = sum(length for _, length in found)
    return found if stored <= size - SHORTEST_HOLE and len(found) <= MOST_EXTENTS else None


def map_stored(extents: Extents, offset: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield where these bytes of the stored content are in the sparse file, with their numbers."""
    for start, size in extents:
        if length <= 0:
            return
        if offset < size:
            part = min(size - offset, length)
            yield start + offset, part
            offset, length = 0, length - part
        else:
            offset -= size


def read_stored(file: int, extents: Extents) -> Iterator[bytes]:
    """Yield the stored content of an open sparse file. Raises OSError."""
    for start, size in extents:
        at, end = start, start + size
        while at < end:
            data = os.pread(file, min(CHUNK, end - at), at)
            if not data:
                return  # the file has become shorter
            yield data
            at += len(data)


def restore_holes(path: str, extents: Extents, size: int) -> None:
    """Replace a file of stored content with the sparse file. Raises OSError."""
    with open(path, "rb") as stored:
        os.unlink(path)
        with open(path, "xb") as file:
            for start, length in extents:
                file.seek(start)
                while length > 0:
                    data = stored.read(min(CHUNK, length))
                    if not data:
                        raise OSError(f"{path}: the stored content of the file is too short")
                    length -= file.write(data)
            file.truncate(size)
