"""MDS, the shard format of MosaicML's Streaming. An index lists the files, and each file contains
the offsets of its samples.

`cavvy data convert` stores arrays of one shape and type exactly as they are in memory, so that an
array is read with a single read and needs no decoding.
"""

import json
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cavvy.readers.files import RandomAccessFiles, decode, decode_image

SHARD_BYTES = 64 << 20
NUMBERS = (
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
)

# name, encoding, and number of bytes if all values have the same size
_Column = tuple[str, str, int | None]
_Row = list[tuple[_Column, bytes]]


class Mds:
    """Reads a folder with an index.json. Shards must not be compressed."""

    def __init__(self, path: str) -> None:
        root = Path(path)
        self._shards = json.loads((root / "index.json").read_text())["shards"]
        for shard in self._shards:
            if shard.get("format") != "mds" or (
                shard.get("compression") and not shard.get("raw_data")
            ):
                raise ValueError(f"{path} contains shards that are not MDS or are only compressed")
        self._files = RandomAccessFiles(
            [root / shard["raw_data"]["basename"] for shard in self._shards]
        )
        missing = [file for file in self._files.paths if not file.exists()]
        if missing:
            raise FileNotFoundError(
                f"{missing[0]} is missing or compressed: unpack the shards first"
            )
        self._starts = np.cumsum([0] + [shard["samples"] for shard in self._shards])
        self._places: dict[int, Any] = {}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        shard, row = self._shards[number], index - int(self._starts[number])
        places = self._places.get(number)
        if places is None:
            places = np.frombuffer(self._files.read(number, 4, 4 * (shard["samples"] + 1)), "<u4")
            self._places[number] = places
        begin, end = int(places[row]), int(places[row + 1])
        data = self._files.read(number, begin, end - begin)
        sizes = shard["column_sizes"]
        free = sum(size is None for size in sizes)
        told, place = iter(struct.unpack_from(f"<{free}I", data)), 4 * free
        sample = {}
        for name, encoding, size in zip(
            shard["column_names"], shard["column_encodings"], sizes, strict=True
        ):
            size = next(told) if size is None else size
            sample[name] = _read(encoding, data[place : place + size])
            place += size
        return sample


def _read(encoding: str, data: bytes) -> Any:
    kind, _, rest = encoding.partition(":")
    if kind == "bytes":
        return data
    if kind == "str":
        return data.decode()
    if kind == "int":
        return int(np.frombuffer(data, "<i8")[0])
    if kind in NUMBERS:
        return np.frombuffer(data, kind)[0].item()
    if kind in ("jpeg", "png", "jpeg_array", "jpegarray"):
        return decode_image(data)
    if kind == "json":
        return decode(kind, data)
    if kind in ("str_int", "str_float"):
        return int(data) if kind == "str_int" else float(data)
    if kind == "ndarray":
        return _array(data, *rest.partition(":")[::2])
    raise ValueError(f"the MDS encoding {encoding!r} of a column is not supported")


def _array(data: bytes, dtype: str, dimensions: str) -> Any:
    """Decode an array. If the column does not fix the type or the shape, each value stores its type
    or shape before its data. The type is one byte. The byte's two low bits are the kind of number:
    0 is unsigned, 1 is signed, 2 is float. The same byte without these two bits is the number of
    bits per value. The shape starts with one byte. Its upper six bits are the number of dimensions.
    Its two low bits are a number k: each size takes 2^k bytes. The sizes follow.
    """
    place = 0
    if not dtype:
        kind, bits = ("uint", "int", "float")[data[0] & 3], data[0] & ~3
        dtype, place = f"{kind}{bits}", 1
    if dimensions:
        shape = [int(n) for n in dimensions.split(",")]
    else:
        count, size = data[place] >> 2, 1 << (data[place] & 3)
        shape = np.frombuffer(data, f"<u{size}", count, place + 1).tolist()
        place += 1 + count * size
    return np.frombuffer(data, dtype, offset=place).reshape(shape).copy()


def write_shards(
    samples: Iterable[Any], folder: str | Path, *, shard_bytes: int = SHARD_BYTES
) -> int:
    """Write samples (dicts, tuples or single values, all with the same columns) as MDS. Return the
    number of samples.

    Arrays in the same column may have different shapes, but must have the same type.

    Raises: ValueError: the columns of two samples differ, the type of a value is not supported, or
    the folder already contains shards.
    """
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    if (root / "index.json").exists():
        raise ValueError(f"{root} already contains shards")
    shards: list[dict[str, Any]] = []
    columns: list[_Column] = []
    held: list[_Row] = []
    count = size = 0
    for sample in samples:
        row = to_row(sample)
        found = [(name, *_kind(row[name])) for name in sorted(row)]
        columns = columns or found
        if list(map(_free, found)) != list(map(_free, columns)):
            raise ValueError(
                f"sample {count} has {_say(found)}, but the first sample has {_say(columns)}: "
                "all samples need the same columns"
            )
        held.append([(each, _bytes(row[each[0]])) for each in found])
        count, size = count + 1, size + sum(len(data) for _, data in held[-1])
        if size >= shard_bytes:
            shards.append(_write(root, len(shards), held))
            held, size = [], 0
    if held:
        shards.append(_write(root, len(shards), held))
    (root / "index.json").write_text(
        json.dumps({"version": 2, "shards": shards})
    )  # The index is written last, so that a folder without an index is recognized as incomplete.
    return count


