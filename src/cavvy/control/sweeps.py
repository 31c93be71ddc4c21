"""Chooses the values of a job of a sweep when it starts, from the results of the jobs before it,
and stops jobs early that fall behind, by asynchronous successive halving (ASHA).

Sources: Bergstra et al., Algorithms for Hyper-Parameter Optimization (NeurIPS 2011); Li et al., A
System for Massively Parallel Hyperparameter Tuning (MLSys 2020). Optuna's TPESampler chooses; jobs
that still run count as bad results ("constant liar"), so that jobs that start together get
different values.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import datetime
from itertools import count
from math import isfinite
from threading import Lock
from weakref import WeakValueDictionary

from cavvy.control.decide.rows import RowChanges, make_event
from cavvy.control.decide.transitions import turn_job
from cavvy.domain.arrays import RungValue, choose_values, count_combinations
from cavvy.domain.jobs import JOB_ENDS, JobPhase, JobRecord, StopCause
from cavvy.domain.tasks import EarlyStop, SweptParam, TaskSpec
from cavvy.domain.units import format_count
from cavvy.domain.values import Struct, replace
from cavvy.packages import extra_command
from cavvy.store.base import AtomicWrite, StaleVersion
from cavvy.store.sql import Store

_TRIES = 20  # choices of Optuna before a combination that was tried is replaced
_LEAST_ORDERED = 3  # numbers; their order says nothing if there are fewer
# Values without an order. More values count as ordered as they are written, because Optuna compares
# all values of each job that was tried, and a job waits for its choice.
_MOST_UNORDERED = 64
_FILTERS = Lock()  # the filters of warnings are those of the whole process


class TriedPoint(Struct, frozen=True, kw_only=True):
    """A combination of values that a job has or had, and what it reported last. `value` is None if
    the job still runs, or has ended without a result."""

    point: int
    value: float | None
    ended: bool


# Chooses a combination for the job with this index.
Choose = Callable[[TaskSpec, int, Sequence[TriedPoint]], int]


class SweepSearcher:
    """Chooses the values of jobs of sweeps with `search`, each once."""

    def __init__(self, store: Store, choose: Choose | None = None) -> None:
        self._store = store
        self._choose = choose or choose_by_optuna
        # by array: a choice knows the choices before it
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def settle(self, job: JobRecord, now: datetime) -> JobRecord:
        """Return the job with its values, which are stored before the job can start, so that a
        crash or a retry changes none. Raises StaleVersion, RowNotFound."""
        search, array_id = job.task.search, job.array_id
        if search is None or array_id is None or job.member is None or job.point is not None:
            return job
        async with self._turns.setdefault(array_id, asyncio.Lock()):
            if (await self._store.job(job.id)).version != job.version:
                # chosen for another rank or an earlier request, while this one waited for its turn
                raise StaleVersion(f"job {job.id} is no longer at version {job.version}")
            tried = await self._list_tried(array_id, search.metric)
            known = sum(each.value is not None for each in tried)
            text = f"chosen by TPE from {format_count(known, 'result')}"
            try:
                point = await asyncio.to_thread(self._choose, job.task, job.member, tried)
            except ImportError:  # the server has moved; its jobs must go on
                point = choose_untried(job.task, job.member, {each.point for each in tried})
                command = extra_command("tuning")
                text = f"chosen at random, because this server has no Optuna: {command}"
            chosen = choose_values(job.task.sweep, point)
            values = ", ".join(f"{each.name}={each.texts[at]}" for each, at in chosen)
            event = make_event(job, now, "chosen", f"{values}: {text}")
            changed = replace(job, point=point)
            await self._store.commit(AtomicWrite(jobs=[changed], events=[event]))
        return await self._store.job(job.id)

    async def _list_tried(self, array_id: str, metric: str) -> Sequence[TriedPoint]:
        """Return the choices in the order of the jobs, so that equal results give equal choices.
        Only jobs that are done or were stopped early have results: the last value of a job that
        failed may be the best one before it diverged.
        """
        points = await self._store.arrays.list_points(array_id)
        return [
            TriedPoint(
                point=points[each.job.id],
                value=_read_number(each.progress.get(metric)) if counts else None,
                ended=each.job.phase in JOB_ENDS,
            )
            for each in await self._store.arrays.members(array_id)
            if each.job.id in points
            for counts in (each.job.phase is JobPhase.DONE or each.early,)
        ]


def choose_by_optuna(task: TaskSpec, index: int, tried: Sequence[TriedPoint]) -> int:
    """Let Optuna choose a combination that no job has. Raises ImportError if Optuna is not
    installed."""
    import warnings

    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
    from optuna.trial import TrialState, create_trial

    search = task.search
    assert search is not None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    orders = {each.name: _order(each) for each in task.sweep if len(each.values) > 1}
    ranks_of = {
        name: {at: rank for rank, at in enumerate(order)}
        for name, order in orders.items()
        if order is not None
    }
    spaces: dict[str, BaseDistribution] = {
        each.name: CategoricalDistribution(range(len(each.values)))
        if orders[each.name] is None
        else IntDistribution(0, len(each.values) - 1)
        for each in task.sweep
        if each.name in orders
    }
    with _FILTERS, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `constant_liar` may change in later versions
        sampler = optuna.samplers.TPESampler(seed=_seed(task, index), constant_liar=True)
    study = optuna.create_study(
        direction="maximize" if search.highest else "minimize", sampler=sampler
    )
    for each in tried:
        state = TrialState.RUNNING if not each.ended else TrialState.COMPLETE
        state = TrialState.FAIL if each.ended and each.value is None else state
        ranks = {
            one.name: ranks_of[one.name][at] if one.name in ranks_of else at
            for one, at in choose_values(task.sweep, each.point)
            if one.name in orders
        }
        study.add_trial(
            create_trial(state=state, value=each.value, params=ranks, distributions=spaces)
        )
    taken = {each.point for each in tried}
    for _ in range(_TRIES):
        params = study.ask(spaces).params
        point = 0
        for one in task.sweep:
            rank, order = int(params.get(one.name, 0)), orders.get(one.name)
            point = point * len(one.values) + (rank if order is None else order[rank])
        if point not in taken:
            return point
    return choose_untried(task, index, taken)


def choose_untried(task: TaskSpec, index: int, taken: Set[int]) -> int:
    """Return a random combination that is not taken, or any if all are."""
    size = count_combinations(task)
    start = random.Random(_seed(task, index)).randrange(size)
    steps = range(size) if size <= len(taken) else count()
    return next((at for step in steps if (at := (start + step) % size) not in taken), start)


def _seed(task: TaskSpec, index: int) -> int:
    """Return the start of the random numbers of one job."""
    seed = 0 if task.search is None else task.search.seed
    return (seed * 1009 + index) % 2**32


def _order(param: SweptParam) -> Sequence[int] | None:
    """Return the places of a parameter's values in the order of the values, or None if they have no
    order and are few."""
    values = param.values
    are_numbers = all(isinstance(each, (int, float)) and type(each) is not bool for each in values)
    if not are_numbers or len(values) < _LEAST_ORDERED:
        return None if len(values) <= _MOST_UNORDERED else range(len(values))
    return sorted(range(len(values)), key=lambda at: values[at])


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
        self._store = store
        self._judge = judge or judge_by_halving

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
        verdict = self._judge(rule, report, [*others.values()])
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
        if (value := _read_number(progress.get(name))) is not None and value >= 0:
            return min(int(value), _MOST_STEPS)
    return None


def _read_number(value: object) -> float | None:
    """Return the number, or None. A value that is not finite says nothing about a job."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and isfinite(value) else None  # type: ignore[arg-type]


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
