"""Where the tensors of a model's files lie, if they are files of safetensors or ONNX, and the
chunks as which these files are stored.

The files come from users: what they say about themselves is checked, and the time is limited.
"""

import json
import logging
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import BinaryIO, NamedTuple

from cavvy.capabilities.models.nouns import ModelVersion
from cavvy.store.base import StoreError
from cavvy.store.blobs import BlobStore
from cavvy.store.chunks import LEAST

_log = logging.getLogger(__name__)
_CHUNKS_S = 8.0  # for all chunks of a version; a file for which it does not suffice stays whole
_MOST_HEADER, _MOST_FIELDS, _DEEPEST = 4 << 20, 500_000, 16
# Bytes of an item, by the names of safetensors and the numbers of ONNX's TensorProto.DataType.
_SAFE = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2}
_SAFE |= {"I16": 2, "U16": 2}
_ONNX = {1: 4, 4: 2, 5: 2, 6: 4, 7: 8, 10: 2, 11: 8, 12: 4, 13: 8, 16: 2}
# Which fields of ONNX's messages lead to tensors.
_FIELDS = {
    "model": {7: "graph"},
    "graph": {1: "node", 5: "tensor"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph"},
}
_TYPE, _FLOATS, _NAME, _RAW = 2, 4, 8, 9  # fields of a TensorProto
_INTEGER, _TEXT, _NUMBERS = 0, 2, {1: 8, 5: 4}  # types of fields; bytes of numbers of fixed length


class ModelTensor(NamedTuple):
    """A tensor's bytes in a file."""

    name: str
    start: int
    size: int
    item: int


def split_files(blobs: BlobStore, model: ModelVersion) -> None:
    """Store the files of a version as chunks. A file of which this fails stays whole."""
    until = time.monotonic() + _CHUNKS_S
    for file in model.files:
        if file.size < LEAST or time.monotonic() > until:
            continue
        try:
            blobs.split(file.sha256, partial(_find_cuts, path=file.path), until)
        except (StoreError, OSError) as error:
            _log.warning("a file of %s is not stored as chunks: %s", model.model, error)


def _find_cuts(file: BinaryIO, path: str) -> list[int]:
    """Return where the larger tensors of a file begin and end."""
    large = [each for each in list_tensors(file, path) if each.size >= LEAST]
    return [place for each in large for place in (each.start, each.start + each.size)]


def list_tensors(file: BinaryIO, path: str) -> list[ModelTensor]:
    """Return the tensors in the file's order. A file of another format, or a damaged one, has
    none."""
    read = {"safetensors": _read_safetensors, "onnx": _read_onnx}.get(path.rpartition(".")[2])
    end = file.seek(0, 2)
    found: list[ModelTensor] = []
    if read is not None:
        with suppress(
            ValueError, ArithmeticError, KeyError, TypeError, AttributeError, RecursionError
        ):
            found = sorted(read(file, end), key=lambda each: each.start)
    at = 0
    for each in found:
        if not at <= each.start <= each.start + each.size <= end:
            return []
        at = each.start + each.size
    return [each for each in found if each.size]


def _read_safetensors(file: BinaryIO, end: int) -> list[ModelTensor]:
    length = struct.unpack("<Q", read_at(file, 0, 8))[0]
    if length > min(_MOST_HEADER, end):
        raise ValueError("the header is too long")
    header = json.loads(read_at(file, 8, length))
    found = []
    for name, told in header.items():
        if name != "__metadata__":
            first, last = map(int, told["data_offsets"])
            found.append(
                ModelTensor(name, 8 + length + first, last - first, _SAFE.get(told["dtype"], 1))
            )
    return found


def _read_onnx(file: BinaryIO, end: int) -> list[ModelTensor]:
    found: list[ModelTensor] = []
    left = [("model", 0, end, 0)]
    fields = 0
    while left:
        kind, start, stop, depth = left.pop()
        name, item, parts = "", 1, []
        for number, at, size, value in _read_fields(file, start, stop):
            fields += 1
            if fields > _MOST_FIELDS or depth > _DEEPEST:
                raise ValueError("the file has too many fields")
            if kind == "tensor":
                if number == _TYPE:
                    item = _ONNX.get(value, 1)
                elif number == _NAME:
                    name = read_at(file, at, min(size, 1000)).decode(errors="replace")
                elif number in (_RAW, _FLOATS):
                    parts.append((at, size))
            elif inner := _FIELDS[kind].get(number):
                left.append((inner, at, at + size, depth + 1))
        found += [ModelTensor(name, at, size, item) for at, size in parts]
    return found


def _read_fields(file: BinaryIO, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the number, place, bytes and value (of an integer) of each field of a message in the
    form of Protocol Buffers. Raises ValueError."""
    at = start
    while at < stop:
        key, at = _read_integer(file, at)
        wire, value, size = key & 7, 0, 0
        if wire == _INTEGER:
            value, after = _read_integer(file, at)
            size = after - at
        elif wire == _TEXT:
            size, at = _read_integer(file, at)
        elif wire in _NUMBERS:
            size = _NUMBERS[wire]
        else:
            raise ValueError(f"a field has the type {wire}")
        if at + size > stop:
            raise ValueError("a field ends after its message")
        yield key >> 3, at, size, value
        at += size


def _read_integer(file: BinaryIO, at: int) -> tuple[int, int]:
    """Return an integer of variable length, and the place behind it."""
    file.seek(at)
    value = 0
    for index, byte in enumerate(file.read(10)):
        value |= (byte & 127) << 7 * index
        if byte < 128:
            return value, at + index + 1
    raise ValueError("an integer does not end")


def read_at(file: BinaryIO, start: int, count: int) -> bytes:
    """Return bytes of a file. Raises ValueError if it ends too early."""
    file.seek(start)
    data = file.read(count)
    if len(data) < count:
        raise ValueError("the file ends too early")
    return data
