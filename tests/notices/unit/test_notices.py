"""What receivers of notices get, over real HTTP and SMTP to strict stand-ins, and when a failed
notice is sent again.
"""

import asyncio
import email
import email.policy
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Barrier, Event, Thread
from typing import Any

import pytest
from msgspec.json import decode
from tests.certificates import Authority
from tests.contract.store_suite import NOW, make_event, submit
from tests.receivers import HttpReceiver, MailReceiver
from tests.waits import PATIENCE_S

from cavvy.capabilities.notices import sender
from cavvy.capabilities.notices.messages import (
    MOST_TRIES,
    HttpNotice,
    MailNotice,
    WrongAddress,
    find_pause,
    make_message,
)
from cavvy.capabilities.notices.notice import Notice, NoticeChannel, NoticeEvent, NoticeTarget
from cavvy.capabilities.notices.rows import SqlNotices
from cavvy.capabilities.notices.sender import NoticeSender, notice_key, send_message
from cavvy.http_client import TargetDenied
from cavvy.store.base import AtomicWrite
from cavvy.store.open import open_store
from cavvy.store.sql import Store

EVIL = "exit code 1 <!channel> [x](http://evil) & \x1b[2J\r\nBcc: eve@evil.test\r\n\r\nhello"


def make_notice(number: int = 1, **fields: Any) -> Notice:
    return Notice(
        **{
            "id": number,
            "project": "p",
            "target": "t",
            "event": NoticeEvent.FAILED,
            "job_id": f"j{number}",
            "job": f"train-{number}",
            "user": "ada",
            "text": EVIL,
            "at": NOW,
            "due_at": NOW,
            **fields,
        }
    )


@pytest.fixture
def receiver() -> Iterator[HttpReceiver]:
    made = HttpReceiver()
    yield made
    made.close()


def deliver(channel: NoticeChannel, address: str, *notices: Notice) -> str:
    message = make_message(channel, address, notices or [make_notice()])
    return asyncio.run(send_message(message))


def test_each_receiver_accepts_its_message_and_hostile_text_stays_text(
    receiver: HttpReceiver,
) -> None:
    at = f"http://{receiver.address}"
    assert deliver(NoticeChannel.SLACK, f"{at}/slack") == ""
    assert deliver(NoticeChannel.TEAMS, f"{at}/teams") == ""
    assert deliver(NoticeChannel.WEBHOOK, f"{at}/webhook?key=s3cret") == ""
    key = "k" * 32
    assert deliver(NoticeChannel.PAGERDUTY, f"http://{key}@{receiver.address}/v2/enqueue") == ""
    assert receiver.wrong == []
    slack, teams, webhook, alert = (told for _, told in receiver.got)
    assert "&lt;!channel&gt;" in slack["text"]
    assert slack["text"].startswith("[failed] train-1 (p by ada): exit code 1")
    (block,) = teams["attachments"][0]["content"]["body"]
    assert "[x](http://evil)" in block["inlines"][0]["text"]  # a run of text has no links
    assert (webhook["event"], webhook["job_id"], webhook["user"]) == ("failed", "j1", "ada")
    assert alert["dedup_key"] == "cavvy/p/j1/failed"
    assert not any("\x1b" in str(told) or "\n" in str(told) for _, told in receiver.got)


def test_pagerduty_gets_the_default_address_for_a_key() -> None:
    message = make_message(NoticeChannel.PAGERDUTY, "a" * 32, [make_notice()])
    assert isinstance(message, HttpNotice)
    assert message.url == "https://events.pagerduty.com/v2/enqueue"


@pytest.mark.parametrize(
    ("event", "severity"),
    [
        (NoticeEvent.DONE, "info"),
        (NoticeEvent.PREEMPTED, "warning"),
        (NoticeEvent.FAILED, "error"),
        (NoticeEvent.BUDGET, "error"),
        ("a capability's", "error"),
    ],
)
def test_pagerduty_is_told_how_urgent_an_event_is(event: str, severity: str) -> None:
    message = make_message(NoticeChannel.PAGERDUTY, "a" * 32, [make_notice(event=event)])
    assert isinstance(message, HttpNotice)
    assert decode(message.body)["payload"]["severity"] == severity


