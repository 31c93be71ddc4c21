"""`run` and `plan` take options that replace what the file says, a command, and standard input."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.unit.cli_client import FakeClient

import cavvy.cli.run
from cavvy.cli.main import cli
from cavvy.client import wire


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, object]]:
    """What is submitted."""
    found: list[dict[str, object]] = []
    client = FakeClient()

    def submit(text: str, **how: object) -> wire.Submitted:
        found.append({"text": text, **how})
        return wire.Submitted(id="1", project="default", name="a", phase="queued")

    monkeypatch.setattr(client, "submit", submit, raising=False)
    monkeypatch.setattr(cavvy.cli.run, "session", lambda: client)
    monkeypatch.chdir(tmp_path)
    return found


def run(*arguments: str, given: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["run", "-d", *arguments], input=given, prog_name="cavvy")


def overrides(sent: list[dict[str, object]]) -> object:
    return json.loads(sent[-1]["origin"].overrides)  # type: ignore[attr-defined]  # a RunOrigin


def test_options_are_sent_beside_the_file(
    sent: list[dict[str, object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "t")
    (tmp_path / "a.yaml").write_text("run: x\nnum_nodes: 2")
    options = "--gpu H100:8 --gpu A100:8 --spot --region eu --provider aws --nodes 3 --env A=b=c"
    options += " --env TOKEN --secret S --budget 25 --deadline 8h --max-price 3.5 --image python:3"
    done = run("a.yaml", *options.split())
    assert done.exit_code == 0, done.output
    assert overrides(sent) == {
        "resources": {
            "gpu": ["H100:8", "A100:8"],
            "spot": "only",
            "providers": ["aws"],
            "regions": ["eu"],
            "max_price": "3.5",
        },
        "nodes": "3",
        "image": "python:3",
        "env": {"A": "b=c", "TOKEN": "t"},
        "secrets": ["S"],
        "limits": {"budget": "25", "deadline": "8h"},
    }
    assert sent[0]["text"] == "run: x\nnum_nodes: 2"
    assert sent[0]["origin"].dialect == "SkyPilot"  # type: ignore[attr-defined]  # a RunOrigin


def test_a_command_needs_no_file(sent: list[dict[str, object]]) -> None:
    assert run("--no-spot", "--", "python", "-c", "print('a b')", "--", "x").exit_code == 0
    assert json.loads(str(sent[0]["text"])) == {"run": """python -c 'print('"'"'a b'"'"')' -- x"""}
    assert (sent[0]["path"], overrides(sent)) == ("python", {"resources": {"spot": "never"}})


def test_one_word_is_a_line_of_shell(sent: list[dict[str, object]]) -> None:
    assert run("--", "cd /tmp && ls").exit_code == 0
    assert json.loads(str(sent[0]["text"])) == {"run": "cd /tmp && ls"}


def test_a_command_replaces_that_of_the_file(sent: list[dict[str, object]], tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("run: x\nnodes: 2")
    assert run("a.yaml", "--", "nvidia-smi").exit_code == 0
    assert (sent[0]["text"], overrides(sent)) == ("run: x\nnodes: 2", {"run": "nvidia-smi"})


def test_a_task_from_standard_input(sent: list[dict[str, object]]) -> None:
    assert run("-", given="name: b\nrun: x").exit_code == 0
    assert sent[0]["text"] == "name: b\nrun: x"


def test_the_tool_can_be_named(sent: list[dict[str, object]], tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: My_Task\nrun: x")
    refused = run("a.yaml")
    assert refused.exit_code == 2
    assert "`--as skypilot` reads it so" in refused.stderr
    assert run("a.yaml", "--as", "skypilot").exit_code == 0
    assert sent[0]["origin"].dialect == "SkyPilot"  # type: ignore[attr-defined]  # a RunOrigin


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "H100:x"], "--gpu H100:x: "),
        (["--nodes", "0"], "--nodes 0: "),
        (["--deadline", "2001-01-01T00:00Z"], "the deadline was "),
        (["--env", "CAVVY_X=1"], "is for Cavvy to set"),
        (["--env", "NOT_SET_HERE"], "there is no such variable here"),
        (["--secret", "A=b"], "--secret A=b: "),
        (["--budget", "much"], "--budget much: "),
    ],
)
def test_a_wrong_option_is_named(
    sent: list[dict[str, object]], tmp_path: Path, options: list[str], message: str
) -> None:
    (tmp_path / "a.yaml").write_text("run: x")
    done = run("a.yaml", *options)
    assert done.exit_code == 2
    assert message in done.stderr
    assert not sent


def test_nothing_to_run_is_a_wrong_use(sent: list[dict[str, object]]) -> None:
    assert run().exit_code == 2
    assert run("--").exit_code == 2


def test_a_dry_run_submits_nothing(sent: list[dict[str, object]]) -> None:
    done = run("--dry-run", "--", "echo", "hi")
    assert done.exit_code == 0, done.output
    assert "echo hi" in done.output
    assert "local" in done.output
    assert not sent
