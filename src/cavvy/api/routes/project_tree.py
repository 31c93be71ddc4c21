"""Routes that move a project below another parent, and archive or unarchive a project."""

from collections.abc import Sequence

from starlette.requests import Request

from cavvy.api.app_state import AppState, app_state_of
from cavvy.api.audit import note_change
from cavvy.api.errors import ApiProblem
from cavvy.api.routes.fleet import empty_project, list_unfinished
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path, principal_of, require, require_above
from cavvy.client import account_wire as wire
from cavvy.domain.accounts import INSTALLATION, Permission, Project
from cavvy.domain.authorization import Principal, list_below, list_line, list_roles
from cavvy.domain.budgets import SpendingBudget, compare_lines
from cavvy.domain.policies import find_lifted
from cavvy.store.base import NameConflict, RowNotFound

router = RouteGroup("accounts", prefix="/v1/projects/{project}")


@router.post(
    "/move",
    rule=in_path(Permission.MANAGE),
    errors=("policy-lifted", "project-archived", "project-budgets"),
    when={RowNotFound: "project-not-found", NameConflict: "project-loop"},
)
async def move_project(
    request: Request, app_state: AppState, project: ProjectPath, ask: wire.ProjectMove
) -> wire.ProjectView:
    """Move a project and its subprojects below another project or to the top level.

    Move the project. The caller must be an admin of the new parent and of the old parent. After the
    move, the old parent's roles and policies no longer apply to the project.
    """
    former = await _find(app_state, project)
    require_above(request, former.parent, f"move {project}")
    require(request, Permission.MANAGE, ask.parent or INSTALLATION)
    await _check_policies(app_state, former, ask)
    await _check_budgets(request, former, ask)
    note_change(request, before={"parent": former.parent}, after={"parent": ask.parent})
    await app_state.store.move_project(former, ask.parent)
    app_state.control_plane.pool.expire()  # the cached offers are those of the former policies
    app_state.control_plane.budgets.expire()
    roles = list_roles(principal_of(request), ask.parent or INSTALLATION)
    told = [str(each) for each in sorted(roles)]
    return wire.ProjectView(
        name=project, parent=ask.parent, roles=told, archived_at=former.archived_at
    )


@router.post("/archive", rule=in_path(Permission.MANAGE), errors=("project-busy",))
async def archive(
    request: Request, app_state: AppState, project: ProjectPath, ask: wire.ProjectArchiveAsk
) -> wire.ProjectView:
    """Archive a project and its subprojects: nothing new starts in them, and all their data stays
    readable.
    """
    found = await _find(app_state, project)
    parents = {each.name: each.parent for each in await app_state.store.projects()}
    names, now = list_below(project, parents), app_state.now()
    note_change(request, after={"archived": sorted(names), "stop": ask.stop})
    # this happens first, so that nothing can start while the rest stops
    await app_state.store.archive.put(names, now, busy=ask.stop)
    for name in sorted(names) if ask.stop else ():
        await empty_project(app_state, name, await list_unfinished(app_state, name))
    roles = [str(each) for each in sorted(list_roles(principal_of(request), project))]
    at = found.archived_at or now
    return wire.ProjectView(name=project, parent=found.parent, roles=roles, archived_at=at)


@router.delete("/archive", rule=in_path(Permission.MANAGE), errors=("project-archived",))
async def unarchive(request: Request, app_state: AppState, project: ProjectPath) -> None:
    """Unarchive a project, with the subprojects that were archived at the same time."""
    note_change(request, after={"archived": None})
    await app_state.store.archive.lift(project)


async def _find(app_state: AppState, name: str) -> Project:
    for each in await app_state.store.projects():
        if each.name == name:
            return each
    raise ApiProblem("project-not-found", f"there is no project {name}")


async def _check_policies(app_state: AppState, former: Project, ask: wire.ProjectMove) -> None:
    """Raise ApiProblem if policies would no longer apply to the project and the caller has not
    permitted this change.
    """
    book = await app_state.store.policies()
    lifted = find_lifted(book, former.name, ask.parent)
    if lifted and not ask.lift_policies:
        owners = " and ".join(each.owner for each in lifted)
        raise ApiProblem(
            "policy-lifted", f"the policy of {owners} would no longer apply to {former.name}"
        )


async def _check_budgets(request: Request, former: Project, ask: wire.ProjectMove) -> None:
    """Raise ApiProblem if the move changes which budgets count the project's spending, unless the
    caller has accepted this change. The change also affects this month's spending.
    """
    app_state = app_state_of(request)
    parents = {each.name: each.parent for each in await app_state.store.projects()}
    above = list_line(ask.parent or INSTALLATION, parents)
    # the store refuses a move that would create a loop
    if ask.accept_budgets or former.name in above:
        return
    line = [former.name, *above]
    found = await app_state.store.budgets.list()
    gained, lost = compare_lines(found, list_line(former.name, parents), line)
    told = [
        f"{verb} {_name_budgets(principal_of(request), each)}"
        for verb, each in (("start to count for", gained), ("no longer count for", lost))
        if each
    ]
    if told:
        spent = f"the spending of {former.name}, including this month's costs"
        raise ApiProblem("project-budgets", f"{spent}, would {', and '.join(told)}")


def _name_budgets(principal: Principal, budgets: Sequence[SpendingBudget]) -> str:
    """Return a text that lists the budgets. Budgets of projects that are hidden from the caller are
    not named.
    """
    return " and ".join(
        f"the budget {each.name} of project {each.project}"
        if list_roles(principal, each.project)
        else "a budget above"
        for each in budgets
    )
