"""Folders that leave this machine only after a question."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from tests.own_parts import reads_other_tools

from cavvy.cli.main import cli
from cavvy.cli.task import submission
from cavvy.cli.task.options import _note_sent
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.output_file import check_output
from cavvy.frame.discover import find_capabilities
from cavvy.sdk.files import find_parts, freeze_parts
from cavvy.sdk.submission import _check_folders
from cavvy.sdk.task import Task
from cavvy.spec.sent_folders import DoubtfulFolder, find_doubtful, find_exit
from cavvy.spec.workdir import FreezeError, list_folder
from cavvy.task_files import ReadOptions, load_task

# the capabilities of commands that write files
OWNERS = {"diagram": "choose", "mcp": "mcp", "edge": "edge", "init": "templates", "audit": "core"}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    folder = home / "repo"
    (folder / "tasks").mkdir(parents=True)
    (folder / "src").mkdir()
    (folder / "src" / "a.py").write_text("a")
    (home / ".ssh").mkdir()
    (home / ".ssh" / "id_ed25519").write_text("key")
    (home / "private").mkdir()
    (home / "private" / "diary").write_text("text")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    (folder / "link").symlink_to("../private")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(folder)
    return folder


def find(folder: Path, text: str, overrides: str = "") -> list[DoubtfulFolder]:
    """Return what a task file of the repository must ask for."""
    file = folder / "tasks" / "a.yaml"
    file.write_text(text)
    loaded = load_task(str(file), {}, options=ReadOptions(overrides=overrides))
    parts = find_parts(loaded.task, loaded.source, loaded.folder)
    snapshot = freeze_parts(loaded.task, parts, folder.parent / ".state", 100)
    submission._agree_to_folders(loaded, parts, snapshot, set())
    return find_doubtful(parts, loaded.folder, snapshot)


@pytest.mark.parametrize(
    ("text", "named", "why"),
    [
        ("workdir: ../link", "private", "outside of"),
        ("workdir: ../../private", "private", "outside of"),
        ("workdir: ../../.ssh", ".ssh", "credentials"),
        *(
            pytest.param(*row, marks=reads_other_tools)
            for row in (
                ("resources: {cpus: 1}\nworkdir: ~/.ssh", ".ssh", "credentials"),
                ("resources: {cpus: 1}\nworkdir: ~/private", "private", "outside of"),
                ("type: task\nrepos: ['~/.ssh']\ncommands: [x]", ".ssh", "credentials"),
                ("type: task\nrepos: ['~/private']\ncommands: [x]", "private", "outside of"),
            )
        ),
    ],
)
def test_a_folder_that_the_file_has_no_right_to_is_named_with_its_size(
    repository: Path, monkeypatch: pytest.MonkeyPatch, text: str, named: str, why: str
) -> None:
    text = text if "type: task" in text else f"{text}\nrun: x\n"
    monkeypatch.setattr(submission, "may_ask", lambda: False)
    with pytest.raises(CommandFailure) as found:
        find(repository, text)
    assert f"{repository.parent / named} (" in found.value.message
    assert " in 1 file) " in found.value.message
    assert why in found.value.message
    assert "--workdir" in found.value.hint
    assert "--yes does not agree" in found.value.hint


def test_folders_of_the_repository_and_those_that_the_user_names_are_sent(
    repository: Path,
) -> None:
    for path in ("..", "../src", "."):
        assert find(repository, f"workdir: {path}\nsetup: x\nrun: x\n") == []
    private = repository.parent / "private"
    chosen = find(repository, "workdir: ../link\nrun: x\n", f'{{"workdir": "{private}"}}')
    assert [each.real for each in chosen] == [private], "named, and not asked for"


def test_a_user_who_says_no_at_the_terminal_sends_nothing(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def refuse(text: str, **_: object) -> None:
        asked.append(text)
        raise click.Abort

    monkeypatch.setattr(submission, "may_ask", lambda: True)
    monkeypatch.setattr(click, "confirm", refuse)
    with pytest.raises(click.Abort):
        find(repository, "workdir: ../../.ssh\nrun: x\n")
    assert asked == ["send it?"]


def test_a_repository_of_the_home_folder_gives_no_right_to_it(repository: Path) -> None:
    subprocess.run(["git", "init", "-q", str(repository.parent)], check=True)
    loose = repository.parent / "download"
    (loose / "tasks").mkdir(parents=True)
    with pytest.raises(CommandFailure, match="outside of"):
        find(loose, "workdir: ../../private\nrun: x\n")


def test_the_current_folder_above_a_file_without_a_working_folder_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "train.py").write_text("x")
    monkeypatch.chdir(tmp_path)
    assert find_folder(tmp_path) == tmp_path
    find(tmp_path, "run: python train.py\n")


def find_folder(folder: Path) -> Path:
    (folder / "tasks" / "a.yaml").write_text("run: python train.py\n")
    loaded = load_task("tasks/a.yaml", {})
    return find_parts(loaded.task, loaded.source, loaded.folder)[""].resolve()


@reads_other_tools
@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("resources: {cpus: 1}\nfile_mounts: {/tmp/x: ~/private}\nrun: x\n", "private"),
        ("resources: {cpus: 1}\nfile_mounts: {/tmp/x: ~/private/diary}\nrun: x\n", "private/diary"),
        ("resources: {cpus: 1}\nfile_mounts: {/tmp/x: ./link}\nrun: x\n", "private"),
        ("resources: {cpus: 1}\nfile_mounts: {/tmp/x: ../private}\nrun: x\n", "private"),
        ("type: task\nfiles: ['~/private:/tmp/x']\ncommands: [x]", "private"),
    ],
)
def test_other_files_outside_of_the_repository_need_a_question_too(
    repository: Path, monkeypatch: pytest.MonkeyPatch, text: str, named: str
) -> None:
    """No list of names knows what is private."""
    real = repository.parent / named
    monkeypatch.setattr(submission, "may_ask", lambda: False)
    with pytest.raises(CommandFailure, match="is outside of") as found:
        find(repository, text)
    assert f"{real} (4 B in 1 file)" in found.value.message
    assert f"--send {real}; --yes does not agree" in found.value.hint
    with click.Context(click.Command("run"), obj=None) as context:
        _note_sent(context, click.Option(["--send"]), (str(real),))
        find(repository, text)
        _note_sent(context, click.Option(["--send"]), ("link",))  # the link is not what it leads to
        with pytest.raises(CommandFailure, match="is outside of"):
            find(repository, text)


@reads_other_tools
def test_files_of_the_repository_and_of_a_named_folder_need_none(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "may_ask", lambda: False)
    mounts = "resources: {cpus: 1}\nfile_mounts: {/tmp/x: %s}\nrun: x\n"
    assert find(repository, mounts % "./src") == []
    loose = repository.parent / "loose"
    (loose / "tasks").mkdir(parents=True)
    (loose / "data").mkdir()
    (loose / "data" / "a").write_text("x")
    monkeypatch.chdir(loose)
    assert find(loose, mounts % "./data") == []


def test_a_link_of_a_repository_is_not_what_the_user_names(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "may_ask", lambda: False)
    with pytest.raises(
        CommandFailure, match=r"is where .*link leads, a link out of its repository"
    ):
        find(repository, "run: x\n", f'{{"workdir": "{repository}/link"}}')
    private = repository.parent / "private"
    assert find_exit(Path("link")) == find_exit(repository / "link/below") == repository / "link"
    assert find_exit(private) is find_exit(Path("src")) is None
    (repository / "inner").symlink_to("src")
    assert find_exit(Path("inner")) is None
    (repository.parent / "data").symlink_to("private")  # the user's own
    assert find_exit(repository.parent / "data") is None


def test_a_link_that_the_user_has_made_is_asked_for(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of both made it, no file says; --yes does not agree to it."""
    asked, answers = list[str](), iter([False, True])

    def confirm(question: str, **more: object) -> None:
        asked.append(question)
        if not next(answers):
            raise click.Abort

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(click, "confirm", confirm)
    with pytest.raises(click.Abort):
        check_output(Path("link/out.json"))
    check_output(Path("link/out.json"))
    check_output(Path("link/other.json"))  # asked once
    assert asked == ["write there?"] * 2
    (repository / "link").unlink()
    (repository / "link").symlink_to(repository.parent)
    with pytest.raises(StopIteration):  # it leads elsewhere now
        check_output(Path("link/out.json"))


