"""A route for `cavvy deploy`, which creates a service's working folder from a job's files."""

import re

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cavvy.api.app_state import app_state_of
from cavvy.api.audit import note_change
from cavvy.api.errors import ApiProblem
from cavvy.api.openapi import document
from cavvy.api.routes.jobs import JobPath, ProjectPath
from cavvy.api.routes.submission import check_snapshot
from cavvy.api.rules import in_path
from cavvy.api.wire import read, reply, view
from cavvy.client import model_wire as wire
from cavvy.control.agents.model_folder import make_model_folder
from cavvy.domain.accounts import Permission
from cavvy.store.base import RowNotFound
from cavvy.store.blobs import NotManifest

router = APIRouter(prefix="/v1", tags=["services"])
_MOST_SNAPSHOTS = 8
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_HASH = re.compile(r"[0-9a-f]{64}")


@router.post(
    "/projects/{project}/jobs/{name}/model",
    **document(
        "Create a service's working folder from the files of the job's newest checkpoint.",
        rule=in_path(Permission.RUN),
        ask=wire.ModelFolderAsk,
        answer=wire.ModelFolderView,
        errors=("job-not-found", "no-model", "snapshot-missing", "disk-full"),
    ),
)
async def make(request: Request, project: ProjectPath, name: JobPath) -> Response:
    app_state = app_state_of(request)
    ask = await read(request, wire.ModelFolderAsk)
    if ask.below is not None and not _NAME.fullmatch(ask.below):
        raise ApiProblem("invalid-request", "`below` must be the name of a folder, such as model")
    if len(ask.snapshots) > _MOST_SNAPSHOTS or not all(map(_HASH.fullmatch, ask.snapshots)):
        raise ApiProblem(
            "invalid-request", f"`snapshots` must have at most {_MOST_SNAPSHOTS} hashes"
        )
    try:
        job = await app_state.store.find_job(project, name)
    except RowNotFound as error:
        raise ApiProblem("job-not-found", str(error)) from error
    for snapshot in ask.snapshots:
        await check_snapshot(app_state, project, snapshot)
    blobs = app_state.blobs.of(project)
    try:
        found = await make_model_folder(
            app_state.control_plane.checkpoints, job, blobs, ask.snapshots, ask.below
        )
    except RowNotFound as error:
        raise ApiProblem("no-model", str(error)) from error
    except NotManifest as error:
        raise ApiProblem("snapshot-missing", str(error)) from error
    note_change(request, after={"snapshot": found.snapshot})
    files = [view(wire.ModelFileView, each) for each in found.files if each.link is None]
    return reply(wire.ModelFolderView(snapshot=found.snapshot, files=files))
