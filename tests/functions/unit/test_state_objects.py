"""`cavvy.Dict` and `cavvy.Queue` in programs, without a server."""

import asyncio
import json
import pickle
import queue
import socket
import threading
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cavvy
from cavvy.capabilities.functions import spawned
from cavvy.capabilities.functions.errors import CallFailed, NotSendable
from cavvy.capabilities.functions.state import asking
from cavvy.capabilities.functions.state.asking import find_asker
from cavvy.capabilities.functions.state.objects import StateObject, read_key, write_key
from cavvy.sdk.errors import CavvyError, InvalidArgument


class Asker:
    """Answers requests with what a test says."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.asked: list[dict[str, Any]] = []
        self._answers = list(answers)

    def ask(self, kind: str, name: str, fields: Any) -> dict[str, Any]:
        self.asked.append({"kind": kind, "name": name, **fields})
        return self._answers.pop(0) if self._answers else {}

    def delete(self, kind: str, name: str) -> None:
        self.asked.append({"kind": kind, "name": name, "op": "delete"})


@pytest.fixture(autouse=True)
def started_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that other tests have started have no result."""
    monkeypatch.setattr(spawned, "is_watched", lambda: False)
    monkeypatch.setattr(spawned, "_looks", [])


def use(made: StateObject, *answers: dict[str, Any]) -> Asker:
    asker = made._asker = Asker(*answers)
    return asker


def entry(value: object) -> dict[str, Any]:
    return {"value": b64encode(pickle.dumps(value, 5)).decode(), "number": 1}


@pytest.mark.parametrize(
    "key", ["a", "ä\n\0", 3, -1.5, None, b"\x00\xff", ("a", 1, (None, b"x")), ()]
)
def test_keys_come_back_as_they_were(key: Any) -> None:
    assert read_key(write_key(key)) == key


def test_keys_that_are_equal_in_python_are_one() -> None:
    assert write_key(1) == write_key(1.0) == write_key(True)
    assert len({write_key(each) for each in ("1", 1, b"1", (1,), None, "", ())}) == 7


@pytest.mark.parametrize(
    "key", [[1], {"a": 1}, {1}, float("nan"), float("inf"), object(), "x" * 1100]
)
def test_other_keys_are_refused(key: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"key of a dict"):
        write_key(key)


def test_a_dict_behaves_as_one() -> None:
    made = cavvy.Dict("d")
    asker = use(
        made,
        {"entries": [entry([1, 2])]},
        {"entries": []},
        {"entries": []},
        {"count": 0},
        {"entries": [], "count": 0},
        {"entries": [entry(None)], "count": 1},
    )
    assert made["a"] == [1, 2]
    assert made.get("b", "none") == "none"
    with pytest.raises(KeyError, match="c"):
        made["c"]
    assert made.put("a", 1, skip_if_exists=True) is False
    with pytest.raises(KeyError):
        del made["x"]
    assert made.pop("a") is None
    assert [each["op"] for each in asker.asked] == ["get", "get", "get", "put", "pop", "pop"]
    ids = [each["id"] for each in asker.asked if "id" in each]
    assert len(set(ids)) == 3
    assert [each["seen"] for each in asker.asked if "id" in each] == ["", *ids[:2]]


def test_many_values_are_sent_in_parts() -> None:
    made = cavvy.Dict("d")
    asker = use(made)
    made.update(
        {number: number for number in range(1500)}, name=bytes(900_000), last=bytes(900_000)
    )
    assert [len(each["keys"]) for each in asker.asked] == [1000, 500, 1, 1]
    assert sum(len(json.dumps(each)) > 2 << 20 for each in asker.asked) == 0


def test_a_value_that_is_too_large_is_not_sent() -> None:
    made = cavvy.Dict("d")
    asker = use(made)
    with pytest.raises(NotSendable, match=r"the value of 'a' .* 1,048,5\d\d bytes.*1,048,576"):
        made["a"] = bytes((1 << 20) - 3)
    with pytest.raises(NotSendable, match="lock"):
        made["a"] = threading.Lock()
    assert asker.asked == []


def test_no_pickle_is_loaded_without_trust() -> None:
    made = cavvy.Dict("d", trust=False)
    asker = use(made, {"count": 1}, {"entries": [entry(1)]}, {"entries": [{"value": "WzFd"}]})
    made["a"] = [1]
    assert asker.asked[0]["data"] == ["WzFd"]
    with pytest.raises(CallFailed, match="is a pickle"):
        made["a"]
    assert made["a"] == [1]
    with pytest.raises(NotSendable, match="is no JSON"):
        made["a"] = {1, 2}
    again = pickle.loads(pickle.dumps(made))
    assert (again.name, again._trust) == ("d", False)


@pytest.mark.parametrize("value", ["%%", "", "/w==", b64encode(b"\x80\x05broken").decode()])
def test_a_value_that_cannot_be_loaded_is_an_error(value: str) -> None:
    made = cavvy.Dict("d")
    use(made, {"entries": [{"value": value}]})
    with pytest.raises((CallFailed, pickle.UnpicklingError)):
        made["a"]


