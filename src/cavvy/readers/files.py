"""Reads files at random positions, from several threads and processes. Each process opens its own
file handles.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class RandomAccessFiles:
    """Reads from many files. A process opens a file at its first read of the file. If this object
    is sent to another process, that process opens its own file handles.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self._open: dict[int, int] = {}

    def read(self, number: int, offset: int, size: int) -> bytes:
        handle = self._open.get(number)
        if handle is None:
            fresh = os.open(self.paths[number], os.O_RDONLY)
            handle = self._open.setdefault(number, fresh)
            if handle != fresh:  # Another thread has opened the file in the meantime.
                os.close(fresh)
        data = os.pread(handle, size, offset)  # This does not move a shared file position.
        if len(data) != size:
            raise ValueError(f"{self.paths[number]} ends within a sample: the file is damaged")
        return data

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "_open": {}}

    def __del__(self) -> None:
        for handle in self._open.values():
            os.close(handle)


def list_shards(path: str, ending: str) -> list[Path]:
    """Return the file at this path or, if the path is a folder, the files in it with this
    extension, sorted by name.
    """
    place = Path(path)
    found = [place] if place.is_file() else sorted(place.rglob(f"*{ending}"))
    if not found:
        raise FileNotFoundError(f"{path} contains no files with the ending {ending}")
    return found
