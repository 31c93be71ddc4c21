"""Which files `cavvy image build` writes, and which it gives to the container engine."""

import os
from pathlib import Path

import pytest

from cavvy.cli.image import _find_inside, _write_context
from cavvy.cli.view.failure import CommandFailure
from cavvy.spec.dockerfile import SETUP_FILE, DockerfileRecipe
from cavvy.spec.workdir import freeze

RECIPE = DockerfileRecipe(text="FROM x\n", files={SETUP_FILE: "setup\n"}, uses=None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    made.mkdir()
    (made / "a.py").write_text("a")
    return made


def test_the_setup_is_not_written_through_a_link_of_the_folder(
    tmp_path: Path, folder: Path
) -> None:
    start = tmp_path / ".bashrc"
    start.write_text("mine")
    (folder / SETUP_FILE).symlink_to(start)
    _write_context(tmp_path / "context", RECIPE, freeze(folder))
    assert start.read_text() == "mine"
    assert (tmp_path / "context" / SETUP_FILE).read_text() == "setup\n"
    assert not (tmp_path / "context" / SETUP_FILE).is_symlink()


def test_a_folder_in_the_place_of_the_setup_is_told(tmp_path: Path, folder: Path) -> None:
    (folder / SETUP_FILE).mkdir()
    (folder / SETUP_FILE / "x").write_text("x")
    with pytest.raises(CommandFailure, match=SETUP_FILE):
        _write_context(tmp_path / "context", RECIPE, freeze(folder))


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_takes_the_place_of_a_file_is_not_read(
    tmp_path: Path, folder: Path, kind: str
) -> None:
    snapshot = freeze(folder)
    (tmp_path / "key").write_text("key")
    (folder / "a.py").unlink()
    if kind == "link":
        (folder / "a.py").symlink_to(tmp_path / "key")
        with pytest.raises(CommandFailure, match=r"a\.py"):
            _write_context(tmp_path / "context", RECIPE, snapshot)
    else:
        os.mkfifo(folder / "a.py")
        _write_context(tmp_path / "context", RECIPE, snapshot)
        assert (tmp_path / "context" / "a.py").read_bytes() == b""


@pytest.mark.parametrize("path", ["link", "link/deep", "..", "/", "loop", "a/../../home"])
def test_a_build_folder_stays_in_the_working_folder(
    tmp_path: Path, folder: Path, path: str
) -> None:
    (tmp_path / "home" / "deep").mkdir(parents=True)
    (folder / "link").symlink_to("../home")
    (folder / "loop").symlink_to("loop")
    with pytest.raises(CommandFailure):
        _find_inside(folder, path)
    (folder / "docker").mkdir()
    (folder / "inner").symlink_to("docker")
    assert _find_inside(folder, ".") == folder
    assert _find_inside(folder, "inner") == folder / "docker"
