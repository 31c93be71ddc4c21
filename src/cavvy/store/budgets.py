"""Budgets, and the alerts that were sent for them: `Store.budgets`."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from cavvy.domain.budgets import ChargedRate, SpendingBudget
from cavvy.domain.events import Announcement, ChargeKind
from cavvy.domain.jobs import AttemptPhase
from cavvy.domain.units import HourlyRate
from cavvy.store.announcements import tell
from cavvy.store.base import RowNotFound
from cavvy.store.documents import decode_budget, encode, to_micros, to_time
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.rows import insert_into

_SELECT = "SELECT document FROM budgets ORDER BY name"
_PUT = insert_into(
    "budgets",
    ("name", "document"),
    "ON CONFLICT (name) DO UPDATE SET document = excluded.document",
)
_FIND = "SELECT document FROM budgets WHERE name = ?"
_SWAP = "UPDATE budgets SET document = ? WHERE name = ? AND document = ?"
_DELETE = "DELETE FROM budgets WHERE name = ?"
_CLAIM = insert_into("budget_alerts", ("budget", "month", "percent"), "ON CONFLICT DO NOTHING")
_FORGET = "DELETE FROM budget_alerts WHERE budget = ? AND month = ? AND percent > ?"
_BY_TIME = (ChargeKind.NODE, ChargeKind.KEPT, ChargeKind.DISK, ChargeKind.ADDRESS)
# The CROSS JOIN makes SQLite begin with the few open attempts. Charges for traffic are ignored,
# because they end at the last message of the node's agent, which may be later than the last poll.
_RATES = (
    "SELECT c.job_id, MAX(c.until), CAST(SUM(c.rate) AS BIGINT) FROM attempts a CROSS JOIN charges "
    f"c WHERE a.phase <> '{AttemptPhase.ENDED}' AND c.attempt_id = a.id AND c.kind IN (?, ?, ?, ?) "
    "AND c.until = (SELECT MAX(n.until) FROM charges n WHERE n.attempt_id = a.id AND n.kind IN "
    "(?, ?, ?, ?)) GROUP BY c.job_id"
)


class _BudgetChanged(Exception):
    """Raised to roll back the transaction together with its record in the audit log, because the
    budget was changed meanwhile.
    """


class SqlBudgets:
    """The rows of budgets and of their alerts."""

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        self._read = read
        self._write = write

    async def list(self) -> Sequence[SpendingBudget]:
        """Return all budgets, sorted by name."""
        rows = await self._read(lambda session: session.run(_SELECT).fetchall())
        return [decode_budget(row[0]) for row in rows]

    async def put(self, budget: SpendingBudget) -> None:
        """Insert or replace the budget of this name."""
        values = (budget.name, encode(budget))
        await self._write(lambda session: session.run(_PUT, values))

    async def swap(self, before: SpendingBudget, budget: SpendingBudget) -> bool:
        """Replace the budget `before`. Returns False if the stored budget has changed since it was
        read."""

        def write(session: DatabaseSession) -> None:
            row = session.run(_FIND, (before.name,)).fetchone()
            if row is None or decode_budget(row[0]) != before:
                raise _BudgetChanged
            if session.run(_SWAP, (encode(budget), before.name, row[0])).rowcount == 0:
                raise _BudgetChanged

        try:
            await self._write(write)
        except _BudgetChanged:
            return False
        return True

    async def delete(self, name: str) -> None:
        """Delete a budget. Raises RowNotFound."""
        missing = RowNotFound(f"there is no budget {name}")
        await self._write(lambda session: session.change_or(missing, _DELETE, (name,)))

    async def claim_alert(
        self,
        budget: SpendingBudget,
        month: datetime,
        percent: int,
        text: str,
        now: datetime,
        texts: Mapping[str, str] | None = None,
    ) -> bool:
        """Record that an alert is being sent, and announce it: `text` in the budget's project or to
        its user and, if the budget is of a tag or a service in all projects, the text of each
        project in `texts` in that project. Returns False if the alert was
        recorded before.
        """
        values = (budget.name, to_micros(month), percent)

        def claim(session: DatabaseSession) -> bool:
            if session.run(_CLAIM, values).rowcount == 0:
                return False
            shown = {budget.project: text}
            if not budget.project and (budget.tag or budget.service):
                shown |= texts or {}
            tell(
                session,
                [
                    Announcement(event="budget", project=each, user=budget.user, text=own, at=now)
                    for each, own in shown.items()
                ],
            )
            return True

        return await self._write(claim)

    async def forget_alerts(self, budget: str, month: datetime, above: int) -> None:
        """Delete the records of the month's alerts for shares above this percentage."""
        values = (budget, to_micros(month), above)
        await self._write(lambda session: session.run(_FORGET, values))

    async def charged_rates(self) -> Mapping[str, ChargedRate]:
        """Return, keyed by job ID, the hourly rates of the gangs that may still cost money,
        according to their newest charges.
        """
        values = 2 * tuple(str(each) for each in _BY_TIME)
        rows = await self._read(lambda session: session.run(_RATES, values).fetchall())
        return {
            job_id: ChargedRate(job_id=job_id, until=to_time(until), rate=HourlyRate(rate))
            for job_id, until, rate in rows
        }
