"""`cavvy.log` and `cavvy log`, with the agent's socket."""

import json
from base64 import b64decode
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy
import PIL.Image
import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure

import cavvy
from cavvy.agent.config import ConfigFields
from cavvy.agent.loop import EventLoop
from cavvy.agent.notification_socket import NotificationSocket
from cavvy.agent.work.meters import UsageMeter
from cavvy.agent.work.monitor import WorkMonitor
from cavvy.capabilities.curves.log_command import command
from cavvy.sdk import curves, examples


class Agent:
    """What an agent of this node hears, and would send."""

    def __init__(self, home: Path) -> None:
        self.sent: list[dict[str, Any]] = []
        self.shown: list[dict[str, Any]] = []
        self.socket = NotificationSocket(EventLoop(), str(home), self._hear, lambda *_: None)
        usage = UsageMeter(None, b"")  # type: ignore[arg-type]
        self.watch = WorkMonitor(
            self._say, usage, progress=str(home / "p"), checkpoints=None, idle_s=None
        )

    def _hear(self, fields: ConfigFields) -> None:
        logged, shown = fields.inner("logged"), fields.inner("shown")
        if shown is not None:
            self.watch.show(shown)
        else:
            assert logged is not None
            self.watch.log(logged)

    def _say(self, kind: str, **fields: Any) -> None:
        if kind == "points":
            self.sent += fields.get("series", ())
            self.shown += fields.get("examples", ())

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


def test_pictures_texts_tables_and_sound_are_sent_beside_numbers(agent: Agent) -> None:
    figure = Figure(figsize=(2, 1))
    figure.subplots().plot([1, 2])
    noise = numpy.arange(200 * 200 * 3, dtype=numpy.uint32) * 2654435761 >> 8 & 255
    values = {
        "loss": 0.5,
        "pil": PIL.Image.new("RGB", (4, 3)),
        "figure": figure,
        "array": numpy.linspace(0, 1, 12).reshape(3, 4),
        "first": numpy.zeros((3, 5, 6)),
        "noise": noise.reshape(200, 200, 3).astype(numpy.uint8),
        "deep": {"text": cavvy.Text("hello")},
        "table": cavvy.Table([{"a": 1}, {"b": 2}]),
        "bins": cavvy.Histogram([0, 1, float("nan")], bins=2),
        "tone": cavvy.Audio([0.0, 2.0], rate=8000),
    }
    cavvy.log(values, step=4)
    assert [(each["names"], each["rows"][0][0]) for each in agent.end()] == [(["loss"], 4)]
    found = {each["name"]: b64decode(each["data"]) for each in agent.shown}
    kinds = [(each["name"], each["kind"], each["step"]) for each in agent.shown]
    assert [name for name, kind, step in kinds if kind == "image"] == [
        "pil",
        "figure",
        "array",
        "first",
        "noise",
    ]
    assert {step for *_, step in kinds} == {4}
    sizes = {name: PIL.Image.open(BytesIO(found[name])).size for name in ("pil", "array", "first")}
    assert sizes == {"pil": (4, 3), "array": (4, 3), "first": (6, 5)}
    picture = numpy.asarray(PIL.Image.open(BytesIO(found["noise"])))
    assert (picture == values["noise"]).all(), "it came in several parts"
    assert found["deep/text"] == b"hello"
    assert json.loads(found["table"]) == {"columns": ["a", "b"], "rows": [[1, None], [None, 2]]}
    assert json.loads(found["bins"]) == {"edges": [0, 0.5, 1], "counts": [1, 1]}
    assert found["tone"].endswith(b"\0\0\xff\x7f")


def test_a_large_picture_is_made_smaller_and_what_is_none_is_refused(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (curves, examples):
        monkeypatch.setattr(place, "MOST_BYTES", 30_000)
    random = numpy.random.default_rng(1)
    cavvy.log({"large": random.integers(0, 256, (300, 300, 3), dtype=numpy.uint8)})
    with pytest.raises(TypeError, match="`bad` cannot be shown: an array of the shape"):
        cavvy.log({"bad": numpy.zeros((2, 3, 7))})
    with pytest.raises(ValueError, match="needs a finite number"):
        cavvy.log({"bad": cavvy.Histogram([])})
    with pytest.raises(ValueError, match="more than 30,000 bytes"):
        cavvy.log({"bad": cavvy.Text("x" * 30_001)})
    agent.end()
    [large] = agent.shown
    assert PIL.Image.open(BytesIO(b64decode(large["data"]))).size == (75, 75)
