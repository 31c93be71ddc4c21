"""The two slots of a model on a device."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from cavvy.capabilities.edge.on_device import slots as module
from cavvy.capabilities.edge.on_device.slots import TRIES, ModelSlots

OLD, NEW = b"old weights" * 40, b"new weights" * 50


def make_manifest(number: int, content: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    files = [{"path": "deep/model.onnx", "sha256": digest, "size": len(content)}]
    return {"model": "m", "number": number, "main": "deep/model.onnx", "files": files}


def update(slots: ModelSlots, number: int, content: bytes) -> None:
    path = Path(slots.prepare(number)) / "files" / "deep" / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    slots.finish(make_manifest(number, content))
    if slots.begin_trial(number):
        slots.accept(number)


def test_a_third_version_replaces_the_slot_that_is_not_served(tmp_path: Path) -> None:
    for number, content in ((1, OLD), (2, NEW), (3, OLD + NEW)):
        update(ModelSlots(str(tmp_path)), number, content)
    slots = ModelSlots(str(tmp_path))
    assert slots.serving == 3
    assert slots.find(2) is not None
    assert slots.find(1) is None


def test_a_version_that_ends_the_device_is_refused_after_some_starts(tmp_path: Path) -> None:
    update(ModelSlots(str(tmp_path)), 1, OLD)
    started = [ModelSlots(str(tmp_path)).begin_trial(2) for _ in range(TRIES + 1)]
    assert started == [True] * TRIES + [False]
    slots = ModelSlots(str(tmp_path))
    assert (slots.serving, slots.refused, slots.trial) == (1, 2, 0)
    assert "ended" in slots.problem


def test_a_fetch_that_was_cut_goes_on_and_that_of_another_version_is_removed(
    tmp_path: Path,
) -> None:
    part = Path(ModelSlots(str(tmp_path)).prepare(2)) / "files" / "m.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(NEW[:9])
    assert ModelSlots(str(tmp_path)).prepare(2) == str(part.parent.parent)
    assert part.read_bytes() == NEW[:9]
    ModelSlots(str(tmp_path)).prepare(3)
    assert not part.exists()


def test_each_version_has_its_own_tries(tmp_path: Path) -> None:
    slots = ModelSlots(str(tmp_path))
    started = [slots.begin_trial(number) for number in [2] * TRIES + [3] * TRIES]
    assert all(started)
    assert not slots.begin_trial(3)


def test_damaged_files_are_not_whole(tmp_path: Path) -> None:
    slots = ModelSlots(str(tmp_path))
    path = Path(slots.prepare(5)) / "files" / "deep" / "model.onnx"
    path.parent.mkdir(parents=True)
    path.write_bytes(NEW[:-1])
    with pytest.raises(ValueError, match=r"model\.onnx is damaged"):
        slots.finish(make_manifest(5, NEW))
    assert slots.find(5) is None


def test_an_unreadable_state_is_that_of_a_new_device(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{broken")
    assert ModelSlots(str(tmp_path)).serving == 0
    (tmp_path / "state.json").write_text(json.dumps(["a"]))
    assert module.read_json(str(tmp_path / "state.json")) is None


def test_a_served_version_with_a_damaged_file_gives_way_to_the_other_one(tmp_path: Path) -> None:
    for number, content in ((1, OLD), (2, NEW)):
        update(ModelSlots(str(tmp_path)), number, content)
    slots = ModelSlots(str(tmp_path))
    assert slots.check(2)
    Path(str(slots.find(2))).write_bytes(NEW[:-1])
    assert not slots.check(2)
    assert slots.serving == ModelSlots(str(tmp_path)).serving == 1
    update(slots, 2, NEW)
    assert slots.check(slots.serving)
    assert slots.serving == 2
    for number in (2, 1):
        Path(str(slots.find(number))).write_bytes(b"")
        assert not slots.check(number)
    assert (slots.serving, slots.find(1)) == (1, None)  # to be fetched again
    update(slots, 1, OLD)
    assert slots.check(1)


def test_a_damaged_state_keeps_the_lower_version_and_its_slot(tmp_path: Path) -> None:
    for number, content in ((1, OLD), (2, NEW), (3, OLD + NEW)):
        update(ModelSlots(str(tmp_path)), number, content)
    (tmp_path / "state.json").write_text("")
    slots = ModelSlots(str(tmp_path))
    assert slots.serving == 2
    update(slots, 4, OLD)  # into the slot of 3
    assert slots.find(2) is not None
    slots.accept(2)  # back: it lies in the slot that is not served
    slots.prepare(5)
    assert slots.find(2) is not None


def test_the_program_that_was_enrolled_gives_way_to_no_version_that_was_not_accepted(
    tmp_path: Path,
) -> None:
    """A version that was given up is in the spare slot while version 0 runs, which has no slot."""
    slots = ModelSlots(str(tmp_path))
    update(slots, 1, OLD)
    slots._write(slot="", number=0)
    assert not slots.check(0)
    assert slots.serving == 0
