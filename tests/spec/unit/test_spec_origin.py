"""What a run was made from: commit, changes, versions."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from cavvy import __version__
from cavvy.cli.main import cli
from cavvy.spec.ignore import list_files
from cavvy.spec.repository import MOST_DIFF_BYTES, capture, run_apart


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


def hostile_settings(program: str) -> str:
    """Return settings of a repository in which everything that git runs is `program`."""
    return f"""
[core]
\tfsmonitor = {program}
\thooksPath = hooks
\tsshCommand = {program}
\tgitProxy = {program}
\tpager = {program}
\teditor = {program}
\taskPass = {program}
\talternateRefsCommand = {program}
\tattributesFile = attributes
[filter "evil"]
\tclean = {program}
\tsmudge = {program}
\tprocess = {program}
\trequired = true
[diff]
\texternal = {program}
\tsubmodule = diff
[diff "evil"]
\tcommand = {program}
\ttextconv = {program}
[alias]
\tls-files = !{program}
\tdiff = !{program}
[pager]
\tdiff = {program}
\tls-files = {program}
[credential]
\thelper = !{program}
[gpg]
\tprogram = {program}
[remote "origin"]
\tpromisor = true
\turl = {os.curdir}
\tuploadpack = {program}
\tvcs = evil
[extensions]
\tpartialClone = origin
[uploadpack]
\tpackObjectsHook = {program}
"""


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def spoil(folder: Path, program: str) -> None:
    """Let git run `program` wherever the settings of the repository `folder` allow this."""
    (folder / "file").write_text("one\n")
    git(folder, "init")
    git(folder, "add", "-A")
    git(folder, "commit", "-m", "x")
    (folder / ".gitattributes").write_text("* filter=evil diff=evil\n")
    (folder / "file").write_text("two\n")
    (folder / "file2").write_text("untracked\n")
    own = Path(git(folder, "rev-parse", "--absolute-git-dir"))
    (own / "more").write_text(hostile_settings(program))
    append(own / "config", hostile_settings(program) + "[include]\n\tpath = more\n")
    for name in ("hooks/post-index-change", "hooks/fsmonitor-watchman", "hooks/pre-auto-gc"):
        (own / name).parent.mkdir(exist_ok=True)
        (own / name).write_text(f"#!/bin/sh\n{program}\n")
        (own / name).chmod(0o755)


def a_repository(folder: Path, program: str) -> None:
    spoil(folder, program)


def a_pointer_to_a_repository(folder: Path, program: str) -> None:
    spoil(folder, program)
    (folder / ".git").rename(folder / "elsewhere")
    (folder / ".git").write_text("gitdir: elsewhere\n")


def a_link_to_a_repository(folder: Path, program: str) -> None:
    spoil(folder, program)
    (folder / ".git").rename(folder / "elsewhere")
    (folder / ".git").symlink_to("elsewhere")


def a_repository_without_a_git_folder(folder: Path, program: str) -> None:
    spoil(folder, program)
    git(folder, "config", "core.bare", "false")
    git(folder, "config", "core.worktree", str(folder))
    for each in (folder / ".git").iterdir():
        each.rename(folder / each.name)
    (folder / ".git").rmdir()


def a_repository_within(folder: Path, program: str) -> None:
    git(folder, "init")
    (folder / "out").mkdir()
    spoil(folder / "out", program)


def a_submodule(folder: Path, program: str) -> None:
    a_repository_within(folder, program)
    git(folder, "add", "out")
    git(folder, "commit", "-m", "x")
    (folder / ".gitmodules").write_text(
        f'[submodule "out"]\n\tpath = out\n\turl = ext::{program}\n\tupdate = !{program}\n'
    )


def a_working_tree_of_a_repository(folder: Path, program: str) -> None:
    (folder / "main").mkdir()
    (folder / "main" / "file").write_text("one\n")
    git(folder / "main", "init")
    git(folder / "main", "add", "-A")
    git(folder / "main", "commit", "-m", "x")
    git(folder / "main", "worktree", "add", "../tree")
    (folder / "tree" / "file").write_text("two\n")
    (folder / "tree" / ".gitattributes").write_text("* filter=evil diff=evil\n")
    git(folder / "main", "config", "extensions.worktreeConfig", "true")
    own = folder / "main/.git/worktrees/tree"
    (own / "config.worktree").write_text(hostile_settings(program))
    append(folder / "main/.git/config", hostile_settings(program))


def a_missing_object(folder: Path, program: str) -> None:
    """git asks the remote of a partial clone for objects that are not here."""
    spoil(folder, program)
    for each in (folder / ".git/objects").glob("??/*"):
        each.unlink()


SHAPES = (
    a_repository,
    a_pointer_to_a_repository,
    a_link_to_a_repository,
    a_repository_without_a_git_folder,
    a_repository_within,
    a_submodule,
    a_working_tree_of_a_repository,
    a_missing_object,
)


@pytest.mark.parametrize("shape", SHAPES)
def test_settings_of_a_folder_run_nothing(
    tmp_path: Path, shape: Callable[[Path, str], None]
) -> None:
    ran, folder = tmp_path / "ran", tmp_path / "folder"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {ran}\nfalse\n")
    program.chmod(0o755)
    folder.mkdir()
    shape(folder, str(program))
    ran.unlink(missing_ok=True)  # git ran the program while the repository was made
    assert list_files(folder)
    for each in (folder, *(path for path in folder.iterdir() if path.is_dir())):
        list_files(each)
        capture(each)
    (folder / "task.yaml").write_text("run: x\nworkdir: .\n")
    assert CliRunner().invoke(cli, ["validate", str(folder / "task.yaml")]).exit_code == 0
    assert not ran.exists()


def test_a_remote_is_asked_without_the_settings_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    a_repository(tmp_path, f"touch {ran};")
    ran.unlink(missing_ok=True)
    monkeypatch.chdir(tmp_path)
    run_apart("ls-remote", "--", "ssh://127.0.0.1:1/x", "HEAD")
    assert not ran.exists()


def test_settings_of_the_user_run_nothing_in_a_folder(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that the user names by a relative path may be one that the folder brings."""
    home = repository.parent / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(
        '[core]\n\tfsmonitor = ./evil\n[filter "own"]\n\tclean = ./evil\n'
    )
    (repository / "evil").write_text("#!/bin/sh\ntouch ran\n")
    (repository / "evil").chmod(0o755)
    (repository / ".gitattributes").write_text("* filter=own\n")
    (repository / "a.py").write_text("new\n")
    monkeypatch.setenv("HOME", str(home))
    assert capture(repository).diff is not None
    assert "ran" not in list_files(repository)
    assert not (repository / "ran").exists()


