"""The route that shows the queue by project: shares, use, and what waits."""

from datetime import timedelta

from cavvy.api.app_state import AppState
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_query
from cavvy.api.wire import view
from cavvy.client import share_wire as wire
from cavvy.domain.accounts import Permission
from cavvy.scheduler.shares import ProjectStanding, ShareBook
from cavvy.store.base import ProjectFilter, is_visible

router = RouteGroup("jobs", "/v1")


@router.get(
    "/shares",
    "Show the share of each project in the queue, what it has used, and what it holds and "
    "waits for now.",
    rule=in_query(Permission.VIEW),
)
async def list_shares(app_state: AppState, projects: ProjectFilter) -> wire.ShareReport:
    queue = app_state.control_plane.fair_queue
    standings, book = await queue.list_standings(app_state.now())
    shown = [
        _view(each, book, projects) for each in standings if is_visible(each.project, projects)
    ]
    return wire.ShareReport(half_life_days=queue.half_life / timedelta(days=1), projects=shown)


def _view(standing: ProjectStanding, book: ShareBook, visible: ProjectFilter) -> wire.ShareView:
    rule, parent = book.rules.get(standing.project), book.parents.get(standing.project)
    return view(
        wire.ShareView,
        standing,
        parent=parent if parent and is_visible(parent, visible) else None,
        used_gpu_hours=standing.used_h,
        gpus=standing.held,
        waiting_gpus=standing.waiting,
        quota_gpus=None if rule is None else rule.quota,
        max_gpus=None if rule is None else rule.limit,
    )
