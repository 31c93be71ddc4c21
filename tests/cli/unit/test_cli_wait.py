"""`cavvy wait`: its exit codes, and when it returns; and why a job waits that is not followed."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from click.testing import CliRunner, Result
from tests.unit.cli_client import FakeClient, client, make_job

from cavvy.cli import logs
from cavvy.cli.main import cli
from cavvy.cli.reach import waiting
from cavvy.cli.reach.waiting import find_wait
from cavvy.client import ApiError, wire

__all__ = ["client"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["wait", *arguments], prog_name="cavvy")


@dataclass
class Clock:
    """Time that passes only while the command sleeps."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(logs, "time", found)
    monkeypatch.setattr(waiting, "time", found)
    return found


def test_the_exit_code_is_that_of_the_first_failed_job(client: FakeClient, clock: Clock) -> None:
    assert run("good").exit_code == 0
    found = run("good", "bad")
    assert found.exit_code == 3
    assert [line.split(":")[0] for line in found.stdout.splitlines()] == ["good", "bad"]


def test_jobs_that_ended_because_of_another_do_not_count(
    client: FakeClient, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = {
        "trainer": make_job(name="trainer", phase="stopped", exit_code=143, stop_cause="group"),
        "reward": make_job(name="reward", phase="failed", exit_code=3),
        "report": make_job(name="report", phase="stopped", stop_cause="dependency"),
    }
    monkeypatch.setattr(client, "job", lambda project, name, session: jobs[name])
    assert waiting.wait_for_all(cast(Any, client), "default", [*jobs], graph=True) == 3
    assert waiting.wait_for_all(cast(Any, client), "default", [*jobs]) == 143


def test_a_job_that_runs_is_waited_for_until_it_ends(
    client: FakeClient, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    phases = iter(["queued", "running", "running", "done"])

    def job(project: str, name: str, *, session: bool) -> wire.JobDetail:
        asked.append(name)
        return make_job(name="now", phase=next(phases))

    monkeypatch.setattr(client, "job", job)
    assert run("now").exit_code == 0
    assert list(phases) == []
    assert asked == ["now", *["id-of-now"] * 3]  # a name may lead to another session later
    phases = iter(["queued", "running", "done"])
    assert run("now", "--for", "running").stdout.startswith("now: running")
    assert list(phases) == ["done"]


def test_a_timeout_has_an_exit_code_of_its_own(client: FakeClient, clock: Clock) -> None:
    found = run("now", "--timeout", "90s")
    assert (found.exit_code, 90 <= clock.now < 93) == (124, True)
    assert "still running" in found.stderr
    assert run("now", "--timeout", "soon").exit_code == 2


def test_a_wait_says_each_reason_once(
    client: FakeClient, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = iter(["submitted", "a", "a", "b"])

    def job(project: str, name: str, *, session: bool) -> wire.JobDetail:
        reason = next(reasons, None)
        return make_job("now", "queued", reason=reason) if reason else make_job("now", "done")

    monkeypatch.setattr(client, "job", job)
    done = run("now")
    assert (done.exit_code, done.stderr) == (0, "now: queued, a\nnow: queued, b\n")


def test_a_command_that_does_not_follow_says_why_the_job_waits(
    client: FakeClient, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = iter(["submitted", "submitted", "waits for free capacity at local/here"])
    queued = wire.EventView(
        id=1, at=datetime.now(UTC), attempt=0, rank=None, kind="queued", text="submitted"
    )
    page = wire.EventPage(events=[queued], last=1, over=False)
    monkeypatch.setattr(client, "events", lambda project, name: page, raising=False)
    monkeypatch.setattr(
        client, "job", lambda project, name: make_job("now", "queued", reason=next(reasons))
    )
    found = find_wait(cast(Any, client), "default", "now")
    assert found == "waits for free capacity at local/here"


def test_a_job_that_starts_or_cannot_be_asked_about_waits_for_nothing(
    client: FakeClient, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = wire.EventPage(events=[], last=0, over=False)
    monkeypatch.setattr(client, "events", lambda project, name: page, raising=False)
    monkeypatch.setattr(client, "job", lambda project, name: make_job("now", "starting"))
    assert find_wait(cast(Any, client), "default", "now") == ""

    def fail(project: str, name: str) -> None:
        raise ApiError("no-server", "the server has ended")

    monkeypatch.setattr(client, "events", fail, raising=False)
    assert find_wait(cast(Any, client), "default", "now") == ""
    assert clock.now == 0
