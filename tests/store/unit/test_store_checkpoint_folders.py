"""The server copies a job's checkpoint folder, which the job may still change."""

import os
from pathlib import Path

import pytest

from cavvy.store import checkpoint_folders as folders
from cavvy.store.checkpoint_folders import CheckpointFolders


def test_links_are_taken_in_as_links(tmp_path: Path) -> None:
    made = CheckpointFolders(tmp_path)
    assert made.take_in("p", "job") == []
    folder = tmp_path / "p/job/checkpoint"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub/file").write_text("content")
    (folder / "last").symlink_to("sub/file")
    (folder / "away").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    found = made.take_in("p", "job")
    assert [(each.path, each.link, each.size) for each in found] == [
        ("away", str(tmp_path), 0),
        ("last", "sub/file", 0),
        ("sub/file", None, 7),
    ]
    made.lay_out("p", "job", found)
    assert (folder / "last").read_text() == "content"


@pytest.mark.parametrize("name", ["file", "sub/file"])
def test_a_file_that_becomes_a_link_is_not_taken_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path / "p/job/checkpoint"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "others").mkdir()
    (tmp_path / "others/file").write_text("secret")
    (folder / name).write_text("of the job")
    plain = folders._walk

    def swap(opened: int) -> list[tuple[str, str]]:
        found = list(plain(opened))
        if name == "file":
            (folder / name).unlink()
            (folder / name).symlink_to(tmp_path / "others/file")
        else:
            (folder / "sub").rename(folder / "moved")
            (folder / "sub").symlink_to(tmp_path / "others")
        return found

    monkeypatch.setattr(folders, "_walk", swap)
    with pytest.raises(OSError):
        CheckpointFolders(tmp_path).take_in("p", "job")
