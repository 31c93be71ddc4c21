"""Spending by day and by project, user, provider or GPU, and the budgets."""

from datetime import datetime, timedelta

from msgspec.structs import replace
from starlette.exceptions import HTTPException
from starlette.requests import Request

from cavvy.client import ApiClient
from cavvy.client.ledger_wire import sum_ledger
from cavvy.client.policy_wire import BudgetAsk, delete_budget, list_budgets, put_budget
from cavvy.console import charts
from cavvy.console.charts import day_of, spending_by_day, total_of
from cavvy.console.pages.page import Page, form_of, memory_of, try_part
from cavvy.domain.units import UnitError, is_whole, parse_usd

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


def set_budget(client: ApiClient, request: Request, now: datetime) -> str:
    """Make or change a budget. Raises ApiError, HTTPException."""
    form = form_of(request)
    name, hard = form.get("name", "").strip(), form.get("hard", "").strip()
    if hard and not (is_whole(hard) and len(hard) < 5):
        raise HTTPException(400, f"Jobs are stopped at a whole percentage, not {hard!r}.")
    try:
        limit = parse_usd(form.get("limit", ""))
    except UnitError as error:
        raise HTTPException(400, f"The budget: {error}.") from None
    old = next((each for each in list_budgets(client) if each.name == name), None)
    ask = BudgetAsk(
        limit_micros=limit.micros,
        project=form.get("project", "").strip(),
        user=form.get("user", "").strip(),
        tag=form.get("tag", "").strip(),
        service=form.get("service", "").strip(),
        hard_percent=int(hard) if hard else None,
        carry_over="carry" in form,
    )
    if old is not None:
        ask = replace(ask, alerts=old.alerts, soft_percent=old.soft_percent)
    put_budget(client, name, ask)
    return "/costs#budgets"


def remove_budget(client: ApiClient, request: Request, now: datetime) -> str:
    """Raises ApiError."""
    delete_budget(client, request.path_params["name"])
    return "/costs#budgets"