def test_a_queue_waits_or_says_that_it_is_empty() -> None:
    made = cavvy.Queue("q")
    asker = use(made, {"items": []}, {"items": [entry(7)]}, {"items": []}, {"items": []})
    assert made.get() == 7
    assert [each["wait_s"] for each in asker.asked] == [asking.WAIT_S] * 2
    assert made.get(block=False) is None
    with pytest.raises(queue.Empty):
        made.get(timeout=0)
    assert [each["wait_s"] for each in asker.asked[2:]] == [0, 0]


def test_a_full_queue_waits_or_says_so() -> None:
    made = cavvy.Queue("q")
    asker = use(made, {"full": True}, {"full": False}, {"full": True})
    made.put(1, partition="p", partition_ttl="2h")
    assert [(each["part"], each["ttl_s"]) for each in asker.asked] == [("p", 7200)] * 2
    assert asker.asked[0]["id"] != asker.asked[1]["id"]
    with pytest.raises(queue.Full):
        made.put(1, block=False)


def test_get_many_takes_what_is_there() -> None:
    made = cavvy.Queue("q")
    asker = use(made, {"items": [entry(1)]}, {"items": [entry(2)]}, {"items": []})
    assert made.get_many(5) == [1, 2]
    assert [each["most"] for each in asker.asked] == [5, 4, 3]
    assert [each["wait_s"] for each in asker.asked] == [asking.WAIT_S, 0, 0]
    with pytest.raises(InvalidArgument, match="n_values=0"):
        made.get_many(0)


def test_iterate_removes_nothing_and_ends() -> None:
    made = cavvy.Queue("q")
    asker = use(made, {"items": [entry(1), {**entry(2), "number": 5}]}, {"items": []})
    assert list(made.iterate()) == [1, 2]
    assert [(each["op"], each["after"]) for each in asker.asked] == [("list", 0), ("list", 5)]


async def test_each_method_has_a_version_for_await() -> None:
    made, work = cavvy.Dict("d"), cavvy.Queue("q")
    use(made, {"count": 1}, {"entries": [{**entry(3), "key": '"a"'}], "more": False})
    assert await made.put.aio("a", 3)
    assert [each async for each in made.items.aio()] == [("a", 3)]
    use(work, {"items": [entry(4)]})
    assert await asyncio.wait_for(work.get.aio(timeout="5s"), 5) == 4


@pytest.mark.parametrize("name", ["", "-a", "a/b", "..", "a" * 65, "ä", None])
def test_names_are_checked(name: Any) -> None:
    with pytest.raises(InvalidArgument, match="is no name"):
        cavvy.Queue(name)


def test_an_ephemeral_one_is_deleted_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    asker = Asker()
    monkeypatch.setattr(
        "cavvy.capabilities.functions.state.objects.find_asker", lambda project: asker
    )
    with pytest.raises(ZeroDivisionError), cavvy.Queue.ephemeral() as made:
        1 / 0  # noqa: B018
    assert asker.asked == [{"kind": "queue", "name": made.name, "op": "delete"}]
    assert made.name.startswith("ephemeral-")


def serve_agent(path: Path, answer: Callable[[dict[str, Any], int], dict[str, Any]]) -> None:
    """An agent's socket, which answers each ask of one connection."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()

    def serve() -> None:
        with server:
            connection, _ = server.accept()
        with connection, connection.makefile("rwb") as lines:
            connection.sendall(b'{"every_s": 5}\n')
            for number, line in enumerate(lines):
                ask = json.loads(line)["ask"]
                told = {"answer": {"id": ask["id"], **answer(ask, number)}}
                lines.write(json.dumps(told).encode() + b"\n")
                lines.flush()

    threading.Thread(target=serve, daemon=True).start()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CAVVY_NOTICE", str(tmp_path / "s"))
    monkeypatch.setenv("CAVVY_JOB", "embed")
    monkeypatch.setenv("CAVVY_PROJECT", "team")
    monkeypatch.setattr(asking, "_PAUSE_S", 0.0)
    return tmp_path / "s"


def test_a_function_asks_through_its_agent(node: Path) -> None:
    asked: list[dict[str, Any]] = []

    def answer(ask: dict[str, Any], number: int) -> dict[str, Any]:
        asked.append(ask)
        if number < 2:  # the server starts again: the same request is sent
            return {"status": (503, 429)[number], "body": {"message": "not now"}}
        return {"status": 200, "body": {"entries": [entry(bytes(1_000_000))]}}

    serve_agent(node, answer)
    made = cavvy.Dict("d")
    assert made.pop("a") == bytes(1_000_000)
    made._find_asker().close()  # type: ignore[attr-defined]  # it is that of a node
    assert [each["to"] for each in asked] == ["state/dict"] * 3
    assert len({each["body"] for each in asked}) == 1
    assert json.loads(asked[0]["body"])["name"] == "d"
    assert asked[0]["lane"]


def test_an_answer_of_the_server_is_an_error_there(node: Path) -> None:
    body = {"code": "state-full", "message": "no room", "hint": "remove one"}
    serve_agent(node, lambda ask, number: {"status": 409, "body": body})
    made = cavvy.Queue("q")
    with pytest.raises(CavvyError, match="no room") as caught:
        made.put(1)
    made._find_asker().close()  # type: ignore[attr-defined]  # it is that of a node
    assert (caught.value.code, caught.value.hint) == ("state-full", "remove one")


def test_a_function_reaches_no_other_project(node: Path) -> None:
    assert find_asker("team") is not None
    with pytest.raises(InvalidArgument, match="project other"):
        cavvy.Dict("d", project="other").len()
