"""Stops jobs of a sweep early that fall behind, by asynchronous successive halving (ASHA).

Source: Li et al., A System for Massively Parallel Hyperparameter Tuning (MLSys 2020).
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from cavvy.capabilities.sweeps.rungs import RungValue, StoredRungs, insert_rung, read_number
from cavvy.control.decide.rows import RowChanges, make_event
from cavvy.control.decide.transitions import turn_job
from cavvy.domain.jobs import JobPhase, JobRecord, StopCause
from cavvy.domain.tasks import EarlyStop
from cavvy.domain.units import format_count
from cavvy.domain.values import Struct, replace
from cavvy.store.base import OwnWrite
from cavvy.store.sql import Store

# The names under which programs report their steps, if the task names none.
_STEPS = ("done", "step", "steps", "epoch", "epochs")
_MOST_STEPS = 10**15  # more steps count as this many: each power of `reduction` is a row

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
        self._rungs = StoredRungs(*store.database)
        self._judge = judge or judge_by_halving

    async def check(
        self, job: JobRecord, progress: Progress, now: datetime
    ) -> tuple[Sequence[OwnWrite], RowChanges]:
        """Return the rows of rungs that the job has newly reached, and its end if it stops there.
        Both are to be written together, so that a crash between them loses no decision."""
        rule, array_id = job.task.stop_early, job.array_id
        if rule is None or array_id is None or job.phase is not JobPhase.RUNNING:
            return (), RowChanges()
        step, value = find_step(progress, rule), read_number(progress.get(rule.metric))
        if job.stop_reason is not None or step is None or value is None:
            return (), RowChanges()
        passed = await self._rungs.count(job.id)
        if step < rule.min_steps * rule.reduction**passed:
            return (), RowChanges()
        others = await self._rungs.list_of_array(array_id)
        others.pop(job.id, None)
        report = RungReport(step=step, value=value, passed=passed)
        verdict = self._judge(rule, report, [*others.values()])
        numbers = range(passed, passed + verdict.reached)
        rungs = [
            insert_rung(
                RungValue(
                    array_id=array_id,
                    job_id=job.id,
                    rung=number,
                    value=value,
                    stopped=verdict.stops and number == numbers[-1],
                )
            )
            for number in numbers
        ]
        if not verdict.stops:
            return rungs, RowChanges()
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
        if (value := read_number(progress.get(name))) is not None and value >= 0:
            return min(int(value), _MOST_STEPS)
    return None


def judge_by_halving(
    rule: EarlyStop, report: RungReport, others: Sequence[Mapping[int, float]]
) -> RungVerdict:
    """Judge a report by asynchronous successive halving. At each rung that the job has newly
    reached, it goes on if its value is among the best 1/`reduction` of all values that were
    reported there, its own included, or is the best one if there are fewer than `reduction`. A
    job that stops at a rung does not reach the next one.
    """
    sign = -1 if rule.highest else 1
    reached = 0
    while report.step >= rule.min_steps * rule.reduction ** (report.passed + reached):
        rung = report.passed + reached
        values = [each[rung] for each in others if rung in each] + [report.value]
        best = sorted(sign * value for value in values)[: max(1, len(values) // rule.reduction)]
        reached += 1
        if sign * report.value > best[-1]:
            return RungVerdict(reached=reached, stops=True)
    return RungVerdict(reached=reached, stops=False)
