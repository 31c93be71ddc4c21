"""Routes for budgets of projects, users and tags, and for the ledger: its sums and its entries."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated

from fastapi import Path, Query
from msgspec.structs import asdict
from pydantic import AwareDatetime
from starlette.requests import Request

from cavvy.api.app_state import AppState, app_state_of
from cavvy.api.audit import note_change
from cavvy.api.errors import ApiProblem
from cavvy.api.routes.accounts import PROJECT_NAME
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.routes.views import energy_view, view_tokens
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import (
    filter_projects,
    in_path,
    in_query,
    name_user,
    on_installation,
)
from cavvy.api.wire import view
from cavvy.client import ledger_wire
from cavvy.client import policy_wire as wire
from cavvy.client.wire import GpuUse
from cavvy.control.budgets import BUDGETS, filter_budget, read_parents, sum_budget
from cavvy.control.decide.budgets import month_limit
from cavvy.control.running_costs import sum_to_now
from cavvy.costs.gpu_use import count_gpus
from cavvy.costs.statements import DAYS, forecast_month
from cavvy.domain.accounts import Permission
from cavvy.domain.budgets import BudgetRequest, SpendingBudget
from cavvy.domain.ledger import LedgerLine, month_of
from cavvy.domain.targets import is_web_address
from cavvy.domain.units import Money, format_usd
from cavvy.domain.values import replace
from cavvy.store.base import LedgerFilter, ProjectFilter, is_visible
from cavvy.store.ledger import DIMENSIONS, MONTH, TAGS

router = RouteGroup("costs", prefix="/v1")
NamePath = Annotated[str, Path(max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
_MOST_PERCENT = 1000
_LONGEST = 2000  # characters of a text


@router.get("/budgets", rule=in_query(Permission.SPENDING))
async def list_budgets(app_state: AppState, projects: ProjectFilter) -> list[wire.BudgetView]:
    """List the budgets with this month's spending and a forecast. Budgets of all projects are
    listed only for callers who may see the costs of all projects.
    """
    found = await app_state.store.budgets.list()
    return [await _view(app_state, each) for each in found if is_visible(each.project, projects)]


@router.put("/budgets/{name}", rule=on_installation(Permission.MANAGE))
async def put(request: Request, app_state: AppState, name: NamePath, ask: wire.BudgetAsk) -> None:
    """Set a budget. A pending request for a new amount is deleted."""
    _check(ask)
    before = await _find(app_state, name)
    budget = view(
        SpendingBudget,
        ask,
        name=name,
        limit=Money(ask.limit_micros),
        alerts=tuple(sorted(set(ask.alerts))),
        since=app_state.now() if before is None else before.since,
    )
    budget = budget.replacing(before, app_state.now())
    note_change(request, before=_facts(before), after=_facts(budget))
    await app_state.store.budgets.put(budget)
    await _renew_alerts(app_state, budget)


@router.delete(
    "/budgets/{name}", rule=on_installation(Permission.MANAGE), errors=("budget-not-found",)
)
async def delete(request: Request, app_state: AppState, name: NamePath) -> None:
    """Delete a budget."""
    note_change(request, before=_facts(await _get(app_state, name)), after=None)
    await app_state.store.budgets.delete(name)
    app_state.control_plane.budgets.expire()


@router.post(
    "/projects/{project}/budgets/{name}/request",
    rule=in_path(Permission.RUN),
    errors=("budget-not-found", "conflict"),
)
async def request_amount(
    request: Request,
    app_state: AppState,
    project: ProjectPath,
    name: NamePath,
    ask: wire.BudgetRequestAsk,
) -> None:
    """Request a new amount for a budget of the project. For a budget without a project, the request
    needs the permission to see the costs of all projects.
    """
    budget = await _get(app_state, name)
    if budget.project != project and (budget.project or not _sees_all(request)):
        raise _missing(name)
    if ask.limit_micros < 0 or len(ask.reason) > _LONGEST:
        raise ApiProblem("invalid-request", "the amount or the reason is not valid")
    wanted = BudgetRequest(
        limit=Money(ask.limit_micros),
        reason=ask.reason,
        account=name_user(request, ""),
        at=app_state.now(),
    )
    await _swap(request, budget, replace(budget, request=wanted))


@router.post(
    "/budgets/{name}/approve",
    rule=on_installation(Permission.MANAGE),
    errors=("budget-not-found", "nothing-requested", "conflict"),
)
async def approve(
    request: Request, app_state: AppState, name: NamePath, ask: wire.BudgetApprovalAsk
) -> None:
    """Approve the pending request for a new amount, if that amount is `limit_micros`."""
    budget = await _get(app_state, name)
    if budget.request is None:
        raise ApiProblem("nothing-requested", f"no new amount has been requested for {name}")
    wanted, approved = budget.request.limit, Money(ask.limit_micros)
    if wanted != approved:
        raise ApiProblem(
            "conflict",
            f"{format_usd(wanted)} was requested for {name}, not {format_usd(approved)}",
            f"`cavvy cost budget show {name}` shows the request",
        )
    new = replace(budget, limit=wanted, request=None).replacing(budget, app_state.now())
    await _swap(request, budget, new)


async def _swap(request: Request, before: SpendingBudget, budget: SpendingBudget) -> None:
    """Store the budget, unless the stored budget has changed since the request read it."""
    note_change(request, before=_facts(before), after=_facts(budget))
    if not await app_state_of(request).store.budgets.swap(before, budget):
        raise ApiProblem("conflict", f"the budget {budget.name} has changed meanwhile")
    await _renew_alerts(app_state_of(request), budget)


async def _renew_alerts(app_state: AppState, budget: SpendingBudget) -> None:
    await app_state.control_plane.budgets.renew_alerts(budget.name)
    app_state.control_plane.hint(BUDGETS)


def _sees_all(request: Request) -> bool:
    """Return whether the answer to the request lists budgets without a project."""
    return filter_projects(request, Permission.SPENDING) is None


def _facts(budget: SpendingBudget | None) -> dict[str, object] | None:
    """Return the facts about a budget for the audit log. A webhook's URL may contain a secret."""
    if budget is None:
        return None
    wanted = None if budget.request is None else budget.request.limit.micros
    return {
        "limit_micros": budget.limit.micros,
        "project": budget.project,
        "user": budget.user,
        "tag": budget.tag,
        "service": budget.service,
        "soft_percent": budget.soft_percent,
        "hard_percent": budget.hard_percent,
        "requested_micros": wanted,
    }