@reads_other_tools
def test_a_program_names_what_it_sends_for_a_file(repository: Path) -> None:
    file, private = repository / "a.yaml", repository.parent / "private"
    file.write_text("resources: {cpus: 1}\nfile_mounts: {/tmp/x: ~/private}\nrun: x\n")
    for sent in ([], ["link"], [private], ["~/private"]):
        task = Task.from_file(file, send=sent).replace(name="b")
        loaded = task._load()
        parts = find_parts(loaded.task, loaded.source, loaded.folder)
        snapshot = freeze_parts(loaded.task, parts, repository.parent / ".state", 100)
        assert task.sent is not None
        if sent in ([], ["link"]):
            with pytest.raises(FreezeError, match=r"is outside of .* send=\[PATH\]"):
                _check_folders(loaded, parts, snapshot, task.sent)
        else:
            _check_folders(loaded, parts, snapshot, task.sent)


def test_what_a_command_writes_follows_no_link_out_of_a_repository(repository: Path) -> None:
    """The text may be another person's, such as the commands of an exported task."""
    obeyed = repository.parent / ".bashrc"
    (repository / "job.sh").symlink_to("../.bashrc")
    (repository / "a.yaml").write_text("run: evil\n")
    for command in (["export", "slurm", "a.yaml", "--to"], ["init", "--defaults"]):
        result = CliRunner().invoke(cli, [*command, "job.sh"])
        assert "a link that leads out of its repository" in result.output.replace("\n", " ")
        assert (result.exit_code, obeyed.exists()) == (2, False)
    private = repository.parent / "private"
    installed = {"core", *(each.name for each in find_capabilities().capabilities)}
    for command in (
        ["diagram", "decision", "--folder", "link"],
        ["diagram", "decision", "--folder", "link/new"],
        ["init", "--template", "cnn", "link"],
        ["audit", "export", "-o", "link/x"],
        ["mcp", "--install-skill", "link"],
        ["edge", "collect", "m", "--out", "link/x"],
    ):
        if OWNERS[command[0]] not in installed:
            continue  # its capability was taken out
        result = CliRunner().invoke(cli, command)
        assert "a link that leads out of its repository" in result.output.replace("\n", " "), (
            command
        )
        assert (result.exit_code, os.listdir(private)) == (2, ["diary"])


