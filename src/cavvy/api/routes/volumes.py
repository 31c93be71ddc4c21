"""Routes to list and delete the named volumes of the server's own machine and of own hosts."""

from typing import Annotated

from fastapi import Path, Query
from starlette.requests import Request

from cavvy.api.app_state import AppState
from cavvy.api.audit import note_change
from cavvy.api.errors import ApiProblem
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path
from cavvy.client import wire
from cavvy.domain.accounts import Permission
from cavvy.domain.jobs import JobPhase
from cavvy.domain.tasks import VolumeKind
from cavvy.providers.base import Refused, TryAgain

router = RouteGroup("volumes", prefix="/v1/projects/{project}/volumes")
NamePath = Annotated[
    str, Path(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", max_length=253)
]
_USING = (JobPhase.STARTING, JobPhase.RUNNING, JobPhase.STOPPING)


@router.get("", rule=in_path(Permission.VIEW), when={Refused: "conflict", TryAgain: "conflict"})
async def list_volumes(app_state: AppState, project: ProjectPath) -> list[wire.VolumeView]:
    """List the named volumes of a project on the server's machine and on hosts reached by SSH, with
    their sizes."""
    found = await app_state.control_plane.pool.folders(project)
    return [
        wire.VolumeView(
            name=each.name,
            provider=provider,
            host=each.host,
            problem=each.problem,
            files=each.files,
            size_bytes=each.size_bytes,
            changed_at=each.changed_at,
        )
        for provider, volumes in found.items()
        for each in volumes
    ]


@router.delete(
    "/{name}",
    rule=in_path(Permission.RUN),
    errors=("volume-not-found", "volume-in-use"),
    when={Refused: "conflict", TryAgain: "conflict"},
)
async def delete_volume(
    request: Request,
    app_state: AppState,
    project: ProjectPath,
    name: NamePath,
    provider: Annotated[str, Query(max_length=64)] = "",
) -> None:
    """Delete a named volume of the server's machine, or of a host, with its files. If several
    providers have a volume of this name, `provider` is required."""
    if user := await _find_user(app_state, project, name):
        raise ApiProblem("volume-in-use", f"the job {user} uses the volume {name}")
    note_change(request, before={"volume": name}, after=None)
    if not await app_state.control_plane.pool.remove_folder(project, name, provider):
        places = f"at {provider}" if provider else "on the server's machine or its hosts"
        raise ApiProblem("volume-not-found", f"project {project} has no volume {name} {places}")


async def _find_user(app_state: AppState, project: str, name: str) -> str:
    """Return the name of a job that may have the volume on some machine, or ""."""
    cursor = None
    while True:
        page = await app_state.store.list_jobs(project, _USING, cursor, 500)
        for row in page.jobs:
            job = await app_state.store.job(row.id)
            if any(
                each.kind is VolumeKind.NAMED and each.source == name for each in job.task.volumes
            ):
                return job.name
        if (cursor := page.cursor) is None:
            return ""
