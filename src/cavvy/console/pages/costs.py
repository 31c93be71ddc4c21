"""Spending by day and by project, user, provider or GPU, and the budgets."""

from datetime import datetime, timedelta

from starlette.exceptions import HTTPException
from starlette.requests import Request

from cavvy.client import ApiClient
from cavvy.client.budget_wire import list_budgets
from cavvy.client.ledger_wire import sum_ledger
from cavvy.console import charts
from cavvy.console.pages.page import Page, memory_of, try_part
from cavvy.console.spending import day_of, spending_by_day, total_of

_DIMENSIONS = ("project", "user", "job", "service", "provider", "region", "gpu", "purchase", "kind")
_PERIODS = (7, 14, 30)  # days


def make(client: ApiClient, request: Request, now: datetime) -> Page:
    """Raises HTTPException."""
    by = request.query_params.get("by") or "project"
    days_text = request.query_params.get("days") or "14"
    if by not in _DIMENSIONS:
        raise HTTPException(400, f"`by` must be one of {', '.join(_DIMENSIONS)}, not {by!r}.")
    if days_text not in map(str, _PERIODS):
        raise HTTPException(400, f"`days` must be one of {', '.join(map(str, _PERIODS))}.")
    count = int(days_text)
    days = try_part(lambda: spending_by_day(client, memory_of(request), by, now, count))
    since = day_of(now) - timedelta(days=count - 1)
    rows = try_part(lambda: sum_ledger(client, [by], since=since)).value or []
    return Page(
        "Costs",
        "costs.html",
        {
            "by": by,
            "days": days,
            "count": count,
            "dimensions": _DIMENSIONS,
            "periods": _PERIODS,
            "chart": charts.stacked_days(days.value) if days.value else None,
            "rows": [row for row in rows if row.amount_micros or row.discount_micros],
            "total_micros": total_of(days.value) if days.value else 0,
            "budgets": try_part(lambda: list_budgets(client)).value or [],
        },
    )
