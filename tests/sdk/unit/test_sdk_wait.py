"""`Job.wait` says why a job waits in the queue."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import pytest
from tests.unit.cli_client import make_job

from cavvy.client import LogChunk, wire
from cavvy.sdk import job as module
from cavvy.sdk.connections import Connections
from cavvy.sdk.job import Job
from cavvy.sdk.status import read_detail


@dataclass
class Server:
    """A job that has the next state at each request; a long poll takes one second."""

    states: list[wire.JobDetail]
    now: float = 0.0

    @contextmanager
    def use(self) -> Iterator["Server"]:
        yield self

    def monotonic(self) -> float:
        return self.now

    def job(self, project: str, name: str) -> wire.JobDetail:
        return self.states.pop(0)

    def log_chunks(self, project: str, name: str, **how: Any) -> Iterator[LogChunk]:
        for data in (b"", b"", b"", b"", b"hi\n"):
            self.now += 1
            yield LogChunk(data=data, attempt=1, offset=0, over=False)

    def events(self, project: str, name: str, **how: Any) -> wire.EventPage:
        self.now += 1
        return wire.EventPage(events=[], last=0, over=False)


def test_a_wait_gives_each_reason_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reasons = ["submitted", "a", "a", "a", "b", "b"]
    states = [make_job("x", "queued", reason=each) for each in reasons]
    states += [make_job("x", "running"), make_job("x", "done")]
    server = Server(states)
    monkeypatch.setattr(module, "time", server)
    job = Job(cast(Connections, server), read_detail(states[0]))
    assert job.wait().phase == "done"
    said = [
        "the job x is queued: a; position 2 in the queue",
        "the job x is queued: b; position 2 in the queue",
    ]
    assert [each.getMessage() for each in caplog.records] == said
    assert all(each.name.startswith("cavvy.sdk") for each in caplog.records)


def test_a_followed_log_says_why_the_job_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server([make_job("x", "queued", reason="a") for _ in range(4)])
    monkeypatch.setattr(module, "time", server)
    job = Job(cast(Connections, server), read_detail(server.states[0]))
    assert list(job.logs(follow=True)) == ["hi"]
    assert [each.getMessage() for each in caplog.records] == [
        "the job x is queued: a; position 2 in the queue"
    ]
