"""What an elastic job has measured, what people are told of it, and the switch."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from tests.records import make_offer

from cavvy.capabilities.elastic.keeper import SETTING, SizeKeeper, make_keeper
from cavvy.capabilities.elastic.measure import LEAST_RUN_S, measure
from cavvy.capabilities.elastic.texts import say_gift, say_growth, say_outcome
from cavvy.domain.elastic import SizeCause, SizeChange
from cavvy.domain.jobs import Attempt, JobRecord
from cavvy.domain.values import replace
from cavvy.scheduler.elastic_sizes import SizeStep
from cavvy.server.state_dir import StateDirError
from cavvy.settings import load

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def make_attempt(number: int, nodes: int, began: float, ended: float | None) -> Attempt:
    return Attempt(
        id=f"j-{number}",
        job_id="j",
        project="p",
        number=number,
        gang=f"g{number}",
        offer=make_offer("fake/r/cheap", 0),
        nodes=nodes,
        created_at=at(began - 20),
        since=at(began),
        running_at=at(began),
        finished_at=None if ended is None else at(ended),
        moved=ended is not None,
    )


def samples(done: float, rate: float | None = None) -> dict[str, float | str]:
    told: dict[str, float | str] = {"done": done, "total": 10_000.0, "unit": "samples"}
    return told if rate is None else {**told, "samples_per_s": rate}


FIRST, SECOND = make_attempt(1, 2, 100, 400), make_attempt(2, 8, 440, None)


def test_speeds_and_the_cost_of_a_change_come_from_the_run_itself() -> None:
    """Of 300 s on two nodes, the first 50 s went by before the first step."""
    told = {1: samples(2500, 10.0), 2: samples(2500 + 60 * 30, 30.0)}
    found = measure([FIRST, SECOND], told, at(440 + 70))
    assert found.rates == {2: 10.0, 8: 30.0}
    assert found.remaining == 10_000 - 4300
    assert found.resize_s == pytest.approx(40 + (50 + 10) / 2)
    assert found.starts == pytest.approx({1: 50.0, 2: 10.0})


def test_a_program_that_tells_only_its_fraction_is_measured_by_its_mean() -> None:
    told: dict[int, dict[str, float | str]] = {1: {"fraction": 0.3}, 2: {"fraction": 0.5}}
    found = measure([FIRST, SECOND], told, at(540))
    assert found.rates == pytest.approx({2: 0.001, 8: 0.002})
    assert found.remaining == pytest.approx(0.5)


def test_a_size_without_progress_has_no_speed() -> None:
    told: dict[int, dict[str, float | str]] = {1: {"fraction": 0.3}, 2: {"fraction": 0.3}}
    assert measure([FIRST, SECOND], told, at(540)).rates == pytest.approx({2: 0.001})


def test_thirty_seconds_of_work_are_a_measure_and_a_whole_one_leaves_nothing() -> None:
    short = make_attempt(1, 2, 0, LEAST_RUN_S)
    found = measure([short], {1: {"fraction": 1.0}}, at(540))
    assert (found.rates, found.remaining) == ({2: 1 / LEAST_RUN_S}, 0.0)


def test_a_program_that_is_now_slower_than_on_average_has_started_at_once() -> None:
    assert measure([FIRST], {1: samples(2500, 5.0)}, at(540)).starts == {1: 0.0}


def test_the_pause_before_a_retry_is_not_the_cost_of_a_change() -> None:
    failed, again = replace(FIRST, moved=False), make_attempt(2, 2, 4000, None)
    assert measure([failed, again], {}, at(4100)).resize_s == 20 + 5


def test_counts_that_may_be_those_of_an_epoch_are_no_measure() -> None:
    found = measure([FIRST], {1: {"done": 3.0, "total": 10.0, "unit": "epochs"}}, at(400))
    assert found.rates == {}
    assert found.remaining is None
    assert found.resize_s == 20 + 5


def test_what_a_change_costs_and_wins_is_said() -> None:
    step = SizeStep(id="j", nodes=8, gain_s=3600.0, speedup=2.0)
    assert say_growth(2, step, 40.0) == (
        "grows from 2 to 8 nodes, which are free: it should end 1h00m sooner, although the change "
        "costs about 40s of work"
    )
    gift = SizeStep(id="j", nodes=2, gain_s=-600.0)
    assert say_gift(8, gift, "sweep", 40.0) == (
        "keeps 2 of 8 nodes, because job sweep waits for the others: it should end 10m00s later, "
        "40s for the change included"
    )
    change = SizeChange(nodes=8, before=2, cause=SizeCause.GROW, at=NOW, attempt=1, rate=10.0)
    assert say_outcome(change, 8, 30.0, 25.0) == (
        "2.50 times as fast on 8 as on 2 nodes; no work was done for 30s, which pays off within 20s"
    )
    assert say_outcome(change, 8, 30.0, None) == (
        "runs on 8 instead of 2 nodes; no work was done for 30s"
    )


class NoJobs:
    """A store without elastic jobs."""

    async def elastic_jobs(self) -> list[JobRecord]:
        return []


class Parts:
    """What the keeper asks for."""

    store, clock, hint, budgets = NoJobs(), None, None, None
    trials = object()  # any use of it fails

    def __init__(self, value: str) -> None:
        self.settings = load({f"CAVVY_{SETTING.upper().replace('.', '_')}": value})

    def find(self, kind: type[object]) -> "Parts":
        return self


def test_the_switch_lets_jobs_keep_their_sizes() -> None:
    keeper = make_keeper(Parts("off"))  # type: ignore[arg-type]
    assert isinstance(keeper, SizeKeeper)
    assert not keeper.changes
    assert asyncio.run(keeper.reconcile("elastic:sizes")) == timedelta(minutes=1)
    on = make_keeper(Parts("on"))  # type: ignore[arg-type]
    assert on is not None
    assert on.changes
    with pytest.raises(StateDirError, match="'maybe'"):
        make_keeper(Parts("maybe"))  # type: ignore[arg-type]
