"""Routes for recipes: task files that the members of a project share."""

from asyncio import to_thread
from typing import Annotated

from fastapi import Path
from starlette.requests import Request

from cavvy.api.app_state import AppState
from cavvy.api.errors import ApiProblem
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path, principal_of
from cavvy.api.wire import view
from cavvy.client import wire
from cavvy.domain.accounts import Permission
from cavvy.store.base import Recipe, RowNotFound
from cavvy.task_files import parse_file

_LONGEST = 256 << 10  # characters of a task file
_MOST = 200  # recipes of a project

router = RouteGroup("jobs", prefix="/v1")
NamePath = Annotated[str, Path(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=63)]


@router.get("/projects/{project}/recipes", rule=in_path(Permission.VIEW))
async def list_recipes(app_state: AppState, project: ProjectPath) -> list[wire.RecipeView]:
    """List the task files that the project's members share."""
    return [view(wire.RecipeView, each) for each in await app_state.store.recipes(project)]


@router.put(
    "/projects/{project}/recipes/{name}",
    rule=in_path(Permission.RUN),
    errors=("invalid-task", "too-large"),
)
async def put(
    request: Request, app_state: AppState, project: ProjectPath, name: NamePath, ask: wire.RecipeAsk
) -> None:
    """Share a task file with the project's members."""
    if len(ask.text) > _LONGEST:
        raise ApiProblem("too-large", f"the recipe has more than {_LONGEST:,} characters")
    async with app_state.parsing:
        await to_thread(parse_file, ask.text, file=f"{name}.yaml")
    known = {each.name for each in await app_state.store.recipes(project)}
    if name not in known and len(known) >= _MOST:
        raise ApiProblem("invalid-request", f"the project has {_MOST} recipes already")
    recipe = Recipe(
        project=project,
        name=name,
        text=ask.text,
        account=principal_of(request).account or "",
        updated_at=app_state.now(),
    )
    await app_state.store.put_recipe(recipe)


@router.delete(
    "/projects/{project}/recipes/{name}", rule=in_path(Permission.RUN), errors=("recipe-not-found",)
)
async def delete(app_state: AppState, project: ProjectPath, name: NamePath) -> None:
    """Delete a recipe."""
    try:
        await app_state.store.delete_recipe(project, name)
    except RowNotFound:
        raise ApiProblem("recipe-not-found", f"project {project} has no recipe {name}") from None
