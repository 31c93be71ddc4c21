"""How work ends that several want to end, and what is told of work whose agent was killed."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cavvy.agent.config import BadConfig, ConfigFields
from cavvy.agent.ends import AgentState, may_leave, serve_on
from cavvy.agent.notification_socket import TaskReports
from cavvy.agent.runner import RankRunner
from cavvy.agent.verdict import ExitRecord, FailureCause


class Timers:
    """Remembers who wants to be called, and when."""

    def __init__(self) -> None:
        self.set: list[float] = []
        self.cancelled: list[object] = []

    def after(self, seconds: float, call: Callable[[], None]) -> object:
        self.set.append(seconds)
        return SimpleNamespace(due=time.monotonic() + seconds)

    def cancel(self, timer: object) -> None:
        self.cancelled.append(timer)


def test_the_earlier_of_two_ends_counts_and_a_stop_outranks_a_notice() -> None:
    runner: Any = RankRunner.__new__(RankRunner)
    runner._home_entries = None
    runner._heard_notice, runner._work = False, None
    runner._loop, runner._kill_timer = Timers(), None
    runner._steps = SimpleNamespace(
        finishing=False, process=object(), ask=lambda wait_s: None, insist=lambda: None
    )
    runner._state, runner._ending = AgentState.WORKING, None
    runner._end("preempted", "the node goes", 300.0)
    first = runner._kill_timer
    runner._end("stopped", "enough", 100.0)
    runner._end("preempted", "the node goes", 200.0)
    assert runner._loop.set == [300.0, 100.0]
    assert runner._loop.cancelled == [None, first]
    assert runner._ending == ("stopped", "enough")


@pytest.mark.parametrize(
    ("status", "outcome", "code"),
    [
        ("0 0", "succeeded", 0),
        ("7 0", "exit", 7),
        ("75 0", "preempted", 75),
        ("0 1", "stopped", 0),
        ("143 1", "stopped", 143),
        ("", "node", None),
        (None, "node", None),
    ],
)
def test_what_the_reaper_wrote_down_is_told_by_the_next_agent(
    status: str | None, outcome: str, code: int | None, tmp_path: Path
) -> None:
    config: Any = SimpleNamespace(
        status_file=str(tmp_path / "status"),
        notice_file=str(tmp_path / "notice.json"),
        started_file=str(tmp_path / "started"),
    )
    if status is not None:
        (tmp_path / "status").write_text(status)
    assert ExitRecord(config).find_lost()[:2] == (outcome, code)


@pytest.mark.parametrize(
    ("code", "interrupted", "signalled", "outcome"),
    [
        (0, False, False, "succeeded"),  # it ended before the signal was delivered
        (7, False, False, "exit"),
        (0, True, False, "preempted"),
        (7, True, False, "preempted"),
        (0, False, True, "preempted"),  # a batch system signals the work itself
    ],
)
def test_only_what_a_signal_reached_ended_by_it(
    code: int, interrupted: bool, signalled: bool, outcome: str
) -> None:
    runner: Any = RankRunner.__new__(RankRunner)
    runner._home_entries = None
    runner._heard_notice, runner._work = False, None
    told: list[object] = []
    runner._steps = SimpleNamespace(interrupted=interrupted, gpu_excess="")
    runner._state = AgentState.RECLAIMED if signalled else AgentState.ENDING
    runner._ending, runner._cause, runner.reports = (
        ("preempted", "gone"),
        FailureCause(),
        TaskReports(),
    )
    runner._conclude = lambda *what: told.extend(what)
    runner._ran(code, 0)
    assert told[:2] == [outcome, code]


@pytest.mark.parametrize(
    ("code", "ranks", "reason"),
    [
        (1, 4, "rank 2 of 4 failed: KeyError: 'x'; the task ended with exit code 1"),
        (1, 1, "the task failed: KeyError: 'x'; the task ended with exit code 1"),
        (75, 4, "the task asked to be run again (exit code 75)"),
        (0, 4, ""),
    ],
)
def test_the_reason_names_the_process_that_failed_and_its_error(
    code: int, ranks: int, reason: str
) -> None:
    runner: Any = RankRunner.__new__(RankRunner)
    runner._home_entries = None
    runner._heard_notice, runner._work = False, None
    runner._steps, runner._state = (
        SimpleNamespace(interrupted=False, gpu_excess=""),
        AgentState.WORKING,
    )
    runner._ending, runner._cause, runner.reports = None, FailureCause(), TaskReports()
    for error in ("an attempt that torchrun repeated", "KeyError: 'x'"):
        line = {"failed": {"rank": 2, "ranks": ranks, "error": error}}
        runner.reports.hear(ConfigFields(line, "a line"))
    assert runner._judge(code, 0)[2] == reason


def test_a_process_that_starts_again_withdraws_its_own_report_of_a_failure_only() -> None:
    reports = TaskReports()

    def hear(**line: Any) -> str:
        reports.hear(ConfigFields(line, "a line"))
        return reports.failure

    def fail(error: str) -> dict[str, object]:
        return {"rank": 2, "ranks": 4, "error": error}

    hear(started={"process": 0})
    hear(started={"process": 1})
    assert hear(failed=fail("a") | {"process": 0}) == "rank 2 of 4 failed: a"
    hear(failed=fail("b") | {"process": 1})
    assert hear(started={"process": 1}) == "rank 2 of 4 failed: a"
    assert hear(failed=fail("c")) == "rank 2 of 4 failed: c"  # process 0 by default
    assert hear(started={}) == ""
    with pytest.raises(BadConfig, match="`process` is -1"):
        hear(started={"process": -1})


def test_a_report_of_a_failure_must_be_complete() -> None:
    with pytest.raises(BadConfig, match="`error` must be text"):
        TaskReports().hear(ConfigFields({"failed": {"rank": 2, "ranks": 4, "error": 7}}, "a line"))


@pytest.mark.parametrize(
    ("after_s", "silent_s", "stored", "leaves"),
    [
        (60, 60, True, True),
        (60, 59, True, False),  # the server may only be restarting
        (60, 9999, False, False),  # the disk is full: only this process knows the result
        (0, 9999, True, False),  # the disk goes with the node
    ],
)
def test_an_agent_leaves_without_the_server_if_its_home_lasts(
    after_s: float, silent_s: float, stored: bool, leaves: bool
) -> None:
    assert may_leave(after_s, silent_s, stored=stored) == leaves


@pytest.mark.parametrize(
    ("serves", "seconds", "on_s"), [(True, 30, 20), (True, 5, 0), (False, 30, 0)]
)
def test_work_that_serves_goes_on_until_its_grace_period_must_begin(
    serves: bool, seconds: float, on_s: float
) -> None:
    work: Any = SimpleNamespace(serves=serves, grace_s=10.0)
    assert serve_on(work, seconds) == on_s
    assert serve_on(None, seconds) == 0


def test_the_reason_names_what_stays_in_the_project_s_folder() -> None:
    runner: Any = RankRunner.__new__(RankRunner)
    runner._line_open, said = False, []
    runner.wrote = said.append
    for reason, told in (("", "new: x"), ("it ended", "it ended; new: x")):
        runner._home_entries = SimpleNamespace(finish=lambda: ("", "new: x"))
        assert runner._close_home_entries(reason) == told
    assert said == [b"cavvy: new: x\n"] * 2
