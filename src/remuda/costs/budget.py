"""How much of a budget is gone and when the rest will be, at the price that is being paid now."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from remuda.domain.jobs import Attempt, AttemptPhase, Job
from remuda.domain.units import HourlyRate, Money

_YEAR = timedelta(days=366)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetState:
    """What a budget looks like at one moment. `limit` None is no budget; then nothing is ever exhausted."""

    limit: Money | None
    spent: Money
    rate: HourlyRate  # of everything that bills now
    left: Money | None  # never below 0
    exhausted: bool
    runs_out_at: datetime | None  # None: never at this rate, or no budget, or more than a year away

    def projected(self, remaining: timedelta) -> Money:
        """What will have been spent after `remaining` more at the present rate."""
        return self.spent + self.rate.over(max(remaining, timedelta(0)))


def budget_of(job: Job) -> Money | None:
    """The lower of the budget in the task file and the ceiling that the user consented to."""
    stated = [amount for amount in (job.task.limits.budget, job.ceiling) if amount is not None]
    return min(stated, default=None)


def burn_rate(attempts: Iterable[Attempt]) -> HourlyRate:
    """What the gangs of all attempts that may still bill cost together, at their offers' prices."""
    return HourlyRate(
        sum(a.offer.rate.times(a.nodes).micros_per_hour for a in attempts if a.phase is not AttemptPhase.ENDED)
    )


def weigh(limit: Money | None, spent: Money, rate: HourlyRate, now: datetime) -> BudgetState:
    """The state of a budget of which `spent` is gone at `now` and which is drawn on at `rate`.

    Exhausted is spent >= limit: a budget of 0 allows what is free only, and is exhausted only once something bills.
    """
    if limit is None:
        return BudgetState(limit=None, spent=spent, rate=rate, left=None, exhausted=False, runs_out_at=None)
    left = max(Money(0), limit - spent)
    bills = rate.micros_per_hour > 0
    exhausted = spent > limit or (spent == limit and (bills or limit > Money(0)))
    return BudgetState(
        limit=limit,
        spent=spent,
        rate=rate,
        left=left,
        exhausted=exhausted,
        runs_out_at=_runs_out(left, rate, now) if bills else None,
    )


def _runs_out(left: Money, rate: HourlyRate, now: datetime) -> datetime | None:
    """Rounded down to a whole microsecond: never later than the money lasts."""
    lasts_us = left.micros * 3_600_000_000 // rate.micros_per_hour
    length = timedelta(microseconds=min(lasts_us, (_YEAR * 2) // timedelta(microseconds=1)))
    return now + length if length <= _YEAR else None
