"""Who waits for the job of a host, with a server that is given."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from cavvy.capabilities.functions.jobs import JobPlace
from cavvy.capabilities.sandboxes import hosts
from cavvy.capabilities.sandboxes.errors import SandboxLost

_NEEDS = hosts.HostNeeds({})


class Jobs:
    """Stands for the server: its jobs by their phase."""

    def __init__(self, **phases: str) -> None:
        self.phases = phases

    @contextmanager
    def use(self) -> Iterator["Jobs"]:
        yield self

    def job(self, project: str, job: str) -> Any:
        return SimpleNamespace(phase=self.phases[job], reason="waits for free capacity at vm")

    def stop(self, project: str, job: str, *, reason: str) -> None:
        self.phases[job] = "stopped"


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> hosts.SandboxHosts:
    """Return hosts of a program that submits the job `mine`, which nothing starts."""
    made = hosts.SandboxHosts()
    monkeypatch.setattr(made, "_connections", Jobs(mine="queued"))
    monkeypatch.setattr(made, "choose_project", lambda project: "p")
    monkeypatch.setattr(made, "_search", lambda *_: None)
    monkeypatch.setattr(made, "_submit", lambda *_: JobPlace("p", "mine", ""))
    return made


def pass_time(monkeypatch: pytest.MonkeyPatch, seconds: int, end: BaseException) -> None:
    """Let the time pass in a wait, which this ends; no host answers on this machine."""
    clock = itertools.count(1)

    def sleep(_: float) -> None:
        if next(clock) > seconds:
            raise end

    def refuse(_: object) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr(hosts, "dial_here", refuse)
    monkeypatch.setattr(hosts.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(hosts.time, "sleep", sleep)


@pytest.mark.parametrize("phase", ["queued", "running"])
def test_a_queued_job_ends_with_the_program_that_submitted_it(
    phase: str,
    waiting: hosts.SandboxHosts,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pass_time(monkeypatch, 9, KeyboardInterrupt())
    monkeypatch.setattr(hosts, "_HERE_S", 99.0)
    jobs: Any = waiting._connections
    jobs.phases["mine"] = phase
    with pytest.raises(KeyboardInterrupt):
        waiting.find(None, _NEEDS)
    # a host that runs takes the sandboxes of others, and ends by itself
    assert jobs.phases["mine"] == ("stopped" if phase == "queued" else "running")
    told = "sandboxes: queued, waits for free capacity at vm\n" if phase == "queued" else ""
    assert capsys.readouterr().err == told


def test_a_host_that_its_program_took_away_is_replaced(
    waiting: hosts.SandboxHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    link: Any = object()

    def connect(place: JobPlace) -> Any:
        if place.id == "theirs":
            raise SandboxLost("its caller has ended")
        return link

    monkeypatch.setattr(waiting, "_search", lambda *_: JobPlace("p", "theirs", ""))
    monkeypatch.setattr(waiting, "_connect", connect)
    assert waiting.find(None, _NEEDS) == (link, JobPlace("p", "mine", ""))
