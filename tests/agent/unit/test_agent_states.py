"""The states of the agent of one rank: what each event does in each of them."""

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cavvy.agent.ends import DONE, MOVES, REPORTED, AgentState
from cavvy.agent.runner import RankRunner
from cavvy.agent.verdict import ExitRecord, FailureCause

GOING = [AgentState.WORKING, AgentState.ENDING, AgentState.RECLAIMED]


def test_every_state_can_be_reached_and_every_end_is_an_end() -> None:
    reached = {AgentState.WAITING}
    while more := {to for start, to in MOVES if start in reached} - reached:
        reached |= more
    assert reached == set(AgentState)
    for start, to in MOVES:
        assert start is not AgentState.DISMISSED, "nothing follows a dismissal"
        assert start not in DONE or to in DONE, "work that is over does not begin again"
        assert start not in REPORTED or to in REPORTED, "an exit is reported once"
        assert to is not AgentState.WAITING
    assert all(MOVES.values())


@pytest.mark.parametrize(("start", "to"), list(itertools.product(AgentState, AgentState)))
def test_a_move_that_the_table_lacks_changes_nothing(start: AgentState, to: AgentState) -> None:
    runner: Any = RankRunner.__new__(RankRunner)
    runner._home_entries = None
    runner._state = start
    legal = (start, to) in MOVES
    assert runner._move(to) is legal
    assert runner._state is (to if legal else start)


def make_runner(tmp_path: Path, state: AgentState) -> Any:
    """A runner in this state, whose work has a process and whose log is delivered."""
    runner: Any = RankRunner.__new__(RankRunner)
    runner._home_entries = runner._ports = runner._program = runner.kept_program = None
    runner._cause = FailureCause()
    runner._state = state
    runner._ending = ("stopped", "") if state in (AgentState.ENDING, AgentState.RECLAIMED) else None
    runner._work = (
        None if state is AgentState.WAITING else SimpleNamespace(keep_s=0.0, serves=False)
    )
    runner._loop = SimpleNamespace(after=lambda *_: SimpleNamespace(due=0.0), cancel=lambda _: None)
    runner._config = SimpleNamespace(
        taken=SimpleNamespace(unless=None, seconds=1.0, warning_s=1.0, source="test"),
        grace_s=1.0,
        home=str(tmp_path),
        private=str(tmp_path),
        exit_file=str(tmp_path / "exit"),
        notice_file=str(tmp_path / "notice"),
    )
    runner._outbox = SimpleNamespace(empty=False, put=lambda *_, **__: None, settle=lambda: None)
    runner._log = SimpleNamespace(pending=False, size=0)
    runner.link = SimpleNamespace(pump=lambda: None, release=lambda: None)
    runner._steps = SimpleNamespace(
        process=object(),
        finishing=False,
        gpu_excess="",
        ask=lambda wait_s: None,
        insist=lambda: None,
        kill=lambda: None,
        reserve=lambda _: 0,
    )
    runner._redactor = SimpleNamespace(flush=lambda: b"", text=str)
    runner.execs = SimpleNamespace(kill=lambda: None, idle=True)
    runner._kill_timer = runner._notification_socket = None
    runner._heard_notice = False
    runner._noticed_why = ""
    runner._polls = []
    runner._exit = ExitRecord(runner._config)
    runner._leave = lambda: None
    return runner


@pytest.mark.parametrize(
    ("event", "moves"),
    [
        (lambda runner: runner._end("stopped", "", 1.0), {AgentState.WORKING: AgentState.ENDING}),
        (
            lambda runner: runner.terminated(),
            {AgentState.WORKING: AgentState.RECLAIMED, AgentState.ENDING: AgentState.RECLAIMED},
        ),
        (
            lambda runner: runner.warned(),
            {AgentState.WORKING: AgentState.RECLAIMED, AgentState.ENDING: AgentState.RECLAIMED},
        ),
        (
            lambda runner: runner._conclude("exit", 1, ""),  # nothing is left of the log
            dict.fromkeys([AgentState.WAITING, *GOING], AgentState.EXITED),
        ),
        (lambda runner: runner.delivered(), {AgentState.OVER: AgentState.EXITED}),
        (
            lambda runner: runner.dismissed(""),
            dict.fromkeys(AgentState, AgentState.DISMISSED),
        ),
    ],
    ids=["end", "terminated", "warned", "conclude", "delivered", "dismissed"],
)
@pytest.mark.parametrize("state", AgentState)
def test_what_an_event_does_in_each_state(
    state: AgentState,
    event: Callable[[Any], None],
    moves: dict[AgentState, AgentState],
    tmp_path: Path,
) -> None:
    runner = make_runner(tmp_path, state)
    event(runner)
    assert runner._state is moves.get(state, state)


@pytest.mark.parametrize(("listens", "outcome"), [(True, "preempted"), (False, "succeeded")])
def test_work_that_ends_before_its_signal_was_interrupted_if_it_has_heard_the_notice(
    listens: bool, outcome: str, tmp_path: Path
) -> None:
    """A task may read the notice from its socket and exit with 0 before SIGTERM reaches it. Work
    that does not listen has then ended by itself.
    """
    runner = make_runner(tmp_path, AgentState.WORKING)
    runner._notification_socket = SimpleNamespace(say=lambda kind, value: listens)
    runner._steps.interrupted = False
    runner.ordered("notice", 30.0, "for a test")
    assert runner._judge(0, 0)[0] == outcome


def test_what_a_node_has_learnt_of_its_loss_stays_in_the_notice(tmp_path: Path) -> None:
    """The order of the control plane, which follows, knows less."""
    runner = make_runner(tmp_path, AgentState.WORKING)
    reasons: list[str] = []
    runner._write_notice = lambda seconds, reason: reasons.append(reason)
    runner.noticed(60.0, "PBS", "the time that PBS allows is nearly over")
    runner.ordered("notice", 50.0, "the provider reclaims the node")
    assert reasons == ["the time that PBS allows is nearly over"] * 2


def test_a_notice_that_nobody_hears_again_is_still_heard(tmp_path: Path) -> None:
    """The program that has heard the first notice may have closed its connection at the second."""
    runner = make_runner(tmp_path, AgentState.WORKING)
    runner._steps.interrupted = False
    for listens in (True, False):
        runner._notification_socket = SimpleNamespace(say=lambda *_, listens=listens: listens)
        runner.ordered("notice", 30.0, "for a test")
    assert runner._judge(0, 0)[0] == "preempted"
