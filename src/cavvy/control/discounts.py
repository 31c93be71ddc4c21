"""Posts the discounts in the settings to the ledger for the current and the previous month."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.costs.discounts import Discount, list_bases, spread_discounts
from cavvy.costs.statements import month_period
from cavvy.domain.postings import month_of
from cavvy.store.base import LedgerFilter, Store

_SUMS = ("subject", "account")


async def post_discounts(store: Store, discounts: Sequence[Discount], now: datetime) -> int:
    """Post the current amounts of the discounts, minus the amounts that were posted before.
    Discounts that are no longer in the settings are reversed. Return the number of new entries.
    """
    count = 0
    this = month_of(now)
    for month in (month_of(this - timedelta(days=1)), this):
        spread: Mapping[str, Mapping[str, int]] = {}
        if discounts:
            since, until = month_period(month)
            sums = await store.sum_ledger(LedgerFilter(since=since, until=until), _SUMS)
            charged = list_bases(
                (each.groups, each.amount.micros - each.discount.micros) for each in sums
            )
            spread = spread_discounts(discounts, charged)
        count += await store.post_discounts(month, spread)
    return count
