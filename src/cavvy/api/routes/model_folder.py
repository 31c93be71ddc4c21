"""The route that makes a working folder of a job's newest checkpoint."""

import re

from starlette.requests import Request

from cavvy.api.app_state import AppState
from cavvy.api.audit import note_change
from cavvy.api.errors import ApiProblem
from cavvy.api.routes.jobs import JobPath, ProjectPath, find_job
from cavvy.api.routes.submission import check_snapshot
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path
from cavvy.api.wire import view
from cavvy.client.model_folder import ModelFileView, ModelFolderAsk, ModelFolderView
from cavvy.control.agents.model_folder import make_model_folder
from cavvy.domain.accounts import Permission
from cavvy.store.base import RowNotFound
from cavvy.store.blobs import NotManifest

router = RouteGroup("jobs", prefix="/v1")
_MOST_SNAPSHOTS = 8
_FOLDER_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_HASH = re.compile(r"[0-9a-f]{64}")


@router.post(
    "/projects/{project}/jobs/{name}/model",
    rule=in_path(Permission.RUN),
    errors=("job-not-found", "disk-full"),
    when={RowNotFound: "no-model", NotManifest: "snapshot-missing"},
)
async def make(
    request: Request,
    app_state: AppState,
    project: ProjectPath,
    name: JobPath,
    ask: ModelFolderAsk,
) -> ModelFolderView:
    """Create a working folder from the files of the job's newest checkpoint, as services have."""
    if ask.below is not None and not _FOLDER_NAME.fullmatch(ask.below):
        raise ApiProblem("invalid-request", "`below` must be the name of a folder, such as model")
    if len(ask.snapshots) > _MOST_SNAPSHOTS or not all(map(_HASH.fullmatch, ask.snapshots)):
        raise ApiProblem(
            "invalid-request", f"`snapshots` must have at most {_MOST_SNAPSHOTS} hashes"
        )
    job = await find_job(app_state, project, name)
    for snapshot in ask.snapshots:
        await check_snapshot(app_state, project, snapshot)
    blobs = app_state.blobs.of(project)
    found = await make_model_folder(
        app_state.control_plane.checkpoints, job, blobs, ask.snapshots, ask.below
    )
    note_change(request, after={"snapshot": found.snapshot})
    files = [view(ModelFileView, each) for each in found.files if each.link is None]
    return ModelFolderView(snapshot=found.snapshot, files=files)
