"""`benchmarks/big_day.py`: a small day with all its faults, whose books the benchmark checks."""

import importlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cavvy.capabilities.serving", reason="the day has services")
pytest.importorskip("cavvy.capabilities.choose", reason="it draws the report")

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("big_day")


def test_a_small_day_loses_nothing_and_false_books_are_noticed(
    program: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = program.DayTimes(0.25)
    plan = program.DayPlan(nodes=12, jobs=60, services=1, seed=3, times=times)
    day, found = program.play_day(plan)
    assert program.show(day, found)
    assert found.jobs >= 60
    assert found.gangs > 30
    assert day.result.cut_off + found.lost_machines > 0
    assert day.store.refused > 0, "the database failed over"
    program.write_day(tmp_path / "day.html", day.result, found)
    assert (tmp_path / "day.html").read_text().count("<svg") == 3

    accepted = day.result.accepted
    free = next(cloud for name, cloud in day.clouds.items() if cloud.gang_list and name != "own")
    free.gang_list.append(free.gang_list[0])
    hall = day.clouds["own"]
    hall.gang_list.append(next(each for each in hall.gang_list if each.ended_at))
    day.store._session.run(
        "UPDATE jobs SET phase = 'running' WHERE id = (SELECT MAX(id) FROM jobs)"
    )
    day.store._session.run(
        "UPDATE charges SET amount = amount + 1 WHERE since = (SELECT MIN(since) FROM charges)"
    )
    wrong = program.check_books(day.store, day.clouds, {**accepted, "never-stored": False})
    assert "never-stored is not stored" in wrong.lost
    assert len(wrong.lost) >= 2
    assert wrong.bought_twice
    assert wrong.held_twice
    assert wrong.wrong_bills
    day.result.plan = plan
    assert not program.show(day, wrong)
    assert "MISSED" in capsys.readouterr().out