def test_the_server_of_an_engine_needs_no_question(repository: Path) -> None:
    file = repository / "service.yaml"
    (repository / "model.onnx").write_text("x")
    file.write_text(
        "name: a\nresources: {cpu: 1}\nservice: {engine: onnxruntime, model: ./model.onnx}\n"
    )
    loaded = load_task(str(file), {}, options=ReadOptions(serves=True))
    parts = find_parts(loaded.task, loaded.source, loaded.folder)
    snapshot = freeze_parts(loaded.task, parts, repository.parent / ".state", 100)
    assert any("cavvy" in str(each.resolve()) for each in parts.values())
    assert find_doubtful(parts, loaded.folder, snapshot) == []


KEY = (
    "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEA\n-----END OPENSSH PRIVATE KEY-----\n"
)


@pytest.mark.parametrize(
    "content",
    [
        KEY,
        KEY.replace("OPENSSH ", ""),
        KEY.replace("OPENSSH", "RSA"),
        f"# mine\r\n{KEY}",
        json.dumps({"type": "service_account", "private_key": KEY.replace("OPENSSH ", "")}),
    ],
)
def test_a_private_key_leaves_a_repository_only_after_a_question(
    repository: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setattr(submission, "may_ask", lambda: False)
    (repository / "src" / "notes.txt").write_text(content)
    with pytest.raises(CommandFailure, match=r"git does not track, src/notes\.txt") as found:
        find(repository, "workdir: ..\nrun: x\n")
    assert f"--workdir {repository}" in found.value.hint
    (repository / ".cavvyignore").write_text("notes.txt\n")
    assert find(repository, "workdir: ..\nrun: x\n") == []
    (repository / ".cavvyignore").unlink()
    subprocess.run(["git", "add", "."], cwd=repository, check=True)  # others have it then
    assert find(repository, "workdir: ..\nrun: x\n") == []


def test_a_text_about_keys_is_none(repository: Path) -> None:
    (repository / "src" / "a.py").write_text('START = "-----BEGIN PRIVATE KEY-----"')
    (repository / "src" / "a.pub").write_text("-----BEGIN PUBLIC KEY-----\nMCow\n")
    assert find(repository, "workdir: ..\nrun: x\n") == []


def test_a_private_key_of_a_folder_without_git_needs_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "may_ask", lambda: False)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "id").write_text(KEY)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the second time, its hash is known
        with pytest.raises(CommandFailure, match="private key"):
            find(tmp_path, "workdir: ..\nrun: x\n")


def test_what_git_does_not_track_is_named_before_it_is_sent(repository: Path) -> None:
    subprocess.run(["git", "add", "."], cwd=repository, check=True)
    repository.chmod(0o755)
    assert not list_folder(repository)[1][1:]  # a link leads out of the folder
    for name, mode in (("a.txt", 0o644), (".env", 0o644), ("z.txt", 0o600), ("b.txt", 0o644)):
        (repository / name).write_text("x")
        (repository / name).chmod(mode)
    told = list_folder(repository)[1][-1]
    assert told.startswith("git does not track z.txt, .env, a.txt and 1 more")
    repository.chmod(0o700)  # nobody else can read it, so that no file is closed more than others
    assert list_folder(repository)[1][-1].startswith("git does not track .env, a.txt, b.txt and 1")
    (repository / ".gitignore").write_text(".env\n?.txt\n.gitignore\n")
    assert not list_folder(repository)[1][1:]
