"""`benchmarks/big_day.py`: a small day with all its faults, whose books the benchmark checks."""

import importlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("cavvy.capabilities.serving", reason="the day has services")
pytest.importorskip("cavvy.capabilities.choose", reason="it draws the report")

from tests.store.ended_rows import copy_ended, weigh

from cavvy.store.drivers import DatabaseSession

FOLDER = Path(__file__).parents[3] / "benchmarks"
_HOT = 60  # statements of the most calls
_FEW, _MANY = 900, 1500  # jobs that have ended; at most 800 are read for estimates
_EVERY = 50  # steps of SQLite's machine, by which two runs of a statement may differ


class Asked:
    """Counts the statements of a day, and keeps the last values of each."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.counts = Counter[str]()
        self.values: dict[str, tuple[object, ...]] = {}
        run = DatabaseSession.run

        def noted(session: DatabaseSession, sql: str, values: Sequence[object] = ()) -> Any:
            self.counts[sql] += 1
            self.values[sql] = tuple(values)
            return run(session, sql, values)

        patch.setattr(DatabaseSession, "run", noted)


class Played(NamedTuple):
    """A day that was played: the module, the plan, the day, its findings and its statements."""

    program: Any
    plan: Any
    day: Any
    found: Any
    asked: Asked


@pytest.fixture(scope="module")
def played() -> Iterator[Played]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        program = importlib.import_module("big_day")
        times = program.DayTimes(0.25)
        plan = program.DayPlan(nodes=12, jobs=60, services=1, seed=3, times=times)
        with pytest.MonkeyPatch.context() as hook:
            asked = Asked(hook)
            day, found = program.play_day(plan)
        yield Played(program, plan, day, found, asked)


def test_a_day_leaves_the_log_as_it_was(played: Played) -> None:
    assert logging.getLogger("cavvy").propagate
    assert not logging.getLogger("cavvy").handlers


def test_a_small_day_loses_nothing_and_false_books_are_noticed(
    played: Played, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, plan, day, found, _ = played
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


def test_no_statement_of_a_day_grows_with_the_ended_jobs(played: Played) -> None:
    asked, day = played.asked, played.day
    own = {sql for sql in asked.counts if "GROUP BY phase" in sql}  # of the benchmark itself
    hot = [sql for sql, _ in asked.counts.most_common() if sql not in own]
    hot = [sql for sql in hot if sql.lstrip().startswith(("SELECT", "WITH", "UPDATE", "DELETE"))]
    hot = hot[:_HOT]
    assert len(hot) == _HOT
    database = day.store._session._raw
    ended = "SELECT id FROM jobs WHERE phase = 'done' AND attempt = 1 ORDER BY id LIMIT 1"
    [(job,)] = database.execute(ended).fetchall()
    ended = f"SELECT '{job}'"
    copy_ended(database, ended, 1, _FEW)
    few = {sql: weigh(database, sql, asked.values[sql], _EVERY) for sql in hot}
    copy_ended(database, ended, _FEW + 1, _FEW + _MANY)
    grown = []
    for sql in hot:
        plan_text, steps = weigh(database, sql, asked.values[sql], _EVERY)
        assert plan_text == few[sql][0]
        if steps > few[sql][1] + _EVERY:
            grown.append(f"{asked.counts[sql]} times: {few[sql][1]}, then {steps}: {sql}")
    assert not grown, "\n\n".join(grown)
