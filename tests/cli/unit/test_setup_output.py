"""A follower shows a setup as one line, its last lines if it fails, and all output of the work."""

from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.unit.cli_client import T0, make_attempt, make_event, make_job, make_node

from cavvy.cli.reach import follow
from cavvy.cli.reach.setup_output import LogPart, SetupOutput, only_setup
from cavvy.cli.view import screen
from cavvy.cli.view.screen import open_screen
from cavvy.cli.view.setup_line import FailedSetup, SetupLine
from cavvy.client import LogChunk, wire

BEFORE, SETUP, WORK = b"cavvy: a note\n", b"Collecting torch\nInstalling\n", b"step 1\nstep 2\n"
FROM, TO = len(BEFORE), len(BEFORE + SETUP)


def make_detail(
    *, to: int | None = None, phase: str = "starting", **node: object
) -> wire.JobDetail:
    known = make_node(setup_from=FROM, setup_to=to, **{"phase": "setup", **node})
    return make_job("x", phase, attempts=[make_attempt(nodes=[known])])


def cut(data: bytes, at: int, cuts: set[int]) -> Iterator[LogPart]:
    edges = sorted({0, len(data), *(each for each in cuts if each < len(data))})
    for begin, end in pairwise(edges):
        yield LogPart(0, 1, data[begin:end], at + begin)


@given(cuts=st.sets(st.integers(1, 60)), known=st.integers(0, 60))
def test_of_a_setup_only_the_works_output_is_shown_however_the_log_arrives(
    cuts: set[int], known: int
) -> None:
    setups, shown, seen = SetupOutput(), b"", 0
    setups.learn(make_detail())
    for part in cut(BEFORE + SETUP + WORK, 0, cuts):
        if seen >= known:
            shown += b"".join(each.data for each in setups.learn(make_detail(to=TO)))
        shown += b"".join(each.data for each in setups.take(part))
        seen += len(part.data)
    shown += b"".join(each.data for each in setups.learn(make_detail(to=TO)))
    assert shown == BEFORE + WORK
    assert setups.lines == SETUP.count(b"\n")
    assert not setups.list_open()


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
        self.told.append(f"{failed.more} before: {failed.data.decode()}")


def test_a_setup_that_fails_shows_its_last_lines_before_its_end() -> None:
    shown = Screen()
    order = follow._Order(shown)
    order.learn(make_detail())
    order.event(make_event(1, "setup", ""))
    order.log(LogPart(0, 1, BEFORE, 0))
    order.log(LogPart(0, 1, b"".join(b"line %d\n" % number for number in range(25)), FROM))
    assert shown.line == b"line 24"
    order.event(make_event(2, "exited", "exit code 3", rank=0, fact="setup"))
    last = "".join(f"line {number}\n" for number in range(5, 25))
    assert shown.told == ["setup", BEFORE.decode(), f"5 before: {last}", "exited"]
    order.log(LogPart(0, 1, b"late\n", 1000))
    assert shown.told[-1] == "late\n"


def test_a_setup_that_was_stopped_shows_nothing() -> None:
    shown = Screen()
    order = follow._Order(shown)
    order.learn(make_detail())
    order.log(LogPart(0, 1, b"line\n", FROM))
    order.event(make_event(2, "exited", "stopped", rank=0, fact="stopped"))
    order.end()
    assert shown.told == ["exited"]


def test_output_after_a_wait_for_another_setup_stands_below_its_start() -> None:
    shown = Screen()
    order = follow._Order(shown)
    order.event(make_event(1, "setup", ""))
    order.event(make_event(2, "waits", "another job runs it"))
    order.log(LogPart(0, 1, WORK, FROM))
    order.learn(make_detail(to=FROM, phase="running"))
    order.event(make_event(3, "running", ""))
    assert shown.told == ["setup", "waits", "running", WORK.decode()]


def test_only_the_setup_of_each_attempt_is_printed() -> None:
    data = BEFORE + SETUP + WORK
    chunks = [
        LogChunk(data=data[at : at + 7], attempt=1, offset=min(len(data), at + 7), over=False)
        for at in range(0, len(data), 7)
    ]
    chunks.append(LogChunk(data=b"no setup", attempt=2, offset=8, over=True))
    found = [*only_setup(chunks, make_detail(to=TO), 0)]
    assert b"".join(each.data for each in found) == SETUP
    assert all(data[each.offset - len(each.data) : each.offset] == each.data for each in found)


def test_a_pipe_is_told_of_a_setup_now_and_then(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(screen, "monotonic", lambda: now[0])
    detail = make_detail(telemetry={"setup_other_s": 64.0, "setup_written_mib": 230.0})
    with open_screen(detail) as shown:
        for _ in range(240):  # two minutes
            shown.setup(b"Downloading\x1b[31m 1 GB\r", 0)
            shown.job(detail)
            now[0] += 0.5
        shown.setup(b"", 120)
        done = make_detail(to=TO, phase="running", running_at=T0 + timedelta(seconds=121))
        shown.job(done)
        shown.job(done)
    out, err = capfd.readouterr()
    said = [line.partition("] ")[2] for line in err.splitlines()]
    other = "setup       by another job on this machine for 1m04s  230.0 MiB written"
    assert said[:-1] == [other] * 3
    assert said[-1] == "setup       took 2m00s; 120 lines of output: cavvy logs --setup x"
    assert not out


def test_the_line_of_a_setup_says_how_long_how_much_and_what() -> None:
    line = SetupLine()
    line.learn(make_detail(telemetry={"setup_written_mib": 1536.0}))
    line.wrote(b" Collecting \x1b]0;title\x07torch\r", 0)
    assert line.open
    assert line.figures("$0.10").split("  ")[1:] == ["1.5 GiB written", "$0.10", "Collecting torch"]
    nodes = [make_node(setup_from=0), make_node(setup_from=0, setup_to=4, rank=1)]
    gang = make_job("x", "starting", attempts=[make_attempt(nodes=nodes)])
    line.learn(gang)
    assert line.figures().startswith("on 1 of 2 nodes  ")
    line.learn(replace(gang, phase="queued"))
    assert not line.open
