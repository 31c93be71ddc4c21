"""Reads folders of samples: images sorted into one folder per class, and the formats of the
packages datasets and litdata.

WebDataset: plain tar files. Adjacent files whose names are equal up to the first dot form one
sample.
"""

import tarfile
from pathlib import Path
from typing import Any

from cavvy.readers.files import IMAGES, RandomAccessFiles, decode, decode_image, list_shards

Parts = tuple[tuple[str, int, int], ...]  # extension, offset, size


class ImageFolder:
    """Reads FOLDER/class/picture.jpg as (pixels, class number). Classes are numbered in
    alphabetical order.
    """

    def __init__(self, path: str) -> None:
        files = sorted(file for file in Path(path).rglob("*") if file.suffix[1:].lower() in IMAGES)
        self.classes = sorted(
            {file.relative_to(path).parts[0] for file in files if file.parent != Path(path)}
        )
        numbers = {name: number for number, name in enumerate(self.classes)}
        self._files = [
            (str(f), numbers[f.relative_to(path).parts[0]]) for f in files if f.parent != Path(path)
        ]
        if not self._files:
            raise FileNotFoundError(f"{path} contains no folders of images")

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, number = self._files[index]
        return decode_image(Path(path).read_bytes()), number


class HuggingFace:
    """Reads the output of `Dataset.save_to_disk`. For a `DatasetDict`, reads the dataset called
    `split`."""

    def __init__(self, path: str, *, split: str = "train") -> None:
        import datasets

        found = datasets.load_from_disk(path)
        self._data = found[split] if isinstance(found, datasets.DatasetDict) else found

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._data[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        columns = self._data[indices]
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


class LitData:
    """Reads the output of `litdata.optimize`."""

    def __init__(self, path: str) -> None:
        import litdata

        self._data = litdata.StreamingDataset(path, shuffle=False)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return _own(self._data[index])


def _own(value: Any) -> Any:
    """Replace views of a chunk's memory with copies of their bytes. The copies stay valid when the
    chunk is freed, and can be sent to another process.
    """
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, dict):
        return {name: _own(each) for name, each in value.items()}
    return type(value)(map(_own, value)) if type(value) in (list, tuple) else value


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
