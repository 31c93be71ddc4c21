"""A caller that does not trust an app loads no pickles of it."""

import os
import pickle
import socket
import threading
from pathlib import Path

import pytest

from cavvy.capabilities.functions.errors import CallFailed, NotSendable
from cavvy.capabilities.functions.frames import CallFrames, Head, pack
from cavvy.capabilities.functions.link import BrokerLink, read_result
from cavvy.capabilities.functions.payload import CallCodec, JsonCodec, PickleCodec


class Hostile(Exception):
    """Makes a folder when it is loaded."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


def answer(codec: CallCodec, head: Head, body: bytes) -> object:
    """Call a function whose broker sends this answer."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        frames = CallFrames()
        while data := theirs.recv(65536):
            for call, _ in frames.feed(data):
                if call["op"] == "call":
                    theirs.sendall(pack({**head, "id": call["id"]}, body))
        theirs.close()

    threading.Thread(target=serve, daemon=True).start()
    link = BrokerLink(lambda: ours, None, codec)
    arrived: list[tuple[Head, bytes]] = []
    done = threading.Event()

    def deliver(head: Head, body: bytes) -> None:
        arrived.append((head, body))
        done.set()

    link.send([link.make_request("f", codec.dump_arguments("f", (1,), {}, None), deliver)])
    assert done.wait(60)
    try:
        return read_result(link, *arrived[0])
    finally:
        link.close()


@pytest.mark.parametrize(
    "head", [{"op": "done"}, {"op": "failed", "kind": "error", "type": "E", "text": "no"}]
)
def test_json_runs_no_code(head: Head, tmp_path: Path) -> None:
    made = tmp_path / "made"
    body = pickle.dumps(Hostile(str(made)))
    with pytest.raises(CallFailed):
        answer(JsonCodec(), head, body)
    assert not made.exists()
    if head["op"] == "done":  # as it is with a caller that trusts the app
        answer(PickleCodec(), head, body)
        assert made.exists()


def test_json_answers() -> None:
    assert answer(JsonCodec(), {"op": "done"}, b'{"a": [1]}') == {"a": [1]}
    assert answer(PickleCodec(), {"op": "done"}, pickle.dumps({1, 2})) == {1, 2}


def test_arguments_that_are_no_json() -> None:
    with pytest.raises(NotSendable, match="the arguments of f are no JSON"):
        JsonCodec().dump_arguments("f", ({1, 2},), {}, None)
