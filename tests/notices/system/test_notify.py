"""`cavvy notify`: a failed job and a spent budget reach their receivers, also if the server is killed
before it could send.
"""

import os
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.certificates import Authority
from tests.receivers import HttpReceiver, MailReceiver
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


def test_each_event_reaches_each_kind_of_receiver(
    user: User, receiver: HttpReceiver, tmp_path: Path
) -> None:
    """A life in which a job is done, one fails, one is preempted, one is stuck and a budget is
    spent.
    """
    authority = Authority(tmp_path)
    certificate, key = authority.issue()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    mail = MailReceiver(context, "s3cret")
    user.variables["SSL_CERT_FILE"] = str(authority.ca)
    user.settings("[providers.local]\nprice_usd_hr = 3600\n")
    at, events = f"http://{receiver.address}", "done,failed,preempted,stuck,budget"
    for channel, address in (
        ("slack", f"{at}/slack"),
        ("teams", f"{at}/teams"),
        ("webhook", f"{at}/webhook"),
        ("pagerduty", f"http://{'k' * 32}@{receiver.address}/v2/enqueue"),
        ("email", f"smtp://ops:s3cret@localhost:{mail.port}/a@x.test?from=c@x.test"),
    ):
        user.cli("notify", "add", channel, "--on", events, stdin=f"{address}\n")
    user.cli("budget", "set", "team", "0.01", "--project", "default", "--soft", "never")
    # nothing can wake it: only such work is ended
    waits = "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()"
    hung = "name: hung\ngrace: 1s\nlimits: {stuck: 10s}\nretry: {node: 0}\n"
    hung += f"run: exec python3 -c '{waits}'\n"
    for task in (
        "{name: fine, run: 'true'}",
        "{name: bad, run: 'exit 3'}",
        "{name: lost, run: sleep 1000, grace: 1s}",
        hung,
    ):
        user.submit(task, "--yes")
    wait_until(lambda: user.json("status", "lost")["phase"] == "running")
    user.cli("drill", "preempt", "lost", "--notice", "1s")
    kinds = {*events.split(",")}

    marks = {"/slack": "[{}]", "/teams": "[{}]", "/webhook": "'event': '{}'", "/v2/enqueue": "/{}'"}

    def told(path: str) -> set[str]:
        texts = [str(body) for where, body in receiver.got if where == path]
        return {kind for kind in kinds for text in texts if marks[path].format(kind) in text}

    def mailed() -> set[str]:
        return {kind for kind in kinds for *_, text in mail.mails if f"[{kind}]" in text}

    wait_until(
        lambda: all(told(path) == kinds for path in marks) and mailed() == kinds,
        why=lambda: str([kinds - told(path) for path in marks] + [kinds - mailed()]),
    )
    assert receiver.wrong == mail.wrong == []
    assert all(mail.secured)
    user.cli("down", "--all", "--yes")
    mail.close()


def test_an_address_that_does_not_answer_is_told_at_once(
    user: User, receiver: HttpReceiver
) -> None:
    receiver.refuses = 1000
    told = add(user, receiver, code=1)
    assert "was not delivered" in told
    assert "s3cret" not in told
    assert "is empty" in user.cli("notify", "add", "slack", stdin="", code=2)
