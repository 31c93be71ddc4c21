"""The named volumes of this machine are listed with their sizes, and removed."""

import os
from pathlib import Path

from cavvy.providers.local.volumes import list_folders, remove_folder


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
    assert list_folders(tmp_path, "nobody") == ()
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


def test_what_an_interrupted_removal_has_left_goes_with_the_next(tmp_path: Path) -> None:
    above = tmp_path / "volumes" / "team"
    for each in (".removed-0/deep", "models"):
        (above / each).mkdir(parents=True)
    assert [each.name for each in list_folders(tmp_path, "team")] == ["models"]
    assert remove_folder(tmp_path, "team", "models")
    assert os.listdir(above) == []