def test_many_events_are_one_message_for_people(receiver: HttpReceiver) -> None:
    notices = [make_notice(number) for number in range(1, 101)]
    assert deliver(NoticeChannel.SLACK, f"http://{receiver.address}/slack", *notices) == ""
    lines = receiver.got[0][1]["text"].splitlines()
    assert (len(lines), lines[-1]) == (21, "and 80 more")


@pytest.fixture
def trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """The context of a server whose certificate clients trust."""
    authority = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
    certificate, key = authority.issue()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


@pytest.mark.parametrize("scheme", ["smtp", "smtps"])
def test_a_mail_is_sent_by_tls_with_a_login(trusted: ssl.SSLContext, scheme: str) -> None:
    server = MailReceiver(trusted, "p@ss:/word", implicit=scheme == "smtps")
    address = f"{scheme}://ada:p%40ss%3A%2Fword@localhost:{server.port}/ops@x.test,b@x.test"
    try:
        assert deliver(NoticeChannel.EMAIL, f"{address}?from=cavvy@x.test") == ""
    finally:
        server.close()
    ((sender, recipients, data),) = server.mails
    assert (server.wrong, server.secured) == ([], [True])
    assert (sender, recipients) == ("cavvy@x.test", ["ops@x.test", "b@x.test"])
    mail = email.message_from_string(data, policy=email.policy.default)
    assert mail["To"] == "ops@x.test, b@x.test"
    assert mail["Bcc"] is None
    assert mail["Subject"].startswith("Cavvy: [failed] train-1 (p by ada): exit code 1")
    assert "p@ss" not in data


def test_the_subject_of_a_mail_counts_its_events() -> None:
    address = "smtp://localhost/ops@x.test?from=c@x.test"
    for count, ending in ((1, "hello"), (3, "and 2 more")):
        notices = [make_notice(number) for number in range(1, count + 1)]
        message = make_message(NoticeChannel.EMAIL, address, notices)
        assert isinstance(message, MailNotice)
        mail = email.message_from_bytes(message.message, policy=email.policy.default)
        assert mail["Subject"].endswith(ending)


def test_a_password_is_not_sent_without_tls_and_never_told(trusted: ssl.SSLContext) -> None:
    plain = MailReceiver()
    address = f"ada:s3cret@localhost:{plain.port}/ops@x.test?from=c@x.test"
    assert "offers no TLS" in deliver(NoticeChannel.EMAIL, f"smtp://{address}")
    plain.close()
    assert plain.mails == []
    strict = MailReceiver(trusted, "other")
    address = f"ada:s3cret@localhost:{strict.port}/ops@x.test?from=c@x.test"
    problem = deliver(NoticeChannel.EMAIL, f"smtp://{address}")
    strict.close()
    assert problem == "the mail server refused the login (535)"


def test_a_mail_server_with_an_unknown_certificate_gets_nothing(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path).issue()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = MailReceiver(context)
    address = f"smtp://localhost:{server.port}/ops@x.test?from=c@x.test"
    problem = deliver(NoticeChannel.EMAIL, address)
    server.close()
    assert "certificate" in problem
    assert server.mails == []


def test_a_plain_mail_server_without_a_login(tmp_path: Path) -> None:
    server = MailReceiver()
    address = f"smtp://localhost:{server.port}/ops@x.test?from=c@x.test"
    assert deliver(NoticeChannel.EMAIL, address) == ""
    server.close()
    assert (len(server.mails), server.wrong) == (1, [])


