"""A device whose power is cut at any write or rename of an update has a whole version to serve, and
the update succeeds when it is started again."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cavvy.edge import slots as module
from cavvy.edge.slots import TRIES, ModelSlots

OLD, NEW = b"old weights" * 40, b"new weights" * 50


class PowerCut(BaseException):
    """Raised in place of a step, which then has no effect."""


class CutDisk:
    """Counts the calls that change the disk, and cuts the power at the call `at`."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def step(self, *_: object) -> None:
        self.calls += 1
        if self.calls > self.at:
            raise PowerCut

    @contextmanager
    def active(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with monkeypatch.context() as patch:
            for name in ("open", "rename", "unlink", "fsync", "makedirs", "rmdir"):
                self._cut(patch, os, name)
            yield

    def _cut(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            self.step()
            return real(*given, **named)

        patch.setattr(owner, name, call)


def make_manifest(number: int, content: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    files = [{"path": "deep/model.onnx", "sha256": digest, "size": len(content)}]
    return {"model": "m", "number": number, "main": "deep/model.onnx", "files": files}


def update(slots: ModelSlots, number: int, content: bytes, cut: CutDisk | None = None) -> None:
    """What a device does for a new version, with the content in pieces of 7 bytes."""
    if slots.find(number) is None:
        slot = slots.prepare(number)
        path = Path(slot) / "files" / "deep" / "model.onnx"
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        have = part.stat().st_size if part.exists() else 0
        with part.open("ab") as file:
            for start in range(have, len(content), 7):
                if cut is not None:
                    cut.step()
                file.write(content[start : start + 7])
                file.flush()
        os.rename(part, path)
        slots.finish(make_manifest(number, content))
    if slots.begin_trial(number):
        slots.accept(number)


def read_served(folder: Path) -> bytes:
    fresh = ModelSlots(str(folder))
    path = fresh.find(fresh.serving)
    assert path is not None, "the device has no version to serve"
    return Path(path).read_bytes()


def test_no_power_cut_leaves_a_device_without_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "first"
    update(ModelSlots(str(first)), 1, OLD)
    assert read_served(first) == OLD
    offset = 0
    while True:
        folder = tmp_path / f"cut-{offset}"
        shutil.copytree(first, folder)
        slots, cut = ModelSlots(str(folder)), CutDisk(offset)
        try:
            with cut.active(monkeypatch):
                update(slots, 2, NEW, cut)
        except PowerCut:
            assert read_served(folder) in (OLD, NEW), f"cut at step {offset}"
            update(ModelSlots(str(folder)), 2, NEW)
            assert read_served(folder) == NEW, f"cut at step {offset}"
            shutil.rmtree(folder)
            offset += 1
            continue
        break
    assert offset > len(NEW) // 7, "no step of the update was cut"
    assert read_served(folder) == NEW


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
