"""The agent's mailbox: requests and answers are whole files, late answers are nobody's, and a
full box is an error.
"""

import http.client
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cavvy.agent.control_client import make_connection
from cavvy.agent.http_client import connect
from cavvy.agent.loop import EventLoop
from cavvy.agent.mailbox import MailboxConnection
from cavvy.agent.wire import ServerAddress

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"


class Post:
    """Answers the letters of one mailbox as a login-node helper does; `answers` are taken in turn, None is
    silence.
    """

    def __init__(self, folder: Path, answers: list[bytes | None]) -> None:
        self.folder = folder
        self.box = folder / "gang.0"
        self.letters: list[bytes] = []
        self._answers = answers
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        while not self._over.is_set():
            for path in [
                path for path in self.folder.iterdir() if "@" in path.name and path.name[0] != "."
            ]:
                self.letters.append(path.read_bytes())
                path.unlink()
                answer = self._answers.pop(0)
                if answer is not None:
                    (self.box / ".new").write_bytes(answer)
                    os.rename(self.box / ".new", self.box / path.name.partition("@")[2])
            time.sleep(0.005)

    def close(self) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture
def answers() -> list[bytes | None]:
    return []


@pytest.fixture
def post(tmp_path: Path, answers: list[bytes | None]) -> Iterator[Post]:
    made = Post(tmp_path, answers)
    yield made
    made.close()


def ask(box: Path, body: bytes = b"", timeout_s: float = 20) -> tuple[int, bytes] | str:
    """One request over the loop: its status and body, or why it failed."""
    loop, result = EventLoop(), []
    connection = make_connection(loop, ServerAddress(f"mailbox:{box}"), "X: y\r\n")
    assert isinstance(connection, MailboxConnection)

    def over(*what: object) -> None:
        result.append(what[0] if len(what) == 1 else what)
        loop.stop()

    connection.request("POST", "/a?b=c", body, timeout_s=timeout_s, replied=over, failed=over)
    assert connection.busy
    loop.run()
    assert not connection.busy
    return result[0]  # type: ignore[return-value]


def test_a_request_is_answered(post: Post, answers: list[bytes | None]) -> None:
    answers += [ANSWER, ANSWER]
    body = os.urandom(300_000)
    assert ask(post.box, body) == (200, b"hi")
    assert ask(post.box) == (200, b"hi")
    head = b"POST /a?b=c HTTP/1.1\r\nHost: localhost\r\nX: y\r\nContent-Length: 300000\r\n\r\n"
    assert post.letters[0] == head + body
    assert list(post.box.iterdir()) == []
    assert list(post.folder.iterdir()) == [post.box]


def test_silence_fails_and_leaves_nothing(tmp_path: Path) -> None:
    box = tmp_path / "gang.0"
    assert ask(box, timeout_s=0.1) == "no answer arrived in the mailbox"
    assert list(tmp_path.iterdir()) == [box]


def test_a_torn_answer_fails(post: Post, answers: list[bytes | None]) -> None:
    answers += [ANSWER[:-30], b"no HTTP at all\r\n\r\n"]
    assert "incomplete" in ask(post.box)  # type: ignore[operator]
    assert "not HTTP" in ask(post.box)  # type: ignore[operator]


def test_a_box_that_takes_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot write" in ask(tmp_path / "file" / "gang.0")  # type: ignore[operator]


def test_letters_are_their_senders_only(post: Post, answers: list[bytes | None]) -> None:
    answers += [None]
    assert ask(post.box, timeout_s=0.1) == "no answer arrived in the mailbox"
    assert post.box.stat().st_mode & 0o077 == 0


def test_a_blocking_reader_gets_one_answer_after_the_other(
    post: Post, answers: list[bytes | None]
) -> None:
    answers += [ANSWER, ANSWER.replace(b"hi", b"ho")]
    connection = connect(ServerAddress(f"mailbox:{post.box}"))
    assert isinstance(connection, http.client.HTTPConnection)
    for expected in (b"hi", b"ho"):
        connection.request("GET", "/agent/v1/blobs/x")
        assert connection.getresponse().read() == expected
    connection.close()


def test_a_blocking_reader_gets_a_full_pack(post: Post, answers: list[bytes | None]) -> None:
    pack = os.urandom(8 * 1024 * 1024)
    answers += [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(pack) + pack]
    connection = connect(ServerAddress(f"mailbox:{post.box}"))
    connection.request("POST", "/agent/v1/blobs/pack", b'{"blobs": []}')
    assert connection.getresponse().read() == pack
    assert post.letters[0].endswith(b'\r\n\r\n{"blobs": []}')
    connection.close()
