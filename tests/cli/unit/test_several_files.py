"""`cavvy run A.yaml B.yaml` submits the tasks of all files with one request."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.unit.cli_client import FakeClient

from cavvy.cli.main import cli
from cavvy.client import ApiError, wire


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[wire.BatchRequest]:
    """The requests that were sent. A task with the name `costly` needs consent, and one with the
    name `wrong` is refused."""
    found, client = list[wire.BatchRequest](), FakeClient()

    def submit(project: str, ask: wire.BatchRequest) -> wire.SubmittedBatch:
        names = [str(each.text).partition("name: ")[2].partition(",")[0] for each in ask.tasks]
        for number, name in enumerate(names):
            if name == "wrong":
                text = f"{ask.tasks[number].path}: project default has no secret S"
                raise ApiError("secret-missing", text, "set it", 422)
            if name == "costly" and not ask.tasks[0].consent:
                text = "costly costs $3/h"
                raise ApiError("consent-needed", text, "", 402)
        found.append(ask)
        jobs = [
            wire.Submitted(id=key, project=project, name=name, phase="queued")
            for key, name in zip(ask.keys, names, strict=True)
        ]
        return wire.SubmittedBatch(jobs=jobs, refused=[])

    monkeypatch.setattr(client, "submit_batch", submit, raising=False)
    monkeypatch.setattr("cavvy.cli.task.several_files.session", lambda: client)
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "costly", "wrong"):
        Path(f"{name}.yaml").write_text(f"{{name: {name}, run: echo {name}}}")
    return found


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["run", "-d", *arguments], prog_name="cavvy")


def test_files_are_submitted_together(asked: list[wire.BatchRequest]) -> None:
    done = run("a.yaml", "b.yaml", "--env", "A=1")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        "2 tasks submitted to project default: a b",
        "wait for them: cavvy wait a b",
    ]
    [ask] = asked
    assert [(each.path, each.text) for each in ask.tasks] == [
        ("a.yaml", "{name: a, run: echo a}"),
        ("b.yaml", "{name: b, run: echo b}"),
    ]
    origins = [json.loads(bytes(each.origin)) for each in ask.tasks]  # type: ignore[arg-type]  # Raw
    assert [json.loads(each["overrides"]) for each in origins] == [{"env": {"A": "1"}}] * 2
    assert not ask.each
    listed = run("a.yaml", "b.yaml", "-o", "json")
    assert [each["name"] for each in json.loads(listed.stdout)] == ["a", "b"]


def test_a_refusal_names_the_file(asked: list[wire.BatchRequest]) -> None:
    done = run("a.yaml", "wrong.yaml")
    assert done.exit_code != 0
    assert isinstance(done.exception, ApiError)
    assert done.exception.message == "wrong.yaml: project default has no secret S"
    done = run("a.yaml", "costly.yaml")
    assert done.exit_code == 2
    assert "costly costs $3/h" in done.stderr
    assert asked == []
    assert run("a.yaml", "costly.yaml", "--yes").exit_code == 0
    assert [each.consent for each in asked[0].tasks] == [True, True]


def test_files_that_cannot_be_submitted_together(asked: list[Any]) -> None:
    Path("pair.yaml").write_text("name: a\nrun: x\n---\nname: b\nrun: x\nafter: a\n")
    Path("folder.yaml").mkdir()
    Path("other.yaml").write_text("{name: c, project: other, run: x}")
    for words, told in (
        (["a.yaml", "pair.yaml"], "pair.yaml has 2 tasks"),
        (["a.yaml", "other.yaml"], "for project default, and other.yaml for project other"),
        (["a.yaml", "folder.yaml"], "folder.yaml: is a folder"),
        (["a.yaml", "none.yaml"], "none.yaml: the file does not exist"),
        (["a.yaml", "b.yaml", "--name", "c"], "--name is for one file"),
        (["a.yaml", "lr=3", "x"], "expected one task file, but 3 words were given"),
    ):
        done = run(*words)
        assert (done.exit_code, told in done.stderr) == (2, True), done.stderr
    assert asked == []


def test_the_same_folder_is_sent_once(
    asked: list[wire.BatchRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = list[str]()

    def upload(_: object, project: str, blobs: object) -> int:
        sent.append(project)
        return 1

    monkeypatch.setattr("cavvy.cli.task.submission.upload", upload)
    done = run("a.yaml", "b.yaml", "--workdir", ".")
    assert done.exit_code == 0, done.output
    assert (len(sent), done.stderr.count("working folder ")) == (1, 1)
    origins = [json.loads(bytes(each.origin)) for each in asked[0].tasks]  # type: ignore[arg-type]
    assert origins[0]["snapshot"] == origins[1]["snapshot"] is not None


def test_a_dry_run_submits_nothing(asked: list[Any]) -> None:
    done = CliRunner().invoke(cli, ["run", "--dry-run", "a.yaml", "b.yaml"], prog_name="cavvy")
    assert done.stdout.splitlines()[:2] == ["a.yaml: a", "b.yaml: b"]
    assert asked == []
