"""Decides whether a job may start before an earlier job that waits for a part of the same shared
host. No I/O. The decision does not predict when running jobs will end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from cavvy.domain.allocations import Allocation, Host
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Task
from cavvy.scheduler.packing import AllocationOwner, allocate_across

# Limits of the work of one pass over the queue. Beyond these limits, jobs wait as without backfill.
CHECKS = 16  # number of jobs that are checked
_MOST_GANGS = 6  # gangs on the hosts; a check tries every combination of gangs that may end
_MOST_WAITS = 3  # number of earlier jobs that wait


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWait:
    """An offer on shared hosts that a job waits for, and the hosts that it may use."""

    task: Task
    offer: Offer
    hosts: tuple[Host, ...]
    owner: AllocationOwner


def may_delay(
    mine: Sequence[Allocation],
    waits: Sequence[Sequence[HostWait]],
    allocations: Sequence[Allocation],
) -> bool:
    """Whether a job with the allocations `mine` could delay one of the waiting jobs.

    `waits` are the waiting jobs in the queue's order, each with its alternatives. The check tries
    every set of gangs on the hosts that may end first. The job delays none if, in each case, every
    waiting job that fits without `mine` also fits beside `mine`. If a waiting job does not even fit
    on empty hosts, it waits for another host that is not known here, and the answer is True.
    """
    if len(waits) > _MOST_WAITS or not all(any(_find_room([each], ())) for each in waits):
        return True
    hosts = {host.name for wait in waits for each in wait for host in each.hosts}
    hosts |= {each.host for each in mine}
    there = [each for each in allocations if each.host in hosts]
    gangs = sorted({each.gang for each in there})
    if len(gangs) > _MOST_GANGS:
        return True
    for count in range(len(gangs) + 1):
        for left in combinations(gangs, count):
            rest = [each for each in there if each.gang in left]
            beside = [*rest, *mine]
            if any(
                without and not with_mine
                for without, with_mine in zip(
                    _find_room(waits, rest), _find_room(waits, beside), strict=True
                )
            ):
                return True
    return False


def _find_room(
    waits: Sequence[Sequence[HostWait]], allocations: Sequence[Allocation]
) -> Iterator[bool]:
    """Whether each waiting job, in order, finds room beside the waiting jobs before it."""
    taken = list(allocations)
    for alternatives in waits:
        found = next(
            (
                placed
                for each in alternatives
                if (placed := allocate_across(each.task, each.offer, each.hosts, taken, each.owner))
                is not None
            ),
            None,
        )
        taken += found or ()
        yield found is not None
