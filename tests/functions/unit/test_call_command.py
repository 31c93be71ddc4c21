"""`cavvy call APP FUNCTION --json`, with answers of the server that are given."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("cavvy.capabilities.serving", reason="`cavvy call` is its command")

from cavvy.capabilities.functions import apps_command, wire
from cavvy.capabilities.serving import call_command
from cavvy.cli.main import cli
from cavvy.cli.view.failure import CommandFailure
from cavvy.client.client import _INPUT_S
from cavvy.client.transport import QUIET_S

_WORDS = ["call", "shop", "pay", "--project", "p", "--json", "{}"]


def run(
    monkeypatch: pytest.MonkeyPatch, read: Callable[[wire.CallsReadAsk], wire.CallsRead]
) -> Any:
    @contextmanager
    def session() -> Iterator[None]:
        yield None

    def call(*args: Any) -> wire.FunctionAnswer:
        assert args[-1] == 0.0  # the command knows the call's ID before it waits
        return wire.FunctionAnswer(call="call1", state="waiting", result=wire.Raw(b"null"))

    monkeypatch.setattr(apps_command, "session", session)
    monkeypatch.setattr(wire, "call_function", call)
    monkeypatch.setattr(wire, "read_calls", lambda _, project, app, ask: read(ask))
    return CliRunner().invoke(cli, _WORDS)


def test_who_stops_waiting_learns_that_the_call_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(ask: wire.CallsReadAsk) -> wire.CallsRead:
        raise KeyboardInterrupt

    done = run(monkeypatch, interrupt)
    assert done.exit_code == 130
    assert "`cavvy apps cancel shop call1`" in done.stderr.replace("\n", " ")


def test_a_long_call_is_waited_for_without_doubts_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end = wire.CallResult(
        id="call1", function="pay", state="done", json=True, end=wire.CallEnd(), result=b"[1]"
    )
    answers = [wire.CallsRead(ended=[], missing=[]), wire.CallsRead(ended=[end], missing=[])]
    asked: list[float] = []

    def read(ask: wire.CallsReadAsk) -> wire.CallsRead:
        asked.append(ask.wait_s)
        return answers.pop(0)

    done = run(monkeypatch, read)
    assert (done.exit_code, done.stdout.split()) == (0, ["[", "1", "]"])
    # the client allows for waits of this length before it reports that nothing answers
    assert QUIET_S < asked[0] <= _INPUT_S


def test_an_app_is_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: str) -> None:
        raise CommandFailure("no service named shop")

    monkeypatch.setattr(call_command, "find_serving", refuse)
    done = CliRunner().invoke(cli, ["call", "shop", "pay", "--project", "p"])
    assert "cavvy call shop pay --json '{}'" in done.output + str(
        getattr(done.exception, "hint", "")
    )
