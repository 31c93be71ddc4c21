"""Stops the jobs of a sweep early that fall behind, by asynchronous successive halving (ASHA).

Source: Li et al., A System for Massively Parallel Hyperparameter Tuning (MLSys 2020). Optuna's
SuccessiveHalvingPruner decides; this module gives it what the jobs have reported.
"""

from asyncio import to_thread
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from math import isfinite

from cavvy.control.decide.rows import RowChanges, make_event
from cavvy.control.decide.transitions import turn_job
from cavvy.domain.arrays import RungValue
from cavvy.domain.events import Event
from cavvy.domain.jobs import JobPhase, JobRecord, StopCause
from cavvy.domain.tasks import EarlyStop
from cavvy.domain.units import format_count
from cavvy.domain.values import Struct, replace
from cavvy.packages import extra_command
from cavvy.store.sql import Store

# The names under which programs report their steps, if the task names none.
_STEPS = ("done", "step", "steps", "epoch", "epochs")
_MOST_STEPS = 10**15  # more steps count as this many: each power of `reduction` is a row
_FIRST = 0  # place of the judged job among the trials

Progress = Mapping[str, float | str]


class RungReport(Struct, frozen=True, kw_only=True):
    """What a job has reported: its step, and the value of the metric. `passed` is the number of the
    rungs that it has passed before."""

    step: int
    value: float
    passed: int


class RungVerdict(Struct, frozen=True, kw_only=True):
    """How many further rungs a job has reached, and whether it stops at the last of them."""

    reached: int
    stops: bool


# Judges a report by the values of the other jobs at each rung.
Judge = Callable[[EarlyStop, RungReport, Sequence[Mapping[int, float]]], RungVerdict]


class EarlyStopper:
    """Decides whether a job that reports its metric goes on."""

    def __init__(self, store: Store, judge: Judge | None = None) -> None:
        self._store = store
        self._judge = judge or judge_by_optuna

    async def check(
        self, job: JobRecord, progress: Progress, now: datetime
    ) -> tuple[Sequence[RungValue], RowChanges]:
        """Return the rungs that the job has newly reached, and its end if it stops there. Both are
        to be written together, so that a crash between them loses no decision."""
        rule, array_id = job.task.stop_early, job.array_id
        if rule is None or array_id is None or job.phase is not JobPhase.RUNNING:
            return (), RowChanges()
        step, value = find_step(progress, rule), _read_number(progress.get(rule.metric))
        if job.stop_reason is not None or step is None or value is None:
            return (), RowChanges()
        passed = await self._store.arrays.count_rungs(job.id)
        if step < rule.min_steps * rule.reduction**passed:
            return (), RowChanges()
        others = await self._store.arrays.list_rungs(array_id)
        others.pop(job.id, None)
        report = RungReport(step=step, value=value, passed=passed)
        events: tuple[Event, ...] = ()
        try:
            verdict = await to_thread(self._judge, rule, report, [*others.values()])
        except ImportError:  # the server has moved; the reports of its jobs must not fail
            verdict = RungVerdict(reached=1, stops=False)
            text = "not compared with other jobs, because this server has no Optuna: "
            events = (make_event(job, now, "unjudged", text + extra_command("tuning")),)
        numbers = range(passed, passed + verdict.reached)
        rungs = [
            RungValue(
                array_id=array_id,
                job_id=job.id,
                rung=number,
                value=value,
                stopped=verdict.stops and number == numbers[-1],
            )
            for number in numbers
        ]
        if not verdict.stops:
            return rungs, RowChanges(events=events)
        last = numbers[-1]
        beside = sum(last in each for each in others.values())
        reached = f"{rule.metric} {value:.6g} after {format_count(step, 'step')}"
        kept = f"the best 1/{rule.reduction} of {beside + 1} jobs"
        reason = f"stopped early: {reached} is not among {kept}"
        stopped = turn_job(job, JobPhase.STOPPING, reason, now)
        stopped = replace(stopped, stop_reason=reason, stop_cause=StopCause.EARLY)
        event = make_event(job, now, JobPhase.STOPPING, reason, fact=StopCause.EARLY)
        return rungs, RowChanges(job=stopped, events=(event,))


def find_step(progress: Progress, rule: EarlyStop) -> int | None:
    """Return the step that a program has reported, or None."""
    for name in (rule.step,) if rule.step else _STEPS:
        if (value := _read_number(progress.get(name))) is not None and value >= 0:
            return min(int(value), _MOST_STEPS)
    return None


def _read_number(value: object) -> float | None:
    """Return the number, or None. A value that is not finite says nothing about a job."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and isfinite(value) else None  # type: ignore[arg-type]


def judge_by_optuna(
    rule: EarlyStop, report: RungReport, others: Sequence[Mapping[int, float]]
) -> RungVerdict:
    """Let Optuna's pruner judge a report. Raises ImportError if Optuna is not installed."""
    import optuna
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize" if rule.highest else "minimize")
    pruner = optuna.pruners.SuccessiveHalvingPruner(
        min_resource=rule.min_steps, reduction_factor=rule.reduction
    )
    passed = {f"completed_rung_{number}": 0.0 for number in range(report.passed)}
    values = [{f"completed_rung_{n}": value for n, value in each.items()} for each in others]
    study.add_trial(
        create_trial(
            state=TrialState.RUNNING,
            system_attrs=passed,
            intermediate_values={report.step: report.value},
        )
    )
    for attributes in values:
        study.add_trial(create_trial(state=TrialState.RUNNING, system_attrs=attributes))
    stops = pruner.prune(study, study.get_trials(deepcopy=True)[_FIRST])
    reached = len(study.get_trials(deepcopy=False)[_FIRST].system_attrs) - report.passed
    return RungVerdict(reached=reached, stops=stops)
