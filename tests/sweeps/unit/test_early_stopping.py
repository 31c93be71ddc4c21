"""Jobs of a sweep that are stopped early: what is judged, stored and shown."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.records import make_attempt_record, make_job_record
from tests.sim.sim.test_sim_scenarios import CHEAP

from cavvy.capabilities.sweeps import keeper
from cavvy.capabilities.sweeps.early import (
    EarlyStopper,
    RungReport,
    RungVerdict,
    find_step,
    judge_by_halving,
)
from cavvy.capabilities.sweeps.keeper import SweepsOfStore
from cavvy.capabilities.sweeps.rungs import StoredRungs
from cavvy.cli.reach.arrays import exit_code_of, say_saved
from cavvy.client.array_wire import ArrayMemberView
from cavvy.control.decide.job import JobSnapshot, decide_job
from cavvy.domain.jobs import AttemptOutcome, AttemptPhase, JobPhase, StopCause
from cavvy.domain.tasks import EarlyStop, SweepSearch, SweptParam, TaskSpec
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.spec import SpecError
from cavvy.store.base import AtomicWrite
from cavvy.store.open import MemoryStore
from cavvy.task_files import parse_task

NOW = datetime(2030, 1, 1, tzinfo=UTC)
RULE = EarlyStop(metric="loss", min_steps=2, reduction=3)
SWEEP = (SweptParam("lr", (0.1, 0.2), ("0.1", "0.2")),)


def make_job(name: str, rule: EarlyStop = RULE, **changes: object) -> object:
    task = TaskSpec(name="tune", run="x", sweep=SWEEP, stop_early=rule)
    usual = {"id": name, "name": name, "array_id": "a", "phase": JobPhase.RUNNING, "task": task}
    return make_job_record(NOW, **{**usual, **changes})


def judge_median(
    rule: EarlyStop, report: RungReport, others: Sequence[Mapping[int, float]]
) -> RungVerdict:
    """A fake: a job that is worse than any other at its rung stops."""
    beside = [each[report.passed] for each in others if report.passed in each]
    return RungVerdict(reached=1, stops=any(value < report.value for value in beside))


class Sweep:
    """A sweep whose jobs report."""

    def __init__(self, judge: object = judge_median, rule: EarlyStop = RULE) -> None:
        self.store, self.rule = MemoryStore(), rule
        self.stopper = EarlyStopper(self.store, judge)  # type: ignore[arg-type]

    def report(self, name: str, **progress: float | str) -> str:
        """Return why the job stops, or ""."""
        return asyncio.run(self._report(name, progress))

    async def _report(self, name: str, progress: Mapping[str, float | str]) -> str:
        rungs, stop = await self.stopper.check(make_job(name, self.rule), progress, NOW)
        await self.store.commit(AtomicWrite(own=rungs))
        return "" if stop.job is None else stop.job.reason

    def rungs(self) -> dict[str, dict[int, float]]:
        return asyncio.run(StoredRungs(*self.store.database).list_of_array("a"))


def test_a_job_is_judged_only_when_it_reaches_a_rung() -> None:
    sweep = Sweep()
    assert sweep.report("a", loss=0.5, step=1) == ""
    assert sweep.rungs() == {}
    assert sweep.report("a", loss=0.5, step=2) == ""
    assert sweep.report("a", loss=0.4, step=5) == ""  # the next rung is at step 6
    assert sweep.rungs() == {"a": {0: 0.5}}
    told = sweep.report("b", loss=0.7, epoch=3)
    assert told == "stopped early: loss 0.7 after 3 steps is not among the best 1/3 of 2 jobs"
    assert sweep.report("a", loss=0.4, step=6) == ""
    assert sweep.rungs() == {"a": {0: 0.5, 1: 0.4}, "b": {0: 0.7}}


@pytest.mark.parametrize(
    "progress",
    [
        {},
        {"loss": 0.5},
        {"loss": "low", "step": 2},
        {"loss": float("nan"), "step": 2},
        {"loss": float("inf"), "step": 2},
        {"loss": 0.5, "step": float("nan")},
        {"accuracy": 0.5, "step": 2},
        {"loss": True, "step": 2},
    ],
)
def test_a_report_without_a_number_and_a_step_is_not_judged(
    progress: dict[str, float | str],
) -> None:
    sweep = Sweep()
    assert sweep.report("a", **progress) == ""
    assert sweep.rungs() == {}


def test_a_huge_step_reaches_few_rungs() -> None:
    """Each rung is a row that all later reports of the sweep read."""
    sweep = Sweep(judge_by_halving, replace(RULE, min_steps=1, reduction=2))
    sweep.report("a", loss=0.5, step=1e300)
    assert 40 < len(sweep.rungs()["a"]) <= 51


def test_a_task_may_name_its_steps() -> None:
    progress = {"done": 3.0, "epoch": 1.0}
    assert find_step(progress, RULE) == 3
    assert find_step(progress, replace(RULE, step="epoch")) == 1
    assert find_step(progress, replace(RULE, step="batch")) is None


@pytest.mark.parametrize("changes", [{"stop_reason": "stopped"}, {"phase": JobPhase.STOPPING}])
def test_a_job_that_ends_already_is_not_stopped(changes: dict[str, object]) -> None:
    stopper = EarlyStopper(MemoryStore(), judge_median)
    job = make_job("a", **changes)
    rungs, stop = asyncio.run(stopper.check(job, {"loss": 1.0, "step": 2}, NOW))  # type: ignore[arg-type]
    assert (rungs, stop.job) == ((), None)


def test_a_job_that_was_stopped_early_is_done() -> None:
    job = make_job(
        "a", phase=JobPhase.STOPPING, stop_cause=StopCause.EARLY, stop_reason="stopped early: x"
    )
    ended = make_attempt_record(
        NOW, CHEAP, phase=AttemptPhase.ENDING, outcome=AttemptOutcome.STOPPED, exit_code=143
    )
    view = JobSnapshot(job=job, attempt=ended, spent=Money(0), rate=HourlyRate(0))  # type: ignore[arg-type]
    action = decide_job(view, NOW)
    assert (action.phase, action.exit_code, action.reason) == (  # type: ignore[union-attr]
        JobPhase.DONE,
        0,
        "stopped early: x",
    )


def make_view(phase: str, spent: int, early: bool = False) -> ArrayMemberView:
    return ArrayMemberView(
        index=0,
        id="j",
        name="tune.0",
        phase=phase,
        reason="",
        attempt=1,
        exit_code=0,
        placement=None,
        since=NOW,
        ended_at=NOW,
        spent_micros=spent,
        params={},
        progress={},
        early=early,
    )


def test_the_saved_cost_is_told() -> None:
    whole, early = make_view("done", 6_000_000), make_view("done", 1_000_000, early=True)
    assert say_saved([whole]) == ""
    assert say_saved([early, make_view("running", 0)]) == "1 of 2 jobs was stopped early"
    told = say_saved([whole, early, make_view("done", 4_000_000), early])
    assert told == "2 of 4 jobs were stopped early, which saved about $8.00"
    assert exit_code_of([whole, early]) == 0


def test_a_server_without_optuna_stops_jobs_early(monkeypatch: pytest.MonkeyPatch) -> None:
    task = TaskSpec(name="tune", run="x", sweep=SWEEP, stop_early=RULE)
    monkeypatch.setattr(keeper, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "optuna", None)
    object_to = partial(SweepsOfStore.find_objection, None)  # type: ignore[arg-type]  # unused
    assert object_to(task) is None
    sweep = Sweep(None)
    assert sweep.report("a", loss=0.5, step=2) == ""
    assert "stopped early" in sweep.report("b", loss=0.7, step=2)
    message, hint = object_to(replace(task, search=SweepSearch(metric="loss"))) or ("", "")
    assert "the server has no Optuna" in message
    assert "optuna" in hint


def ask_optuna(
    rule: EarlyStop, report: RungReport, others: Sequence[Mapping[int, float]]
) -> RungVerdict:
    """The verdict of another implementation of the same rule."""
    optuna = pytest.importorskip("optuna", reason="needs the extra `tuning`")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize" if rule.highest else "minimize")
    pruner = optuna.pruners.SuccessiveHalvingPruner(
        min_resource=rule.min_steps, reduction_factor=rule.reduction
    )
    passed = {f"completed_rung_{number}": 0.0 for number in range(report.passed)}
    make, running = optuna.trial.create_trial, optuna.trial.TrialState.RUNNING
    value = {report.step: report.value}
    study.add_trial(make(state=running, system_attrs=passed, intermediate_values=value))
    for each in others:
        attributes = {f"completed_rung_{n}": value for n, value in each.items()}
        study.add_trial(make(state=running, system_attrs=attributes))
    stops = pruner.prune(study, study.get_trials(deepcopy=True)[0])
    reached = len(study.get_trials(deepcopy=False)[0].system_attrs) - report.passed
    return RungVerdict(reached=reached, stops=stops)


VALUES = st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0, 7.5])


@settings(max_examples=150, deadline=None)
@given(
    highest=st.booleans(),
    min_steps=st.integers(1, 4),
    reduction=st.integers(2, 4),
    step=st.integers(0, 70),
    passed=st.integers(0, 3),
    value=VALUES,
    others=st.lists(st.dictionaries(st.integers(0, 4), VALUES), max_size=12),
)
def test_the_verdict_is_that_of_optuna(
    highest: bool,
    min_steps: int,
    reduction: int,
    step: int,
    passed: int,
    value: float,
    others: list[dict[int, float]],
) -> None:
    rule = EarlyStop(metric="loss", highest=highest, min_steps=min_steps, reduction=reduction)
    report = RungReport(step=step, value=value, passed=passed)
    assert judge_by_halving(rule, report, others) == ask_optuna(rule, report, others)


def test_the_keys_are_read() -> None:
    text = "{run: x, params: {lr: 1}, sweep: {lr: 1..3}, best: acc:max, stop_early: %s}"
    found = parse_task(text % "asha", file="t.yaml").stop_early
    assert found == EarlyStop(metric="acc", highest=True)
    found = parse_task(text % "{min_steps: 5, reduction: 2, step: e}", file="t.yaml").stop_early
    assert found == EarlyStop(metric="acc", highest=True, min_steps=5, reduction=2, step="e")
    for wrong, told in (
        (text % "median", "`asha`"),
        (text % "{reduction: 1}", "from 2 to 100"),
        (text % "{eta: 3}", "write `reduction`"),
        ("{run: x, stop_early: asha}", "`best` is missing"),
        ("{run: x, best: loss}", "val_loss:min"),
        ('{run: x, best: "\\e[2Jloss:min"}', "val_loss:min"),  # is shown in tables and reasons
    ):
        with pytest.raises(SpecError, match=told):
            parse_task(wrong, file="t.yaml")


@pytest.mark.parametrize("highest", [False, True])
def test_the_worse_job_stops_and_the_better_one_goes_on(highest: bool) -> None:
    sweep = Sweep(judge_by_halving, replace(RULE, highest=highest, min_steps=1, reduction=2))
    sign = -1 if highest else 1
    assert sweep.report("a", loss=sign * 2.0, step=1) == ""
    assert "is not among the best 1/2 of 2 jobs" in sweep.report("b", loss=sign * 3.0, step=1)
    assert sweep.report("c", loss=sign * 1.0, step=1) == ""


@pytest.mark.parametrize("highest", [False, True])
@settings(max_examples=25, deadline=timedelta(seconds=20))
@given(data=st.data())
def test_the_best_job_at_the_top_rung_is_never_stopped(highest: bool, data: st.DataObject) -> None:
    """Also if reports come in any order, are repeated, or skip rungs."""
    rule = EarlyStop(metric="loss", highest=highest, min_steps=1, reduction=2)
    sweep = Sweep(judge_by_halving, rule)
    jobs = data.draw(st.integers(2, 6))
    stopped: dict[str, int] = {}
    steps = dict.fromkeys(map(str, range(jobs)), 0)
    for _ in range(data.draw(st.integers(1, 25))):
        name = data.draw(st.sampled_from(sorted(steps)))
        if name in stopped:
            continue
        steps[name] += data.draw(st.integers(0, 3))
        if sweep.report(name, loss=data.draw(st.floats(-1e6, 1e6)), step=steps[name]):
            stopped[name] = max(sweep.rungs()[name])
    found = sweep.rungs()
    for name, reached in found.items():
        assert all(steps[name] >= 2**rung for rung in reached)
    top = max((max(each) for each in found.values()), default=0)
    at_top = {name: each[top] for name, each in found.items() if top in each}
    if at_top:
        best = (max if highest else min)(at_top.values())
        winners = [name for name, value in at_top.items() if value == best]
        assert any(stopped.get(name) != top for name in winners)
