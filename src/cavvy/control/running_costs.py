"""Adds up the ledger for people: the sums of its entries, and what running nodes cost since.

Views, metrics and the statements of budgets call this. Bills, discounts and the limits that end
jobs are computed from the entries alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from cavvy.costs.running import UnwrittenCost, list_unwritten, sum_unwritten
from cavvy.domain.jobs import Attempt, AttemptPhase
from cavvy.domain.ledger import EntryKind, LedgerSubject, LedgerSum, list_months
from cavvy.domain.services import SERVICE_TAG
from cavvy.domain.units import Money
from cavvy.domain.values import replace
from cavvy.store.base import LedgerFilter, ProjectFilter, is_visible
from cavvy.store.ledger import MONTH, group_subject
from cavvy.store.sql import Store


async def sum_to_now(
    store: Store, which: LedgerFilter, by: Sequence[str], now: datetime
) -> Sequence[LedgerSum]:
    """Return what `Store.sum_ledger` returns, with what running nodes cost since their newest
    entries, the largest sum first."""
    # The entries are read last, so that no spending is missing from both.
    costs = await _read_costs(store, which.projects, now)
    sums = await store.sum_ledger(which, by)
    return add_unwritten(sums, costs, which, by)


async def read_unwritten(
    store: Store, projects: ProjectFilter, now: datetime
) -> Mapping[str, Money]:
    """Return, by job ID, what running nodes of these projects cost since their newest entries."""
    return sum_unwritten(await list_open(store, await store.open_attempts(projects), now))


async def sum_gang(store: Store, attempt: Attempt, now: datetime) -> Money:
    """Return what the gang of an open attempt has cost by now, over all attempts that used it."""
    unwritten = [each.over(None, None).micros for each in await list_open(store, [attempt], now)]
    return await store.gang_spent(attempt.bought_as) + Money(sum(unwritten))


async def list_open(
    store: Store, attempts: Sequence[Attempt], now: datetime
) -> Sequence[UnwrittenCost]:
    """Return what these open attempts cost since their newest entries."""
    rates = await store.budgets.charged_rates() if attempts else {}
    return list_unwritten(attempts, rates, now)


async def _read_costs(
    store: Store, projects: ProjectFilter, now: datetime
) -> list[tuple[UnwrittenCost, LedgerSubject]]:
    attempts = await store.open_attempts(projects)
    costs = [each for each in await list_open(store, attempts, now) if each.rate.micros_per_hour]
    if not costs:
        return []
    subjects = await store.open_subjects([each.attempt.id for each in costs])
    # an attempt that ended in between is in the ledger, which is read afterwards
    return [(each, subjects[each.attempt.id]) for each in costs if each.attempt.id in subjects]


def add_unwritten(
    sums: Sequence[LedgerSum],
    costs: Iterable[tuple[UnwrittenCost, LedgerSubject]],
    which: LedgerFilter,
    by: Sequence[str],
) -> Sequence[LedgerSum]:
    """Add the costs that the filter selects to the sums of their groups."""
    found = {tuple(each.groups[name] for name in by): each for each in sums}
    for cost, subject in costs:
        if not _selects(which, subject):
            continue
        kept = cost.attempt.phase is AttemptPhase.KEPT
        kind = EntryKind.IDLE if kept else EntryKind.NODE
        since = cost.since if which.since is None else max(cost.since, which.since)
        until = cost.until if which.until is None else min(cost.until, which.until)
        if since >= until:
            continue
        begins = [since, *(list_months(since, until) if MONTH in by else ())]
        for begin, end in zip(begins, [*begins[1:], until], strict=True):
            key = group_subject(by, subject, kind, begin)
            found[key] = _grow(found.get(key), dict(zip(by, key, strict=True)), cost, begin, end)
    return sorted(found.values(), key=lambda each: (-each.amount.micros, [*each.groups.values()]))


def _grow(
    known: LedgerSum | None,
    groups: Mapping[str, str],
    cost: UnwrittenCost,
    begin: datetime,
    end: datetime,
) -> LedgerSum:
    amount = cost.over(begin, end)
    # whether `known.jobs` counts the job, by its entries or those of an earlier attempt
    counted = begin == cost.since and (cost.written or cost.attempt.number > 1)
    if known is None:
        return LedgerSum(
            groups=groups, amount=amount, discount=Money(), jobs=1, since=begin, until=end
        )
    return replace(
        known,
        amount=known.amount + amount,
        jobs=known.jobs + (not counted),
        since=min(known.since or begin, begin),
        until=max(known.until or end, end),
    )


def _selects(which: LedgerFilter, subject: LedgerSubject) -> bool:
    tags = subject.tags
    return (
        is_visible(subject.project, which.projects)
        and which.user in (None, subject.user)
        and (which.tag is None or tags.get(which.tag[0]) == which.tag[1])
        and which.service in (None, tags.get(SERVICE_TAG))
    )
