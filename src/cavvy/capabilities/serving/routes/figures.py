"""The route for the traffic of a service over time."""

from asyncio import to_thread
from datetime import timedelta
from typing import Annotated

from fastapi import Query
from pydantic import AwareDatetime

from cavvy.api.app_state import AppState
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.routes.logs import (
    USUAL_NAMES,
    USUAL_PERIOD,
    Points,
    Since,
    answer_figures,
    check_size,
    check_years,
    divide_period,
    list_series,
)
from cavvy.api.rules import in_path
from cavvy.capabilities.serving.routes.services import ServicePath, router
from cavvy.capabilities.serving.service_rows import services_of
from cavvy.client import wire
from cavvy.domain.accounts import Permission
from cavvy.domain.figures import summarize_blocks
from cavvy.store.base import RowNotFound


@router.get(
    "/projects/{project}/services/{name}/figures",
    rule=in_path(Permission.VIEW),
    errors=("invalid-request",),
    when={RowNotFound: "service-not-found"},
)
async def service_figures(
    app_state: AppState,
    project: ProjectPath,
    name: ServicePath,
    since: Since = None,
    until: Annotated[AwareDatetime | None, Query(description="By default, now.")] = None,
    points: Points = 300,
) -> wire.JobFigures:
    """Get the traffic, queue and replicas of a service over time."""
    check_years(since, until)
    service = await services_of(app_state.store).get(project, name)
    end = until or app_state.now() + timedelta(minutes=1)
    begin = since or max(end - USUAL_PERIOD, service.created_at)
    check_size(begin, end, 1, USUAL_NAMES)
    steps = divide_period(begin, end, points)
    blocks = await app_state.store.figures.list(service.id, 0, since=begin, until=end)
    found = await to_thread(summarize_blocks, blocks, *steps)
    return answer_figures(steps, list_series(0, 0, found))
