"""Changes the sizes of running elastic jobs. Every few seconds it reads what runs, what waits and
what is free, lets the pure policy of `scheduler.elastic_sizes` decide, and writes the changes as
`cavvy resize` does: the work of a job gets a notice, saves a checkpoint, and starts again on its
new number of nodes. A server that was killed in between goes on with what is written.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from datetime import datetime, timedelta

from cavvy.capabilities.elastic.holds import GrowthFacts, find_hold, list_larger, note_hold
from cavvy.capabilities.elastic.measure import (
    LEAST_RUN_S,
    Progress,
    SizeMeasures,
    measure,
    read_work,
)
from cavvy.capabilities.elastic.texts import (
    say_gift,
    say_growth,
    say_move,
    say_outcome,
    say_return,
    say_untaken,
)
from cavvy.control.decide.job import TAKES_SIZE, deadline_of
from cavvy.control.decide.placement import is_steered
from cavvy.control.decide.requests import change_size
from cavvy.control.decide.rows import RowChanges, make_event
from cavvy.control.decide.standby import HANDOVER
from cavvy.control.decide.start_trials import share_held
from cavvy.control.decide.transitions import roll_back_size
from cavvy.control.parts import ControlParts
from cavvy.control.start_trials import OpenTrial, find_same
from cavvy.control.unit_of_work import make_write
from cavvy.control.worklist import QUEUE
from cavvy.domain.elastic import HoldCause, SizeCause, SizeChange, SizeHold
from cavvy.domain.jobs import Attempt, AttemptPhase, JobPhase, JobRecord
from cavvy.domain.offers import Offer
from cavvy.domain.services import SERVICE_TAG
from cavvy.domain.shares import size_of_task
from cavvy.domain.values import Struct, replace
from cavvy.scheduler.elastic_sizes import (
    ElasticRun,
    SizeStep,
    choose_donors,
    choose_growth,
    choose_moves,
    choose_returns,
    find_scaling,
)
from cavvy.scheduler.offer_lines import pool_of
from cavvy.scheduler.queue import WaitingJob
from cavvy.scheduler.reclaim import ShareQuotas
from cavvy.scheduler.shares import ShareBook, ShareRule
from cavvy.server.parts import ServerParts
from cavvy.server.state_dir import StateDirError
from cavvy.store.base import RowNotFound, StaleVersion

KEY = "elastic:sizes"
SETTING = "elastic.change_sizes"
_LOOK_AGAIN = timedelta(seconds=15)  # while elastic jobs run
_IDLE = timedelta(minutes=1)  # without elastic jobs
_AFTER_CHANGE = timedelta(seconds=2)
# A job grows only if it has run for so long since its last start, or for so many times the seconds
# that a change costs, whichever is longer.
_REST, _RESTS = timedelta(minutes=2), 5
_SLACK = 1e-6  # nodes; sums of fractions are not exact in floating point
_LATEST = 8  # attempts of a job whose measurements count
_WAITING = 4  # waiting jobs for which others may give nodes back in one pass
# when a program that reports no speed has run long enough to tell what the change has cost
_TELL_AFTER = timedelta(minutes=2)


def make_keeper(parts: ControlParts) -> "SizeKeeper | None":
    """Return the keeper of a server or a simulation. Raises StateDirError if the setting is
    wrong."""
    server = parts.find(ServerParts)
    wish = "on" if server is None else server.settings.text(SETTING).strip().lower()
    if wish not in ("on", "off"):
        raise StateDirError("settings-invalid", f"{SETTING} is {wish!r}", "set it to on or off")
    return None if parts.trials is None else SizeKeeper(parts, changes=wish == "on")


class _SizedRun(Struct, frozen=True, kw_only=True):
    """A running elastic job with its attempt, what it has measured, and what the policy sees.
    `over_budget` states whether a budget keeps it from starting again, so that it must not end, and
    `rests_until` is the time from which it may change its size."""

    job: JobRecord
    attempt: Attempt
    measures: SizeMeasures
    policy: ElasticRun
    area: str
    over_budget: bool
    rests_until: datetime


class _WaitingJob(Struct, frozen=True):
    """The name of a job that waits, and the areas whose nodes it could use."""

    name: str
    areas: Set[str]


class SizeKeeper:
    """Reconciles one key, for all elastic jobs together, since they share nodes."""

    waits_outside = False

    def __init__(self, parts: ControlParts, *, changes: bool = True) -> None:
        assert parts.trials is not None
        self._store, self._clock, self._trials = parts.store, parts.clock, parts.trials
        self._hint, self._budgets, self.changes = parts.hint, parts.budgets, changes

    def owns(self, key: str) -> bool:
        return key == KEY

    async def unfinished(self) -> Sequence[str]:
        return (KEY,)

    async def reconcile(self, key: str) -> timedelta | None:
        elastic = await self._store.elastic_jobs()
        jobs, fixed = list[JobRecord](), list[JobRecord]()
        for job in elastic:
            (jobs if self.changes and _may_change(job) else fixed).append(job)
        with suppress(StaleVersion, RowNotFound):  # another writer was first: look again
            changed = await self._pass(jobs) if jobs else False
            if not changed:
                await self._note_fixed(fixed)
            return _AFTER_CHANGE if changed else _LOOK_AGAIN if elastic else _IDLE
        return _AFTER_CHANGE

    async def _pass(self, jobs: Sequence[JobRecord]) -> bool:
        """Make the most urgent changes. Return whether something has changed."""
        trial = await self._trials.begin()
        own = {job.id: attempt for attempt, job in trial.running if attempt.number == job.attempt}
        found = []
        for job in jobs:
            attempt = own.get(job.id)
            if attempt is None or not _is_settled(job, attempt):
                continue
            history = [each for each in await self._store.attempts(job.id)][-_LATEST:]
            told = {each.number: await self._read_progress(each) for each in history}
            if await self._look_back(job, attempt, history, told, trial.now):
                return True
            found.append(await self._observe(trial, job, attempt, history, told))
        scaling = find_scaling([run.policy.rates for run in found])
        found = [replace(run, policy=replace(run.policy, scaling=scaling)) for run in found]
        found = _lend(found, trial.book)
        if await self._give_way(trial, found):
            return True
        waiting = [
            _WaitingJob(job.name, _areas_of(await trial.line_up(job, _least_of(job))))
            for job in trial.waiting
        ]
        if await self._grow(trial, found, waiting):
            return True
        await self._note_holds(trial, found, waiting)
        return False

    async def _read_progress(self, attempt: Attempt) -> Progress:
        nodes = await self._store.nodes(attempt.id)
        return next((each.progress for each in nodes if each.rank == 0), {})

    # What the last change was worth

    async def _look_back(
        self,
        job: JobRecord,
        attempt: Attempt,
        history: Sequence[Attempt],
        told: Mapping[int, Progress],
        now: datetime,
    ) -> bool:
        """Say once what the last change of a job has cost and won, and roll it back if the program
        tells no progress on its new size. Return whether a row was written."""
        change, began = job.sizing, attempt.running_at
        if change is None or change.attempt >= attempt.number or began is None:
            return False
        if change.told:
            return False
        mine, ran = told.get(attempt.number, {}), now - began
        if mine or attempt.checkpoint_at is not None:
            found = measure(history, told, now)
            rate, start_s = found.rates.get(attempt.nodes), found.starts.get(attempt.number, 0.0)
            if ran.total_seconds() < LEAST_RUN_S or (rate is None and ran < _TELL_AFTER):
                return False
            await self._tell(job, attempt, history, change, rate, now, start_s)
            return True
        worked = any(read_work(each) is not None for each in told.values())
        if not worked or attempt.nodes == change.before:
            if ran >= _TELL_AFTER:
                await self._tell(job, attempt, history, change, None, now)
            return ran >= _TELL_AFTER
        if ran < TAKES_SIZE:
            return False
        text = say_untaken(attempt.nodes, change.before, ran.total_seconds())
        back = roll_back_size(job, attempt.nodes, now)
        assert back.sizing is not None
        await self._write(back, attempt, back.sizing, text, now)
        return True

    async def _tell(
        self,
        job: JobRecord,
        attempt: Attempt,
        history: Sequence[Attempt],
        change: SizeChange,
        rate: float | None,
        now: datetime,
        start_s: float = 0.0,
    ) -> None:
        ended = next((each.finished_at for each in history if each.number == change.attempt), None)
        took = None
        if ended is not None and attempt.running_at is not None:
            took = max((attempt.running_at - ended).total_seconds(), 0.0) + start_s
        text = say_outcome(change, attempt.nodes, took, rate)
        event = make_event(job, now, "resized", text, attempt.number)
        changed = replace(job, sizing=replace(change, told=True))
        await self._store.commit(make_write(RowChanges(job=changed, events=(event,))))

    # What the policy sees

    async def _observe(
        self,
        trial: OpenTrial,
        job: JobRecord,
        attempt: Attempt,
        history: Sequence[Attempt],
        told: Mapping[int, Progress],
    ) -> _SizedRun:
        measures, sizes = measure(history, told, trial.now), _list_sizes(job)
        deadline, rests_until = deadline_of(job), _rests_until(job, attempt, measures)
        over_budget = await self._is_blocked(job, attempt)
        room = attempt.nodes if over_budget else await _find_room(trial, job, attempt, sizes)
        policy = ElasticRun(
            id=job.id,
            project=job.project,
            place=_area_of(attempt.offer),
            sizes=sizes,
            nodes=attempt.nodes,
            room=room,
            unit=max(1, attempt.offer.accelerator_count),
            rates=measures.rates,
            remaining=measures.remaining,
            done=measures.done,
            resize_s=measures.resize_s,
            time_left_s=None if deadline is None else (deadline - trial.now).total_seconds(),
            weight=trial.book.rules.get(job.project, ShareRule()).weight,
            paid=attempt.offer.rate.micros_per_hour > 0,
            rested=trial.now >= rests_until,
        )
        return _SizedRun(
            job=job,
            attempt=attempt,
            measures=measures,
            policy=policy,
            area=policy.place,
            over_budget=over_budget,
            rests_until=rests_until,
        )

    async def _is_blocked(self, job: JobRecord, attempt: Attempt) -> bool:
        """Return whether a budget keeps the job from starting again, so that it must not end."""
        paid = attempt.offer.rate.micros_per_hour > 0
        return paid and bool(await self._budgets.find_block(job))

    # The changes

    async def _give_way(self, trial: OpenTrial, runs: Sequence[_SizedRun]) -> bool:
        """Let jobs give nodes back for the first waiting job that can start with them."""
        looked = 0
        for job in trial.waiting:
            if not _may_claim(job) or looked == _WAITING:
                continue
            looked += 1
            if await self._give_to(trial, job, runs):
                return True
        return False

    async def _give_to(self, trial: OpenTrial, job: JobRecord, runs: Sequence[_SizedRun]) -> bool:
        wanted = await trial.line_up(job, _least_of(job))
        donors = [run for run in runs if run.area in _areas_of(wanted)]
        if not donors or await self._is_claim_blocked(job, wanted):
            return False
        leaving, coming = await _list_leaving(trial)
        lines = {
            (run.job.id, size): find_same(await trial.line_up(run.job, size), run.attempt.offer)
            for run in donors
            for size in run.policy.sizes
            if run.policy.least <= size < run.attempt.nodes
        }
        by_id = {run.job.id: run for run in donors}

        def suffices(sizes: Mapping[str, int]) -> bool:
            smaller = {key: size for key, size in sizes.items() if size < by_id[key].attempt.nodes}
            beside = [lines.get((key, size)) for key, size in smaller.items()]
            placed = [each for each in beside if each is not None]
            gone = [*leaving, *(by_id[key].attempt.gang for key in smaller)]
            fits = trial.can_start_now(wanted, gone, [*coming, *placed])
            return len(placed) == len(beside) and fits

        steps = choose_donors(job.project, [run.policy for run in donors], suffices)
        for step in steps:
            run = by_id[step.id]
            text = say_gift(run.attempt.nodes, step, job.name, run.measures.resize_s)
            await self._change(run, step, SizeCause.GIVE_WAY, text, trial.now)
        return bool(steps)

    async def _is_claim_blocked(self, job: JobRecord, lines: Sequence[WaitingJob]) -> bool:
        """Return whether a budget keeps the waiting job from starting."""
        paid = any(each.rate.micros_per_hour for line in lines for each in line.offers)
        return paid and bool(await self._budgets.find_block(job))

    async def _grow(
        self, trial: OpenTrial, runs: Sequence[_SizedRun], waiting: Sequence[_WaitingJob]
    ) -> bool:
        """Where no job waits, let jobs grow, one at a time in each area and project. Let those go
        back that have grown in vain, and those give nodes away of which others make more."""
        leaving = [each for each, _ in trial.running if each.drill_until is not None]
        taken = {_area_of(each.offer) for each in leaving}.union(*(each.areas for each in waiting))
        by_id, changed = {run.job.id: run for run in runs}, False
        policies = [run.policy for run in runs]
        for step in choose_returns(policies):
            run = by_id[step.id]
            text = say_return(run.attempt.nodes, step)
            await self._change(run, step, SizeCause.ROLL_BACK, text, trial.now)
            changed = True
        growth = () if changed else choose_growth(policies)
        for step in growth:
            run = by_id[step.id]
            if not taken.isdisjoint((run.area, run.job.project)):
                continue
            lines = _keep_alike(await trial.line_up(run.job, step.nodes), run.attempt.offer)
            if not lines or not trial.can_start_now(lines, (run.attempt.gang,), ()):
                continue
            text = say_growth(run.attempt.nodes, step, run.measures.resize_s)
            await self._change(run, step, SizeCause.GROW, text, trial.now)
            taken |= {run.area, run.job.project}
            changed = True
        for step in () if changed or growth else choose_moves(policies):
            run = by_id[step.id]
            if run.area not in taken:
                text = say_move(run.attempt.nodes, step)
                await self._change(run, step, SizeCause.GIVE_WAY, text, trial.now)
                changed = True
        return changed

    # Why jobs do not grow

    async def _note_holds(
        self, trial: OpenTrial, runs: Sequence[_SizedRun], waiting: Sequence[_WaitingJob]
    ) -> None:
        """Say of each job why it has no more nodes, once growth was decided."""
        for run in runs:
            job, attempt = run.job, run.attempt
            larger = [each for each in run.policy.sizes if each > attempt.nodes]
            offered = larger and _keep_alike(await trial.line_up(job, larger[0]), attempt.offer)
            facts = GrowthFacts(
                taken=run.policy.sizes,
                room=run.policy.room,
                offered=bool(offered),
                over_budget=run.over_budget,
                waiting=next((each.name for each in waiting if run.area in each.areas), None),
                rests_until=run.rests_until,
                pays=bool(choose_growth([run.policy])),  # others may get the nodes first
            )
            await self._note(job, attempt, find_hold(job, attempt, facts, trial.now))

    async def _note_fixed(self, jobs: Sequence[JobRecord]) -> None:
        """Say of each running job whose size is not changed why this is so."""
        for job in jobs:
            if job.phase is not JobPhase.RUNNING:
                continue
            attempts = await self._store.attempts(job.id)
            # not the last one, which may be a standby's
            attempt = next((each for each in attempts if each.number == job.attempt), None)
            if attempt is None:
                continue
            larger, hold = list_larger(job, attempt.nodes), None
            if larger:
                cause = HoldCause.OFF if not self.changes else HoldCause.FIXED
                cause = HoldCause.NO_CHECKPOINT if job.task.checkpoint is None else cause
                hold = SizeHold(cause=cause, attempt=attempt.number, nodes=larger[0])
            await self._note(job, attempt, hold)

    async def _note(self, job: JobRecord, attempt: Attempt, hold: SizeHold | None) -> None:
        changes = note_hold(job, attempt, hold, self._clock.now())
        if changes is not None:
            await self._store.commit(make_write(changes))

    async def _change(
        self, run: _SizedRun, step: SizeStep, cause: SizeCause, text: str, now: datetime
    ) -> None:
        change = SizeChange(
            nodes=step.nodes,
            before=run.attempt.nodes,
            cause=cause,
            at=now,
            attempt=run.attempt.number,
            rate=run.measures.rates.get(run.attempt.nodes),
            gain_s=step.gain_s,
        )
        await self._write(run.job, run.attempt, change, text, now)

    async def _write(
        self, job: JobRecord, attempt: Attempt, change: SizeChange, text: str, now: datetime
    ) -> None:
        notice = max(HANDOVER, job.task.grace)
        changes = change_size(job, attempt, change, text, notice, now)
        await self._store.commit(make_write(changes))
        self._hint(job.id)
        self._hint(QUEUE)


def _may_change(job: JobRecord) -> bool:
    """Return whether the size of a job may be changed while it runs. A job without checkpoints
    would start from its beginning; those with a policy for spot, on machines, in pools, in groups
    and in arrays have rules of their own."""
    task = job.task
    return (
        task.elastic is not None
        and task.checkpoint is not None
        and task.machine is None
        and task.pool is None
        and task.group is None
        and job.member is None
        and not task.session
        and SERVICE_TAG not in task.tags
        and not is_steered(job)
    )


def _may_claim(job: JobRecord) -> bool:
    """Return whether other jobs give nodes back so that this waiting job can start."""
    own = job.task.machine is not None or job.task.pool is not None
    return not own and job.task.group is None and not is_steered(job) and not job.barred


def _is_settled(job: JobRecord, attempt: Attempt) -> bool:
    """Return whether the job works, and nothing is under way that ends this attempt."""
    return (
        job.phase is JobPhase.RUNNING
        and attempt.phase is AttemptPhase.RUNNING
        and attempt.running_at is not None
        and attempt.drill_until is None
        and not job.standbys
        and job.stop_reason is None
    )


async def _find_room(
    trial: OpenTrial, job: JobRecord, attempt: Attempt, sizes: Sequence[int]
) -> int:
    """Return the most nodes that the job could have now, if its own gang had ended, on offers like
    its own."""
    for size in reversed(sizes):
        if size <= attempt.nodes:
            break
        lines = _keep_alike(await trial.line_up(job, size), attempt.offer)
        if lines and trial.can_start_now(lines, (attempt.gang,), ()):
            return size
    return attempt.nodes


def _rests_until(job: JobRecord, attempt: Attempt, measures: SizeMeasures) -> datetime:
    """Return the time from which the job has run long enough to change its size again."""
    rest = max(_REST, timedelta(seconds=_RESTS * measures.resize_s))
    assert attempt.running_at is not None  # it is settled
    last = job.sizing
    gave = last is not None and last.cause is SizeCause.GIVE_WAY
    # others took the nodes for which it had made room
    failed = last is not None and last.cause is SizeCause.GROW and attempt.nodes <= last.before
    return attempt.running_at + rest * (4 if failed else 2 if gave else 1)


def _list_sizes(job: JobRecord) -> tuple[int, ...]:
    """Return the numbers of nodes that the job may have, ascending."""
    assert job.task.elastic is not None
    sizes = job.task.elastic.list_sizes(job.most_nodes)
    return tuple(sorted(each for each in sizes if each not in job.untaken)) or (job.task.nodes,)


def _least_of(job: JobRecord) -> int:
    return job.task.nodes if job.task.elastic is None else _list_sizes(job)[0]


def _lend(runs: Sequence[_SizedRun], book: ShareBook) -> list[_SizedRun]:
    """Return the running jobs with how many nodes they lend to other projects: those above the
    quotas that count them, of several jobs of a project first those of the largest one."""
    quotas, given = ShareQuotas(book), defaultdict[str, float](float)
    found = []
    for run in sorted(runs, key=lambda each: -each.attempt.nodes):
        project, nodes = run.job.project, run.attempt.nodes
        share, size = share_held(run.attempt, run.job), size_of_task(run.job.task)
        spare = quotas.count_spare(project, share, size)
        lends = None
        if spare is not None:
            lends = max(0, min(nodes, int(spare * nodes - given[project] + _SLACK)))
            given[project] += lends
        found.append(replace(run, policy=replace(run.policy, lends=lends)))
    return found


def _area_of(offer: Offer) -> str:
    """Return the name of what jobs on the offer compete for: the nodes of its pool or, on shared
    hosts, all hosts of the account, since a job may have nodes on several of them."""
    return f"hosts of {offer.account}" if offer.shared else pool_of(offer)


def _areas_of(lines: Sequence[WaitingJob]) -> set[str]:
    return {_area_of(each) for line in lines for each in line.offers}


async def _list_leaving(trial: OpenTrial) -> tuple[Sequence[str], Sequence[WaitingJob]]:
    """Return the gangs that are about to end, and the jobs among theirs that start again on another
    number of nodes: what is freed by them need not be given once more."""
    leaving = [each for each in trial.running if each[0].drill_until is not None]
    coming = []
    for attempt, job in leaving:
        change = job.sizing
        if change is not None and change.attempt == attempt.number:
            line = find_same(await trial.line_up(job, change.nodes), attempt.offer)
            coming += [line] if line is not None else []
    return [attempt.gang for attempt, _ in leaving], coming


def _keep_alike(lines: Sequence[WaitingJob], own: Offer) -> Sequence[WaitingJob]:
    """Return the entries with those of their offers that have the same accelerators as the job's
    own, and no higher price: a job that grows must not find itself on dearer nodes."""
    kept = []
    for line in lines:
        offers = tuple(
            each
            for each in line.offers
            if (each.accelerator, each.accelerator_count)
            == (own.accelerator, own.accelerator_count)
            and each.rate.micros_per_hour <= own.rate.micros_per_hour
        )
        if offers:
            kept.append(replace(line, offers=offers))
    return kept
