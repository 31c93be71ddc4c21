"""How work ends that several want to end, and what is told of work whose agent was killed."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cavvy.agent.runner import Runner


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
    runner: Any = Runner.__new__(Runner)
    runner._loop, runner._kill_timer = Timers(), None
    runner._steps = SimpleNamespace(finishing=False, process=object(), ask=lambda: None)
    runner._over, runner._ending = False, None
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
        ("0", "succeeded", 0),
        ("7", "exit", 7),
        ("75", "preempted", 75),
        ("", "node", None),
        (None, "node", None),
    ],
)
def test_what_the_guardian_wrote_down_is_told_by_the_next_agent(
    status: str | None, outcome: str, code: int | None, tmp_path: Path
) -> None:
    runner: Any = Runner.__new__(Runner)
    runner._places = SimpleNamespace(status=str(tmp_path / "status"))
    if status is not None:
        (tmp_path / "status").write_text(status)
    assert runner._lost_exit()[:2] == (outcome, code)
