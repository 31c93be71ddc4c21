"""What a follower of a job sees: each step once, logs by rank, a bar that fits, tables that
wrap.
"""

import io
import os
import re
import sys
import tty

import pytest
from rich.console import Console
from tests.unit.cli_client import FakeClient, make_attempt, make_event, make_job, make_node

from cavvy.cli.reach.session import make_patience
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.formatting import JobStory, show_progress
from cavvy.cli.view.output import TableColumn, rows_out
from cavvy.cli.view.screen import ProgressBar, open_screen
from cavvy.cli.view.summary import summary_out
from cavvy.client import wire
from cavvy.domain.tasks import TaskSpec

FACTS = {"submitted": "submitted", "exit code 0": "succeeded"}


def told(story: JobStory, *steps: tuple[str, str]) -> list[str]:
    events = [
        make_event(number, kind, text, rank=0, fact=FACTS.get(text))
        for number, (kind, text) in enumerate(steps)
    ]
    return [" ".join(story.text(step).split()) for event in events for step in story.tell(event)]


def test_a_preempted_job_is_told_without_saying_anything_twice() -> None:
    assert told(
        JobStory(several=False),
        ("queued", "submitted"),
        ("placed", "starts on a"),
        ("claimed", "the agent of rank 0 reported in"),
        ("setup", "the setup began"),
        ("running", "runs on a"),
        ("checkpoint", "a checkpoint is complete"),
        ("drill", "a fire drill reclaims the node away in 5 s"),
        ("notice", "a fire drill reclaims the node"),
        ("checkpoint", "a checkpoint is complete"),
        ("exited", "a fire drill reclaims the node"),
        ("preempted", "a fire drill reclaims the node"),
        ("queued", "a fire drill reclaims the node; tried again"),
        ("billed", "it cost $1"),
        ("placed", "starts on b"),
        ("checkpoint", "a checkpoint is complete"),
        ("exited", "exit code 0"),
        ("done", "the work succeeded"),
        ("billed", "it cost $1"),
    ) == [
        "placed starts on a",
        "setup the setup began",
        "running runs on a",
        "notice a fire drill reclaims the node",
        "checkpoint a checkpoint is complete",
        "preempted a fire drill reclaims the node",
        "queued tried again",
        "placed starts on b",
    ]


def test_an_end_is_told_only_when_it_was_not_the_end() -> None:
    story = JobStory(several=False)
    assert told(story, ("failed", "exit code 3"), ("billed", "it cost $1")) == []
    assert told(story, ("queued", "the user asked for a retry")) == [
        "failed exit code 3",
        "queued the user asked for a retry",
    ]


def test_of_a_gang_the_rank_that_failed_is_told() -> None:
    steps = [
        ("exited", "exit code 0", 2),
        ("exited", "exit code 4", 0),
        ("stop", "rank 0 failed", None),
    ]
    steps += [
        ("exited", "rank 0 failed", 1),
        ("exit", "exit code 4 on rank 0", None),
        ("failed", "exit code 4 on rank 0", None),
    ]
    events = [
        make_event(number, kind, text, rank=rank, fact=FACTS.get(text))
        for number, (kind, text, rank) in enumerate(steps)
    ]
    story = JobStory(several=True)
    assert [story.text(step) for event in events for step in story.tell(event)] == [
        "exited      rank 0: exit code 4",
        "stop        rank 0 failed",
    ]


def drawn(bar: ProgressBar, width: int, **how: bool) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=True, color_system=None, **how).print(bar)
    return out.getvalue().rstrip("\n")


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 300])
def test_the_bar_is_one_line_at_any_width(width: int) -> None:
    line = drawn(ProgressBar(make_job("digits", "running")), width)
    assert "\n" not in line
    assert len(line) < width
    assert ("3/12 epochs  loss 0.25  9s left" in line) == (width >= 60)
    assert ("━" in line) == (width >= 60)


def test_the_bar_shows_the_part_that_is_done() -> None:
    job = make_job("digits", "running")
    line = drawn(ProgressBar(job), 120, no_color=True)
    assert (line.count("━"), line.count("─")) == (10, 30)
    bar = ProgressBar(job)
    bar.show(
        make_job(
            "digits",
            "done",
            attempts=[make_attempt(nodes=[make_node(progress={"done": 4, "total": 4})])],
        )
    )
    line = drawn(bar, 120, no_color=True)
    assert line.startswith("✓ digits  ━")
    assert line.count("━") == 40
    assert "left" not in line


def test_the_bar_says_what_a_job_waits_for() -> None:
    assert "queued  position 2 in the queue; waits for CPUs" in drawn(
        ProgressBar(make_job("digits", "queued")), 80
    )
    assert "starting  as it should be" in drawn(
        ProgressBar(make_job("digits", "starting", attempts=[])), 80
    )
    odd = make_attempt(nodes=[make_node(progress={"done": 9, "total": 0, "state": "warming up"})])
    assert "warming up" in drawn(ProgressBar(make_job("digits", "running", attempts=[odd])), 80)


def test_progress_as_one_line() -> None:
    assert (
        show_progress({"done": 3, "total": 4, "loss": 0.5, "left_s": 61.2})
        == "3/4  loss 0.5  1m01s left"
    )
    assert show_progress({}) == ""


