"""The console's memory of answers that change slowly."""

import pytest

from cavvy.console.memory import Memory


def test_an_answer_is_fetched_again_after_its_time() -> None:
    now = 0.0
    memory = Memory(lambda: now)
    answers = iter("abc")
    assert memory.recall("x", lambda: next(answers), 60) == "a"
    now = 59.0
    assert memory.recall("x", lambda: next(answers), 60) == "a"
    now = 61.0
    assert memory.recall("x", lambda: next(answers), 60) == "b"


def test_errors_are_not_kept() -> None:
    memory = Memory()
    with pytest.raises(ZeroDivisionError):
        memory.recall("x", lambda: 1 // 0)
    assert memory.recall("x", lambda: 2) == 2


def test_the_oldest_answers_are_forgotten() -> None:
    memory = Memory()
    for number in range(400):
        memory.keep(number, number)
    assert memory.find(0) is None
    assert memory.find(399) == 399
