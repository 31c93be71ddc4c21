"""Files for random reads by several threads and processes. Each process has its own handles."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class RandomAccessFiles:
    """Reads from many files. A file is opened on its first use in a process; a process that
    receives this object opens its own handles.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self._open: dict[int, int] = {}

    def read(self, number: int, offset: int, size: int) -> bytes:
        handle = self._open.get(number)
        if handle is None:
            fresh = os.open(self.paths[number], os.O_RDONLY)
            handle = self._open.setdefault(number, fresh)
            if handle != fresh:  # another thread has opened the file in the meantime
                os.close(fresh)
        data = os.pread(handle, size, offset)  # does not move a shared file position
        if len(data) != size:
            raise ValueError(f"{self.paths[number]} ends within a sample: the file is damaged")
        return data

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "_open": {}}

    def __del__(self) -> None:
        for handle in self._open.values():
            os.close(handle)


def list_shards(path: str, ending: str) -> list[Path]:
    """The file at this path, or the files of the folder with that extension, sorted by name."""
    place = Path(path)
    found = [place] if place.is_file() else sorted(place.rglob(f"*{ending}"))
    if not found:
        raise FileNotFoundError(f"{path} contains no files with the ending {ending}")
    return found
