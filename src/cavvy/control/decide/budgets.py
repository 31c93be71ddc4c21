"""Decides what budgets of projects, users and tags permit."""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from cavvy.domain.budgets import SpendingBudget
from cavvy.domain.ledger import month_of, next_month, share_of
from cavvy.domain.units import HourlyRate, Money, format_usd
from cavvy.domain.values import Struct, replace


class SeenSpending(Struct, frozen=True, kw_only=True):
    """The amount that a running job had spent at a given time, and its hourly rate at that time.
    `posted` is the part of the amount that the ledger already contains, and `posted_until` is the
    end of that part, or None if the ledger contains no charges of the job's nodes.
    """

    project: str = ""

    at: datetime
    spent: Money
    rate: HourlyRate
    posted: Money = Money()
    posted_until: datetime | None = None

    def unposted(self, now: datetime, month: datetime) -> int:
        """Return the micro-dollars that the job has spent by now, in the given month, and that the
        ledger does not contain yet. The job is assumed to have spent these evenly since
        `posted_until`.
        """
        reached = self.spent.micros + self.rate.over(now - self.at).micros
        since = month if self.posted_until is None else self.posted_until
        more = max(0, reached - self.posted.micros)
        return share_of(more, since, now, month, next_month(month))


class BudgetState(Struct, frozen=True, kw_only=True):
    """A budget in the current month: when the month begins, the budget's amount, the spending in
    the ledger, in total and by project, and the running jobs by ID.
    """

    budget: SpendingBudget
    month: datetime
    limit: Money
    posted: Money
    running: Mapping[str, SeenSpending] = {}
    by_project: Mapping[str, Money] = {}

    def spent(self, now: datetime) -> Money:
        """Return the amount that has been spent in the month by now."""
        more = sum(each.unposted(now, self.month) for each in self.running.values())
        return Money(self.posted.micros + more)

    def spent_by(self, project: str, now: datetime) -> Money:
        """Return the part of the amount that this project has spent."""
        running = [each for each in self.running.values() if each.project == project]
        more = sum(each.unposted(now, self.month) for each in running)
        return self.by_project.get(project, Money()) + Money(more)

    def say_part(self, project: str, now: datetime) -> str:
        """Return which part this project has spent, or "" if other projects have spent nothing.
        What each of the others has spent is for those who may see it."""
        own, spent = self.spent_by(project, now), self.spent(now)
        return f", {format_usd(own)} of it in project {project}" if own < spent else ""

    def part(self, percent: int) -> Money:
        return Money(self.limit.micros * percent // 100)


def month_limit(budget: SpendingBudget, last_month: Money, now: datetime) -> Money:
    """Return the budget's amount for the current month. `last_month` is the amount spent in the
    previous month."""
    if not budget.carry_over or budget.since >= month_of(now):
        return budget.limit
    unspent = budget.limit_before(month_of(now)) - last_month
    return budget.limit + max(Money(), unspent)


def find_block(states: Iterable[BudgetState], project: str, now: datetime) -> str:
    """Return why no new paid work of a project may start, or "" if new paid work may start."""
    for state in states:
        percents = (state.budget.soft_percent, state.budget.hard_percent)
        reached = min((each for each in percents if each is not None), default=None)
        spent = state.spent(now)
        if reached is not None and spent >= state.part(reached):
            return (
                f"the budget {state.budget.name} permits no new paid work: {format_usd(spent)} of "
                f"{format_usd(state.limit)} spent this month{state.say_part(project, now)}"
            )
    return ""


def find_stop(states: Iterable[BudgetState], project: str, now: datetime) -> str:
    """Return why a project's paid nodes must be released, or "" if they may be kept."""
    for state in states:
        hard, spent = state.budget.hard_percent, state.spent(now)
        if hard is not None and spent >= state.part(hard):
            return (
                f"the hard stop of the budget {state.budget.name} is reached: {format_usd(spent)} "
                f"of {format_usd(state.limit)} spent this month{state.say_part(project, now)}"
            )
    return ""


class ServiceStop(Struct, frozen=True, kw_only=True):
    """The names of the budgets that stop a service, or "" if no budget stops it. If `soft` is set,
    the service gets no more replicas; if `hard` is set, its replicas are ended.
    """

    soft: str = ""
    hard: str = ""

    @property
    def any(self) -> bool:
        return bool(self.soft or self.hard)


def find_service_stop(
    states: Iterable[BudgetState], now: datetime, ahead: timedelta
) -> ServiceStop:
    """Return the budgets that stop a service whose replicas may take the time `ahead` to end."""
    found = ServiceStop()
    for state in states:
        budget = state.budget
        percents = [each for each in (budget.soft_percent, budget.hard_percent) if each is not None]
        if percents and state.spent(now) >= state.part(min(percents)):
            found = replace(found, soft=found.soft or budget.name)
        hard = budget.hard_percent
        if hard is not None and state.spent(now + ahead) >= state.part(hard):
            found = replace(found, hard=found.hard or budget.name)
    return found


class BudgetAllowance(Struct, frozen=True, kw_only=True):
    """The maximum that a job may spend in total, and the budget that sets this maximum. `part` says
    which part of the budget the job's project has spent, see `BudgetState.say_part`."""

    budget: str
    part: str = ""
    most: Money


def find_allowance(
    states: Iterable[BudgetState], job_id: str, now: datetime
) -> BudgetAllowance | None:
    """Return the lowest amount that any of the budgets allows a running job to spend. The rest of a
    budget is divided among its running jobs in proportion to their rates. Therefore the running
    jobs use up their parts of the budget at the same time. The result is None if no budget stops
    the job, or if the job has no rate.
    """
    found: list[BudgetAllowance] = []
    for state in states:
        seen = state.running.get(job_id)
        if state.budget.hard_percent is None or seen is None or not seen.rate.micros_per_hour:
            continue
        left = max(0, state.part(state.budget.hard_percent).micros - state.spent(now).micros)
        total = sum(each.rate.micros_per_hour for each in state.running.values())
        reached = seen.spent.micros + seen.rate.over(now - seen.at).micros
        most = Money(reached + left * seen.rate.micros_per_hour // total)
        part = state.say_part(seen.project, now)
        found.append(BudgetAllowance(budget=state.budget.name, most=most, part=part))
    return min(found, key=lambda each: each.most, default=None)


def list_alerts(state: BudgetState, spent: Money) -> list[int]:
    """Return the thresholds, in percent, at which an alert is due for this spending."""
    return [each for each in sorted(state.budget.alerts) if spent >= state.part(each)]
