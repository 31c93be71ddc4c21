"""Tries whether a waiting job could start if some gangs had ended. Nothing is changed."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from cavvy.domain.jobs import Attempt, JobRecord
from cavvy.domain.offers import Offer
from cavvy.domain.shares import GangShare, QueueRow, share_of, size_of_task
from cavvy.domain.values import replace
from cavvy.scheduler.offer_lines import count_left, pool_of, units_of
from cavvy.scheduler.queue import JobScheduler, QueueCapacity, WaitingJob
from cavvy.scheduler.shares import ShareBook, ShareLimits


def share_held(attempt: Attempt, job: JobRecord) -> GangShare:
    """Return what the gang of the attempt holds."""
    return share_of(attempt.offer, attempt.nodes, size_of_task(job.task))


def share_on(wish: JobRecord, offer: Offer) -> GangShare:
    """Return what the job would hold on the offer, with all gangs that start at the same time."""
    gangs = 1 if offer.shared else max(1, wish.task.retry.parallel)
    return share_of(offer, wish.task.nodes * gangs, size_of_task(wish.task))


class StartTrial:
    """What runs, what is free and what the limits of projects count, as they are in one pass.
    `scheduler` is only used to try: it need not know `capacity` yet."""

    def __init__(
        self,
        running: Sequence[tuple[Attempt, JobRecord]],
        capacity: QueueCapacity,
        scheduler: JobScheduler,
        book: ShareBook,
    ) -> None:
        self._gangs = {attempt.gang: (attempt, job) for attempt, job in running}
        self._capacity, self._scheduler, self._book = capacity, scheduler, book
        self._has_limits = any(rule.has_limits for rule in book.rules.values())

    def can_start(
        self,
        row: QueueRow,
        lines: Iterable[WaitingJob],
        gone: Collection[str],
        beside: Sequence[WaitingJob] = (),
    ) -> bool:
        """Return whether a job could start on an offer of `lines`, within all limits, if the gangs
        with these names had ended, and these other jobs had started instead."""
        limits = ShareLimits(self._book)
        for attempt, job in (self._gangs[each] for each in gone if self._has_limits):
            share = share_held(attempt, job)
            limits.end_gang(job.project, job.user, size_of_task(job.task), share)
        left = [each for each in self._capacity.allocations if each.gang not in gone]
        self._scheduler = trial = self._scheduler.renew(
            replace(self._capacity, used={}, allocations=left)
        )
        units = _count_units(self._gangs[each][0] for each in gone)
        for each in beside:
            own = make_row(each.job)
            if self._has_limits:
                limits.start(own)
                limits.start_gang(own.project, own.user, share_on(each.job, each.offers[0]))
            trial.decide(_free(each, self._capacity, units))
        if limits.find(row):
            return False
        free = (_free(_admit(each, row, limits), self._capacity, units) for each in lines)
        return any(trial.can_start(each) for each in free)


def make_row(job: JobRecord) -> QueueRow:
    """Return a job as a row of the queue."""
    size, parallel = size_of_task(job.task), job.task.parallel
    return QueueRow(job.id, job.project, job.user, size, job.array_id, parallel)


def _admit(line: WaitingJob, row: QueueRow, limits: ShareLimits) -> WaitingJob:
    offers = tuple(each for each in line.offers if limits.admits(row, share_on(line.job, each)))
    return replace(line, offers=offers)


def _count_units(ended: Iterable[Attempt]) -> Mapping[str, int]:
    """Return the units of each pool that these gangs hold: GPUs or, without GPUs, nodes."""
    units: Counter[str] = Counter()
    for attempt in ended:
        if not attempt.offer.shared:
            units[pool_of(attempt.offer)] += attempt.nodes * units_of(attempt.offer)
    return units


def _free(line: WaitingJob, capacity: QueueCapacity, units: Mapping[str, int]) -> WaitingJob:
    """Return the line with the capacity that its offers have when the units are free."""
    offers = [
        each
        if each.shared or (left := count_left(each, capacity.used)) is None
        else replace(each, capacity=left + units.get(pool_of(each), 0) // units_of(each))
        for each in line.offers
    ]
    return replace(line, offers=tuple(offers))
