"""Chooses the values of a job of a sweep when it starts, from the results of the jobs before it.

Source: Bergstra et al., Algorithms for Hyper-Parameter Optimization (NeurIPS 2011). Optuna's
TPESampler chooses; jobs that still run count as bad results ("constant liar"), so that jobs that
start together get different values.
"""

import asyncio
import random
from collections.abc import Callable, Sequence, Set
from datetime import datetime
from itertools import count
from threading import Lock
from weakref import WeakValueDictionary

from cavvy.capabilities.sweeps.rungs import read_number
from cavvy.control.decide.rows import make_event
from cavvy.domain.arrays import choose_values, count_combinations
from cavvy.domain.jobs import JOB_ENDS, JobPhase, JobRecord
from cavvy.domain.tasks import SweptParam, TaskSpec
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
                value=read_number(each.progress.get(metric)) if counts else None,
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
