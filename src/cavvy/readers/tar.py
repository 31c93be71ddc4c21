"""WebDataset: plain tar files. Adjacent files whose names are equal up to the first dot form one
sample.
"""

import tarfile
from typing import Any

from cavvy.readers.files import RandomAccessFiles, decode, list_shards

Parts = tuple[tuple[str, int, int], ...]  # extension, offset, size


class WebDataset:
    """Reads a tar file or a folder of tar files. All headers are read once, when the reader is
    created. Reading a sample takes one read for each of its files.
    """

    def __init__(self, path: str, *, decoded: bool = True) -> None:
        self._files, self._decoded = RandomAccessFiles(list_shards(path, ".tar")), decoded
        self._samples: list[tuple[int, str, Parts]] = []
        for number, shard in enumerate(self._files.paths):
            self._scan(number, str(shard))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, key, parts = self._samples[index]
        sample: dict[str, Any] = {"__key__": key}
        for ending, offset, size in parts:
            data = self._files.read(number, offset, size)
            sample[ending] = decode(ending, data) if self._decoded else data
        return sample

    def _scan(self, number: int, shard: str) -> None:
        key = ""
        parts: list[tuple[str, int, int]] = []
        with tarfile.open(shard, "r:") as file:  # only uncompressed files, because of random access
            for member in file:
                if not member.isfile():
                    continue
                folder, _, name = member.name.rpartition("/")
                stem, _, ending = name.partition(".")
                now = f"{folder}/{stem}" if folder else stem
                if parts and now != key:
                    self._samples.append((number, key, tuple(parts)))
                    parts = []
                key = now
                parts.append((ending, member.offset_data, member.size))
        if parts:
            self._samples.append((number, key, tuple(parts)))
