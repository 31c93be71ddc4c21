"""Posts the discounts in the settings to the ledger for the current and the previous month."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from cavvy.costs.discounts import Discount, list_bases, spread_discounts
from cavvy.costs.statements import month_period
from cavvy.domain.ledger import MonthDiscounts
from cavvy.domain.postings import month_of
from cavvy.store.base import LedgerFilter
from cavvy.store.sql import Store

_SUMS = ("subject", "account")


async def post_discounts(store: Store, discounts: Sequence[Discount], now: datetime) -> int:
    """Post the current amounts of the discounts, minus the amounts that were posted before.
    Discounts that are no longer in the settings are reversed. Return the number of new entries.
    """
    count = 0
    this = month_of(now)
    for month in (month_of(this - timedelta(days=1)), this):
        posted = MonthDiscounts(month=month)
        if discounts:
            since, until = month_period(month)
            sums = await store.sum_ledger(LedgerFilter(since=since, until=until), _SUMS)
            charged = list_bases(
                (each.groups, each.amount.micros - each.discount.micros) for each in sums
            )
            periods = {
                each.groups["subject"]: (each.since, each.until)
                for each in sums
                if each.since is not None and each.until is not None
            }
            spread = spread_discounts(discounts, charged)
            posted = MonthDiscounts(month=month, spread=spread, periods=periods)
        count += await store.post_discounts(posted)
    return count
