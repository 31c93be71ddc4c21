"""Routes for named machines: list, start, stop, keep and forget machines."""

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Path, Query
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from cavvy.api.app_state import app_state_of
from cavvy.api.errors import ApiProblem
from cavvy.api.openapi import document
from cavvy.api.routes import views
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.routes.submission import start_machine
from cavvy.api.rules import filter_projects, in_path, in_query, name_user
from cavvy.api.wire import done, read, reply, view
from cavvy.client import wire
from cavvy.control.machine_service import MachineInUse, MachineService, MachineStopped
from cavvy.domain.accounts import Permission
from cavvy.domain.machines import MachineStatus
from cavvy.store.base import RowNotFound

_LONGEST_H = 24
MachinePath = Annotated[str, Path(max_length=63)]

router = APIRouter(prefix="/v1", tags=["machines"])


@router.get(
    "/machines",
    **document("Named machines.", rule=in_query(Permission.VIEW), answer=list[wire.MachineView]),
)
async def list_all(
    request: Request, project: Annotated[str | None, Query(max_length=63)] = None
) -> Response:
    projects = filter_projects(request, Permission.VIEW, project)
    return reply([views.machine_view(each) for each in await _machines(request).list(projects)])


@router.get(
    "/projects/{project}/machines/{name}",
    **document(
        "Get one named machine.",
        rule=in_path(Permission.VIEW),
        answer=wire.MachineView,
        errors=("machine-not-found",),
    ),
)
async def get(request: Request, project: ProjectPath, name: MachinePath) -> Response:
    return reply(views.machine_view(await _find(request, project, name)))


@router.post(
    "/projects/{project}/machines/{name}/start",
    **document(
        "Start a stopped machine again, with a job that does no work.",
        rule=in_path(Permission.RUN),
        ask=wire.MachineStartAsk,
        answer=wire.Submitted,
        status=201,
        errors=("machine-not-found", "no-offer", "consent-needed", "secret-missing"),
    ),
)
async def start(request: Request, project: ProjectPath, name: MachinePath) -> Response:
    ask = await read(request, wire.MachineStartAsk)
    ask = structs.replace(ask, user=name_user(request, ask.user))
    await _find(request, project, name)
    job = await start_machine(app_state_of(request), project, name, ask)
    return reply(view(wire.Submitted, job, created=True), 201)


@router.post(
    "/projects/{project}/machines/{name}/stop",
    **document(
        "Stop a machine's jobs and release its nodes.",
        rule=in_path(Permission.RUN),
        answer=wire.MachineView,
        errors=("machine-not-found",),
    ),
)
async def stop(request: Request, project: ProjectPath, name: MachinePath) -> Response:
    await _find(request, project, name)
    return reply(views.machine_view(await _machines(request).stop(project, name)))


@router.post(
    "/projects/{project}/machines/{name}/keep",
    **document(
        "Set how long a machine is kept while it has no work.",
        rule=in_path(Permission.RUN),
        ask=wire.MachineKeepAsk,
        answer=wire.MachineView,
        errors=("machine-not-found", "machine-stopped"),
    ),
)
async def keep(request: Request, project: ProjectPath, name: MachinePath) -> Response:
    ask = await read(request, wire.MachineKeepAsk)
    if not 0 < ask.keep_s <= _LONGEST_H * 3600:
        text = f"`keep_s` must be more than 0 and at most {_LONGEST_H} hours"
        raise ApiProblem("invalid-request", text)
    await _find(request, project, name)
    length = timedelta(seconds=ask.keep_s)
    try:
        return reply(views.machine_view(await _machines(request).keep(project, name, length)))
    except MachineStopped as error:
        raise ApiProblem("machine-stopped", str(error)) from error


@router.delete(
    "/projects/{project}/machines/{name}",
    **document(
        "Delete a stopped machine from the list of machines.",
        rule=in_path(Permission.RUN),
        status=204,
        errors=("machine-not-found", "machine-in-use"),
    ),
)
async def delete(request: Request, project: ProjectPath, name: MachinePath) -> Response:
    await _find(request, project, name)
    try:
        await _machines(request).forget(project, name)
    except MachineInUse as error:
        raise ApiProblem("machine-in-use", str(error)) from error
    return done()


def _machines(request: Request) -> MachineService:
    return app_state_of(request).control_plane.machines


async def _find(request: Request, project: str, name: str) -> MachineStatus:
    try:
        return await _machines(request).get(project, name)
    except RowNotFound as error:
        raise ApiProblem("machine-not-found", str(error)) from error
