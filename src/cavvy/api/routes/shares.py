"""The route that shows the queue by project: shares, use, quotas and loans, and what waits."""

from collections.abc import Sequence
from datetime import timedelta

from cavvy.api.app_state import AppState
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_query
from cavvy.api.wire import view
from cavvy.client import queue_wire as wire
from cavvy.domain.accounts import Permission
from cavvy.domain.policies import ProjectPolicy
from cavvy.domain.shares import DOLLARS
from cavvy.scheduler.reclaim import QuotaLoan, list_loans
from cavvy.scheduler.shares import ProjectStanding
from cavvy.store.base import ProjectFilter, is_visible

router = RouteGroup("jobs", "/v1")


@router.get("/shares", rule=in_query(Permission.VIEW))
async def list_shares(app_state: AppState, projects: ProjectFilter) -> wire.ShareReport:
    """Show the share of each project in the queue, what it has used, what it holds and waits for
    now, and who has borrowed its quota.
    """
    queue = app_state.control_plane.fair_queue
    standings, book = await queue.list_standings(app_state.now())
    policies = {each.project: each.policy for each in await app_state.store.policies()}
    loans = list_loans(book)
    shown = [
        _view(
            each,
            policies.get(each.project, ProjectPolicy()),
            loans,
            parent=book.parents.get(each.project),
            visible=projects,
        )
        for each in standings
        if is_visible(each.project, projects)
    ]
    return wire.ShareReport(half_life_days=queue.half_life / timedelta(days=1), projects=shown)


def _view(
    standing: ProjectStanding,
    policy: ProjectPolicy,
    loans: Sequence[QuotaLoan],
    *,
    parent: str | None,
    visible: ProjectFilter,
) -> wire.ShareView:
    name = standing.project
    return view(
        wire.ShareView,
        standing,
        parent=parent if parent and is_visible(parent, visible) else None,
        used_gpu_hours=standing.used_h,
        debt_gpu_hours=standing.debt_h,
        accelerators=dict(standing.accelerators),
        micros_per_hour=round(standing.micros_per_hour),
        gpus=standing.held,
        waiting_gpus=standing.waiting,
        quota_gpus=policy.quota_gpus,
        max_gpus=policy.max_gpus,
        quota_accelerators=dict(policy.quota_accelerators),
        max_accelerators=dict(policy.max_accelerators),
        quota_micros_per_hour=policy.quota_micros_per_hour,
        max_micros_per_hour=policy.max_micros_per_hour,
        lent=[_loan(each, each.borrower) for each in loans if each.lender == name],
        borrowed=[_loan(each, each.lender) for each in loans if each.borrower == name],
    )


def _loan(loan: QuotaLoan, other: str) -> wire.LoanView:
    in_dollars = loan.name == DOLLARS
    return wire.LoanView(
        project=other,
        accelerator=None if in_dollars else loan.name or None,
        gpus=0.0 if in_dollars else loan.amount,
        micros_per_hour=round(loan.amount) if in_dollars else 0,
    )
