"""A follower sees output and events in the order in which they happened, and what a silent job
does; a command without a name finds the folder's job.
"""

import io
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import click
import pytest
from rich.console import Console
from tests.unit.cli_client import FakeClient, make_attempt, make_event, make_job, make_node

from cavvy import AsyncClient, Client
from cavvy.cli.reach import follow
from cavvy.cli.reach.newest import find_newest
from cavvy.cli.reach.setup_output import LogPart
from cavvy.cli.view import screen
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.setup_line import FailedSetup
from cavvy.client import wire


class Screen:
    def __init__(self) -> None:
        self.told: list[str] = []
        self.line = b""

    def log(self, rank: int, data: bytes) -> None:
        self.told.append(data.decode())

    def event(self, event: wire.EventView) -> None:
        self.told.append(event.kind)

    def job(self, job: wire.JobDetail) -> None: ...

    def setup(self, line: bytes, lines: int) -> None:
        self.line = line

    def failed_setup(self, failed: FailedSetup) -> None:
        self.told.append(f"{failed.more} before {failed.data.decode()}")


def test_output_that_overtakes_its_event_stands_below_it() -> None:
    shown = Screen()
    order = follow._Order(shown)
    order.log(LogPart(0, 1, b"first"))
    for number, kind in enumerate(("placed", "claimed", "setup", "running")):
        order.event(make_event(number, kind, ""))
    order.log(LogPart(0, 1, b"second"))
    order.log(LogPart(0, 2, b"resumed"))
    order.event(make_event(5, "preempted", ""))
    order.event(make_event(6, "setup", "", attempt=2))
    order.event(make_event(7, "running", "", attempt=2))
    order.end()
    assert shown.told == [
        *("placed", "claimed", "setup", "running", "first", "second"),
        *("preempted", "setup", "running", "resumed"),
    ]


def test_a_traceback_stands_before_the_end_that_it_explains() -> None:
    shown = Screen()
    order = follow._Order(shown)
    order.log(LogPart(0, 1, b"Traceback"))
    order.event(make_event(1, "exited", "exit code 1"))
    assert shown.told == ["Traceback", "exited"]


def test_output_is_never_kept_back(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, now = Screen(), [0.0]
    monkeypatch.setattr(follow, "monotonic", lambda: now[0])
    order = follow._Order(shown)
    order.log(LogPart(0, 1, b"of an agent that never says so"))
    order.look()
    assert not shown.told
    now[0] += 60
    order.look()
    order.log(LogPart(0, 2, b"rest"))
    order.end()
    assert shown.told == ["of an agent that never says so", "rest"]


def test_a_silent_job_shows_its_time_its_spending_and_its_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(screen, "monotonic", lambda: now[0])
    node = make_node(progress={}, telemetry={"cpu_percent": 97.4, "gpu_percent": 0.0})
    job = make_job(
        "quiet",
        "running",
        since=datetime.now(UTC),
        spent_micros=1_230_000,
        attempts=[make_attempt(nodes=[node])],
    )
    bar = screen.ProgressBar(job)

    def drawn() -> str:
        out = io.StringIO()
        Console(file=out, width=160, force_terminal=True, color_system=None).print(bar)
        return out.getvalue()

    assert "$1.23  cpu 97 %, gpu 0 %" in drawn()
    assert "no output" not in drawn()
    now[0] += 150
    assert "no output for 2m00s" in drawn()
    bar.heard()
    assert "no output" not in drawn()


def make_client(*names: str) -> FakeClient:
    return FakeClient(all_jobs={name: make_job(name, "running") for name in names})


def test_without_a_name_the_newest_job_of_the_folders_task_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.yaml").write_text("name: digits\nrun: 'true'\n")
    client = make_client("other", "digits-3", "digits")
    assert find_newest(client, "default", "logs") == "digits-3"  # type: ignore[arg-type]
    assert "digits-3" in capsys.readouterr().err


def feed(lines: str) -> Callable[[str], str]:
    """What a user types, a line at each question."""
    left = iter(lines.split("\n"))
    return lambda question: next(left)


def test_without_a_task_the_only_job_is_meant_and_of_several_there_is_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_newest(make_client("one"), "default", "logs") == "one"  # type: ignore[arg-type]
    with pytest.raises(CommandFailure) as raised:
        find_newest(make_client("one", "two"), "default", "logs")  # type: ignore[arg-type]
    assert "one (running), two (running)" in raised.value.hint
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    for given, wanted in (("", "one"), ("2", "two"), ("nonsense\n3\ntwo", "two")):
        monkeypatch.setattr(click.termui, "visible_prompt_func", feed(given))
        assert find_newest(make_client("one", "two"), "default", "logs") == wanted  # type: ignore[arg-type]
    with pytest.raises(CommandFailure, match="there is no job"):
        find_newest(make_client(), "default", "logs")  # type: ignore[arg-type]


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_the_command_run_has_its_name_in_python(client: type) -> None:
    assert client.run is client.submit  # type: ignore[attr-defined]
