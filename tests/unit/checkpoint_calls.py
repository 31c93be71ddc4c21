"""What tests of handed-over checkpoints share."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cavvy.agent.work import checkpoint_hand_over


class StillLoop:
    """Calls nothing by itself."""

    def after(self, seconds: float, call: Callable[[], None]) -> object:
        return object()

    def cancel(self, timer: object) -> None:
        pass


def make_calm_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str = "a") -> Path:
    """A checkpoint folder with one file; to hand it over leaves the test's own process as it is."""
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (folder / name).write_text("first")
    monkeypatch.setattr(os, "nice", lambda by: by)
    monkeypatch.setattr(checkpoint_hand_over, "raise_limit", lambda: None)
    return folder
