"""`cavvy serve` takes options that replace what the file says."""

import json
import os
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from tests.unit.cli_client import FakeClient

import cavvy.capabilities.serving.serve_command
from cavvy import named_files
from cavvy.capabilities.serving.wire import ServedView
from cavvy.cli.main import cli
from cavvy.client.wire import SubmitRequest

FILE = """\
envs: {WORD: }
resources: {ports: 80}
service: {readiness_probe: {path: /, headers: {X-Word: $WORD}}, replicas: 1}
run: x
"""
SERVED: dict[str, object] = {
    **dict.fromkeys(("project", "name", "user", "state", "why", "problem"), "a"),
    **dict.fromkeys(("revision", "ready", "target", "least", "most", "spent_micros"), 1),
    **{"models": [], "replicas": [], "traffic": None, "url": "http://127.0.0.1:1/default/a"},
    "created_at": "2026-01-02T03:04:05Z",
}


class ServiceClient(FakeClient):
    """Records the bodies of requests."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[bytes] = []

    def ask(
        self,
        target: str,
        kind: type[ServedView],
        body: SubmitRequest | None = None,
        *,
        method: str = "GET",
    ) -> ServedView:
        if body is not None:
            self.bodies.append(msgspec.json.encode(body))
        return msgspec.convert(SERVED, kind)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ServiceClient:
    found = ServiceClient()
    monkeypatch.setattr(cavvy.capabilities.serving.serve_command, "session", lambda: found)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(FILE)
    return found


def serve(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["serve", *arguments], prog_name="cavvy")


def test_options_are_sent_beside_the_file(client: ServiceClient) -> None:
    done = serve("a.yaml", "--as", "skypilot", "--env", "WORD=hi", "--gpu", "H100:8", "-y")
    assert done.exit_code == 0, done.output
    sent = json.loads(client.bodies[0])
    assert sent["text"] == FILE
    expected = {"env": {"WORD": "hi"}, "resources": {"gpu": ["H100:8"]}}
    assert json.loads(sent["origin"]["overrides"]) == expected
    assert sent["origin"]["dialect"] == "SkyPilot"


def test_the_help_offers_no_option_that_every_service_is_refused_for(
    client: ServiceClient,
) -> None:
    offered = serve("--help").output
    for option in ("--after", "--group", "--machine", "--pool", "--deadline"):
        refused = serve("a.yaml", "--env", "WORD=hi", option, "2h")
        assert (refused.exit_code, "a service cannot have this key" in refused.stderr) == (2, True)
        assert f"{option} " not in offered
    assert "--gpu " in offered


def test_what_a_service_needs_is_asked_for(client: ServiceClient) -> None:
    for arguments, problem in (
        ((), "expected a task file or -"),
        (("a.yaml",), "set the variable with --env"),
        (("a.yaml", "--env", "WORD=hi", "--machine", "m"), "a service cannot have this key"),
    ):
        done = serve(*arguments)
        assert (done.exit_code, problem in done.stderr) == (2, True), done.stderr
    assert not client.bodies


def test_the_list_of_keys_needs_a_service() -> None:
    asked = CliRunner().invoke(cli, ["key"], prog_name="cavvy")
    assert "expected one of create, list, revoke" in asked.stderr


def test_a_pipe_into_which_nothing_writes_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named_files, "WAIT_S", 0.1)
    os.mkfifo(tmp_path / "pipe.yaml")
    done = serve(str(tmp_path / "pipe.yaml"))
    assert done.exit_code in (1, 2), done.output
    assert "no program has opened it to write" in done.output