def test_a_program_in_the_folder_is_not_git(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "git").write_text("#!/bin/sh\ntouch ran\n")
    (repository / "git").chmod(0o755)
    monkeypatch.chdir(repository)
    monkeypatch.setenv("PATH", f".:{os.environ['PATH']}")
    assert capture(repository).commit is not None
    assert not (repository / "ran").exists()


def test_a_repository_is_read_as_git_reads_it(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed references, a divided index, line ends and ignore files of the user still count."""
    home = repository.parent / "home"
    (home / ".config/git").mkdir(parents=True)
    (home / ".config/git/ignore").write_text("*.swp\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (repository / "a.swp").write_text("x")
    git(repository, "pack-refs", "--all")
    git(repository, "gc", "-q")
    git(repository, "update-index", "--split-index")
    git(repository, "config", "core.autocrlf", "input")
    (repository / "a.py").write_bytes(b"one\r\n")
    (repository / "new").write_text("x")
    git(repository, "add", "new")
    assert list_files(repository) == ["a.py", "new", "sub/b.py"]
    origin = capture(repository)
    assert origin.commit == git(repository, "rev-parse", "HEAD")
    assert origin.diff is not None
    assert "new file" in origin.diff
    assert "one" not in origin.diff
    (home / ".gitconfig").write_text("[core]\n\texcludesFile = ~/other\n")
    (home / "other").write_text("new*\nsub\n")
    (repository / "newer").write_text("x")
    assert list_files(repository) == ["a.py", "a.swp", "new", "sub/b.py"]


def test_a_working_tree_and_a_detached_one_have_their_own_commit(repository: Path) -> None:
    git(repository, "worktree", "add", "-b", "other", "../tree")
    tree = repository.parent / "tree"
    (tree / "a.py").write_text("two\n")
    git(tree, "commit", "-a", "-m", "y")
    assert capture(tree).commit == git(tree, "rev-parse", "HEAD")
    assert capture(tree).commit != capture(repository).commit
    git(tree, "checkout", "--detach")
    (tree / "a.py").write_text("three\n")
    assert capture(tree).commit == git(tree, "rev-parse", "HEAD")
    assert "+three" in (capture(tree).diff or "")


def test_a_repository_of_other_hashes(tmp_path: Path) -> None:
    git(tmp_path, "init", "--object-format=sha256")
    (tmp_path / "a").write_text("x")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-m", "x")
    assert capture(tmp_path).commit == git(tmp_path, "rev-parse", "HEAD")
    assert list_files(tmp_path) == ["a"]


def test_git_does_not_wait_for_the_writers_of_pipes(repository: Path) -> None:
    """A pipe has no end, so git would wait until its time limit."""
    expected = list_files(repository)
    pipes = ("index", "packed-refs", "excludes")
    for name in pipes:
        (repository / ".git" / name).unlink(missing_ok=True)
        os.mkfifo(repository / ".git" / name)
    git_config = repository / ".git/config"
    append(git_config, f"[core]\nexcludesFile = {repository}/.git/excludes\n")
    assert list_files(repository) == expected
    assert capture(repository).commit