def _check(ask: wire.BudgetAsk) -> None:
    """Raises ApiProblem."""
    stops = [each for each in (ask.soft_percent, ask.hard_percent) if each is not None]
    percents = [*ask.alerts, *stops]
    problem = ""
    if ask.limit_micros < 0:
        problem = "the amount is negative"
    elif not all(0 < each <= _MOST_PERCENT for each in percents):
        problem = f"percentages are from 1 to {_MOST_PERCENT}"
    elif ask.tag and not all(ask.tag.partition("=")[::2]):
        problem = "a tag is NAME=VALUE"
    elif len(stops) == 2 and stops[0] > stops[1]:
        problem = (
            f"hard_percent, {stops[1]}, is below soft_percent, {stops[0]}: between {stops[1]}% and "
            f"{stops[0]}% of the budget, new work would start and be stopped immediately; set "
            f"hard_percent to at least {stops[0]}"
        )
    elif ask.webhook and not is_web_address(ask.webhook):
        problem = f"the webhook {ask.webhook[:200]!r} is not a web address without a login"
    elif ask.project and not PROJECT_NAME.fullmatch(ask.project):
        problem = f"{ask.project[:80]!r} cannot be the name of a project"
    elif ask.service and not PROJECT_NAME.fullmatch(ask.service):
        problem = f"{ask.service[:80]!r} cannot be the name of a service"
    elif max(map(len, (ask.project, ask.user, ask.tag, ask.webhook))) > _LONGEST:
        problem = "a text is too long"
    if problem:
        raise ApiProblem("invalid-request", problem)


async def _find(app_state: AppState, name: str) -> SpendingBudget | None:
    return next((each for each in await app_state.store.budgets.list() if each.name == name), None)


async def _get(app_state: AppState, name: str) -> SpendingBudget:
    found = await _find(app_state, name)
    if found is None:
        raise _missing(name)
    return found


def _missing(name: str) -> ApiProblem:
    return ApiProblem("budget-not-found", f"there is no budget {name}")


async def _view(app_state: AppState, budget: SpendingBudget) -> wire.BudgetView:
    now, store = app_state.now(), app_state.store
    parents = await read_parents(store)
    spent = await sum_budget(store, budget, parents, month_of(now), now)
    last = await sum_budget(store, budget, parents, month_of(month_of(now) - timedelta(days=1)))
    forecast = forecast_month(spent, await _read_days(app_state, budget, parents), now)
    asked = budget.request
    return view(
        wire.BudgetView,
        budget,
        limit_micros=budget.limit.micros,
        month_limit_micros=month_limit(budget, last, now).micros,
        spent_micros=spent.micros,
        expected_micros=None if forecast is None else forecast.expected.micros,
        low_micros=None if forecast is None else forecast.low.micros,
        high_micros=None if forecast is None else forecast.high.micros,
        alerts=list(budget.alerts),
        request=asked and view(wire.BudgetRequestView, asked, limit_micros=asked.limit.micros),
    )


