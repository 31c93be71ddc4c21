"""What a run was made from: commit, changes, versions."""

import subprocess
from pathlib import Path

import pytest

from cavvy import __version__
from cavvy.spec.origin import MOST_DIFF_BYTES, capture


def git(folder: Path, *arguments: str) -> str:
    author = (
        "-c",
        "user.name=A",
        "-c",
        "user.email=a@example.org",
        "-c",
        "init.defaultBranch=main",
    )
    done = subprocess.run(
        ["git", *author, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.py").write_text("one\n")
    (tmp_path / "sub" / "b.py").write_text("two\n")
    git(tmp_path, "init")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-m", "x")
    return tmp_path


def test_a_clean_repository_has_a_commit_and_no_diff(repository: Path) -> None:
    origin = capture(repository, task_text="run: x", snapshot="abc")
    assert origin.commit == git(repository, "rev-parse", "HEAD")
    assert origin.diff is None
    assert (origin.task_text, origin.snapshot) == ("run: x", "abc")
    assert origin.versions["cavvy"] == __version__
    assert set(origin.versions) == {"cavvy", "python", "platform"}


def test_the_diff_applies_to_the_commit(repository: Path) -> None:
    (repository / "a.py").write_text("changed\n")
    (repository / "sub" / "b.py").unlink()
    (repository / "untracked").write_text("x")
    diff = capture(repository).diff
    assert diff is not None
    assert "untracked" not in diff
    git(repository, "checkout", "--", ".")
    (repository.parent / "d.patch").write_text(diff)
    git(repository, "apply", str(repository.parent / "d.patch"))
    assert (repository / "a.py").read_text() == "changed\n"
    assert not (repository / "sub" / "b.py").exists()


def test_only_changes_below_the_folder_count(repository: Path) -> None:
    (repository / "a.py").write_text("changed\n")
    assert capture(repository / "sub").diff is None


def test_a_huge_diff_is_cut_with_a_note(repository: Path) -> None:
    (repository / "a.py").write_text("line of text\n" * 200_000)
    diff = capture(repository).diff
    assert diff is not None
    assert len(diff) < MOST_DIFF_BYTES + 200
    assert diff.splitlines()[-1].startswith("# cut here by Cavvy: 2,")


def test_settings_of_the_caller_do_not_lead_elsewhere(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert capture(repository).commit is not None


def test_a_plain_folder_and_a_repository_without_commits(tmp_path: Path) -> None:
    assert capture(tmp_path).commit is None
    git(tmp_path, "init")
    origin = capture(tmp_path)
    assert (origin.commit, origin.diff) == (None, None)
