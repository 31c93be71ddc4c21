"""Folders that jobs have filled, however deep they are: Python's own functions fail at a depth of
about a thousand, so a job could keep a server from being backed up.
"""

import os
from pathlib import Path

import pytest

from cavvy.server.backup import list_files
from cavvy.store.checkpoint_folders import CheckpointFolders
from cavvy.trees import remove_tree, walk_tree


def make_deep(top: Path, levels: int) -> None:
    """Folders within each other, with a file in the first and in the last."""
    top.mkdir(parents=True)
    (top / "first").write_text("x")
    here = os.open(top, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("last", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)


@pytest.mark.parametrize("levels", [3, 1_200, 3_000])
def test_a_deep_folder_is_removed(tmp_path: Path, levels: int) -> None:
    make_deep(tmp_path / "top", levels)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    (tmp_path / "top" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "top" / "d" / "file").symlink_to(tmp_path / "kept" / "file")
    remove_tree(tmp_path / "top")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept" / "file").read_text() == "x"


@pytest.mark.parametrize("known", [False, True])
def test_folders_that_a_removal_left_or_a_job_placed_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """Folders that are not empty have the names that the removal gives to others."""
    mark = str(os.getpid())
    if known:
        monkeypatch.setattr(os, "urandom", bytes)
        mark = "00" * 8
    for number in range(4):
        for inner in ("x/y", "z"):
            (tmp_path / "top" / f".removed-{mark}-{number}" / inner).mkdir(parents=True)
    remove_tree(tmp_path / "top")
    assert not (tmp_path / "top").exists()


def test_what_is_no_folder_is_an_error_unless_errors_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "to")
    for name in ("missing", "link"):
        with pytest.raises(OSError, match=name):
            remove_tree(tmp_path / name)
        remove_tree(tmp_path / name, ignore_errors=True)
    assert (tmp_path / "to").is_dir()


def test_a_walk_is_that_of_the_library(tmp_path: Path) -> None:
    for name in ("a/b/c", "a/x", "b"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text("x")
    found = {where: (sorted(inner), sorted(names)) for where, inner, names in walk_tree(tmp_path)}
    wanted = {where: (sorted(inner), sorted(names)) for where, inner, names in os.walk(tmp_path)}
    assert found == wanted
    kept = []
    for where, inner, _ in walk_tree(tmp_path):
        kept.append(os.path.relpath(where, tmp_path))
        inner[:] = [name for name in inner if name != "b"]
    assert sorted(kept) == [".", "a", "a/x"]


def test_a_job_with_deep_folders_is_backed_up_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "storage" / "default" / "j1" / "checkpoint"
    make_deep(folder, 1_200)
    listed = {str(path) for path in list_files(tmp_path)}
    inner = "storage/default/j1/checkpoint/"
    assert listed == {f"{inner}first", f"{inner}{'d/' * 1_200}last"}
    removed = CheckpointFolders(tmp_path / "storage").remove("default", "j1")
    assert (removed.bytes >= 1, removed.kept) == (True, "")
    assert not folder.parent.exists()
