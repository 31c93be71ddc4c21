"""Which questions of a sandbox to dicts and queues are passed on."""

import json
import pickle
from base64 import b64encode
from typing import Any

import pytest

from cavvy.capabilities.sandboxes.on_node.state_gate import WrongQuestion, read_question
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