def test_a_pipe_gets_the_log_alone(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with open_screen(make_job("x", "running")) as screen:
        screen.log(0, b"half a")
        screen.event(make_event(1, "running", "runs on a"))
        screen.log(0, b" line\r\n\xff")
    out, err = capfdbinary.readouterr()
    assert out == b"half a line\r\n\xff"
    assert err == b"[cavvy 03:04:06 UTC] running     runs on a\n"


def test_lines_of_several_ranks_are_whole_and_named(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    with open_screen(
        make_job("x", "running", task=TaskSpec(name="x", run="true", nodes=2))
    ) as screen:
        screen.log(0, b"one ")
        screen.log(1, b"two\nrest")
        screen.log(0, b"line\n")
    assert capfdbinary.readouterr().out == b"[1] two\n[0] one line\n[1] rest\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def read_screen(terminal: int) -> str:
    """What a live screen has written: at its end, it shows the cursor again. The kernel hands the
    output over in pieces.
    """
    shown = b""
    while b"\x1b[?25h" not in shown:
        shown += os.read(terminal, 65536)
    return shown.decode()


def test_a_silent_server_is_reported_above_the_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as out, os.fdopen(os.dup(slave), "w") as err:
        tty.setraw(slave)
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        with open_screen(make_job("x", "running")):
            make_patience().note_silence()
        out.flush()
        shown = read_screen(master)
    os.close(master)
    line = next(each for each in shown.split("\n") if "no answer from the server" in each)
    assert re.split("\r|\x1b\\[2K", line)[-1].startswith("cavvy: no answer from the server yet")


@pytest.mark.parametrize("size", [{}, {"COLUMNS": "0"}, {"COLUMNS": "0", "LINES": "0"}])
def test_the_log_is_shown_on_a_terminal_that_states_no_size(
    monkeypatch: pytest.MonkeyPatch, size: dict[str, str]
) -> None:
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm", **size}.items():
        monkeypatch.setenv(name, value)
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with open_screen(make_job("x", "running")) as screen:
            screen.log(0, b'first line\nCAVVY_PROGRESS {"done": 1, "total": 2}\n')
        out.flush()
        shown = read_screen(master)
    os.close(master)
    assert "first line" in shown
    assert "CAVVY_PROGRESS" not in shown  # the bar has the values


@pytest.mark.parametrize(
    ("variables", "styled"),
    [({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"NO_COLOR": "1"}, False)],
)
def test_tables_errors_and_summaries_have_colours_where_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], styled: bool
) -> None:
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    job = make_job("x", "failed")
    for print_some in (
        lambda: rows_out(["kind"], [("failed",)], file=sys.stderr),
        lambda: CommandFailure("no such job", "list the jobs").show(),
        lambda: summary_out(job, FakeClient({"x": job}).cost("default", "x")),
    ):
        monkeypatch.setattr(sys, "stderr", err := Terminal())
        print_some()
        assert ("\x1b[" in err.getvalue()) == styled, err.getvalue()


def test_a_long_reason_goes_on_below_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    rows_out(
        ["kind", TableColumn("text", wrap=True)],
        [("failed", "no place has as many CPUs as that"), ("x", "y")],
        file=out,
    )
    assert out.getvalue().splitlines() == [
        "KIND    TEXT",
        "failed  no place has as many",
        "        CPUs as that",
        "x       y",
    ]


def test_a_pipe_says_once_the_position_of_a_job_without_a_reason(
    capfd: pytest.CaptureFixture[str],
) -> None:
    job = make_job("x", "queued", reason="submitted", queue_position=9)
    with open_screen(job) as screen:
        screen.event(make_event(1, "queued", "submitted", fact="submitted"))
        for _ in range(3):
            screen.job(job)
        assert capfd.readouterr().err == ""
        for _ in range(5):
            screen.job(job)
    assert re.findall(r"\] (\w+ +.*)", capfd.readouterr().err) == [
        "queued      position 9 in the queue"
    ]


def test_a_reason_that_is_seen_before_its_event_is_told_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    again = "a fire drill reclaims the node; tried again"
    job = make_job("x", "queued", reason=again)
    with open_screen(job) as screen:
        screen.event(make_event(1, "notice", "a fire drill reclaims the node: 5 s left"))
        screen.job(job)
        screen.event(make_event(2, "preempted", "a fire drill reclaims the node"))
        screen.event(make_event(3, "queued", again))
        screen.job(job)
    said = [line.partition("] ")[2] for line in capfd.readouterr().err.splitlines()]
    assert [line.split(maxsplit=1) for line in said[-2:]] == [
        ["preempted", "a fire drill reclaims the node"],
        ["queued", "tried again"],
    ]
    assert len(said) == 3


def test_a_pipe_says_once_why_a_job_waits(capfd: pytest.CaptureFixture[str]) -> None:
    def queued(reason: str) -> wire.JobDetail:
        return make_job("x", "queued", reason=reason)

    with open_screen(queued("submitted")) as screen:
        screen.job(queued("submitted"))
        screen.event(make_event(1, "queued", "submitted", fact="submitted"))
        for reason in ("submitted", "waits for a", "waits for a", "waits for b", "waits for b"):
            screen.job(queued(reason))
        screen.job(make_job("x", "running"))
    shown = capfd.readouterr()
    assert shown.out == ""
    assert re.findall(r"\] (\w+ +.*)", shown.err) == [
        "queued      waits for a",
        "queued      waits for b",
    ]
