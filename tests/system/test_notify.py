"""`cavvy notify`: a failed job and a spent budget reach their receivers, also if the server is killed
before it could send.
"""

import os
import signal
from collections.abc import Iterator

import pytest
from tests.receivers import HttpReceiver
from tests.system.trust import User
from tests.waits import wait_until

from cavvy.client.state import read_server

pytestmark = pytest.mark.system


@pytest.fixture
def receiver() -> Iterator[HttpReceiver]:
    made = HttpReceiver()
    yield made
    made.close()


def add(user: User, receiver: HttpReceiver, *arguments: str, code: int = 0) -> str:
    address = f"http://{receiver.address}/slack?key=s3cret\n"
    return user.cli("notify", "add", "slack", *arguments, stdin=address, code=code)


def test_a_killed_server_loses_no_notice(user: User, receiver: HttpReceiver) -> None:
    told = add(user, receiver, "--on", "failed,done")
    assert "a test message was delivered to slack" in told
    receiver.refuses = 1000
    names = [user.submit("{run: 'exit 3'}", "--name", f"bad-{number}") for number in range(3)]
    for name in names:
        user.cli("wait", name, code=None)
    wait_until(lambda: receiver.refuses < 1000)
    server = read_server(str(user.home))
    assert server is not None
    os.kill(server.pid, signal.SIGKILL)
    user.forget()
    receiver.refuses = 0
    user.cli("ps")  # starts the server again
    wait_until(lambda: all(name in str(receiver.got) for name in names))
    assert receiver.wrong == []
    assert "s3cret" not in user.cli("notify", "list", "-o", "json")
    [row] = user.json("notify", "list")
    assert (row["channel"], row["problem"]) == ("slack", "")
    assert "s3cret" not in (user.home / "server.log").read_text()
    user.cli("notify", "rm", "slack")
    assert user.json("notify", "list") == []


def test_an_address_that_does_not_answer_is_told_at_once(
    user: User, receiver: HttpReceiver
) -> None:
    receiver.refuses = 1000
    told = add(user, receiver, code=1)
    assert "was not delivered" in told
    assert "s3cret" not in told
    assert "is empty" in user.cli("notify", "add", "slack", stdin="", code=2)
