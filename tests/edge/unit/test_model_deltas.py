"""Deltas between two versions of a model: what is made of tensors, and what a device does with a delta
that lies about itself."""

import io
import json
import random
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import pytest

from cavvy.capabilities.edge import deltas as model_deltas
from cavvy.capabilities.edge.deltas import add_deltas, choose_bases, make_delta
from cavvy.capabilities.edge.nouns import Rollout, RolloutPhase
from cavvy.capabilities.edge.on_device.delta import ALONE, HEAD, RECORD, apply_delta
from cavvy.capabilities.models.nouns import ModelFile, ModelVersion
from cavvy.capabilities.models.registry import make_manifest
from cavvy.capabilities.models.tensors import split_files
from cavvy.domain.values import replace
from cavvy.spec.workdir import FolderEntry, encode_manifest
from cavvy.store.blobs import BlobStore
from cavvy.store.chunks import LEAST

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def delta_of(old: bytes, new: bytes, path: str) -> bytes:
    """Make a delta, check what it makes, and return it."""
    made = b"".join(make_delta(io.BytesIO(old), io.BytesIO(new), path))
    assert b"".join(apply_delta(io.BytesIO(old), io.BytesIO(made), len(new))) == new
    return made


def make_weights(seed: int, count: int = 20_000) -> bytes:
    rng = random.Random(seed)
    return struct.pack(f"<{count}f", *(rng.gauss(0, 1) for _ in range(count)))


def tune(weights: bytes) -> bytes:
    """Change each weight by less than a thousandth."""
    values = struct.unpack(f"<{len(weights) // 4}f", weights)
    return struct.pack(f"<{len(values)}f", *(each * 1.0002 for each in values))


def to_safetensors(tensors: dict[str, bytes], note: str) -> bytes:
    header: dict[str, object] = {"__metadata__": {"note": note}}
    at = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "F32", "shape": [], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


def to_field(number: int, value: bytes | int) -> bytes:
    def integer(left: int) -> bytes:
        found = b""
        while left > 127:
            found += bytes([left & 127 | 128])
            left >>= 7
        return found + bytes([left])

    if isinstance(value, int):
        return integer(number << 3) + integer(value)
    return integer(number << 3 | 2) + integer(len(value)) + value


def to_onnx(tensors: dict[str, bytes], note: str) -> bytes:
    """A file of ONNX, of which the last tensor is the constant of a node."""
    made = [
        to_field(2, 1) + to_field(8, name.encode()) + to_field(9, data)
        for name, data in tensors.items()
    ]
    graph = b"".join(to_field(5, each) for each in made[:-1])
    graph += to_field(1, to_field(4, b"Constant") + to_field(5, to_field(5, made[-1])))
    return to_field(1, 8) + to_field(2, note.encode()) + to_field(7, graph)


@pytest.mark.parametrize(("form", "path"), [(to_safetensors, "m.safetensors"), (to_onnx, "m.onnx")])
def test_tensors_are_found_by_name_though_they_have_moved(
    form: Callable[[dict[str, bytes], str], bytes], path: str
) -> None:
    one, two, three = (make_weights(seed) for seed in range(3))
    old = form({"a": one, "b": two, "c": three}, "short")
    new = form({"b": two, "a": one, "c": tune(three)}, "a note that moves all that follows it")
    assert len(delta_of(old, new, path)) < 0.22 * len(new)
    renamed = form({"x": one, "y": two, "z": tune(three)}, "longer note")
    assert len(delta_of(old, renamed, path)) < 0.22 * len(new)