def test_a_mail_server_that_never_ends_its_answer_keeps_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sender, "_LONGEST_S", 0.2)
    ended = Event()

    def serve(listener: socket.socket) -> None:
        line, _ = listener.accept()
        line.settimeout(0.1)
        with line, suppress(ConnectionError):
            while not ended.is_set():
                with suppress(TimeoutError):
                    line.send(b"220-one more line\r\n" * 100)

    with socket.create_server(("localhost", 0)) as listener:
        Thread(target=serve, args=(listener,), daemon=True).start()
        address = f"smtp://localhost:{listener.getsockname()[1]}/a@x.test?from=c@x.test"
        assert "did not accept" in deliver(NoticeChannel.EMAIL, address)
        # each of the threads meets the others, so none of them still reads
        met = Barrier(4)
        for each in [sender._THREADS.submit(met.wait, PATIENCE_S) for _ in range(4)]:
            each.result()
        ended.set()


@pytest.mark.parametrize(
    "address", ["smtp://127.0.0.1:{}/a@x.test", "smtp://localhost:{}/a@x.test"]
)
def test_private_mail_servers_are_refused_like_private_web_servers(address: str) -> None:
    server = MailReceiver()
    message = make_message(
        NoticeChannel.EMAIL, f"{address.format(server.port)}?from=c@x.test", [make_notice()]
    )
    with pytest.raises(TargetDenied, match="private_targets"):
        asyncio.run(send_message(message, ""))
    server.close()


@pytest.mark.parametrize(
    ("channel", "address"),
    [
        (NoticeChannel.SLACK, "hooks.slack.com/x"),
        (NoticeChannel.SLACK, "https://ada:s3cret@hooks.slack.com/x"),
        (NoticeChannel.TEAMS, "ftp://x/s3cret"),
        (NoticeChannel.WEBHOOK, ""),
        (NoticeChannel.PAGERDUTY, "s3cret"),
        (NoticeChannel.PAGERDUTY, "https://events.pagerduty.com/s3cret"),
        (NoticeChannel.EMAIL, "ops@s3cret.test"),
        (NoticeChannel.EMAIL, "smtp://s3cret.test/"),
        (NoticeChannel.EMAIL, "smtp://s3cret.test/a@x.test%0d%0aBcc:e@x.test"),
        (NoticeChannel.EMAIL, "smtp://s3cret.test/a@x.test?from=b@x.test&x=1"),
        (NoticeChannel.EMAIL, "smtp://s3cret.test:99999/a@x.test"),
    ],
)
def test_wrong_addresses_are_refused_and_not_repeated(channel: NoticeChannel, address: str) -> None:
    with pytest.raises(WrongAddress) as caught:
        make_message(channel, address, [make_notice()])
    assert "s3cret" not in str(caught.value).replace("cavvy:s3cret@mail.example.com", "")


def test_the_pauses_grow_and_end() -> None:
    pauses = [find_pause(tries) for tries in range(1, MOST_TRIES)]
    assert pauses[:3] == [timedelta(seconds=each) for each in (5, 10, 20)]
    assert max(filter(None, pauses)) == timedelta(hours=1)
    assert sum(filter(None, pauses), timedelta(0)) > timedelta(hours=12)
    assert find_pause(MOST_TRIES) is None


# The sender


class Clock:
    def __init__(self) -> None:
        self.at = NOW

    def now(self) -> Any:
        return self.at


