"""Reads folders of samples: images sorted into one folder per class, and the formats of the
packages datasets and litdata.
"""

from pathlib import Path
from typing import Any

from cavvy.readers.files import IMAGES, decode_image


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
