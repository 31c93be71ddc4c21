"""Makes the deltas of a model version that is published (`edge/delta.py` has their form), tensor by
tensor where a file is one of safetensors or ONNX, and else byte by byte. Divides its files into
chunks at the same places.

The files come from users: what they say about themselves is checked, and the time is limited.
"""

import logging
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import BinaryIO, NamedTuple

from cavvy.capabilities.edge.nouns import Rollout, RolloutPhase
from cavvy.capabilities.edge.on_device.delta import ALONE, HEAD, ITEMS, RECORD, group, mix
from cavvy.capabilities.models.nouns import ModelDelta, ModelFile, ModelVersion
from cavvy.capabilities.models.tensors import list_tensors, read_at
from cavvy.control.agents.model_folder import read_entries
from cavvy.domain.values import replace
from cavvy.spec.workdir import FolderEntry, encode_manifest
from cavvy.store.base import RowNotFound, StoreError
from cavvy.store.blobs import BlobStore

_log = logging.getLogger(__name__)
BUDGET_S = 15.0  # for all deltas of a version; clients wait for 30 s
_LEAST = 4096  # bytes of a file below which a delta is not worth a request
_BASES = 2  # former versions
_LEVEL = 6
_DELTAS = ".cavvy-deltas"  # the folder of deltas in a version's snapshot
_RETRY = 0.6  # of a record's size: if its XOR packs to more, it is also packed as it is
_PROBE = 64 << 10


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


def add_deltas(
    blobs: BlobStore, model: ModelVersion, bases: Sequence[ModelVersion]
) -> ModelVersion:
    """Return the version with deltas, and a snapshot that keeps them as long as its files."""
    files = make_deltas(blobs, model, bases)
    made = {delta.sha256: delta for file in files for delta in file.deltas}
    if not made:
        return model
    fresh = [
        FolderEntry(path=f"{_DELTAS}/{name}", size=each.size, mode=0o644, sha256=name)
        for name, each in sorted(made.items())
    ]
    manifest = encode_manifest([*read_entries(blobs, model.snapshot), *fresh])
    snapshot = sha256(manifest).hexdigest()
    blobs.put(snapshot, [manifest])
    return replace(model, files=files, snapshot=snapshot)


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
            raw = read_at(new, start, min(RECORD, run.start + run.size - start))
            place = ALONE if run.old is None else run.old + start - run.start
            if place + len(raw) > old_size:
                place = ALONE
            yield _make_record(old, raw, place, run.item)


def _check_time(until: float) -> None:
    if time.monotonic() > until:
        raise ValueError("the time for deltas is used up")


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
        mixed = mix(raw, read_at(old, place, len(raw)))
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
    for name, start, size, _ in list_tensors(old, path):
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

    tensors = list_tensors(new, path)
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
    mixed = mix(read_at(new, start, count), read_at(old, start, count))
    return min(ITEMS, key=lambda item: len(zlib.compress(group(mixed, item), 1)))
