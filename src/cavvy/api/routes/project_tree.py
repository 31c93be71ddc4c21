"""The route that moves a project to another place in the tree."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cavvy.api.app_state import AppState, app_state_of
from cavvy.api.audit import note_change
from cavvy.api.errors import ApiProblem
from cavvy.api.openapi import document
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.rules import in_path, principal_of, require
from cavvy.api.wire import read, reply
from cavvy.client import account_wire as wire
from cavvy.domain.accounts import INSTALLATION, Permission, Project
from cavvy.domain.authorization import list_roles
from cavvy.domain.policies import find_lifted
from cavvy.store.base import NameConflict, RowNotFound

router = APIRouter(prefix="/v1/projects/{project}", tags=["accounts"])


@router.post(
    "/move",
    **document(
        "Move a project, with those below it, below another one or below the installation.",
        rule=in_path(Permission.MANAGE),
        ask=wire.ProjectMove,
        answer=wire.ProjectView,
        errors=("policy-lifted", "project-loop"),
    ),
)
async def move_project(request: Request, project: ProjectPath) -> Response:
    """The caller must be an admin of the place that the project leaves, whose roles and policies no
    longer apply to it, and of the new one.
    """
    app_state = app_state_of(request)
    ask = await read(request, wire.ProjectMove)
    former = await _find(app_state, project)
    _require_above(request, former)
    require(request, Permission.MANAGE, ask.parent or INSTALLATION)
    await _check_policies(app_state, former, ask)
    note_change(request, before={"parent": former.parent}, after={"parent": ask.parent})
    try:
        await app_state.store.move_project(former, ask.parent)
    except RowNotFound as error:
        raise ApiProblem("project-not-found", str(error)) from error
    except NameConflict as error:
        raise ApiProblem("project-loop", str(error)) from error
    app_state.control_plane.pool.expire()  # the cached offers are those of the former policies
    roles = list_roles(principal_of(request), ask.parent or INSTALLATION)
    told = [str(each) for each in sorted(roles)]
    return reply(wire.ProjectView(name=project, parent=ask.parent, roles=told))


async def _find(app_state: AppState, name: str) -> Project:
    for each in await app_state.store.projects():
        if each.name == name:
            return each
    raise ApiProblem("project-not-found", f"{name} was not created as a project")


def _require_above(request: Request, project: Project) -> None:
    """Raise ApiProblem unless the caller is an admin of the project's place. The error does not
    name the place, which may be hidden from the caller.
    """
    try:
        require(request, Permission.MANAGE, project.parent or INSTALLATION)
    except ApiProblem:
        told = f"to move {project.name}, you need the role admin in the project above it, or, at "
        told += "the top, in the installation"
        raise ApiProblem("role-needed", told) from None


async def _check_policies(app_state: AppState, former: Project, ask: wire.ProjectMove) -> None:
    """Raise ApiProblem if restrictions would end and the caller has not said that they may."""
    book = await app_state.store.policies()
    lifted = find_lifted(book, former.name, ask.parent)
    if lifted and not ask.lift_policies:
        owners = " and ".join(each.owner for each in lifted)
        raise ApiProblem(
            "policy-lifted", f"the policy of {owners} would no longer apply to {former.name}"
        )
