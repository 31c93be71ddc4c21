"""Reads rows of Parquet and HDF5 tables by row number."""

import threading
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from typing import Any

from cavvy.readers.files import list_shards

# number of row groups kept in memory, because reading one row requires reading its whole group
KEPT = 8


class Parquet:
    """Reads a file or a folder of *.parquet. Random access is fast if row groups are small."""

    def __init__(self, path: str, *, columns: list[str] | None = None) -> None:
        import pyarrow.parquet as pq  # type: ignore[import-untyped]

        self._paths, self._columns = list_shards(path, ".parquet"), columns
        self._groups, lengths = [], []
        for number, shard in enumerate(self._paths):
            about = pq.read_metadata(shard)
            for group in range(about.num_row_groups):
                self._groups.append((number, group))
                lengths.append(about.row_group(group).num_rows)
        self._ends = list(accumulate(lengths))
        self._forget()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._ends, index)
        row = index - (self._ends[number - 1] if number else 0)
        found: dict[str, Any] = self._read(number).slice(row, 1).to_pylist()[0]
        return found

    def _read(self, number: int) -> Any:
        import pyarrow.parquet as pq

        with self._lock:
            if number not in self._kept:
                shard, group = self._groups[number]
                with pq.ParquetFile(self._paths[shard]) as file:
                    self._kept[number] = file.read_row_group(group, columns=self._columns)
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(number)
            return self._kept[number]

    def _forget(self) -> None:
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value for name, value in self.__dict__.items() if name not in ("_kept", "_lock")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()


class Hdf5:
    """Reads the named datasets of one file. The default is all datasets at the top level. The first
    dimension of each dataset is the sample.
    """

    def __init__(self, path: str, *, names: list[str] | None = None) -> None:
        import h5py

        self._file: Any = None
        self._path, self._lock = path, threading.Lock()
        with h5py.File(path, "r") as file:
            self._names = names or sorted(
                name for name, item in file.items() if isinstance(item, h5py.Dataset)
            )
            lengths = {len(file[name]) for name in self._names}
        if len(lengths) != 1:
            raise ValueError(
                f"{path}: expected columns of equal length, but the columns "
                f"({', '.join(self._names) or 'none'}) have the lengths {sorted(lengths)}"
            )
        self._length = lengths.pop()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        import h5py

        with self._lock:
            if self._file is None:
                self._file = h5py.File(self._path, "r")
            return {name: self._file[name][index] for name in self._names}

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path, "_names": self._names, "_length": self._length}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _file=None, _lock=threading.Lock())
