"""Counts the spending of running nodes to now, for views.

The ledger's rows of running nodes are written every 45 s, of very many nodes every 4 minutes. What
a node costs since its newest row is known all the same: it goes on at the rate of this row until
the node ends.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from cavvy.costs.metering import charge_node
from cavvy.domain.budgets import ChargedRate
from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.jobs import Attempt, AttemptPhase
from cavvy.domain.ledger import share_of
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import Struct, replace

_MACHINES = (ChargeKind.NODE, ChargeKind.KEPT)
_BY_TIME = (*_MACHINES, ChargeKind.DISK, ChargeKind.ADDRESS)


def charge_to_now(
    attempts: Iterable[Attempt], charges: Sequence[Charge], now: datetime
) -> list[Charge]:
    """Return the charges as if they were written now. Each node of an attempt that has not ended
    costs what it cost last; one without a charge costs the offer's price since the work began.
    """
    found = list(charges)
    for attempt in attempts:
        if attempt.phase is AttemptPhase.ENDED:
            continue
        newest = _find_newest(attempt, charges)
        for at in newest.values():
            grown = max(now, found[at].until)
            amount = found[at].rate.over(grown - found[at].since)
            found[at] = replace(found[at], until=grown, amount=amount)
        mine = (each for each in charges if each.attempt_id == attempt.id)
        charged = {each.rank for each in mine if each.kind in _MACHINES}
        since = attempt.adopted_at or attempt.running_at
        if since is None or since >= now or not attempt.offer.rate.micros_per_hour:
            continue
        for rank in range(attempt.nodes):
            if rank not in charged:
                found.append(charge_node(attempt, rank, since, now, attempt.offer.rate))
    return found


def _find_newest(attempt: Attempt, charges: Sequence[Charge]) -> Mapping[object, int]:
    """Return the positions of the newest charges of what is billed by time: of each node's machine,
    and of each of its disks and addresses that went on as long as the machine. Those of a node
    whose charges ended before those of the others, and so the node itself, are omitted."""
    mine = [
        (at, each)
        for at, each in enumerate(charges)
        if each.attempt_id == attempt.id and each.kind in _BY_TIME
    ]
    last = max((each.until for _, each in mine), default=None)
    return {
        (each.rank, each.kind in _MACHINES or each.kind): at
        for at, each in mine
        if each.until == last
    }


class UnwrittenCost(Struct, frozen=True, kw_only=True):
    """What the nodes of an open attempt cost since the ledger's newest rows: `rate` for the time
    from `since` to `until`. `written` is true if the ledger has rows of the job's open attempts."""

    attempt: Attempt
    since: datetime
    until: datetime
    rate: HourlyRate
    written: bool = False

    def over(self, first: datetime | None, last: datetime | None) -> Money:
        """Return the amount in [first, last). None means no limit on this side."""
        whole = self.rate.over(self.until - self.since).micros
        return Money(share_of(whole, self.since, self.until, first, last))


def list_unwritten(
    attempts: Iterable[Attempt], rates: Mapping[str, ChargedRate], now: datetime
) -> Sequence[UnwrittenCost]:
    """Return what the open attempts cost since the ledger's newest rows. `rates` contains the jobs
    that have such rows; what such a job costs counts once, for its newest attempt.
    """
    found = dict[str, UnwrittenCost]()
    for attempt in sorted(attempts, key=lambda each: each.number):
        known = rates.get(attempt.job_id)
        since = attempt.adopted_at or attempt.running_at
        rate = attempt.offer.rate.times(attempt.nodes)
        if known is not None:
            since, rate = known.until, known.rate
        if since is not None and since < now and rate.micros_per_hour:
            key = attempt.id if known is None else attempt.job_id
            found[key] = UnwrittenCost(
                attempt=attempt, since=since, until=now, rate=rate, written=known is not None
            )
    return list(found.values())


def sum_unwritten(costs: Iterable[UnwrittenCost]) -> Mapping[str, Money]:
    """Return the amounts by job ID."""
    found = defaultdict[str, Money](Money)
    for each in costs:
        found[each.attempt.job_id] += each.over(None, None)
    return found
