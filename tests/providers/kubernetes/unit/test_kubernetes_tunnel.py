"""The first process of a pod: what happens to the agent's data before there is a tunnel, and when
one breaks.
"""

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cavvy.providers import kubernetes
from cavvy.providers.kubernetes.pod import init
from cavvy.providers.kubernetes.pod.init import CLOSE, DATA, FRAME, OPEN, PodInit
from cavvy.providers.kubernetes.pods import make_bundle


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PodInit]:
    monkeypatch.setattr(init, "HANDLED", ())  # the signals are the tests' own
    monkeypatch.setattr(init.signal, "set_wakeup_fd", lambda *_, **__: None)
    agents, lines = init.listen(str(tmp_path / "agents")), init.listen(str(tmp_path / "lines"))
    found = PodInit(agents, lines, os.getpid(), 60.0)
    yield found
    found.lose_tunnel()
    for each in (agents, lines, *found.connections.values()):
        each.close()
    os.close(found.wake)


def speak(held: PodInit, data: bytes) -> socket.socket:
    """A connection of the agent on which it has said something."""
    agent = socket.socket(socket.AF_UNIX)
    agent.connect(held.agents.getsockname())
    held.accept()
    agent.sendall(data)
    held.read_agent(held.count, held.connections[held.count])
    return agent


def make_line(held: PodInit, *, dead: bool = False) -> socket.socket:
    """The far end of a new line."""
    near, far = socket.socketpair()
    if dead:
        far.close()
    held.take_tunnel(near)
    return far


def read(line: socket.socket) -> list[tuple[bytes, int, bytes]]:
    line.setblocking(False)
    try:
        data = line.recv(65536)
    except BlockingIOError:
        return []
    found = []
    while data:
        kind, number, length = FRAME.unpack_from(data)
        found.append((kind, number, data[FRAME.size : FRAME.size + length]))
        data = data[FRAME.size + length :]
    return found


def test_what_is_said_before_there_is_a_line_is_heard_over_it(held: PodInit) -> None:
    with speak(held, b"one"), speak(held, b"two"), make_line(held) as line:
        assert read(line) == [(OPEN, 1, b""), (DATA, 1, b"one"), (OPEN, 2, b""), (DATA, 2, b"two")]


def test_what_was_said_early_outlives_a_line_that_breaks_as_it_is_told(held: PodInit) -> None:
    with speak(held, b"one"), speak(held, b"two"), make_line(held, dead=True):
        assert held.tunnel is None
        with make_line(held) as line:
            assert read(line) == [
                (OPEN, 1, b""),
                (DATA, 1, b"one"),
                (OPEN, 2, b""),
                (DATA, 2, b"two"),
            ]


def test_what_was_under_way_over_a_line_ends_with_it(held: PodInit) -> None:
    with make_line(held) as first, speak(held, b"one") as agent, make_line(held) as second:
        assert read(first) == [(OPEN, 1, b""), (DATA, 1, b"one")]
        assert agent.recv(1) == b""
        assert read(second) == []
        with speak(held, b"two") as other:
            assert read(second) == [(OPEN, 2, b""), (DATA, 2, b"two")]
            other.close()
            held.read_agent(2, held.connections[2])
            assert read(second) == [(CLOSE, 2, b"")]


def test_every_file_that_a_pod_runs_is_in_its_bundle() -> None:
    bundle = make_bundle(b"PK\x05\x06" + bytes(18))  # an archive of nothing
    texts = [path.read_text() for path in Path(kubernetes.__file__).parent.rglob("*.[ps][yh]")]
    used = {name for text in texts for name in re.findall(r"/cavvy/agent/([\w.]+)", text)}
    assert {"boot.sh", "init.py", "tunnel.sh", "tunnel.py"} <= used
    assert used <= {*bundle["data"], *bundle["binaryData"]}
