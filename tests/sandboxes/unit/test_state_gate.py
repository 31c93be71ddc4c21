"""Which questions of a sandbox to dicts and queues are passed on."""

import asyncio
import json
import pickle
import socket
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cavvy.capabilities.sandboxes.on_node.state_gate import (
    StateGate,
    WrongQuestion,
    read_question,
)
from cavvy.capabilities.sandboxes.options import SandboxOptions
from cavvy.sdk.errors import InvalidArgument

NAMES = {"dict": ["notes"], "queue": []}


def question(to: str = "state/dict", id: object = "q1", **body: Any) -> bytes:
    text = json.dumps({"op": "get", "name": "notes", **body})
    return json.dumps({"ask": {"id": id, "to": to, "lane": "x", "body": text}}).encode()


def write(data: bytes) -> list[str]:
    return [b64encode(data).decode()]


def test_a_question_to_a_named_dict_is_passed_on() -> None:
    name, asked = read_question(question(op="put", keys=['"a"'], data=write(b'{"x": 1}')), NAMES)
    assert (name, asked["to"]) == ("q1", "state/dict")
    assert json.loads(asked["body"])["name"] == "notes"
    assert set(asked) == {"to", "body"}


@pytest.mark.parametrize(
    "line",
    [
        question(name="other"),
        question(name=["notes"]),
        question(name=None),
        question(to="state/queue"),
        question(to="state/dict/../queue"),
        question(to="apps/report"),
        question(to="slurm/submit"),
        question(to=""),
        json.dumps({"ask": {"id": "q1", "to": ["state/dict"], "body": "{}"}}).encode(),
    ],
)
def test_nothing_else_is(line: bytes) -> None:
    with pytest.raises(WrongQuestion) as caught:
        read_question(line, NAMES)
    assert (caught.value.status, caught.value.name) == (403, "q1")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[1]",
        b"\x80",
        b'{"ask": 1}',
        b"[" * 100_000,
        question(id=1),
        question(id="x" * 65),
        b'{"ask": {"id": "q1", "to": "state/dict", "body": "[]"}}',
        b'{"ask": {"id": "q1", "to": "state/dict", "body": 1}}',
    ],
)
def test_what_is_no_question_is_refused(line: bytes) -> None:
    with pytest.raises(WrongQuestion) as caught:
        read_question(line, NAMES)
    assert caught.value.status == 422


def test_the_longest_name_of_a_question_is_kept() -> None:
    assert read_question(question(id="x" * 64), NAMES)[0] == "x" * 64


@asynccontextmanager
async def open_gate(folder: Path) -> AsyncIterator[str]:
    """Yield the socket of a gate. The agent behind it first answers another question, and closes
    a connection after its answer."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = json.loads(await reader.readline())["ask"]
        for name, told in (("other", "foreign"), (asked["id"], "own")):
            found = {"answer": {"id": name, "status": 200, "body": told}}
            writer.write(json.dumps(found).encode() + b"\n")
        await writer.drain()
        writer.close()

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path := f"{folder}/gate")
    listener.listen()
    gate = StateGate(f"{folder}/agent", NAMES)
    agent = await asyncio.start_unix_server(answer, f"{folder}/agent")
    async with agent, await gate.start(listener):
        yield path
        gate.close()


async def ask_gate(way: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> dict[str, Any] | None:
    """Return the answer, or None if the connection was closed."""
    way[1].write(question() + b"\n")
    line = await way[0].readline()
    return json.loads(line)["answer"] if line else None


async def test_a_sandbox_gets_its_own_answers_also_after_its_agent_was_gone(tmp_path: Path) -> None:
    async with open_gate(tmp_path) as path:
        way = await asyncio.open_unix_connection(path)
        told = [await ask_gate(way) for _ in range(3)]
        way[1].close()
    own = {"status": 200, "body": "own", "id": "q1"}
    assert [told[0], told[2]] == [own, own]
    assert told[1] is not None
    assert (told[1]["status"], told[1]["id"]) == (503, "q1")


async def test_a_sandbox_has_four_connections_at_a_time(tmp_path: Path) -> None:
    async with open_gate(tmp_path) as path:
        ways = [await asyncio.open_unix_connection(path) for _ in range(5)]
        told = [await ask_gate(each) for each in ways]
        assert [each is not None for each in told] == [True] * 4 + [False]
        for _, writer in ways:
            writer.close()


@pytest.mark.parametrize(
    "data",
    [
        write(pickle.dumps(print)),
        write(pickle.dumps(1, protocol=0)),
        write(b"\x80\x00"),
        write('"x"'.encode("utf-16")),
        write(b""),
        ["no base 64"],
        [1],
        [["e30="]],
        "e30=",
        {"0": "e30="},
    ],
)
def test_a_sandbox_writes_only_json(data: Any) -> None:
    """A pickle would run code of the sandbox in who reads it."""
    with pytest.raises(WrongQuestion, match="must be JSON") as caught:
        read_question(question(op="put", keys=['"a"'], data=data), NAMES)
    assert "trust=False" in caught.value.hint


@pytest.mark.parametrize("names", ["notes", ["../x"], [""], [1], ["x"] * 101])
def test_names_are_checked_where_the_sandbox_is_made(names: Any) -> None:
    with pytest.raises(InvalidArgument, match="dicts"):
        SandboxOptions(dicts=names).to_wire()
