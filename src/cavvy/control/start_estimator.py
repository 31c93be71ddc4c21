"""Estimates when the waiting jobs start, and learns from the jobs that have started since. Nothing
is estimated until a user asks.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Container, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from math import inf
from random import Random
from statistics import median

from cavvy.control.decide.maintenance import compare_reserved
from cavvy.control.decide.placement import MarketSnapshot, list_usable
from cavvy.control.decide.queue_state import GangRow, WaitingRow, find_kind_of, make_queue_state
from cavvy.control.fair_queue import FairQueue, OrderedQueue
from cavvy.control.provider_pool import ProviderPool
from cavvy.domain.jobs import Attempt, JobRecord
from cavvy.domain.offers import Offer
from cavvy.domain.services import SERVICE_TAG
from cavvy.domain.shares import EndedGang, QueueRow
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import Struct, replace
from cavvy.planner.candidates import jobs_of
from cavvy.scheduler.maintenance import ReservedHosts
from cavvy.scheduler.shares import ShareLimits
from cavvy.scheduler.start_estimates import (
    DEEPEST,
    LATEST,
    EstimateOutcome,
    PastGang,
    PlannedGang,
    RunTimes,
    StartEstimate,
    correct,
    estimate_starts,
    find_kind,
)
from cavvy.store.sql import Store

_PAST = 800  # ended gangs that are read
_ENDS = 25  # draws of the end of a running gang
_BOOTS = 50  # boot times of each provider that count
# How long estimates are used again, for each job that has one: if a job that is asked for has none,
# and otherwise. To compute them takes 0.2 to 0.5 ms a job.
_UNKNOWN, _KNOWN = timedelta(milliseconds=4), timedelta(milliseconds=20)
_UNCHANGED = timedelta(seconds=30)  # how long while the mark of the queue is the same
_SHORTEST = 64  # jobs of the queue that are estimated, or as many as wait
_OFFERS_AGE = timedelta(minutes=1)  # while jobs wait, the queue reads the offers more often
# A job that could start at once but still waits after this time waits for something else.
_AT_ONCE = timedelta(seconds=30)
_SECOND = timedelta(seconds=1)


class DatedEstimate(Struct, frozen=True, kw_only=True):
    """When a job's work starts: the median, and the range that contains the start in 90 of 100
    cases."""

    earliest: datetime
    likely: datetime
    latest: datetime


class _Asked(Struct, frozen=True):
    at: datetime
    estimate: StartEstimate


class _Known(Struct, frozen=True):
    """The estimates of the first jobs of the queue, whose IDs are `line`, and the mark
    (`SqlQueue.mark`) that was read before the queue was lined up."""

    at: datetime
    line: Sequence[str]
    mark: object
    starts: Mapping[str, DatedEstimate]


class StartEstimator:
    """Keeps the newest estimates, and the errors of earlier ones.

    All requests read the same estimates. These are computed again when the mark has changed, and
    then only so often that a fixed part of a core suffices, however many jobs wait.
    """

    def __init__(self, store: Store, pool: ProviderPool, fair_queue: FairQueue) -> None:
        self._store, self._pool, self._fair_queue = store, pool, fair_queue
        self._jobs: dict[str, JobRecord] = {}  # of the estimated part of the queue, and running
        self._asked: dict[str, _Asked] = {}  # the first estimate of each job that waits
        self._outcomes: deque[EstimateOutcome] = deque(maxlen=LATEST)
        self._known = _Known(datetime.min.replace(tzinfo=UTC), (), None, {})
        self._computing = asyncio.Lock()

    async def estimate(self, job_ids: Sequence[str], now: datetime) -> Mapping[str, DatedEstimate]:
        """Return when the waiting jobs start. A job is missing if it does not wait, or if too
        little is known. The estimates may be a moment old.
        """
        line = await self._fair_queue.line_up(job_ids, now)
        places = [line.places[each] for each in job_ids if each in line.places]
        deepest = max((each for each in places if each < DEEPEST), default=None)
        if deepest is None:
            return {}
        rows = line.rows[: min(DEEPEST, max(_SHORTEST, 1 << deepest.bit_length()))]
        async with self._computing:
            known = self._known
            wanted = {each for each in job_ids if line.places.get(each, DEEPEST) < DEEPEST}
            pause = _KNOWN if wanted <= {*known.line} else _UNKNOWN
            if now - known.at >= len(known.line) * pause:
                known = await self._renew(rows, line, now)
            return {each: known.starts[each] for each in job_ids if each in known.starts}

    async def _renew(self, rows: Sequence[QueueRow], line: OrderedQueue, now: datetime) -> _Known:
        """Return the estimates of these first jobs of the line: the known ones, if the mark is that
        of their line."""
        mark, known = await self._store.queue.mark(now), self._known
        ids = [row.id for row in rows]
        same = mark == known.mark and [*known.line[: len(ids)]] == ids
        if not same or now - known.at >= _UNCHANGED:
            starts = await self._compute(rows, line, now)
            # not the newer mark of now, which would hide what was written after the line was read
            self._known = known = _Known(now, ids, line.mark, starts)
        return known

    async def estimate_ends(
        self, gangs: Sequence[GangRow], now: datetime
    ) -> Mapping[str, datetime]:
        """Return when the running gangs probably end, by the ID of their attempt: the median of the
        run times of gangs like them. A gang is missing if none is known, or if it is a replica.
        """
        ended = await self._store.queue.ended_gangs(_PAST)
        run_times = RunTimes(_list_past(ended, gangs, now), Random(0))
        found = {}
        for each in gangs:
            began = each.attempt.running_at
            if began is None or SERVICE_TAG in each.job.task.tags:
                continue
            age_s = max(0.0, (now - each.attempt.created_at) / _SECOND)
            planned = PlannedGang(kind=find_kind_of(each.job), age_s=age_s)
            left_s = median(run_times.draw(planned, 0) for _ in range(_ENDS))
            if left_s < inf:
                found[each.attempt.id] = now + left_s * _SECOND
        return found

    async def _compute(
        self, rows: Sequence[QueueRow], line: OrderedQueue, now: datetime
    ) -> Mapping[str, DatedEstimate]:
        attempts = await self._store.open_attempts()
        ended = await self._store.queue.ended_gangs(_PAST)
        await self._read_jobs({row.id for row in rows}, {each.job_id for each in attempts})
        await self._learn(line.places, now)
        gangs = [
            GangRow(attempt=each, job=self._jobs[each.job_id])
            for each in attempts
            if each.job_id in self._jobs
        ]
        snapshot = await self._pool.market(_OFFERS_AGE)
        reserved = ReservedHosts(
            await self._store.maintenance.reservations(), (), snapshot.market.policies.parents
        )
        waiting = [
            replace(each, suited=())
            if reserved.find_closed(compare_reserved(each.job), now)
            else each
            for each in self._list_waiting(rows, snapshot)
        ]
        boots = _list_boots(ended, attempts)
        limits, allocations = ShareLimits(line.book), await self._store.allocations()
        state = make_queue_state(waiting, gangs, snapshot, allocations, limits, boots, now)
        # The same state gives the same estimates.
        run_times = RunTimes(_list_past(ended, gangs, now), Random(0))
        found = await asyncio.to_thread(estimate_starts, state, run_times, Random(0))
        return self._date(found, now)

    def _date(
        self, found: Mapping[str, StartEstimate], now: datetime
    ) -> Mapping[str, DatedEstimate]:
        late = (
            EstimateOutcome(each.estimate, (now - each.at) / _SECOND, started=False)
            for each in self._asked.values()
        )
        outcomes = [*self._outcomes, *late]
        dated = {}
        for job_id, estimate in found.items():
            job = self._jobs[job_id]
            if estimate.low_s <= 0 and now - max(job.submitted_at, job.since) > _AT_ONCE:
                continue
            self._asked.setdefault(job_id, _Asked(now, estimate))
            shown = correct(estimate, outcomes)
            dated[job_id] = DatedEstimate(
                earliest=now + shown.low_s * _SECOND,
                likely=now + shown.median_s * _SECOND,
                latest=now + shown.high_s * _SECOND,
            )
        return dated

    async def _learn(self, waiting: Container[str], now: datetime) -> None:
        """Note when the jobs have started that do not wait any more."""
        for job_id in [each for each in self._asked if each not in waiting]:
            asked = self._asked[job_id]
            attempts = await self._store.attempts(job_id)
            starts = [each.running_at for each in attempts if each.running_at is not None]
            start = min((each for each in starts if each >= asked.at), default=None)
            if start is not None:
                waited = (start - asked.at) / _SECOND
                self._outcomes.append(EstimateOutcome(asked.estimate, waited))
            elif any(each.ended_at is None for each in attempts):
                continue  # its nodes boot
            del self._asked[job_id]

    async def _read_jobs(self, waiting: set[str], running: set[str]) -> None:
        """Read those of the jobs that are not known yet, and the waiting jobs that have changed: a
        job may have run, failed and returned to the queue since it was read."""
        wanted = waiting | running
        versions = await self._store.live_versions()
        self._jobs = {
            each: job
            for each, job in self._jobs.items()
            if each in wanted and (each not in waiting or job.version == versions.get(each))
        }
        missing = sorted(wanted - self._jobs.keys())
        if missing:
            self._jobs |= {job.id: job for job in await self._store.find_jobs(missing)}

    def _list_waiting(
        self, line: Sequence[QueueRow], snapshot: MarketSnapshot
    ) -> Sequence[WaitingRow]:
        known: dict[object, Sequence[tuple[TaskSpec, Sequence[Offer]]]] = {}
        found = []
        for row in line:
            job = self._jobs.get(row.id)
            if job is None:
                continue
            needs = _needs_of(job)
            if needs not in known:
                known[needs] = [
                    (each.task, list_usable(each, snapshot, self._pool.objections))
                    for each in jobs_of(job)
                ]
            found.append(WaitingRow(row=row, job=job, suited=known[needs]))
        return found


def _needs_of(job: JobRecord) -> object:
    """Return what decides which offers suit a job, but for what providers object to: a queue may
    have a thousand jobs whose tasks differ in the rest."""
    task = job.task
    sizes = task.nodes, task.elastic, job.most_next, job.untaken
    where = task.resources, task.image, task.topology, task.volumes
    return job.project, job.consented, sizes, where


def _list_boots(
    ended: Sequence[EndedGang], running: Sequence[Attempt]
) -> Mapping[str, Sequence[float]]:
    """Return the seconds that the latest gangs at each provider needed until their work ran."""
    known = [
        (each.offer.provider, each.running_at - each.created_at)
        for each in reversed(running)
        if each.running_at is not None
    ]
    boots: defaultdict[str, list[float]] = defaultdict(list)
    for provider, boot in [*known, *((each.provider, each.boot) for each in ended)]:
        if len(boots[provider]) < _BOOTS:
            boots[provider].append(boot / _SECOND)
    return boots


def _list_past(
    ended: Sequence[EndedGang], gangs: Sequence[GangRow], now: datetime
) -> Sequence[PastGang]:
    """Return the gangs from which run times are predicted, sorted by the time of submission, the
    newest first."""
    past = {
        each.attempt_id: PastGang(
            find_kind(each.project, each.user, each.name), each.held / _SECOND
        )
        for each in ended
    }
    oldest = ended[-1].attempt_id if len(ended) == _PAST else ""
    for each in gangs:
        attempt = each.attempt
        if attempt.running_at is not None and attempt.id > oldest:
            held_s = max(0.0, (now - attempt.created_at) / _SECOND)
            over = attempt.finished_at is not None
            past[attempt.id] = PastGang(find_kind_of(each.job), held_s, over)
    return [past[each] for each in sorted(past, reverse=True)]
