"""Which files `cavvy model publish` sends."""

import subprocess
from pathlib import Path

import pytest

from cavvy.capabilities.models.version_files import find_files
from cavvy.cli.view.failure import CommandFailure


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a link out of it, in the home folder."""
    home = tmp_path / "home"
    (home / "repo" / "src").mkdir(parents=True)
    (home / "private").mkdir()
    (home / "private" / "diary").write_text("text")
    (home / "repo" / "link").symlink_to("../private")
    subprocess.run(["git", "init", "-q", str(home / "repo")], check=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "repo")
    return home / "repo"


def test_a_link_of_a_repository_is_not_what_the_user_names(folder: Path) -> None:
    with pytest.raises(CommandFailure, match="leads out of its repository"):
        find_files("link", folder / "x")
    private = folder.parent / "private"
    assert find_files(str(private), folder / "x") == private
