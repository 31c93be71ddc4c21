"""`cavvy services queue` says why a call is not sent again."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from cavvy.capabilities.serving import call_command as call
from cavvy.capabilities.serving import call_wire


@pytest.mark.parametrize(
    ("arguments", "count", "said", "code"),
    [
        (["chat", "one"], 1, "1 call of chat will be sent again", 0),
        (["chat"], 0, "0 calls of chat will be sent again", 0),
        (["chat", "one"], 0, "call one is done; only dead calls can be sent again", 1),
    ],
)
def test_only_dead_calls_are_sent_again(
    arguments: list[str], count: int, said: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(call=SimpleNamespace(state="done"))
    monkeypatch.setattr(call, "session", nullcontext)
    monkeypatch.setattr(call_wire, "retry_calls", lambda *_: count)
    monkeypatch.setattr(call_wire, "find_call", lambda *_: found)
    done = CliRunner().invoke(call.queue_command, ["retry", *arguments])
    assert (done.exit_code, said in done.output) == (code, True)
