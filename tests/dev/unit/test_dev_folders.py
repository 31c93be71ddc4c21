"""Which folders `cavvy dev --sync` mirrors."""

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from cavvy.capabilities.dev import command as dev
from cavvy.cli.main import cli
from cavvy.cli.view.failure import CommandFailure


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a link out of it, in the home folder of a user with keys."""
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
        dev._find_sync(Path("link"))
    private = folder.parent / "private"
    assert dev._find_sync(private) == private


def test_a_link_that_the_user_has_made_is_asked_for_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(click, "confirm", lambda question, **more: asked.append(question))
    private = folder.parent / "private"
    assert [dev._find_sync(Path("link")) for _ in range(2)] == [private] * 2
    assert len(asked) == 1
    (folder / "link").unlink()
    (folder / "link").symlink_to(folder.parent / "private2")
    (folder.parent / "private2").mkdir()
    assert dev._find_sync(Path("link")) == folder.parent / "private2"
    assert len(asked) == 2, "it leads elsewhere now"


def test_a_folder_with_the_users_keys_is_not_mirrored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAVVY_HOME", str(folder / ".state" / "cavvy"))
    for wrong in (Path.home(), folder, folder / ".state"):
        with pytest.raises(CommandFailure, match="keys that a session must not read"):
            dev._find_sync(wrong)
    assert dev._find_sync(folder / "src") == folder / "src"
    result = CliRunner().invoke(cli, ["dev", "--sync", str(Path.home())])
    assert (result.exit_code, "nothing was sent" in result.output) == (2, True)
