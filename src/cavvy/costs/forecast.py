"""Forecasts the total spending at the end of a month."""

from collections.abc import Sequence
from datetime import datetime
from math import sqrt
from statistics import fmean, stdev

from cavvy.costs.statements import month_period
from cavvy.domain.postings import month_of
from cavvy.domain.units import Money
from cavvy.domain.values import Struct

DAYS = 14  # number of whole days before now on which the forecast is based
# 80 % of a normal distribution lie within this many standard deviations of its mean
_Z80 = 1.2816


class SpendingForecast(Struct, frozen=True, kw_only=True):
    """The expected spending at the end of the month, and an interval for the spending. If spending
    on the remaining days is independent and distributed as on the earlier days, the interval
    contains the actual spending with a probability of about 80 %.
    """

    expected: Money
    low: Money
    high: Money


def forecast_month(spent: Money, daily: Sequence[int], now: datetime) -> SpendingForecast | None:
    """Forecast the spending of the month that contains `now`, from the amount spent so far in that
    month and the micro-dollars spent on each day in `daily`. Returns None if fewer than two days
    are given.

    The days have the mean m and the standard deviation s, and d days remain (not always a whole
    number). Then expected = spent + m d, and the interval is expected ± 1.2816 s √d. Its lower
    bound is at least `spent`.
    """
    if len(daily) < 2:
        return None
    _, end = month_period(month_of(now))
    left = (end - now).total_seconds() / 86400
    expected = spent.micros + fmean(daily) * left
    spread = _Z80 * stdev(daily) * sqrt(left)
    return SpendingForecast(
        expected=Money(round(expected)),
        low=Money(max(spent.micros, round(expected - spread))),
        high=Money(max(spent.micros, round(expected + spread))),
    )
