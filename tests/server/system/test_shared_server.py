"""A server for a company: it starts with a certificate and makes its first admin, who sets up two
teams. A member of each signs in from another machine, works, is refused and asks for more, and an
auditor verifies the log.
"""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from tests.certificates import Authority
from tests.system.ports import free_port
from tests.system.trust import User, user_at
from tests.waits import wait_until

pytestmark = pytest.mark.system
_MISTAKE = ("role", "grant", "ben", "member", "-p", "vison")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_team_shares_a_server(tmp_path: Path, stack: ExitStack) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue()
    root, ada, ben, cal = (stack.enter_context(user_at(tmp_path / name)) for name in "rabc")
    root.settings("[providers.local]\n")
    assert "cavvy server start --listen" in root.cli("server", "init", "--admin", "ada", code=1)
    root.cli("server", "stop")
    url = f"https://127.0.0.1:{free_port()}"
    listen = url.removeprefix("https://")
    told = root.cli(
        *("server", "start", "--listen", listen),
        *("--tls-cert", str(certificate), "--tls-key", str(key)),
    )
    assert url in told

    line = root.output("server", "init", "--admin", "ada").split()
    assert line[:4] == ["cavvy", "login", url, "--token"]
    assert "already has an admin: ada" in root.cli("server", "init", "--admin", "eve", code=1)

    # Without its authority, the certificate is not trusted; the token is not sent, nor the try
    # repeated.
    said = ada.cli(*line[1:], code=69)
    assert "certificate of" in said
    assert "--ca-file" in said
    trust = ("--ca-file", str(authority.ca))
    assert "does not belong" in ada.cli("login", url, "--token", "wrong", *trust, code=1)
    assert "signed in" in ada.cli(*line[1:], *trust)
    assert ada.json("context", "list")[0]["used"]

    ada.cli("project", "create", "vision")
    ada.cli("user", "add", "ben")
    assert "not created" not in ada.cli("role", "grant", "ben", "member", "-p", "vision")
    assert "vison was not created as a project" in ada.cli(*_MISTAKE)
    ada.cli("role", "revoke", *_MISTAKE[2:])
    token = ada.output("token", "create", "--user", "ben")
    (ben.root / "token").write_text(token)
    ben.cli("login", url, "--token-file", str(ben.root / "token"), "--name", "team", *trust)
    check_work(ada, ben, root)
    check_second_team(ada, ben, cal, (url, *trust))
    check_audit(ada, ben, tmp_path / "audit.jsonl")

    # A renewed certificate needs no restart; connections that began stay.
    newer = authority.issue("newer")
    for old, new in zip((certificate, key), newer, strict=True):
        new.replace(old)
    assert {each["name"] for each in ben.json("ps", "-p", "vision")} == {"hello", "hello-2"}
    check_targets(ben)
    ben.cli("logout")
    assert json.loads((ben.home / "contexts.json").read_text())["contexts"] == []
    assert ben.cli("server", "status", code=3)  # no server of ben's own was ever started


def check_second_team(ada: User, ben: User, cal: User, server: tuple[str, ...]) -> None:
    """A member of another team sees only that team, is refused by its policy, and asks for a larger
    budget, which only an admin can approve.
    """
    ada.cli("project", "create", "speech")
    ada.cli("user", "add", "cal")
    ada.cli("role", "grant", "cal", "member", "-p", "speech")
    token = ada.output("token", "create", "--user", "cal")
    cal.cli("login", server[0], "--token", token.strip(), "--name", "team", *server[1:])
    for user, other in ((ben, "speech"), (cal, "vision")):
        assert "project" in user.cli("ps", "-p", other, code=1)
    (cal.work / "task.yaml").write_text("name: hello\nrun: echo hello from cal\n")
    assert "created as" not in ada.cli("policy", "set", "-p", "speech", "--providers", "aws")
    set_by_mistake = ("policy", "set", "-p", "spech", "--max-price", "1")
    assert "spech was not created as a project" in ada.cli(*set_by_mistake)
    (ada.work / "key").write_text("hunter2")
    secret = ("secret", "set", "KEY", "--file", str(ada.work / "key"))
    assert "`cavvy secret delete KEY -p spech` removes" in ada.cli(*secret, "-p", "spech")
    assert "created as" not in ada.cli(*secret, "-p", "speech")
    assert "policy" in cal.cli("run", "task.yaml", "-p", "speech", "--yes", code=1)
    ada.cli("policy", "set", "-p", "speech", "--providers", "any")
    assert "hello from cal" in cal.cli("run", "task.yaml", "-p", "speech", "--yes")

    set_by_mistake = ("budget", "set", "speech-month", "10", "--project", "spech")
    assert "`cavvy cost budget remove speech-month`" in ada.cli(*set_by_mistake)
    set_right = ada.cli("budget", "set", "speech-month", "10", "--project", "speech")
    assert "created as" not in set_right
    assert "of all projects" not in set_right
    assert "note: jobs of all projects with this tag" in ada.cli(
        "budget", "set", "b", "1", "--tag", "a=b"
    )
    ada.cli("budget", "remove", "b")
    cal.cli("budget", "request", "speech-month", "20", "-p", "speech", "--reason", "more data")
    assert "role" in cal.cli("budget", "approve", "speech-month", "20", code=1)
    assert ada.cli("budget", "approve", "speech-month", "15", code=1)
    ada.cli("budget", "approve", "speech-month", "20")
    (budget,) = ada.json("budget", "list")
    assert budget["month_limit_micros"] == 20_000_000


