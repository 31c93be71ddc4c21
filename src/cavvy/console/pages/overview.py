"""The first page: what runs, what it costs, what needs attention."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from starlette.requests import Request

from cavvy.client import ApiClient
from cavvy.client.policy_wire import BudgetView, list_budgets
from cavvy.client.service_wire import NamedService, list_named_services
from cavvy.client.wire import GpuUse, JobListing, NodeListing
from cavvy.console import charts
from cavvy.console.charts import spending_by_day, total_of
from cavvy.console.pages.page import UNFINISHED, Page, memory_of, try_part

_DAYS = 14
_MOST = 500  # unfinished jobs that are counted
_RECENT = 10
_READ = 60  # newest rows, of which replicas are left out
_ATTENTION = timedelta(days=1)  # how long a failed job needs attention
_LONG = timedelta(minutes=30)  # after which a job that waits needs attention
_IDLE = timedelta(minutes=15)  # after which GPUs that do nothing need attention
_MOST_KINDS = 6  # of GPUs in a chart
_MOST_TOLD = 5  # jobs that wait, and nodes with idle GPUs
_FULL = 0.8  # the used share of a budget from which it needs attention


def make(client: ApiClient, request: Request, now: datetime) -> Page:
    unfinished = client.jobs(phases=UNFINISHED, limit=_MOST)
    counts = Counter(each.phase for each in unfinished.jobs)
    nodes = try_part(client.nodes).value or []
    memory = memory_of(request)
    days = try_part(lambda: spending_by_day(client, memory, "project", now, _DAYS))
    budgets = memory.recall("budgets", lambda: try_part(lambda: list_budgets(client)).value or [])
    failed = client.jobs(phases=("failed",), limit=_RECENT, arrays=True).jobs
    services = try_part(lambda: list_named_services(client)).value
    return Page(
        "Overview",
        "overview.html",
        {
            "counts": {phase: counts[phase] for phase in UNFINISHED},
            "is_cut": bool(unfinished.cursor),
            "recent": _list_recent(client, services or []),
            "failed": [each for each in failed if each.since > now - _ATTENTION],
            "waiting": [each for each in unfinished.jobs if _waits_long(each, now)][:_MOST_TOLD],
            "idle": [each for each in nodes if _is_idle(each)][:_MOST_TOLD],
            "gpus": _count_gpus(nodes),
            "use": memory.recall("gpu-use", lambda: _draw_use(client)),
            "nodes": len(nodes),
            "rate_micros": sum(each.rate_micros_per_hour for each in nodes),
            "days": days,
            "spent_micros": total_of(days.value) if days.value else 0,
            "chart": charts.stacked_days(days.value) if days.value else None,
            "budgets": [each for each in budgets if _is_full(each)],
            "services": services,
            "problem": _find_problem(client),
        },
    )


def _list_recent(client: ApiClient, services: Sequence[NamedService]) -> Sequence[JobListing]:
    """Return the newest jobs: an array is one row, and services have rows of their own."""
    replicas = {replica.job for service in services for replica in service.replicas}
    found = client.jobs(limit=_READ if replicas else _RECENT, arrays=True).jobs
    return [each for each in found if each.id not in replicas][:_RECENT]


def _waits_long(job: JobListing, now: datetime) -> bool:
    return job.phase == "queued" and not job.held and job.since <= now - _LONG


def _is_idle(node: NodeListing) -> bool:
    """Return whether a node's GPUs have done nothing for long, as its agent tells."""
    return node.telemetry.get("gpu_idle_s", 0.0) >= _IDLE.total_seconds()


def _count_gpus(nodes: Sequence[NodeListing]) -> Mapping[str, float]:
    """Return how many GPUs of each kind are in use now, the most first."""
    counts = Counter[str]()
    for each in nodes:
        if each.accelerator:
            counts[each.accelerator] += each.accelerator_count  # type: ignore[assignment]
    return dict(counts.most_common())


def _draw_use(client: ApiClient) -> charts.Chart | None:
    """Return a chart of the GPUs in use over the day, or None if there were none."""
    use = try_part(lambda: client.ask("/v1/gpu-use", GpuUse)).value
    if use is None or not use.gpus:
        return None
    lines = [charts.Line(name, 0.0, use.step_s, means) for name, means in use.gpus.items()]
    return charts.curves(lines[:_MOST_KINDS], "gpus", use.begin)


def _find_problem(client: ApiClient) -> str:
    """Return what the server cannot do, or ""."""
    server = try_part(client.server).value
    return server.problem if server else ""


def _is_full(budget: BudgetView) -> bool:
    return budget.spent_micros >= _FULL * budget.month_limit_micros
