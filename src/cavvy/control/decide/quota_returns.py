"""Decides which gangs give their nodes back for a waiting job that is within its project's quota,
and says who has borrowed the quota and when it comes back."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.control.decide.queue import QueueWait, make_borrowers, share_held, share_on
from cavvy.control.decide.standby import HANDOVER
from cavvy.domain.jobs import Attempt, JobRecord
from cavvy.domain.shares import QueueRow, size_of_task
from cavvy.domain.values import replace
from cavvy.scheduler.pools import count_left, pool_of, units_of
from cavvy.scheduler.queue import JobScheduler, QueueCapacity, WaitingJob
from cavvy.scheduler.reclaim import choose_borrowers, find_return
from cavvy.scheduler.shares import ShareBook, ShareLimits

_MINUTE = timedelta(minutes=1)
Gangs = Sequence[tuple[Attempt, JobRecord]]


def decide_return(
    row: QueueRow,
    lines: Sequence[WaitingJob],
    running: Gangs,
    capacity: QueueCapacity,
    scheduler: JobScheduler,
    book: ShareBook,
    now: datetime,
    min_run: timedelta,
) -> tuple[Collection[str], str]:
    """Return the gangs that give their nodes back now, so that the job can start on an offer of
    `lines`, and what to tell about its quota. All these offers are within the quota. The nodes and
    what the limits of projects above count may both have to become free. `scheduler` is only used
    to try: it need not know `capacity` yet.
    """
    gangs = {attempt.gang: (attempt, job) for attempt, job in running}
    leaving = {attempt.gang for attempt, _ in running if attempt.reclaimed_for}
    attempts = [attempt for attempt, _ in running]
    has_limits = any(rule.has_limits for rule in book.rules.values())

    def suffices(freed: Collection[str]) -> bool:
        gone = leaving.union(freed)
        limits = ShareLimits(book)
        for attempt, job in (gangs[each] for each in gone if has_limits):
            share = share_held(attempt, job)
            limits.end_gang(job.project, job.user, size_of_task(job.task), share)
        if limits.find(row):
            return False
        left = [each for each in capacity.allocations if each.gang not in gone]
        nonlocal scheduler
        scheduler = scheduler.renew(replace(capacity, used={}, allocations=left))
        units = _count_units(attempt for attempt in attempts if attempt.gang in gone)
        return any(
            scheduler.can_start(_free(_admit(line, row, limits), capacity, units)) for line in lines
        )

    share = share_on(lines[0].job, lines[0].offers[0])
    borrowers, latest = make_borrowers(running), now - min_run
    chosen = {each.gang for each in choose_borrowers(row, borrowers, book, suffices, latest, share)}
    ends = [now + max(HANDOVER, gangs[each][1].task.grace) for each in chosen]
    if not chosen:
        chosen_before = [each for each in running if each[0].reclaimed_for == row.project]
        ends = [each.drill_until for each, _ in chosen_before if each.drill_until is not None]
        if ends:
            return (), _say_borrowed(chosen_before, max(ends))
        later = find_return(row, borrowers, book, suffices, latest, share)
        if later is None:
            return (), ""
        found = [gangs[each.gang] for each in later.borrowers]
        grace = max(HANDOVER, *(job.task.grace for _, job in found))
        return (), _say_borrowed(found, later.since + min_run + grace)
    return chosen, _say_borrowed([gangs[each] for each in sorted(chosen)], max(ends))


def tell_reasons(waits: Sequence[QueueWait], added: Mapping[str, str]) -> Sequence[QueueWait]:
    """Return the waits with what is added to the reasons of some jobs, by their IDs."""
    return [
        replace(each, wait=replace(each.wait, reason=f"{each.wait.reason}; {more}"))
        if (more := added.get(each.wait.job.id))
        else each
        for each in waits
    ]


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


def _say_borrowed(gangs: Gangs, until: datetime) -> str:
    """Return who has borrowed what the job needs of its quota, and when it comes back."""
    sums: defaultdict[tuple[str, str], float] = defaultdict(float)
    for attempt, job in gangs:
        share = share_held(attempt, job)
        sums[job.project, share.accelerator] += share.gpus or size_of_task(job.task)
    borrowed = " and ".join(
        f"project {project} has borrowed {gpus:g} {accelerator or 'GPUs'}"
        for (project, accelerator), gpus in sums.items()
    )
    return f"{borrowed} of its quota, back by {until + _MINUTE:%Y-%m-%d %H:%M} UTC at the latest"