def check_audit(ada: User, ben: User, exported: Path) -> None:
    """An auditor sees what happened, and finds a change in an exported log."""
    ada.cli("user", "add", "eve")
    ada.cli("role", "grant", "eve", "auditor", "--all-projects")
    token = ada.output("token", "create", "--user", "eve").strip()
    url = ada.json("context", "list")[0]["address"]
    ben.variables["SSL_CERT_FILE"] = str(exported.with_name("ca.pem"))  # trusted by the system
    ben.cli("login", url, "--token", token, "--name", "audit")
    told = ben.cli("audit", "list")
    asked = "POST /v1/projects/{project}/budgets/{name}/request"
    for text in ("POST /v1/projects/{project}/jobs", asked, "role-needed", "ben", "127.0.0.1"):
        assert text in told
    assert token not in told
    assert [each["code"] for each in ben.json("audit", "list", "--refused", "--account", "ben")]
    head = ben.output("audit", "verify").strip()
    ada.cli("user", "remove", "eve")
    assert "does not belong" in ben.cli("audit", "verify", code=1)
    ada.cli("audit", "export", "-o", str(exported))
    assert "are intact" in ben.cli("audit", "verify", str(exported), "--head", head)
    lines = exported.read_text().splitlines(keepends=True)
    exported.write_text("".join(lines[:2]))
    assert "the log ends at record 2" in ben.cli(
        "audit", "verify", str(exported), "--head", head, code=1
    )
    exported.write_text("".join([*lines[:2], *lines[3:]]))
    assert "record 3: the record is missing" in ben.cli("audit", "verify", str(exported), code=1)
    exported.write_text("no record\n")
    assert "line 1: this is not a record" in ben.cli("audit", "verify", str(exported), code=1)
    assert "expected NUMBER:HASH" in ben.cli("audit", "verify", "--head", "x", code=2)
    ben.cli("logout", "audit")
    ben.cli("context", "use", "team")


def check_work(ada: User, ben: User, root: User) -> None:
    """A member runs a job with a file of theirs, and is refused where they have no role."""
    (ben.work / "words.txt").write_text("hello from ben\n")
    (ben.work / "task.yaml").write_text("name: hello\nworkdir: .\nrun: cat words.txt\n")
    assert "hello from ben" in ben.cli("run", "task.yaml", "-p", "vision", "--yes")
    (job,) = ada.json("ps", "-p", "vision")
    assert (job["name"], job["phase"]) == ("hello", "done")
    assert ada.json("status", "hello", "-p", "vision")["user"] == "ben"
    assert "hello from ben" in root.cli("logs", "hello", "-p", "vision")
    # Without -p it goes to the one project that the member has, which is named first.
    said = ben.cli("run", "task.yaml", "--yes")
    assert "hello from ben" in said
    assert "vision" in said
    refused = ben.cli("run", "task.yaml", "-p", "default", "--yes", code=1)
    assert "hello from ben" not in refused
    assert "project" in refused
    assert "role" in ben.cli("user", "add", "eve", code=1)


def check_targets(ben: User) -> None:
    """A member's webhook and input reach no program on the server's machine, and the refusals do
    not tell whether one is there.
    """
    with socket.create_server(("127.0.0.1", 0)) as program:
        program.setblocking(False)
        port = program.getsockname()[1]
        for host in (f"127.0.0.1:{port}", "127.0.0.1:9", f"[::ffff:127.0.0.1]:{port}"):
            hook = f"webhooks: [{{url: 'http://{host}/hook', on: [finish]}}]"
            ben.task(f"name: hooked\nrun: 'true'\n{hook}\n")
            ben.cli("run", "task.yaml", "-p", "vision", "--yes")
            name = ben.json("ps", "-p", "vision", "--all")[0]["name"]
            wait_until(partial(tell_webhook, ben, name))
            assert "server.private_targets does not list it" in tell_webhook(ben, name)
            ben.task(
                f"name: fed\nrun: 'true'\ninputs: [{{source: 'http://{host}/x', target: x}}]\n"
            )
            said = ben.cli("run", "task.yaml", "-p", "vision", "--yes", code=None)
            assert "server.private_targets does not list it" in said
        with pytest.raises(BlockingIOError):
            program.accept()


def tell_webhook(user: User, job: str) -> str:
    events = user.json("events", job, "-p", "vision")
    return " ".join(each["text"] for each in events if each["kind"] == "webhook")
