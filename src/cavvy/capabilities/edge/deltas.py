"""Makes the deltas of a model version that is published (`edge/delta.py` has their form), tensor by
tensor where a file is one of safetensors or ONNX, and else byte by byte. Divides its files into
chunks at the same places.

The files come from users: what they say about themselves is checked, and the time is limited.
"""

import json
import logging
import struct
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import BinaryIO, NamedTuple

from cavvy.capabilities.edge.nouns import ModelDelta, ModelFile, ModelVersion, Rollout, RolloutPhase
from cavvy.capabilities.edge.on_device.delta import ALONE, HEAD, ITEMS, RECORD, group, mix
from cavvy.domain.values import replace
from cavvy.store.base import RowNotFound, StoreError
from cavvy.store.blobs import BlobStore
from cavvy.store.chunks import LEAST

_log = logging.getLogger(__name__)
BUDGET_S = 15.0  # for all deltas of a version; clients wait for 30 s
_CHUNKS_S = 8.0  # for all chunks of a version; a file for which it does not suffice stays whole
_LEAST = 4096  # bytes of a file below which a delta is not worth a request
_BASES = 2  # former versions
_LEVEL = 6
_RETRY = 0.6  # of a record's size: if its XOR packs to more, it is also packed as it is
_PROBE = 64 << 10
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


class _Tensor(NamedTuple):
    """A tensor's bytes in a file."""

    name: str
    start: int
    size: int
    item: int


class _FileRun(NamedTuple):
    """A part of the new file, and where the old file has its former content, or None."""

    start: int
    size: int
    old: int | None
    item: int


def choose_bases(
    model: ModelVersion, known: Sequence[ModelVersion], rollouts: Sequence[Rollout]
) -> Sequence[ModelVersion]:
    """Return the versions from which devices will probably come: the newest ones that were rolled
    out and not halted, or the newest one. A version of another residency is none of them, because
    the delta to it would tell what it contains."""
    mine = [
        each
        for each in sorted(known, key=lambda each: each.number, reverse=True)
        if each.model == model.model and each.residency == model.residency
    ]
    out = {
        each.to
        for each in rollouts
        if each.model == model.model and each.phase is not RolloutPhase.HALTED
    }
    return [each for each in mine if each.number in out][:_BASES] or mine[:1]


def make_deltas(
    blobs: BlobStore, model: ModelVersion, bases: Sequence[ModelVersion]
) -> tuple[ModelFile, ...]:
    """Return the files of the version with their deltas, which are stored. A file for which the
    time or the disk's space did not suffice has none: devices fetch it whole."""
    until, files = time.monotonic() + BUDGET_S, []
    for file in model.files:
        found: list[ModelDelta] = []
        for base in bases:
            old = _find_former(file, model, base)
            if old is None or old.sha256 in {file.sha256, *(each.old for each in found)}:
                continue
            with suppress(StoreError, RowNotFound, OSError, ValueError, ArithmeticError):
                if made := _store_delta(blobs, old, file, base.number, until):
                    found.append(made)
        files.append(replace(file, deltas=tuple(found)))
    return tuple(files)


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
    large = [each for each in _list_tensors(file, path) if each.size >= LEAST]
    return [place for each in large for place in (each.start, each.start + each.size)]


def make_delta(
    old: BinaryIO, new: BinaryIO, path: str, until: float = float("inf")
) -> Iterator[bytes]:
    """Yield the delta from `old` to `new`, two files that can seek. `path` names their format.
    Raises ValueError after the moment `until` of the monotonic clock."""
    old_size = old.seek(0, 2)
    _check_time(until)  # also before a file is parsed
    for run in _plan(old, new, path):
        for start in range(run.start, run.start + run.size, RECORD):
            _check_time(until)
            raw = _read(new, start, min(RECORD, run.start + run.size - start))
            place = ALONE if run.old is None else run.old + start - run.start
            if place + len(raw) > old_size:
                place = ALONE
            yield _make_record(old, raw, place, run.item)


def _check_time(until: float) -> None:
    if time.monotonic() > until:
        raise ValueError("the time for deltas is used up")


def _list_tensors(file: BinaryIO, path: str) -> list[_Tensor]:
    """Return the tensors in the file's order. A file of another format, or a damaged one, has
    none."""
    read = {"safetensors": _read_safetensors, "onnx": _read_onnx}.get(path.rpartition(".")[2])
    end = file.seek(0, 2)
    found: list[_Tensor] = []
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


