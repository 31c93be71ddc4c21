"""Copies of a database do not stay in the state folder when a command is killed."""

from pathlib import Path

from cavvy.server.backup import work_folder


def test_the_folders_of_killed_commands_are_deleted(tmp_path: Path) -> None:
    left = tmp_path / "backup-abc"
    left.mkdir()
    (left / "cavvy.db").write_text("secrets")
    (tmp_path / "backup-notes").write_text("a file of the user")
    (tmp_path / "other-abc").mkdir()
    with work_folder(tmp_path, "backup") as folder:
        (folder / "cavvy.db").write_text("copy")
        assert not left.exists()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["backup-notes", "other-abc"]


def test_the_folder_of_a_running_command_stays(tmp_path: Path) -> None:
    with work_folder(tmp_path, "backup") as one:
        assert one.stat().st_mode & 0o077 == 0
        with work_folder(tmp_path, "backup") as two:
            assert one.is_dir()
            assert two.is_dir()
        assert one.is_dir()
    assert not list(tmp_path.iterdir())
