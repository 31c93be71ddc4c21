"""Budgets limit the monthly spending of a project, of a user, or of the jobs with a tag."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from cavvy.domain.ledger import month_of
from cavvy.domain.services import SERVICE_TAG
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import Struct, replace


class BudgetRequest(Struct, frozen=True, kw_only=True):
    """A pending request to change a budget's amount; it ends when it is approved or when the budget
    is set."""

    limit: Money
    reason: str
    account: str
    at: datetime


class FormerLimit(Struct, frozen=True, kw_only=True):
    """The amount of a budget before its first change in the month that begins at `month`."""

    limit: Money
    month: datetime


class SpendingBudget(Struct, frozen=True, kw_only=True):
    """A monthly budget for the jobs that match all of `project`, `user`, `tag` and `service`; an
    empty text matches every job. Months are in UTC. The jobs of a service are its replicas. A
    project includes the projects below it.

    Percentages refer to the month's amount. At `soft_percent`, no new paid work starts. At
    `hard_percent`, running work saves a checkpoint and stops. None means never. With `carry_over`,
    the unspent amount of the last month is added to the month's amount. `former` shows which amount
    applied in the last month if the budget was changed in this month.
    """

    name: str
    limit: Money
    project: str = ""
    user: str = ""
    tag: str = ""  # NAME=VALUE
    service: str = ""
    alerts: tuple[int, ...] = (50, 80, 100)
    soft_percent: int | None = 100
    hard_percent: int | None = None
    carry_over: bool = False
    webhook: str = ""  # URL to which alerts are posted
    since: datetime  # when the budget was first set
    request: BudgetRequest | None = None
    former: FormerLimit | None = None

    def replacing(self, before: "SpendingBudget | None", now: datetime) -> "SpendingBudget":
        """Return this budget with the amount that applied in the last month. `before` is the budget
        that this budget replaces, or None if the budget is new.
        """
        if before is None:
            return self
        month = month_of(now)
        if before.former is not None and before.former.month == month:
            return replace(self, former=before.former)
        return replace(self, former=FormerLimit(limit=before.limit, month=month))

    def limit_before(self, month: datetime) -> Money:
        """Return the amount that applied in the month before `month`, the current month."""
        former = self.former
        return self.limit if former is None or former.month != month else former.limit

    @property
    def tag_pair(self) -> tuple[str, str] | None:
        """The name and the value of the budget's tag, or None without a tag."""
        name, _, value = self.tag.partition("=")
        return (name, value) if self.tag else None

    def covers(self, line: Sequence[str], user: str, tags: Mapping[str, str]) -> bool:
        """Return whether the spending of a job with this user and these tags counts toward the
        budget. `line` contains the job's project and the projects above it.
        """
        pair = self.tag_pair
        return (
            (not self.project or self.project in line)
            and self.user in ("", user)
            and (pair is None or tags.get(pair[0]) == pair[1])
            and self.service in ("", tags.get(SERVICE_TAG))
        )


def compare_lines(
    budgets: Sequence[SpendingBudget], former: Sequence[str], new: Sequence[str]
) -> tuple[Sequence[SpendingBudget], Sequence[SpendingBudget]]:
    """Return the budgets that count a project's spending only after the project moves, and the
    budgets that count it only before. `former` and `new` are the projects above the project before
    and after the move.
    """
    gained = [each for each in budgets if each.project in new and each.project not in former]
    lost = [each for each in budgets if each.project in former and each.project not in new]
    return gained, lost


class ChargedRate(Struct, frozen=True, kw_only=True):
    """The hourly cost of an unfinished job's nodes, from their newest charges, which end at
    `until`.
    """

    job_id: str
    until: datetime
    rate: HourlyRate