def test_other_files_are_compared_byte_by_byte() -> None:
    weights = make_weights(1)
    assert len(delta_of(weights, tune(weights), "m.bin")) < 0.65 * len(weights)
    for old, new in ((b"", weights), (weights, b""), (weights, weights[:-3]), (b"x", b"yyyy")):
        delta_of(old, new, "m.bin")


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<Q", 1 << 62),
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 40) + b'{"a": {"data_offsets": [0, 99999999]}}  ',
        struct.pack("<Q", 44) + b'{"a": {"dtype": "F32", "data_offsets": [8]}}',
        b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x3a\x02" * 3000,
        b"\xff" * 30,
    ],
)
@pytest.mark.parametrize("path", ["m.safetensors", "m.onnx"])
def test_a_file_that_lies_about_its_tensors_has_a_delta_all_the_same(
    head: bytes, path: str
) -> None:
    rest = make_weights(3, 2000)
    delta_of(head + rest, head + tune(rest), path)


def record(
    data: bytes, *, item: int = 1, place: int = ALONE, length: int | None = None, more: bytes = b""
) -> bytes:
    packed = zlib.compress(data, 9) + more
    told = len(data) if length is None else length
    return HEAD.pack(item, place, told, len(packed)) + packed


@pytest.mark.parametrize(
    "delta",
    [
        b"",
        record(b"x" * 50),  # too short
        record(b"x" * 100) + b"!",  # goes on
        record(b"x" * 101),  # too long
        record(b"x" * 100, length=99) + record(b"x"),
        record(b"x" * 99, length=100),
        record(b"x" * 100, more=b"??"),
        record(b"x" * 100, item=3),
        record(b"x" * 100, place=ALONE - 1),
        record(b"x" * 100, place=1),  # beyond the end of the old file
        HEAD.pack(1, ALONE, 100, 1 << 31),
        HEAD.pack(1, ALONE, 100, 4) + b"junk",
        HEAD.pack(1, ALONE, 0, 0) * 1000,
    ],
)
def test_a_wrong_delta_is_an_error(delta: bytes) -> None:
    with pytest.raises(ValueError, match="delta"):
        list(apply_delta(io.BytesIO(b"o" * 100), io.BytesIO(delta), 100))


def test_a_delta_that_unpacks_to_gigabytes_takes_some_memory_only() -> None:
    stream = zlib.compressobj(9)
    bomb = b"".join(stream.compress(bytes(1 << 20)) for _ in range(200)) + stream.flush()
    head = HEAD.pack(1, ALONE, RECORD, len(bomb))
    tracemalloc.start()
    with pytest.raises(ValueError, match="does not unpack"):
        list(apply_delta(io.BytesIO(), io.BytesIO(head + bomb), 1 << 40))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 8 * RECORD


def version(number: int, content: bytes = b"", residency: str = "") -> ModelVersion:
    file = ModelFile(path="m.bin", sha256=sha256(content).hexdigest(), size=len(content))
    return ModelVersion(
        project="p",
        name=f"m@{number}",
        snapshot="",
        files=(file,),
        main="m.bin",
        residency=residency,
        created_at=NOW,
    )


@pytest.mark.parametrize("offsets", ["[0, 1e999]", "[0, 1e300]", "[NaN, 1]", "[-1, 5]", "[[], 1]"])
def test_a_header_with_impossible_offsets_is_no_fault(offsets: str) -> None:
    text = f'{{"a": {{"dtype": "F32", "data_offsets": {offsets}}}}}'.encode()
    lie = struct.pack("<Q", len(text)) + text + make_weights(1)
    delta_of(to_safetensors({"a": make_weights(1)}, ""), lie, "m.safetensors")


def test_no_file_is_parsed_after_the_time_for_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_deltas, "_plan", lambda *_: pytest.fail("it was parsed"))
    with pytest.raises(ValueError, match="is used up"):
        list(make_delta(io.BytesIO(b"a"), io.BytesIO(b"b"), "m.onnx", until=0.0))