class Outbox:
    """A sender over a store, whose messages are recorded instead of sent."""

    def __init__(self, store: Store) -> None:
        self.store, self.clock, self.hints = store, Clock(), list[str]()
        self.sent: list[HttpNotice | MailNotice] = []
        self.problem: str | Exception = ""

        async def open_address(target: NoticeTarget) -> str:
            return target.sealed.decode()

        async def read_targets() -> str:
            return ""

        async def send(message: HttpNotice | MailNotice, targets: str) -> str:
            self.sent.append(message)
            if isinstance(self.problem, Exception):
                raise self.problem
            return self.problem

        clock: Any = self.clock
        self.sender = NoticeSender(
            store, clock, self.hints.append, open_address, read_targets, send
        )

    async def target(self, name: str = "t", **fields: Any) -> NoticeTarget:
        target = NoticeTarget(
            **{
                "project": "p",
                "name": name,
                "channel": NoticeChannel.SLACK,
                "sealed": b"https://hooks.test/s3cret",
                "events": ("done", "failed"),
                "updated_at": NOW,
                **fields,
            }
        )
        await SqlNotices(*self.store.database).put(target)
        return target

    async def end(self, job_id: str, kind: str = "failed", **fields: Any) -> None:
        job = await submit(self.store, job_id, name=job_id, **fields)
        await self.store.commit(AtomicWrite(events=[make_event(job, EVIL, kind=kind)]))

    async def problem_of(self, name: str = "t") -> str:
        return (await SqlNotices(*self.store.database).target("p", name)).problem


def in_outbox(scenario: Any) -> None:
    async def main() -> None:
        store = open_store("memory:")
        await store.open()
        try:
            await scenario(Outbox(store))
        finally:
            await store.close()

    asyncio.run(main())


def test_a_notice_waits_until_its_receiver_has_accepted_it() -> None:
    async def scenario(outbox: Outbox) -> None:
        target, key = await outbox.target(), notice_key("p", "t")
        await outbox.end("one")
        await outbox.sender.look()
        assert outbox.hints == [key]
        outbox.problem = "status 503"
        assert await outbox.sender.reconcile(key) == timedelta(seconds=5)
        assert await outbox.problem_of() == "status 503"
        outbox.hints.clear()
        await outbox.sender.look()
        assert outbox.hints == []
        assert await outbox.sender.reconcile(key) == timedelta(seconds=5)  # it is too early
        assert len(outbox.sent) == 1
        outbox.clock.at += timedelta(seconds=5)
        assert await outbox.sender.reconcile(key) == timedelta(seconds=10)
        outbox.clock.at += timedelta(seconds=10)
        outbox.problem = ""
        await outbox.end("two")  # both are in the next message
        await outbox.sender.reconcile(key)
        assert await SqlNotices(*outbox.store.database).waiting(target, 9) == []
        assert await outbox.problem_of() == ""
        assert b"two" in outbox.sent[-1].body  # type: ignore[union-attr]  # Slack's is by HTTP
        assert await outbox.sender.reconcile(key) is None

    in_outbox(scenario)


def test_a_notice_is_given_up_after_many_tries_or_a_refused_target() -> None:
    async def scenario(outbox: Outbox) -> None:
        target, key = await outbox.target(), notice_key("p", "t")
        await outbox.end("one")
        outbox.problem = "status 404"
        for _ in range(MOST_TRIES):
            outbox.clock.at += timedelta(hours=1)
            await outbox.sender.reconcile(key)
        assert await SqlNotices(*outbox.store.database).waiting(target, 9) == []
        assert (len(outbox.sent), await outbox.problem_of()) == (MOST_TRIES, "not sent: status 404")
        await outbox.end("two")
        outbox.problem = TargetDenied("hooks.test is not a public address")
        await outbox.sender.reconcile(key)
        assert await SqlNotices(*outbox.store.database).waiting(target, 9) == []
        assert len(outbox.sent) == MOST_TRIES + 1
        assert "not a public address" in await outbox.problem_of()

    in_outbox(scenario)


def test_programs_get_each_event_and_the_key_of_no_address_is_told() -> None:
    async def scenario(outbox: Outbox) -> None:
        await outbox.target(channel=NoticeChannel.WEBHOOK)
        await outbox.end("one")
        await outbox.end("two", "done")
        for _ in range(3):
            await outbox.sender.reconcile(notice_key("p", "t"))
        assert len(outbox.sent) == 2
        broken = await outbox.target("broken", sealed=b"s3cret")
        problem = await outbox.sender.test(broken, "ada")
        assert problem.startswith("expected a web address")
        assert "s3cret" not in problem

    in_outbox(scenario)
