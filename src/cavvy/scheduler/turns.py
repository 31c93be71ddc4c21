"""Whose turn it is: the queue's order and what may start now, as a plan that is a value. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from cavvy.domain.jobs import Job
from cavvy.domain.offers import Offer
from cavvy.domain.places import Hold, Host
from cavvy.scheduler.packing import Owner, holds_across, hosts_of
from cavvy.scheduler.pools import count_left, take


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A job in the queue with the offers that it may use, best first, and the name that its gang
    would have.
    """

    job: Job
    gang: str
    offers: tuple[Offer, ...]
    avoid: frozenset[str] = frozenset()  # names of shared hosts that failed it lately


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What there is now. `used` is the part of each pool that was given away since the capacity
    was told.
    """

    hosts: Sequence[Host] = ()
    holds: Sequence[Hold] = ()
    used: Mapping[str, Fraction] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Start the job there, holding these parts of a shared host."""

    job: Job
    offer: Offer
    holds: tuple[Hold, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """The job stays in the queue; `behind` are the places that it waits for."""

    job: Job
    reason: str
    behind: tuple[str, ...]


class Turns:
    """Decides for one waiting job after the other, in the queue's order, whether and where it
    starts.

    Strict at every place: while a job waits for one, no later job is put there, so that small jobs
    cannot starve a large one. A later job that can use another place is not held up.
    """

    def __init__(self, capacity: Capacity) -> None:
        self._hosts = [host for host in capacity.hosts if host.ready]
        self._holds = list(capacity.holds)
        self._used = dict(capacity.used)
        self.blocked: set[str] = set()  # the places that a job waits for

    def decide(self, turn: Waiting, *others: Waiting) -> Place | Stay:
        """The next job's turn; placing it counts for those after it. `others`: what else will
        do, tried in order.
        """
        choices = (turn, *others)
        placed = next((found for each in choices if (found := self._place(each)) is not None), None)
        if placed is None:
            offers = [offer for each in choices for offer in each.offers]
            behind = tuple(dict.fromkeys(place_of(offer) for offer in offers))
            earlier = all(place in self.blocked for place in behind)
            self.blocked.update(
                *(self._lanes(offer, each.avoid) for each in choices for offer in each.offers)
            )
            return Stay(job=turn.job, reason=_reason(behind, earlier), behind=behind)
        self._holds += placed.holds
        take(self._used, placed.offer, turn.job.task.nodes)
        return placed

    def can_start(self, turn: Waiting) -> bool:
        """Whether the job would be placed if it were its turn now; it is not."""
        return self._place(turn) is not None

    def _place(self, turn: Waiting) -> Place | None:
        task = turn.job.task
        owner = Owner(gang=turn.gang, project=turn.job.project)
        hosts = (
            [host for host in self._hosts if host.name not in turn.avoid]
            if turn.avoid
            else self._hosts
        )
        for offer in turn.offers:
            if not self.blocked.isdisjoint(self._lanes(offer, turn.avoid)):
                continue
            if not offer.shared:
                left = count_left(offer, self._used)
                if left is None or left >= task.nodes:
                    return Place(job=turn.job, offer=offer)
                continue
            mine = holds_across(task, offer, hosts, self._holds, owner)
            if mine is not None:
                return Place(job=turn.job, offer=offer, holds=mine)
        return None

    def _lanes(self, offer: Offer, avoid: frozenset[str]) -> set[str]:
        """Every place that a job for this offer waits for: of a group, each of its hosts but
        those that it avoids.
        """
        hosts = hosts_of(offer, self._hosts) if offer.shared else ()
        return {place_of(offer), *(host.name for host in hosts if host.name not in avoid)}


def place_of(offer: Offer) -> str:
    """What jobs queue for: a shared host as a whole, else the offer."""
    return f"{offer.provider}/{offer.zone or offer.region}" if offer.shared else offer.key


def _reason(behind: Sequence[str], earlier: bool) -> str:
    names = behind[0] if len(behind) == 1 else f"{behind[0]} and {len(behind) - 1} more that fit"
    return (
        f"waits behind earlier jobs for {names}"
        if earlier
        else f"waits for free capacity at {names}"
    )
