"""Counts the spending of running nodes to now, for views.

The ledger's rows of running nodes are written every 45 s. What a node costs since its newest row is
known all the same: it goes on at the rate of this row until the node ends.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from cavvy.costs.metering import charge_node
from cavvy.domain.budgets import ChargedRate
from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.jobs import Attempt, AttemptPhase
from cavvy.domain.units import Money
from cavvy.domain.values import replace

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


def list_unwritten(
    attempts: Iterable[Attempt], rates: Mapping[str, ChargedRate], now: datetime
) -> Mapping[str, Money]:
    """Return, by job ID, what the nodes of open attempts cost since the ledger's newest rows.
    `rates` contains the jobs that have such rows."""
    found = dict[str, Money]()
    for attempt in attempts:
        known = rates.get(attempt.job_id)
        since = attempt.adopted_at or attempt.running_at
        if known is not None:
            found[attempt.job_id] = known.rate.over(max(now, known.until) - known.until)
        elif since is not None and since < now:
            price = attempt.offer.rate.times(attempt.nodes).over(now - since)
            found[attempt.job_id] = found.get(attempt.job_id, Money()) + price
    return found
