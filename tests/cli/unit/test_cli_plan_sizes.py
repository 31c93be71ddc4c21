"""`cavvy plan` of a task with a range of nodes."""

from types import SimpleNamespace
from typing import Any

import pytest

import cavvy.cli.plan as plan_command
from cavvy.cli.view.failure import CommandFailure
from cavvy.domain.elastic import NodeRange
from cavvy.domain.tasks import TaskSpec

WIDE = TaskSpec(name="t", run="x", nodes=4, elastic=NodeRange(least=4, most=12))


def plan(task: TaskSpec, fits: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Plan a task that fits on this many nodes or more, and return the sizes that were asked for;
    the last one is shown."""
    asked: list[int] = []

    def answer(wish: TaskSpec) -> Any:
        asked.append(wish.nodes)
        message = "" if wish.nodes >= fits else "No offer"
        nothing = SimpleNamespace(problems=())
        return SimpleNamespace(task=wish, message=message, warnings=(), advice=(), offered=nothing)

    shown: list[int] = []
    monkeypatch.setattr(
        plan_command, "_put_out", lambda answers, *_: shown.extend(a.task.nodes for a in answers)
    )
    plan_command._plan(task, answer, "table", False)
    assert shown == asked[-1:]
    return asked


def test_the_least_size_is_shown_that_has_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan(WIDE, 1, monkeypatch) == [4]
    assert plan(WIDE, 5, monkeypatch) == [4, 7]
    assert plan(TaskSpec(name="t", run="x", nodes=2), 1, monkeypatch) == [2]


def test_a_task_that_fits_on_no_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CommandFailure, match="No offer"):
        plan(WIDE, 99, monkeypatch)
