"""`cavvy.log` and `cavvy log`, with the agent's socket."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import cavvy
from cavvy.agent.config import ConfigFields
from cavvy.agent.loop import EventLoop
from cavvy.agent.notification_socket import NotificationSocket
from cavvy.agent.work.meters import UsageMeter
from cavvy.agent.work.monitor import WorkMonitor
from cavvy.capabilities.curves.log_command import command
from cavvy.sdk import curves


class Agent:
    """What an agent of this node hears, and would send."""

    def __init__(self, home: Path) -> None:
        self.sent: list[dict[str, Any]] = []
        self.socket = NotificationSocket(EventLoop(), str(home), self._hear, lambda *_: None)
        usage = UsageMeter(None, b"")  # type: ignore[arg-type]
        self.watch = WorkMonitor(
            self._say, usage, progress=str(home / "p"), checkpoints=None, idle_s=None
        )

    def _hear(self, fields: ConfigFields) -> None:
        logged = fields.inner("logged")
        assert logged is not None
        self.watch.log(logged)

    def _say(self, kind: str, **fields: Any) -> None:
        if kind == "points":
            self.sent += fields["series"]

    def end(self) -> list[dict[str, Any]]:
        self.socket.drain()
        self.watch.end()
        return self.sent


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    made = Agent(tmp_path)
    monkeypatch.setenv("CAVVY_NOTICE", made.socket.path)
    monkeypatch.setattr(curves, "_door", curves._Door())
    yield made
    curves._door._close()
    made.socket.close()


def rows(sent: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (tuple(each["names"]), each.get("process", 0), row[0], *row[2:])
        for each in sent
        for row in each["rows"]
    ]


def test_values_of_a_program_reach_the_agent(agent: Agent) -> None:
    import numpy

    cavvy.log({"loss": 0.5, "train": {"acc": numpy.float32(0.25)}}, step=3)
    cavvy.log({"loss": 0.25, "ok": True})
    assert rows(agent.end()) == [
        (("loss", "train/acc"), 0, 3, 0.5, 0.25),
        (("loss", "ok"), 0, None, 0.25, 1),
    ]


def test_what_a_program_logs_before_it_ends_is_read(agent: Agent) -> None:
    """The agent learns of its end before it has read the socket."""
    for step in range(2030):  # the last 30 are left; Linux keeps about 70 such lines of a sender
        curves.log({"loss": step}, step=step)
        if step % 50 == 49:
            agent.socket.drain()
    curves._door._close()
    assert len(rows(agent.end())) == 2030


def test_no_number_is_a_gap_with_a_name(agent: Agent) -> None:
    cavvy.log({"loss": float("nan"), "acc": 0.5}, step=1)
    sent = agent.end()
    assert json.dumps(sent, allow_nan=False)
    assert [(each["names"], each.get("odd", False)) for each in sent] == [
        (["acc"], False),
        (["loss"], True),
    ]


def test_processes_of_a_node_are_told_apart(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    cavvy.log({"loss": 0.5}, step=1)
    assert rows(agent.end()) == [(("loss",), 3, 1, 0.5)]


def test_more_names_than_a_message_holds_are_several(agent: Agent) -> None:
    found = {f"{'x' * 500}{number}": float(number) for number in range(100)}
    curves.log(found)
    agent.end()
    pieces = curves._cut(found)
    assert len(pieces) > 1
    assert {name: value for each in pieces for name, value in each.items()} == found
    assert all(len(json.dumps(each)) < 65_000 for each in pieces)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"loss": "high"}, "`loss` is 'high'"),
        ({"a": {"b": [1, 2]}}, "`a/b` is"),
        ({"x": None}, "`x`"),
    ],
)
def test_what_is_no_number_is_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(TypeError, match="must be") as refused:
        cavvy.log(values)
    assert named in str(refused.value)


def test_a_script_logs_values(agent: Agent) -> None:
    result = CliRunner().invoke(command, ["loss=0.3", "a=b=2", "acc=nan", "--step", "3"])
    assert (result.exit_code, result.output) == (0, "")
    assert rows(agent.end()) == [(("loss", "a=b"), 0, 3, 0.3, 2), (("acc",), 0, 3, 1)]
    for wrong in ("loss", "=3", "loss=high"):
        result = CliRunner().invoke(command, [wrong])
        assert result.exit_code == 2
        assert "expected NAME=NUMBER" in result.output


def test_outside_a_job_a_note_says_once_that_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(curves, "_door", curves._Door())
    monkeypatch.delenv("CAVVY_NOTICE", raising=False)
    cavvy.log({"loss": 1})
    cavvy.log({"loss": 1})
    assert capsys.readouterr().err == "note: cavvy.log keeps no values: this is no job of Cavvy\n"
    monkeypatch.setenv("CAVVY_NOTICE", str(tmp_path / "gone.sock"))
    monkeypatch.setattr(curves, "_door", curves._Door())
    cavvy.log({"loss": 1})
    assert "does not answer" in capsys.readouterr().err
