"""Routes for named machines: list, start, stop, keep and forget machines."""

from datetime import timedelta
from typing import Annotated

from fastapi import Path
from msgspec import structs
from starlette.requests import Request

from cavvy.api.app_state import AppState
from cavvy.api.errors import ApiProblem
from cavvy.api.routes import views
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.routes.submission import start_machine
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path, in_query, name_user
from cavvy.api.wire import view
from cavvy.client import wire
from cavvy.control.machine_service import MachineInUse, MachineStopped
from cavvy.domain.accounts import Permission
from cavvy.store.base import ProjectFilter, RowNotFound

_LONGEST_H = 24
MachinePath = Annotated[str, Path(max_length=63)]

router = RouteGroup("machines", prefix="/v1")


@router.get("/machines", rule=in_query(Permission.VIEW))
async def list_all(app_state: AppState, projects: ProjectFilter) -> list[wire.MachineView]:
    """Named machines."""
    return [
        views.machine_view(each) for each in await app_state.control_plane.machines.list(projects)
    ]


@router.get(
    "/projects/{project}/machines/{name}",
    rule=in_path(Permission.VIEW),
    when={RowNotFound: "machine-not-found"},
)
async def get(app_state: AppState, project: ProjectPath, name: MachinePath) -> wire.MachineView:
    """Get one named machine."""
    return views.machine_view(await app_state.control_plane.machines.get(project, name))


@router.post(
    "/projects/{project}/machines/{name}/start",
    rule=in_path(Permission.RUN),
    status=201,
    when={RowNotFound: "machine-not-found"},
    errors=("no-offer", "consent-needed", "secret-missing", "policy-refused", "project-archived"),
)
async def start(
    request: Request,
    app_state: AppState,
    project: ProjectPath,
    name: MachinePath,
    ask: wire.MachineStartAsk,
) -> wire.Submitted:
    """Start a stopped machine again, with a job that does no work."""
    ask = structs.replace(ask, user=name_user(request, ask.user))
    await app_state.control_plane.machines.get(project, name)
    job = await start_machine(app_state, project, name, ask)
    return view(wire.Submitted, job, created=True)


@router.post(
    "/projects/{project}/machines/{name}/stop",
    rule=in_path(Permission.RUN),
    when={RowNotFound: "machine-not-found"},
)
async def stop(app_state: AppState, project: ProjectPath, name: MachinePath) -> wire.MachineView:
    """Stop a machine's jobs and release its nodes."""
    await app_state.control_plane.machines.get(project, name)
    return views.machine_view(await app_state.control_plane.machines.stop(project, name))


@router.post(
    "/projects/{project}/machines/{name}/keep",
    rule=in_path(Permission.RUN),
    when={RowNotFound: "machine-not-found", MachineStopped: "machine-stopped"},
)
async def keep(
    app_state: AppState, project: ProjectPath, name: MachinePath, ask: wire.MachineKeepAsk
) -> wire.MachineView:
    """Set how long a machine is kept while it has no work."""
    if not 0 < ask.keep_s <= _LONGEST_H * 3600:
        text = f"`keep_s` must be more than 0 and at most {_LONGEST_H} hours"
        raise ApiProblem("invalid-request", text)
    await app_state.control_plane.machines.get(project, name)
    length = timedelta(seconds=ask.keep_s)
    return views.machine_view(await app_state.control_plane.machines.keep(project, name, length))


@router.delete(
    "/projects/{project}/machines/{name}",
    rule=in_path(Permission.RUN),
    when={RowNotFound: "machine-not-found", MachineInUse: "machine-in-use"},
)
async def delete(app_state: AppState, project: ProjectPath, name: MachinePath) -> None:
    """Delete a stopped machine from the list of machines."""
    await app_state.control_plane.machines.get(project, name)
    await app_state.control_plane.machines.forget(project, name)