def _find_former(file: ModelFile, model: ModelVersion, base: ModelVersion) -> ModelFile | None:
    path = base.main if file.path == model.main else file.path
    found = next((each for each in base.files if each.path == path), None)
    return None if found is None or min(found.size, file.size) < _LEAST else found


def _store_delta(
    blobs: BlobStore, old: ModelFile, new: ModelFile, number: int, until: float
) -> ModelDelta | None:
    digest, size = sha256(), 0
    with tempfile.TemporaryFile() as kept:
        with blobs.open(old.sha256) as before, blobs.open(new.sha256) as after:
            for piece in make_delta(before, after, new.path, until):
                size += len(piece)
                if size >= new.size:
                    return None
                digest.update(piece)
                kept.write(piece)
        kept.seek(0)
        blobs.put(digest.hexdigest(), iter(lambda: kept.read(RECORD), b""))
    return ModelDelta(base=number, old=old.sha256, sha256=digest.hexdigest(), size=size)


def _make_record(old: BinaryIO, raw: bytes, place: int, item: int) -> bytes:
    packed = b""
    if place != ALONE:
        mixed = mix(raw, _read(old, place, len(raw)))
        packed = zlib.compress(group(mixed, item), _LEVEL)
    if place == ALONE or len(packed) > _RETRY * len(raw):
        plain = zlib.compress(group(raw, item), _LEVEL)
        if place == ALONE or len(plain) < len(packed):
            place, packed = ALONE, plain
    return HEAD.pack(item, place, len(raw), len(packed)) + packed


def _plan(old: BinaryIO, new: BinaryIO, path: str) -> list[_FileRun]:
    """Find for each tensor of the new file the one of the same name, or else the one at the same
    position among those of its size. What lies between two tensors has its former content behind
    the same tensor as before."""
    names: dict[tuple[str, int], int] = {}
    order: dict[tuple[int, int], int] = {}
    counts: dict[int, int] = {}
    for name, start, size, _ in _list_tensors(old, path):
        names.setdefault((name, size), start)
        order[size, counts.get(size, 0)] = start
        counts[size] = counts.get(size, 0) + 1
    counts.clear()
    runs: list[_FileRun] = []
    end, at, shift = new.seek(0, 2), 0, 0

    def add(start: int, size: int, place: int | None, item: int) -> None:
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.item == item
            and last.old is not None
            and place is not None
            and last.old - last.start == place - start
        ):
            runs[-1] = last._replace(size=last.size + size)
            return
        runs.append(_FileRun(start, size, None if place is None or place < 0 else place, item))

    tensors = _list_tensors(new, path)
    for name, start, size, item in tensors:
        if start > at:
            add(at, start - at, at + shift, 1)
        place = names.get((name, size)) if name else None
        place = order.get((size, counts.get(size, 0))) if place is None else place
        counts[size] = counts.get(size, 0) + 1
        shift = shift if place is None else place - start
        add(start, size, place, item)
        at = start + size
    if end > at:
        add(at, end - at, at + shift, 1 if tensors else _guess_item(old, new))
    return runs


def _guess_item(old: BinaryIO, new: BinaryIO) -> int:
    """Return the bytes of an item with which the middle of the files packs best."""
    end = min(old.seek(0, 2), new.seek(0, 2))
    start = end // 2 // 8 * 8
    count = min(_PROBE, end - start)
    mixed = mix(_read(new, start, count), _read(old, start, count))
    return min(ITEMS, key=lambda item: len(zlib.compress(group(mixed, item), 1)))


def _read_safetensors(file: BinaryIO, end: int) -> list[_Tensor]:
    length = struct.unpack("<Q", _read(file, 0, 8))[0]
    if length > min(_MOST_HEADER, end):
        raise ValueError("the header is too long")
    header = json.loads(_read(file, 8, length))
    found = []
    for name, told in header.items():
        if name != "__metadata__":
            first, last = map(int, told["data_offsets"])
            found.append(
                _Tensor(name, 8 + length + first, last - first, _SAFE.get(told["dtype"], 1))
            )
    return found


def _read_onnx(file: BinaryIO, end: int) -> list[_Tensor]:
    found: list[_Tensor] = []
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
                    name = _read(file, at, min(size, 1000)).decode(errors="replace")
                elif number in (_RAW, _FLOATS):
                    parts.append((at, size))
            elif inner := _FIELDS[kind].get(number):
                left.append((inner, at, at + size, depth + 1))
        found += [_Tensor(name, at, size, item) for at, size in parts]
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


def _read(file: BinaryIO, start: int, count: int) -> bytes:
    file.seek(start)
    data = file.read(count)
    if len(data) < count:
        raise ValueError("the file ends too early")
    return data
