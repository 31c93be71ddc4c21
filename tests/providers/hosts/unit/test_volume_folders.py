"""The named volumes of this machine are listed with their sizes, and removed."""

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cavvy.providers.local import volumes
from cavvy.providers.local.volumes import list_folders, list_names, remove_folder


def test_volumes_of_a_project_are_counted_and_removed(tmp_path: Path) -> None:
    for path, size in (
        ("team/models/deep/a", 9000),
        ("team/models/b", 1),
        ("team/empty/", 0),
        ("other/models/c", 1),
    ):
        place = tmp_path / "volumes" / path
        (place if path.endswith("/") else place.parent).mkdir(parents=True, exist_ok=True)
        if size:
            place.write_bytes(bytes([1]) * size)
    (tmp_path / "volumes/team/models/link").symlink_to("/usr")
    empty, models = list_folders(tmp_path, "team")
    assert (empty.name, empty.files, empty.size_bytes) == ("empty", 0, 0)
    assert (models.name, models.files) == ("models", 3)
    used = sum(
        (tmp_path / "volumes/team/models" / each).stat().st_blocks for each in ("deep/a", "b")
    )
    assert models.size_bytes >= used * 512 >= 9001
    assert remove_folder(tmp_path, "team", "models")
    assert not remove_folder(tmp_path, "team", "models")
    assert os.listdir(tmp_path / "volumes/team") == ["empty"]
    assert list_folders(tmp_path, "nobody") == []
    assert (tmp_path / "volumes/other/models/c").exists()
    assert os.path.isdir("/usr")


def test_nothing_else_is_removed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    above = tmp_path / "volumes" / "team"
    above.mkdir(parents=True)
    (above / "link").symlink_to(kept)
    (above / "file").write_text("x")
    for name in ("..", ".", "", "../../kept", "link", ".hidden"):
        assert not remove_folder(tmp_path, "team", name)
    assert list_folders(tmp_path, "team") == []
    assert kept.is_dir()
    assert not remove_folder(tmp_path, "team", "file")


_NOBODY = """
import os, sys
from pathlib import Path
from cavvy.providers.local.volumes import list_folders, list_names, remove_folder
home = Path(sys.argv[1])
if os.geteuid() == 0:
    os.chown(home, 65534, 65534)
    os.setgid(65534)
    os.setuid(65534)
above = home / "volumes" / "team"
for name in ("cache", "kept", ".removed-0"):
    inner = above / name / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "file").write_text("x")
    for folder, mode in ((inner, 0o555), (inner.parent, 0o111), (above / name, 0o555)):
        folder.chmod(mode)
assert remove_folder(home, "team", "cache"), "read-only folders"
assert os.listdir(above) == ["kept"], "what an interrupted removal has left goes, too"
above.chmod(0o555)
try:
    remove_folder(home, "team", "kept")
except PermissionError:
    assert [each.name for each in list_folders(home, "team")] == ["kept"]
    print("done")
above.chmod(0o755)
"""


def test_read_only_folders_hinder_neither_this_removal_nor_others() -> None:
    """As a user that is not root, for whom modes of folders count."""
    with tempfile.TemporaryDirectory() as home:
        found = subprocess.run(
            [sys.executable, "-c", _NOBODY, home], capture_output=True, text=True, check=False
        )
    assert (found.stdout, found.stderr) == ("done\n", "")


def test_a_volume_that_cannot_be_removed_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "volumes/team/models").mkdir(parents=True)
    (tmp_path / "volumes/team/other").mkdir()

    def fail(top: Path) -> None:
        raise OSError(errno.EBUSY, "busy", str(top))

    with monkeypatch.context() as patch:
        patch.setattr(volumes, "remove_tree", fail)
        with pytest.raises(OSError, match="busy"):
            remove_folder(tmp_path, "team", "models")
    assert [each.name for each in list_folders(tmp_path, "team")] == ["models", "other"]
    assert remove_folder(tmp_path, "team", "models")
    assert os.listdir(tmp_path / "volumes/team") == ["other"]


def test_what_an_interrupted_removal_has_left_goes_with_the_next(tmp_path: Path) -> None:
    above = tmp_path / "volumes" / "team"
    for each in (".removed-0/deep", "models"):
        (above / each).mkdir(parents=True)
    assert [each.name for each in list_folders(tmp_path, "team")] == ["models"]
    assert remove_folder(tmp_path, "team", "models")
    assert os.listdir(above) == []


def test_the_names_of_all_projects_are_listed(tmp_path: Path) -> None:
    assert list_names(tmp_path) == []
    for each in ("b/models", "a/models", "a/.removed-0", ".x/models"):
        (tmp_path / "volumes" / each).mkdir(parents=True)
    (tmp_path / "volumes/a/link").symlink_to("/usr")
    assert list_names(tmp_path) == [("a", "models"), ("b", "models")]
