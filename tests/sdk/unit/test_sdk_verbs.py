"""What the command does has the same name in Python, or a reason why Python has no such method."""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from cavvy import AsyncClient, Client, Job, JobNotFound
from cavvy.cli.main import COMMANDS
from cavvy.client import ApiError
from cavvy.sdk import client as sdk_client
from cavvy.sdk.connections import Connections
from cavvy.sdk.errors import public_errors

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "cli.md"
# Commands whose method has the name of what it returns or takes.
NAMED = {
    "batch": "map",  # as built-in functions that apply a function to each row
    "nodes": "hosts",  # the part of nodes that has verbs
    "policy": "policies",
}
# Why a command has no method.
REASONS = {
    "it works on files and the terminal of this computer, before there is a job": (
        *(
            "init",
            "validate",
            "convert",
            "import",
            "export",
            "image",
            "data",
            "diagram",
            "bench",
            "profile",
        ),
        "tune",
        *("deploy", "doctor", "completion", "mcp", "setup", "check", "server", "runner", "quota"),
    ),
    "it answers from the catalog without a server: `cavvy ... -o json` prints it for programs": (
        *("offers", "plan", "estimate", "compare", "tco", "decide", "simulate", "catalog"),
    ),
    "it belongs to a capability, which the package does not need: the API returns the same": (
        *("curves", "log"),
    ),
    "Python has an interface of its own for it: `cavvy.App`, `Dict`, `Sandbox`": (
        *("apps", "sandbox", "state"),
    ),
    "it opens a terminal, a browser or a connection": (
        *("top", "console", "dev", "exec", "ssh", "cp", "forward", "chat"),
    ),
    "services have an interface of their own, HTTP, which every language calls": (
        *("serve", "services", "call", "key", "queue", "unserve", "model", "edge"),
    ),
    "people decide it, seldom, with the whole picture before them": (
        *("budget", "notify", "advise", "join", "joined", "drill", "down", "gc"),
        *("user", "role", "project", "audit", "credential", "pool", "trust", "token", "secret"),
        *("machines", "schedules", "diff", "resize"),
    ),
    "an argument of Client says it: the address, the token": ("login", "logout", "context"),
    "`Client.submit` runs a task again, with other parameters if they are given": ("rerun",),
}
# Commands whose name means something else in Python.
OTHERS = {"reserve": "`Client.reserve` holds own hosts, as `cavvy nodes reservations add` does"}
UNNAMED = {name: why for why, names in REASONS.items() for name in names}


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_every_command_has_a_method_of_its_name_or_a_reason(client: type) -> None:
    # the page is that of a whole installation; here, a capability may be left out
    known = re.findall(r"^(?:## |\| `)cavvy ([\w-]+)(?:$|` \|)", PAGE.read_text(), re.MULTILINE)
    assert not {*UNNAMED} - {*known, "completion"}, "a command is gone"
    for command in COMMANDS.keys() - OTHERS:
        method = getattr(client, NAMED.get(command, command), None)
        assert callable(method) != (command in UNNAMED), command


def test_both_clients_have_the_same_methods_with_the_same_arguments() -> None:
    methods = [name for name, each in vars(Client).items() if callable(each) and name[0] != "_"]
    for name in methods:
        plain, other = (inspect.signature(getattr(each, name)) for each in (Client, AsyncClient))
        given, wanted = list(other.parameters), list(plain.parameters)
        assert given[1:] == wanted[1:] or name.startswith("submit"), name


def test_a_verb_of_the_client_is_that_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, dict[str, object]]] = []
    client = object.__new__(Client)
    job = object.__new__(Job)
    job.last_status = made = object()  # type: ignore[assignment]
    monkeypatch.setattr(Client, "job", lambda self, name, *, project=None: job)

    def record(name: str) -> Callable[..., Iterator[str]]:
        def call(self: Job, *args: object, **how: object) -> Iterator[str]:
            called.append((name, how))
            return iter("ab")

        return call

    for name in ("wait", "stop", "retry", "remove", "logs", "events"):
        monkeypatch.setattr(Job, name, record(name))
    assert client.status("x") is made
    assert "".join(client.logs("x", rank=2)) == "ab"
    assert len([*client.events("x", follow=True)]) == 2
    client.wait("x", "running", check=False)
    client.stop("x", wait=False)
    client.retry("x")
    client.rm("x")
    assert called == [
        ("logs", {"follow": False, "rank": 2, "attempt": None}),
        ("events", {"follow": True}),
        ("wait", {"timeout": None, "check": False}),
        ("stop", {"wait": False}),
        ("retry", {}),
        ("remove", {}),
    ]


def test_the_name_of_an_array_leads_to_the_array(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ApiError("job-not-found", "project default has no job", "", 404)

    @contextmanager
    def use(self: object) -> Iterator[object]:
        with public_errors():
            yield SimpleNamespace(job=fail)

    def fail(*names: str, **how: object) -> None:
        raise missing

    def read(connection: object, project: str, name: str) -> str:
        if name != "sweep":
            raise missing
        return name

    monkeypatch.setattr(Connections, "use", use)
    monkeypatch.setattr(sdk_client, "read_array", read)
    client = Client("http://127.0.0.1:1", token="t", project="default")
    with pytest.raises(JobNotFound, match="sweep is an array") as told:
        client.wait("sweep")
    assert "Client.array('sweep')" in told.value.hint
    for name in ("train", "sweep.0"):
        with pytest.raises(JobNotFound, match="has no job"):
            client.wait(name)
