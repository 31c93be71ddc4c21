"""Files that others have made: which are obeyed here, and where they are written."""

import os
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import pytest
from tests.blob_source import BlobSource

from cavvy.cli.reach.received import find_obeyed_files, is_obeyed
from cavvy.client import ApiError
from cavvy.client.blobs import download_files
from cavvy.client.landing import Receipts


@pytest.mark.parametrize(
    "path",
    [
        *(".git/config", ".GIT/config", "a/.git./hooks/x", "git~1/config", ".g\u200cit/config"),
        *(".envrc", "a/.vscode/tasks.json", ".VSCODE/x", ".gitignore", "b/.cavvyignore"),
        *("cavvy.yaml", "CAVVY.YAML", ".devcontainer/devcontainer.json", ".gitattributes"),
    ],
)
def test_files_that_programs_obey_are_known_by_every_spelling(path: str) -> None:
    assert is_obeyed(path)
    assert find_obeyed_files(["model.onnx", path]) == [path]


def test_a_repository_without_a_git_folder_is_obeyed_as_a_whole() -> None:
    bare = ["b/HEAD", "b/config", "b/objects/aa/1", "b/refs/heads/main"]
    assert find_obeyed_files([*bare, "weights/HEAD", "git.onnx", ".github/x"]) == bare


@pytest.mark.parametrize("bad", ["../x", "/x", "a/../../x", "a//x", "./x", "x\0y", "", "link/x"])
def test_a_download_writes_only_below_its_folder(tmp_path: Path, bad: str) -> None:
    folder, outside = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    outside.mkdir()
    (folder / "link").symlink_to(outside)
    name = sha256(b"data").hexdigest()
    with pytest.raises(ApiError, match=r"out of the folder|link/x: Not a directory"):
        download_files(cast(Any, BlobSource({name: b"data"})), "p", [(bad, name, 4)], folder)
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]


def test_a_download_replaces_links_and_pipes_and_does_not_open_them(tmp_path: Path) -> None:
    folder, target = tmp_path / "in", tmp_path / "target"
    folder.mkdir()
    target.write_bytes(b"data")
    (folder / "link").symlink_to(target)
    (folder / "hard").hardlink_to(target)
    os.mkfifo(folder / "pipe")
    name = sha256(b"new!").hexdigest()
    files = [(each, name, 4) for each in ("link", "hard", "pipe")]
    assert download_files(cast(Any, BlobSource({name: b"new!"})), "p", files, folder) == 3
    assert target.read_bytes() == b"data"
    for each, _, _ in files:
        assert (folder / each).read_bytes() == b"new!"
        assert not (folder / each).is_symlink()


def test_a_folder_of_the_user_is_told_from_one_that_was_received(tmp_path: Path) -> None:
    folder, home = tmp_path / "models", str(tmp_path / "state")

    def receive(*paths: str) -> tuple[list[str], list[str]]:
        with Receipts(folder, home) as receipts:
            found = receipts.find_doubtful(paths)
            folder.mkdir(exist_ok=True)
            for path in paths * (found == ([], [])):
                (folder / path).write_text(f"received {len(paths)}")
                receipts.note(path)
        return found

    assert receive("a") == receive("a", "b") == receive("b", "c", "d") == ([], [])
    (folder / "b").write_text("mine")
    assert receive("a", "b", "e") == ([], ["b"])
    for path in folder.iterdir():  # another folder in its place, perhaps with the same inode
        path.unlink()
    (folder / "own").write_text("mine")
    assert receive("a", "own") == (["a"], ["own"])
    (folder / "own").unlink()
    assert receive("a") == ([], [])


def test_what_the_user_agreed_to_stays_received_in_a_folder_of_theirs(tmp_path: Path) -> None:
    home = str(tmp_path / "state")
    (tmp_path / "own").write_text("mine")
    with Receipts(tmp_path, home) as receipts:
        assert receipts.find_doubtful(["a"]) == (["a"], [])
        (tmp_path / "a").write_text("received")
        receipts.note("a")
    assert Receipts(tmp_path, home).find_doubtful(["a", "b"]) == (["b"], [])
