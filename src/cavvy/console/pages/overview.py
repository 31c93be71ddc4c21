"""The first page: what runs, what it costs, what needs attention."""

from collections import Counter
from datetime import datetime, timedelta

from starlette.requests import Request

from cavvy.client import ApiClient
from cavvy.client.policy_wire import BudgetView, list_budgets
from cavvy.client.service_wire import list_named_services
from cavvy.console import charts
from cavvy.console.charts import spending_by_day, total_of
from cavvy.console.pages.page import UNFINISHED, Page, memory_of, try_part

_DAYS = 14
_MOST = 500  # unfinished jobs that are counted
_RECENT = 10
_ATTENTION = timedelta(days=1)  # how long a failed job needs attention
_FULL = 0.8  # the used share of a budget from which it needs attention


def make(client: ApiClient, request: Request, now: datetime) -> Page:
    unfinished = client.jobs(phases=UNFINISHED, limit=_MOST)
    counts = Counter(each.phase for each in unfinished.jobs)
    nodes = try_part(client.nodes).value or []
    memory = memory_of(request)
    days = try_part(lambda: spending_by_day(client, memory, "project", now, _DAYS))
    budgets = memory.recall("budgets", lambda: try_part(lambda: list_budgets(client)).value or [])
    failed = client.jobs(phases=("failed",), limit=_RECENT).jobs
    return Page(
        "Overview",
        "overview.html",
        {
            "counts": {phase: counts[phase] for phase in UNFINISHED},
            "is_cut": bool(unfinished.cursor),
            "recent": client.jobs(limit=_RECENT).jobs,
            "failed": [each for each in failed if each.since > now - _ATTENTION],
            "nodes": len(nodes),
            "rate_micros": sum(each.rate_micros_per_hour for each in nodes),
            "days": days,
            "spent_micros": total_of(days.value) if days.value else 0,
            "chart": charts.stacked_days(days.value) if days.value else None,
            "budgets": [each for each in budgets if _is_full(each)],
            "services": try_part(lambda: list_named_services(client)).value,
            "problem": _find_problem(client),
        },
    )


def _find_problem(client: ApiClient) -> str:
    """Return what the server cannot do, or ""."""
    server = try_part(client.server).value
    return server.problem if server else ""


def _is_full(budget: BudgetView) -> bool:
    return budget.spent_micros >= _FULL * budget.month_limit_micros