async def _read_days(
    app_state: AppState, budget: SpendingBudget, parents: Mapping[str, str | None]
) -> list[int]:
    """Return the spending of each recent day, starting with the first day that has spending."""
    now, days = app_state.now(), []
    for back in range(DAYS, 0, -1):
        since = now - timedelta(days=back)
        which = filter_budget(budget, parents, since, since + timedelta(days=1))
        sums = await sum_to_now(app_state.store, which, (), now)
        days.append(sums[0].amount.micros if sums else 0)
    first = next((i for i, each in enumerate(days) if each), len(days))
    return days[first:]


_USE_STEP, _USE_STEPS = timedelta(minutes=30), 48  # of the GPUs in use
_MOST_ATTEMPTS = 5000  # of which these are counted


@router.get("/gpu-use", rule=in_query(Permission.VIEW))
async def gpu_use(app_state: AppState, projects: ProjectFilter) -> GpuUse:
    """Get how many GPUs were in use in the last 24 hours."""
    now = app_state.now()
    last = now - timedelta(
        microseconds=round(now.timestamp() * 1e6) % round(1e6 * _USE_STEP.total_seconds())
    )
    begin = last - (_USE_STEPS - 1) * _USE_STEP
    found = await app_state.store.attempts_with_gpus(projects, begin, _MOST_ATTEMPTS)
    means = count_gpus(found, begin, _USE_STEP, _USE_STEPS, now)
    return GpuUse(begin=begin, step_s=_USE_STEP.total_seconds(), gpus=dict(means))


_LAST = 2**63 - 1  # the largest number that the databases can store
_MOST_DIMENSIONS = 4


@router.get("/ledger/sums", rule=in_query(Permission.SPENDING))
async def sums(
    app_state: AppState,
    projects: ProjectFilter,
    by: Annotated[
        str,
        Query(
            max_length=400,
            description="Dimensions, separated by commas: "
            f"{', '.join([*DIMENSIONS, MONTH, TAGS])} or tag:NAME.",
        ),
    ] = "job",
    since: AwareDatetime | None = None,
    until: AwareDatetime | None = None,
) -> list[ledger_wire.LedgerSumView]:
    """Get the spending in a period, summed by any dimensions."""
    dimensions = _read_dimensions(by)
    which = LedgerFilter(projects=projects, since=since, until=until)
    rows = await sum_to_now(app_state.store, which, dimensions, app_state.now())
    tokens = await app_state.store.meters.sum_tokens(which, dimensions)
    energy = await app_state.store.meters.sum_energy(which, dimensions)
    return [
        ledger_wire.LedgerSumView(
            groups=dict(row.groups),
            amount_micros=row.amount.micros,
            discount_micros=row.discount.micros,
            jobs=row.jobs,
            tokens=view_tokens(tokens.get(key, {})),
            energy=energy_view(energy.get(key, ())),
        )
        for row in rows
        for key in [tuple(row.groups[name] for name in dimensions)]
    ]


def _read_dimensions(by: str) -> list[str]:
    """Raises ApiProblem."""
    names = list(dict.fromkeys(filter(None, by.split(","))))
    known = {*DIMENSIONS, MONTH, TAGS}
    for name in names:
        if name not in known and name.removeprefix("tag:") == name:
            hint = f"use {', '.join(sorted(known))} or tag:NAME"
            raise ApiProblem("invalid-request", f"{name!r} is not a dimension", hint)
    if len(names) > _MOST_DIMENSIONS:
        hint = f"name at most {_MOST_DIMENSIONS} dimensions"
        raise ApiProblem("invalid-request", f"{len(names)} dimensions were named", hint)
    return names


@router.get("/ledger", rule=in_query(Permission.SPENDING))
async def entries(
    app_state: AppState,
    projects: ProjectFilter,
    since: AwareDatetime | None = None,
    until: AwareDatetime | None = None,
    after: Annotated[int, Query(ge=0, le=_LAST)] = 0,
) -> list[ledger_wire.LedgerEntryView]:
    """List the ledger entries that overlap a period, ordered by number."""
    which = LedgerFilter(projects=projects, since=since, until=until)
    store = app_state.store
    lines = await store.ledger_lines(which, after=after, limit=ledger_wire.PAGE)
    return [_entry(line) for line in lines]


def _entry(line: LedgerLine) -> ledger_wire.LedgerEntryView:
    entry, subject = line.entry, line.subject
    corrects = None if entry.corrects is None else f"{subject.id}/{entry.rank}/{entry.corrects}"
    given = {**asdict(subject), "id": entry.id, "project": entry.project}
    return view(
        ledger_wire.LedgerEntryView,
        entry,
        **given,
        corrects=corrects,
        rate_micros_per_hour=entry.rate.micros_per_hour,
        amount_micros=entry.amount.micros,
    )
