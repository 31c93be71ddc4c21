"""What changes something names its project in the first line, unless that is the usual one."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from click.testing import CliRunner, Result

from cavvy.cli.main import cli
from cavvy.client import API, REVISION

TOKEN = "cavvy_" + 43 * "x"


class Server(ThreadingHTTPServer):
    """Knows one account with roles in `projects`. `changed` has what was not only read."""

    projects: tuple[str, ...] = ()
    changed: list[str]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        names = self.server.projects
        roles = [{"account": "mia", "project": each, "role": "member"} for each in names]
        listed = [{"name": each, "parent": None, "roles": ["member"]} for each in names]
        about = {name: 0 for name in ("pid", "uptime_s", "idle_s", "idle_stop_s", "unfinished")}
        about |= {name: "x" for name in ("version", "host", "home", "address", "database")}
        about |= {"api": API, "revision": REVISION, "agent_protocols": [1]}
        about |= {"started_at": "2026-01-01T00:00:00Z"}
        answers: dict[str, object] = {"/v1/server": about}
        answers |= {"/v1/whoami": {"account": "mia", "roles": roles}, "/v1/projects": listed}
        self._answer(answers.get(self.path.partition("?")[0], []))

    def do_DELETE(self) -> None:
        self.server.changed.append(self.path)
        self._answer(None)

    do_PUT = do_POST = do_DELETE

    def _answer(self, value: object) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.rfile.read(length)
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *values: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server to which this user is signed in."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("CAVVY_HOME", "CAVVY_PROJECT", "CAVVY_CONTEXT", "CAVVY_URL", "CAVVY_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with Server(("127.0.0.1", 0), Handler) as made:
        made.changed = []
        made.projects = ("pm",)
        Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        signed_in = run("login", f"http://127.0.0.1:{made.server_port}", "--token", TOKEN)
        assert signed_in.exit_code == 0, signed_in.output
        yield made
        made.shutdown()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, prog_name="cavvy")


def delete(*more: str) -> list[str]:
    found = run("secret", "delete", "KEY", *more)
    assert found.exit_code == 0, found.output
    return found.output.splitlines()


def test_the_only_project_is_named_before_something_changes(server: Server) -> None:
    assert delete()[0] == "project pm"
    assert server.changed == ["/v1/projects/pm/secrets/KEY"]
    assert delete("-p", "other")[0] != "project other", "who names it knows it"
    assert "project pm" not in run("secret", "list").output, "nothing changes"


def test_the_chosen_project_is_named_and_the_usual_one_is_not(server: Server) -> None:
    server.projects = ("a", "b")
    refused = run("secret", "delete", "KEY")
    assert refused.exit_code != 0
    assert "several projects: a, b" in refused.output
    assert server.changed == []
    chosen = run("project", "use", "b")
    assert chosen.exit_code == 0, chosen.output
    assert delete()[0] == "project b"
    server.projects = ("a", "b", "default")
    assert run("project", "use", "default").exit_code == 0
    assert not delete()[0].startswith("project ")


def test_a_role_and_an_account_may_be_given_in_either_order(server: Server) -> None:
    for given in (("mia", "member"), ("member", "mia")):
        granted = run("role", "grant", *given, "-p", "pm")
        assert granted.exit_code == 0, granted.output
        assert "mia is member" in granted.output
    refused = run("role", "grant", "mia", "ben", "-p", "pm")
    assert refused.exit_code == 2
    assert "'ben' is not one of 'viewer', 'member'" in refused.output
