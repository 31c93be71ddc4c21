"""Spending by day, read from the ledger."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cavvy.client import ApiClient
from cavvy.client.ledger_wire import LedgerSumView, sum_ledger
from cavvy.console.memory import KEPT_S, Memory

_DAY = timedelta(days=1)
_SERIES = 6  # the groups with the largest sums; the others are added up
OTHERS = "others"
_TODAY_S = 10.0  # seconds for which today's sums are kept


@dataclass(frozen=True)
class DailySpending:
    """The spending of each day in micro-dollars. `series` has one amount for each of `days`, which
    are midnights in UTC; the last day has not ended. The largest group comes first.
    """

    days: Sequence[datetime]
    series: dict[str, Sequence[int]]

    @property
    def totals(self) -> list[int]:
        """The sum of each day."""
        return [sum(amounts) for amounts in zip(*self.series.values(), strict=True)]


def spending_by_day(
    client: ApiClient, memory: Memory, by: str, now: datetime, count: int
) -> DailySpending:
    """Return the spending of the last `count` days, which include today, for each value of the
    dimension `by`. The sums of past days may be a minute old, and today's a few seconds. Raises
    ApiError.
    """
    today = day_of(now)
    days = [today - each * _DAY for each in reversed(range(count))]
    amounts: dict[str, list[int]] = {}
    for number, day in enumerate(days):
        for row in _spending_of(
            client, memory, by, day, kept_s=KEPT_S if day < today else _TODAY_S
        ):
            name = row.groups[by] or f"no {by}"
            amounts.setdefault(name, [0] * count)[number] += row.amount_micros
    ordered = sorted(amounts, key=lambda name: (-sum(amounts[name]), name))
    shown = ordered
    if len(ordered) > _SERIES:  # a group may have the name of the others, too
        shown = [name for name in ordered[:_SERIES] if name != OTHERS]
    series: dict[str, Sequence[int]] = {name: amounts[name] for name in shown}
    if rest := [name for name in ordered if name not in series]:
        columns = zip(*(amounts[name] for name in rest), strict=True)
        series[OTHERS] = [sum(column) for column in columns]
    return DailySpending(days, series or {"": [0] * count})


def _spending_of(
    client: ApiClient, memory: Memory, by: str, day: datetime, *, kept_s: float
) -> Sequence[LedgerSumView]:
    return memory.recall(
        ("spending", by, day),
        lambda: sum_ledger(client, [by], since=day, until=day + _DAY),
        kept_s,
    )


def total_of(spending: DailySpending) -> int:
    return sum(spending.totals)


def day_of(moment: datetime) -> datetime:
    """Return the midnight in UTC at which the day began."""
    return moment.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
