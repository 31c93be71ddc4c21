"""Which connections without a request are closed, and when no more are accepted."""

import pytest

from cavvy.api import doors
from cavvy.api.doors import WAITING, Waiting


def fill(waiting: Waiting, count: int) -> list[int]:
    """Add connections, each from its own address; returns those that were closed so far."""
    closed: list[int] = []
    for number in range(count):
        waiting.add(
            number, f"10.0.{number // 250}.{number % 250}", lambda n=number: closed.append(n)
        )
    return closed


def test_a_crowd_is_served_before_more_connections_are_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(doors.time, "monotonic", lambda: now)
    waiting = Waiting()
    closed = fill(waiting, WAITING)
    assert waiting.crowded
    waiting.remove(0)  # it has sent its request
    assert not waiting.crowded
    waiting.add("new", "10.9.9.9", lambda: None)
    assert waiting.crowded
    assert not closed


def test_connections_that_stay_silent_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(doors.time, "monotonic", lambda: now)
    waiting = Waiting()
    closed = fill(waiting, WAITING)
    now += doors.SERVED_S
    assert not waiting.crowded
    waiting.add("new", "10.9.9.9", lambda: None)
    assert closed == [0]