def test_deltas_start_at_what_devices_have_and_never_tell_of_another_residency() -> None:
    known = [version(1), version(2), version(3), version(4, residency="eu")]
    assert [each.number for each in choose_bases(version(0), known, [])] == [3]
    rollouts = [
        Rollout(project="p", name=f"m-{to}", model="m", to=to, wave_at=NOW, created_at=NOW)
        for to in (1, 2, 3)
    ]
    rollouts[2] = replace(rollouts[2], phase=RolloutPhase.HALTED)
    assert [each.number for each in choose_bases(version(0), known, rollouts)] == [2, 1]
    assert choose_bases(version(0, residency="us"), known, rollouts) == []


def test_a_delta_is_kept_and_signed_with_its_version_and_is_never_larger_than_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = BlobStore(tmp_path)
    old, tuned, other = make_weights(1), tune(make_weights(1)), random.Random(1).randbytes(80_000)
    for each in (old, tuned, other):
        blobs.put(sha256(each).hexdigest(), [each])

    def publish(content: bytes) -> ModelVersion:
        made = version(2, content)
        entry = FolderEntry(path="m.bin", size=len(content), sha256=made.files[0].sha256)
        manifest = encode_manifest([entry])
        blobs.put(sha256(manifest).hexdigest(), [manifest])
        made = replace(made, snapshot=sha256(manifest).hexdigest())
        return add_deltas(blobs, made, [version(1, old)])

    made = publish(tuned)
    (delta,) = made.files[0].deltas
    assert delta.sha256 in blobs.folder_parts(made.snapshot)
    assert json.loads(make_manifest(made))["files"][0]["deltas"][0]["sha256"] == delta.sha256
    assert publish(other).files[0].deltas == publish(old).files[0].deltas == ()
    assert "deltas" not in json.loads(make_manifest(publish(other)))["files"][0]
    monkeypatch.setattr(model_deltas, "BUDGET_S", -1.0)
    assert publish(tuned).files[0].deltas == ()


@pytest.mark.parametrize(("form", "path"), [(to_safetensors, "m.safetensors"), (to_onnx, "m.onnx")])
def test_a_version_of_which_one_tensor_changed_takes_the_space_of_this_tensor(
    form: Callable[[dict[str, bytes], str], bytes],
    path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blobs, rng = BlobStore(tmp_path), random.Random(1)
    tensors = {f"t{each}": rng.randbytes(LEAST + 4 * each) for each in range(12)}
    tensors["bias"] = rng.randbytes(100)

    def publish(tensors: dict[str, bytes], note: str) -> int:
        content = form(tensors, note)
        model = version(1, content)
        model = replace(model, files=(replace(model.files[0], path=path, size=len(content)),))
        before = weigh()
        blobs.put(model.files[0].sha256, [content])
        split_files(blobs, model)
        with blobs.open(model.files[0].sha256) as file:
            assert file.read() == content
        return weigh() - before

    def weigh() -> int:
        return sum(each.stat().st_size for each in tmp_path.rglob("*") if each.is_file())

    assert publish(tensors, "one") > 12 * LEAST
    changed = tensors | {"t5": rng.randbytes(LEAST)}
    assert publish(changed, "a note that moves all that follows it") < LEAST + 10_000
    assert publish(changed, "a note that moves all that follows it") == 0
    monkeypatch.setattr("cavvy.capabilities.models.tensors._CHUNKS_S", -1.0)
    assert publish(changed, "no time is left") > 12 * LEAST


@pytest.mark.parametrize("content", [b"", b"\xff" * 30, struct.pack("<Q", 1 << 62)])
def test_a_file_that_lies_about_its_tensors_is_stored_all_the_same(
    content: bytes, tmp_path: Path
) -> None:
    blobs, model = BlobStore(tmp_path), version(1, content + bytes(LEAST))
    name = model.files[0].sha256
    blobs.put(name, [content, bytes(LEAST)])
    for path in ("m.onnx", "m.safetensors"):
        split_files(blobs, replace(model, files=(replace(model.files[0], path=path),)))
        with blobs.open(name) as file:
            assert file.read() == content + bytes(LEAST)
