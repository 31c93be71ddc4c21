"""Budgets, and the alerts that were sent for them: `SqlStore.budgets`."""

from collections.abc import Sequence
from datetime import datetime

from cavvy.domain.budgets import SpendingBudget
from cavvy.store.base import RowNotFound
from cavvy.store.documents import decode_budget, encode, to_micros
from cavvy.store.drivers import RunTransaction
from cavvy.store.rows import insert_into

_SELECT = "SELECT document FROM budgets ORDER BY name"
_PUT = insert_into(
    "budgets",
    ("name", "document"),
    "ON CONFLICT (name) DO UPDATE SET document = excluded.document",
)
_DELETE = "DELETE FROM budgets WHERE name = ?"
_CLAIM = insert_into("budget_alerts", ("budget", "month", "percent"), "ON CONFLICT DO NOTHING")


class SqlBudgets:
    """The rows of budgets and of their alerts."""

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        self._read = read
        self._write = write

    async def list(self) -> Sequence[SpendingBudget]:
        rows = await self._read(lambda session: session.run(_SELECT).fetchall())
        return [decode_budget(row[0]) for row in rows]

    async def put(self, budget: SpendingBudget) -> None:
        values = (budget.name, encode(budget))
        await self._write(lambda session: session.run(_PUT, values))

    async def delete(self, name: str) -> None:
        if await self._write(lambda session: session.run(_DELETE, (name,)).rowcount) == 0:
            raise RowNotFound(f"there is no budget {name}")

    async def claim_alert(self, budget: str, month: datetime, percent: int) -> bool:
        values = (budget, to_micros(month), percent)
        return await self._write(lambda session: session.run(_CLAIM, values).rowcount) > 0
