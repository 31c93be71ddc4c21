"""Limits stop a job for the right reason, and whoever asked to be told is told."""

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from tests.system.trust import User, check_bill, check_clean, wait_until

pytestmark = pytest.mark.system


class Receiver:
    """Somebody's own service on loopback; refuses the first `refuse` posts."""

    def __init__(self, refuse: int = 0) -> None:
        self.heard: list[dict[str, object]] = []
        self.refuse = refuse
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.heard.append(json.loads(body))
                self.send_response(503 if len(receiver.heard) <= receiver.refuse else 204)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook?key=hidden"
        Thread(target=self.server.serve_forever, daemon=True).start()

    def events(self) -> list[tuple[object, object]]:
        return [(post["event"], post["job"]) for post in self.heard]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def test_duration_counts_over_attempts(user: User) -> None:
    name = user.submit(
        "{name: long, limits: {duration: 3s}, grace: 1s, run: 'echo began; sleep 300'}"
    )
    wait_until(lambda: "began" in user.said(name))
    user.cli("drill", "preempt", name, "--notice", "1s")
    job = user.ended(name)
    assert (job.phase, job.attempt) == ("failed", 2)
    assert [attempt.outcome for attempt in job.attempts] == ["preempted", "limit"]
    assert "limits.duration" in job.reason
    check_clean(user)


def test_budget_is_kept_and_told(user: User, receiver: Receiver) -> None:
    user.settings("[providers.local]\nprice_usd_hr = 3600\n")
    hook = f"webhooks: [{{url: '{receiver.url}'}}]"
    text = (
        f'{{name: dear, limits: {{budget: 14}}, grace: 1s, {hook}, run: \'trap "exit 4" TERM; '
        f"sleep 300 & wait'}}"
    )
    told = user.cli("run", user.task(text), code=None)
    job = user.ended("dear")
    assert job.phase == "failed", told
    assert "spending limit of $14" in job.reason
    assert 0 < job.spent_micros <= 14_000_000
    assert job.attempts[0].outcome == "limit"
    wait_until(lambda: len(receiver.heard) >= 2)
    assert sorted(receiver.events()) == [("budget", "dear"), ("failure", "dear")]
    check_bill(user, job)
    check_clean(user)


def test_deadline_ends_what_runs_and_what_waits(user: User) -> None:
    user.settings("[providers.local]\ncpus = 1\n")
    user.cli("server", "start")  # no command takes its time between the two
    at = datetime.now(UTC) + timedelta(seconds=12)  # long after the other's
    running = user.api.submit(
        f"{{name: late, limits: {{deadline: '{at:%Y-%m-%dT%H:%M:%SZ}'}}, grace: 1s, "
        "resources: {cpu: 1}, run: 'sleep 300'}"
    ).name
    waiting = user.api.submit(
        "{name: never, limits: {deadline: 3s}, resources: {cpu: 1}, run: 'true'}"
    ).name
    late, never = user.ended(running), user.ended(waiting)
    assert (late.phase, late.attempts[0].outcome) == ("failed", "limit")
    assert (never.phase, never.attempts) == ("failed", [])
    assert "deadline" in late.reason
    assert "deadline" in never.reason
    check_clean(user)


def test_idle_work_is_ended(user: User) -> None:
    told = user.cli(
        "run",
        user.task("{name: idle, limits: {idle: 10s}, grace: 1s, run: 'sleep 300'}"),
        code=None,
    )
    job = user.ended("idle")
    assert (job.phase, job.attempts[0].outcome) == ("failed", "limit"), told
    assert "no output, no CPU use and no connection in use" in job.reason
    check_clean(user)


def test_a_lease_is_over_when_nobody_comes_back_and_never_while_somebody_is_there(
    user: User,
) -> None:
    """A node that hears nothing for `limits.unattended` ends itself; the next server sees it and
    goes on.
    """
    run = (
        f"echo $CAVVY_ATTEMPT >> {user.root}/starts; while [ ! -e {user.root}/go ]; do sleep "
        "0.1; done"
    )
    name = user.submit(f"{{name: alone, limits: {{unattended: 10s}}, grace: 1s, run: '{run}'}}")
    user.wait(name, "running")
    wait_until(lambda: (user.root / "starts").exists())  # else there may be no work to see yet
    user.kill_server()
    wait_until(lambda: not user.worked())
    user.wait(name, lambda job: job.attempt == 2 and job.phase == "running")
    time.sleep(12)
    assert user.job(name).phase == "running"
    (user.root / "go").touch()
    job = user.ended(name)
    assert [attempt.outcome for attempt in job.attempts] == ["preempted", "succeeded"]
    assert "the lease has expired" in job.attempts[0].reason
    assert (user.root / "starts").read_text().split() == ["1", "2"]
    check_clean(user)


def test_finish_and_failure_are_told_to_those_who_asked(user: User, receiver: Receiver) -> None:
    hook = f"webhooks: [{{url: '{receiver.url}', on: ONLY}}]"
    user.cli("run", user.task(f"{{name: well, {hook}, run: 'true'}}".replace("ONLY", "[finish]")))
    user.cli(
        "run",
        user.task(f"{{name: badly, {hook}, run: 'exit 6'}}".replace("ONLY", "[failure]")),
        code=6,
    )
    user.cli(
        "run",
        user.task(f"{{name: quiet, {hook}, run: 'exit 6'}}".replace("ONLY", "[finish, budget]")),
        code=6,
    )
    wait_until(lambda: len(receiver.heard) >= 2)
    assert receiver.events() == [("finish", "well"), ("failure", "badly")]
    post = receiver.heard[1]
    assert (post["phase"], post["exit_code"], post["project"]) == ("failed", 6, "default")
    wait_until(lambda: "webhook" in dict(user.scenario("badly")))
    scenario = user.cli("events", "badly") + user.cli("events", "badly", "-o", "json")
    assert "127.0.0.1 was told" in scenario
    assert "hidden" not in scenario  # an address may hold a key


def test_a_receiver_that_is_away_is_told_later_by_another_server(user: User) -> None:
    user.settings("[providers.local]\nprice_usd_hr = 3600\n")
    receiver = Receiver(refuse=3)
    hook = f"webhooks: [{{url: '{receiver.url}'}}]"
    try:
        user.cli("run", "--yes", user.task(f"{{name: well, {hook}, run: 'true'}}"))
        user.cli(
            "run",
            user.task(f"{{name: dear, limits: {{budget: 1}}, grace: 0s, {hook}, run: sleep 300}}"),
            code=None,
        )
        wait_until(lambda: len(receiver.heard) >= 3)
        user.kill_server()
        user.cli("ps")
        wait_until(lambda: len(receiver.heard) >= 6)
        assert sorted(receiver.events()[3:]) == [
            ("budget", "dear"),
            ("failure", "dear"),
            ("finish", "well"),
        ]
    finally:
        receiver.close()
