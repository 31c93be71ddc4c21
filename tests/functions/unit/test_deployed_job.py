"""What a program does that calls a deployed app."""

import signal
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

from cavvy.capabilities.functions import deployed, jobs, wire
from cavvy.capabilities.functions.errors import AppBroken
from cavvy.client.client import ApiClient
from cavvy.client.errors import ApiError


class Connections:
    """Stands for connections to a server."""

    def use(self) -> "Connections":
        return self

    def __enter__(self) -> ApiClient:
        return None  # type: ignore[return-value]  # only the replaced functions get it

    def __exit__(self, *_: object) -> None:
        pass


def make_part(revision: str) -> wire.AppPart:
    return wire.AppPart(
        part=0,
        revision=revision,
        text=f"run: {revision}",
        origin=Raw(b"{}"),
        snapshot="",
        meet="",
        functions=[wire.DeployedFunction(name="f")],
        consent=False,
        job="",
        user="ada",
        updated_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


def make_app(**changed: str) -> wire.DeployedApp:
    return wire.DeployedApp(name="embed", parts=[replace(make_part("r2"), **changed)])


@pytest.mark.parametrize("consent", [False, True])
def test_an_app_that_is_deployed_meanwhile_is_read_again(
    consent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, submitted = ["r1", "r2"], list[tuple[str, bool]]()

    def claim(_: object, project: str, app: str, ask: wire.NextJobAsk) -> str:
        if ask.revision == "r1":
            raise ApiError("app-changed", "the app has no revision r1 any more", "", 409)
        return "job2"

    def submit(_: object, *given: Any, consent: bool) -> None:
        submitted.append((given[2].text, consent))

    monkeypatch.setattr(deployed, "find_part", lambda *_: make_part(read.pop(0)))
    monkeypatch.setattr(wire, "claim_job", claim)
    monkeypatch.setattr(wire, "read_app", lambda *_: make_app(job="job2"))
    monkeypatch.setattr(deployed, "submit_part", submit)
    job = deployed.DeployedJob("embed", "f", "team", consent=consent)
    assert job.find(Connections()).id == "job2"  # type: ignore[arg-type]
    assert submitted == [("run: r2", consent)]


class Listed:
    """A job in a list."""

    def __init__(self, id: str, *, held: bool = False, **tags: str) -> None:
        self.id, self.held = id, held
        self.tags = {f"cavvy-{name}": value for name, value in tags.items()}


class Jobs:
    """Stands for a server with these unfinished jobs, two on a page."""

    def __init__(self, *jobs: Listed) -> None:
        self._jobs = jobs

    def jobs(self, *_: object, cursor: str | None, **__: object) -> Any:
        at = int(cursor or 0)
        more = str(at + 2) if at + 2 < len(self._jobs) else None
        return SimpleNamespace(jobs=self._jobs[at : at + 2], cursor=more)


def test_a_deployment_ends_what_one_before_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have ended after it stored the revision, and before it did the rest."""
    monkeypatch.setattr(wire, "read_app", lambda *_: make_app(job="now"))
    repeats = {"schedule": "embed", "held": True}
    server: Any = Jobs(
        Listed("now", app="embed", deployed="embed"),
        Listed("old", app="embed", deployed="embed"),
        Listed("other app", app="count", deployed="count"),
        Listed("of app.run()", app="embed"),
        Listed("nightly", revision="r2", function="nightly", **repeats),  # type: ignore[arg-type]
        Listed("twice", revision="r2", function="nightly", **repeats),  # type: ignore[arg-type]
        Listed("older", revision="r1", function="weekly", **repeats),  # type: ignore[arg-type]
        Listed("oldest", **repeats),  # type: ignore[arg-type]
        Listed("a run", schedule="embed", revision="r1", function="weekly"),
    )
    old, known = deployed.sort_jobs(server, "team", "embed", "r2")
    assert (old, known) == (["old", "twice", "older", "oldest"], {"nightly"})


class Waits:
    """Stands for a job, and for the clock of who waits for it."""

    name, stays = "embed", False

    def __init__(self, phases: list[str]) -> None:
        self._phases, self._now = phases, 0.0

    def find(self, _: object) -> jobs.JobPlace:
        return jobs.JobPlace("default", "job1", "")

    def look(self, *_: object) -> tuple[str, str]:
        phase, _, reason = (self._phases.pop(0) if self._phases else "failed").partition(" ")
        return phase, reason

    def monotonic(self) -> float:
        return self._now

    def sleep(self, _: float) -> None:
        self._now += 1


def test_a_job_that_stays_queued_is_told_with_its_reason_when_it_changes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: object) -> None:
        raise ConnectionRefusedError

    waits = Waits(["queued"] * 3 + ["queued waits"] * 3 + ["queued is next"] * 2 + ["starting"] * 2)
    monkeypatch.setattr(jobs, "read_state", waits.look)
    monkeypatch.setattr(jobs, "time", waits)
    monkeypatch.setattr(jobs, "dial_here", refuse)
    job = jobs.FunctionJob(waits)
    monkeypatch.setattr(job, "_read_log", lambda _: "")
    with pytest.raises(AppBroken):
        job.dial()
    assert capsys.readouterr().err.splitlines() == [
        "embed: queued; `cavvy status job1` says why",
        "embed: queued, waits",
        "embed: queued, is next",
        "embed: starting",
    ]


def test_the_caller_of_a_deployed_app_is_told_when_it_waits_for_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its job may be queued behind another one for ever; a start of some seconds is none of its
    business."""

    def refuse(_: object) -> None:
        raise ConnectionRefusedError

    waits = Waits(["queued"] * 4 + ["queued waits"] * 4 + ["starting"] * 2)
    monkeypatch.setattr(waits, "stays", True)
    monkeypatch.setattr(jobs, "read_state", waits.look)
    monkeypatch.setattr(jobs, "time", waits)
    monkeypatch.setattr(jobs, "dial_here", refuse)
    monkeypatch.setattr(deployed, "find_part", lambda *_: make_part("r1"))
    monkeypatch.setattr(deployed, "Connections", lambda *_: Connections())
    looked_up = deployed.find_function("embed", "f", "team", trust=True, consent=False)
    real = jobs.FunctionJob
    monkeypatch.setattr(real, "_read_log", lambda *_: "")
    monkeypatch.setattr(jobs, "FunctionJob", lambda _, **options: real(waits, **options))
    with pytest.raises(AppBroken):
        looked_up.remote()
    assert capsys.readouterr().err.splitlines() == ["embed: queued, waits", "embed: starting"]


def test_a_killed_caller_ends_as_by_exit_and_keeps_its_own_handlers() -> None:
    def be_killed() -> None:
        with jobs.ended_by_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # `nohup`
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL  # or the test would end
            signal.raise_signal(signal.SIGTERM)

    before = [signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.getsignal(signal.SIGTERM)]
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with pytest.raises(SystemExit) as ended:
            be_killed()
        assert ended.value.code == 128 + signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before[0])
        signal.signal(signal.SIGTERM, before[1])
