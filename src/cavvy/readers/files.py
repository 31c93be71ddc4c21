"""Reads files at random positions, from several threads and processes. Each process opens its own
file handles.
"""

import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "ppm")


def decode(ending: str, data: bytes) -> Any:
    ending = ending.lower().rpartition(".")[2]
    if ending in ("txt", "text"):
        return data.decode()
    if ending in ("cls", "index", "inx", "id"):
        return int(data)
    if ending == "json":
        return json.loads(data)
    if ending == "npy":
        import numpy as np

        return np.load(io.BytesIO(data), allow_pickle=False)
    return decode_image(data) if ending in IMAGES else data


def decode_image(data: bytes) -> Any:
    """Decode an image to an array (height, width, channels) with values from 0 to 255. For a grey
    image, the array has no dimension for channels.
    """
    import numpy as np
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return np.array(image if image.mode in ("L", "RGB") else image.convert("RGB"))


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
