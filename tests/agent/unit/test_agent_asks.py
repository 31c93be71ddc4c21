"""What a program of the work asks the control plane, through the agent."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cavvy.agent import asks
from cavvy.agent.config import BadConfig, ConfigFields
from cavvy.agent.loop import EventLoop
from cavvy.agent.notification_socket import NotificationSocket, TaskReports


class Connection:
    """Keeps the newest request, which the test answers."""

    def __init__(self) -> None:
        self.closed = False

    def request(self, method: str, path: str, body: bytes, **callbacks: Any) -> None:
        self.asked = (method, path, json.loads(body))
        self.replied: Callable[[int, bytes], None] = callbacks["replied"]
        self.failed: Callable[[str], None] = callbacks["failed"]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    made: list[Connection] = []

    def make(*_: object) -> Connection:
        made.append(Connection())
        return made[-1]

    monkeypatch.setattr(asks, "make_connection", make)
    return made


def make_asks() -> tuple[asks.TaskAsks, list[Callable[[], None]]]:
    """The asks of an agent, and what its loop was told to do later."""
    later: list[Callable[[], None]] = []
    loop = SimpleNamespace(after=lambda seconds, call: later.append(call))
    link = SimpleNamespace(loop=loop, address=None, headers="", query="?gang=g&rank=0")
    return asks.TaskAsks(link), later  # type: ignore[arg-type]


def ask(name: str, place: str = "slurm/submit", lane: str = "") -> ConfigFields:
    body = '{"a": 1}'
    return ConfigFields({"id": name, "to": place, "body": body, "lane": lane}, "a line")


def test_asks_are_sent_one_after_the_other(opened: list[Connection]) -> None:
    waiting, later = make_asks()
    answers: list[dict[str, Any]] = []
    waiting.add(ask("1"), answers.append)
    waiting.add(ask("2", "slurm/state"), answers.append)
    (first,) = opened
    assert first.asked == ("POST", "/agent/v1/asks/slurm/submit?gang=g&rank=0", {"a": 1})
    first.failed("no route")
    assert answers == []
    later.pop()()  # the same again, after a pause
    first.replied(200, b'{"number": 7}')
    assert answers == [{"answer": {"id": "1", "status": 200, "body": {"number": 7}}}]
    assert first.closed
    second = opened[1]
    assert second.asked[1].startswith("/agent/v1/asks/slurm/state?")
    second.replied(502, b"<html>")
    assert answers[1]["answer"]["status"] == 502
    assert "502" in answers[1]["answer"]["body"]["message"]


def test_asks_of_other_lanes_do_not_wait(opened: list[Connection]) -> None:
    waiting, _ = make_asks()
    answers: list[dict[str, Any]] = []
    for name, lane in (("1", "a"), ("2", "b"), ("3", "a")):
        waiting.add(ask(name, "state/queue", lane), answers.append)
    first, second = opened
    second.replied(200, b"{}")
    first.replied(200, b"{}")
    assert [each["answer"]["id"] for each in answers] == ["2", "1"]
    opened[2].replied(200, b"{}")
    assert waiting._lanes == {}  # nothing is kept of a lane without asks


def test_a_server_that_is_not_reached_is_told(opened: list[Connection]) -> None:
    waiting, later = make_asks()
    answers: list[dict[str, Any]] = []
    waiting.add(ask("1"), answers.append)
    for _ in range(asks.TRIES - 1):
        opened[0].failed("no route")
        later.pop()()
    opened[0].failed("no route")
    assert later == []
    assert answers[0]["answer"]["status"] == asks.UNREACHABLE
    assert "no route" in answers[0]["answer"]["body"]["message"]


def test_too_many_asks_are_refused_at_once(opened: list[Connection]) -> None:
    waiting, _ = make_asks()
    answers: list[dict[str, Any]] = []
    for number in range(asks.MOST_WAITING + 1):
        waiting.add(ask(str(number)), answers.append)
    assert [each["answer"]["status"] for each in answers] == [429]


@pytest.mark.parametrize("place", ["", "jobs", "../claim", "slurm/../../claim", "slurm/submit?x"])
def test_a_program_reaches_no_other_route(place: str, opened: list[Connection]) -> None:
    waiting, _ = make_asks()
    with pytest.raises(BadConfig):
        waiting.add(ask("1", place), print)
    assert opened == []


def test_only_the_program_that_asks_gets_the_answer(tmp_path: Path) -> None:
    loop = EventLoop()
    asked: list[str] = []

    def answer(found: ConfigFields, send: Callable[[dict[str, object]], None]) -> None:
        asked.append(found.read("id", "str"))
        send({"answer": {"id": asked[-1]}})
        loop.after(0.05, loop.stop)

    opened = NotificationSocket(loop, str(tmp_path), TaskReports().hear, answer)
    with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as other:
        one.connect(opened.path)
        other.connect(opened.path)
        one.sendall(b'{"ask": {"id": "7", "to": "a/b", "body": "{}"}}\n')
        loop.run()
        assert asked == ["7"]
        assert json.loads(one.recv(1000)) == {"answer": {"id": "7"}}
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv(1000)
    opened.close()