def _free(column: _Column) -> _Column:
    """Return the column without its fixed shape if the column has arrays of a fixed shape;
    otherwise return the column itself.
    """
    name, encoding, _ = column
    is_array = encoding.startswith("ndarray:")
    return (name, encoding.rpartition(":")[0], None) if is_array else column


def _merge(rows: Sequence[_Row]) -> list[_Column]:
    kinds = zip(*([column for column, _ in row] for row in rows), strict=True)
    return [each[0] if len(set(each)) == 1 else _free(each[0]) for each in kinds]


def _prefix(shape: str) -> bytes:
    """Encode the shape of an array for a column without a fixed shape, with 4 bytes per size.
    `_array` decodes it.
    """
    sizes = [int(size) for size in shape.split(",")]
    return struct.pack(f"<B{len(sizes)}I", len(sizes) << 2 | 2, *sizes)


def _pack(row: _Row, columns: Sequence[_Column]) -> bytes:
    """Encode a sample: the lengths of the values of variable size
    come first, then all values."""
    parts = [
        data if own == column else _prefix(own[1].rpartition(":")[2]) + data
        for (own, data), column in zip(row, columns, strict=True)
    ]
    free = [len(part) for part, (_, _, fixed) in zip(parts, columns, strict=True) if fixed is None]
    return struct.pack(f"<{len(free)}I", *free) + b"".join(parts)


def to_row(sample: Any) -> dict[str, Any]:
    """Convert a sample to a dictionary of values. The values of a tuple are named by index."""
    if isinstance(sample, dict):
        return {str(name): value for name, value in sample.items()}
    return (
        dict(zip(map(str, range(len(sample))), sample, strict=True))
        if isinstance(sample, tuple)
        else {"0": sample}
    )


def _kind(value: Any) -> tuple[str, int | None]:
    if isinstance(value, bool | int | np.integer):
        return "int", 8
    if isinstance(value, float | np.floating):
        return "float64", 8
    if isinstance(value, str):
        return "str", None
    if isinstance(value, bytes):
        return "bytes", None
    if isinstance(value, list | dict):
        return "json", None
    array = np.asarray(value)
    if array.dtype.name not in NUMBERS or not array.ndim:
        raise ValueError(f"a value of the type {type(value).__name__} cannot be written")
    return f"ndarray:{array.dtype.name}:{','.join(map(str, array.shape))}", array.nbytes


def _bytes(value: Any) -> bytes:
    if isinstance(value, bool | int | np.integer):
        return struct.pack("<q", value)
    if isinstance(value, float | np.floating):
        return struct.pack("<d", value)
    if isinstance(value, str | bytes):
        return value.encode() if isinstance(value, str) else value
    return (
        json.dumps(value).encode()
        if isinstance(value, list | dict)
        else np.asarray(value).tobytes()
    )


def _say(columns: list[_Column]) -> str:
    return ", ".join(f"{name} ({encoding})" for name, encoding, _ in columns)


def _write(root: Path, number: int, held: Sequence[_Row]) -> dict[str, Any]:
    """Write a shard. If the arrays of a column have several shapes, the shape of
    each array is stored.
    """
    columns = _merge(held)
    rows = [_pack(row, columns) for row in held]
    about: dict[str, Any] = {
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": SHARD_BYTES,
    }
    names, encodings, sizes = ([column[n] for column in columns] for n in range(3))
    about |= {"column_encodings": encodings, "column_names": names, "column_sizes": sizes}
    config = json.dumps(about, sort_keys=True).encode()
    first = 4 + 4 * (len(rows) + 1) + len(config)
    places = np.cumsum([first] + [len(row) for row in rows]).astype("<u4")
    data = struct.pack("<I", len(rows)) + places.tobytes() + config + b"".join(rows)
    name = f"shard.{number:05}.mds"
    (root / name).write_bytes(data)
    raw = {"basename": name, "bytes": len(data), "hashes": {}}
    return {**about, "version": 2, "raw_data": raw, "samples": len(rows), "zip_data": None}
