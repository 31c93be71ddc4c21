"""Adds up charges by job and provider."""

from collections import defaultdict
from collections.abc import Sequence

from cavvy.domain.units import Money
from cavvy.store.base import JobSpending
from cavvy.store.documents import decode_attempt, decode_tags
from cavvy.store.drivers import Row


def add_up(charges: Sequence[Row], attempts: Sequence[Row], start: int) -> list[JobSpending]:
    """Add up what each job has spent at each provider, the largest amount first. Each row of
    `charges` has attempt, start, end and amount. Each row of `attempts` has attempt, document, job,
    project, name, user and tags. Only the time from `start` on is counted. Times are in
    microseconds.
    """
    by_attempt: defaultdict[str, int] = defaultdict(int)
    for attempt, since, until, amount in charges:
        counted = until - max(since, start)
        by_attempt[attempt] += amount * counted // (until - since) if since < start else amount
    found: defaultdict[tuple[str, str], int] = defaultdict(int)
    about: dict[str, Sequence[str]] = {}
    for attempt, document, job, *facts in attempts:
        found[job, decode_attempt(document).offer.provider] += by_attempt[attempt]
        about[job] = facts
    rows = [
        JobSpending(
            project=about[job][0],
            job=about[job][1],
            user=about[job][2],
            tags=decode_tags(about[job][3]),
            provider=provider,
            amount=Money(amount),
        )
        for (job, provider), amount in found.items()
    ]
    return sorted(rows, key=lambda row: (-row.amount.micros, row.job))
