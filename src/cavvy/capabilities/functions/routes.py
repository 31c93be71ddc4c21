"""Routes for deployed apps. The server stores what submits their jobs; it reads no arguments and
no results.
"""

from collections.abc import Sequence
from typing import Annotated

from fastapi import Path
from msgspec.json import decode, encode
from starlette.requests import Request

from cavvy.api.app_state import AppState
from cavvy.api.audit import note_change
from cavvy.api.errors import ApiProblem
from cavvy.api.routes import submission
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path, name_user, principal_of
from cavvy.capabilities.functions import wire
from cavvy.capabilities.functions.rows import FunctionRows, StoredPart
from cavvy.client.paths import make_key
from cavvy.client.wire import SubmitRequest
from cavvy.domain.accounts import Permission
from cavvy.store.base import RowNotFound

router = RouteGroup("apps", prefix="/v1/projects/{project}/apps")
NamePath = Annotated[str, Path(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=50)]
_MOST = 200  # apps of a project
_MOST_PARTS = 50
# keys of a task that no job of functions has; some need more rights than to run a job
_REFUSED = (
    "edge", "service", "array", "sweep", "search", "after", "group", "schedule", "session",
    "machine", "pool", "webhooks",
)  # fmt: skip
_MISSING: dict[type[Exception], str] = {RowNotFound: "app-not-found"}


@router.get("", rule=in_path(Permission.VIEW))
async def list_apps(
    request: Request, app_state: AppState, project: ProjectPath
) -> list[wire.DeployedApp]:
    """List the deployed apps of a project."""
    by_name: dict[str, list[StoredPart]] = {}
    for each in await _rows(app_state).parts(project):
        by_name.setdefault(each.app, []).append(each)
    return [_view(request, name, parts) for name, parts in by_name.items()]


@router.get("/{name}", rule=in_path(Permission.VIEW), errors=("app-not-found",))
async def read_app(
    request: Request, app_state: AppState, project: ProjectPath, name: NamePath
) -> wire.DeployedApp:
    """Get a deployed app."""
    return _view(request, name, await _find(app_state, project, name))


@router.put(
    "/{name}",
    rule=in_path(Permission.RUN),
    errors=("invalid-task", "snapshot-missing"),
    limit=1 << 20,
)
async def put_app(
    request: Request, app_state: AppState, project: ProjectPath, name: NamePath, ask: wire.AppAsk
) -> None:
    """Deploy a revision of an app, which replaces the one before."""
    if not 0 < len(ask.parts) <= _MOST_PARTS:
        raise ApiProblem("invalid-request", f"an app has 1 to {_MOST_PARTS} parts")
    for part in ask.parts:
        await _check_part(app_state, project, name, part)
    rows = _rows(app_state)
    known = await rows.revisions(project)
    before = known.get(name)
    if before is None and len(known) >= _MOST:
        raise ApiProblem(
            "invalid-request",
            f"{project} has {_MOST} apps",
            "delete one of them, by DELETE …/apps/NAME",
        )
    note_change(
        request,
        before={"revision": before} if before is not None else None,
        after={"revision": ask.revision},
    )
    user, now = name_user(request, ask.user), app_state.now()
    await rows.put(
        project,
        name,
        [
            StoredPart(
                project=project,
                app=name,
                part=part,
                revision=ask.revision,
                snapshot=each.snapshot,
                document=encode(each).decode(),
                job="",
                user=user,
                updated_at=now,
            )
            for part, each in enumerate(ask.parts)
        ],
    )


@router.delete("/{name}", rule=in_path(Permission.RUN), errors=("app-not-found",), when=_MISSING)
async def delete_app(
    request: Request, app_state: AppState, project: ProjectPath, name: NamePath
) -> None:
    """Remove a deployed app. Its jobs go on until they are stopped."""
    before = await _find(app_state, project, name)
    note_change(request, before={"revision": before[0].revision}, after=None)
    await _rows(app_state).delete(project, name)


@router.post(
    "/{name}/claim",
    rule=in_path(Permission.RUN),
    errors=("app-not-found", "app-changed"),
    when=_MISSING,
)
async def claim(
    app_state: AppState, project: ProjectPath, name: NamePath, ask: wire.NextJobAsk
) -> wire.NextJob:
    """Get the ID of an app's next job, which the caller submits. All who ask when the same job has
    ended get the same ID, so an app has one job.
    """
    job = await _rows(app_state).claim(project, name, ask, make_key())
    if not job:
        raise ApiProblem("app-changed", f"the app {name} has no revision {ask.revision} any more")
    return wire.NextJob(job=job)


async def _check_part(app_state: AppState, project: str, name: str, part: wire.AppPartAsk) -> None:
    """Raise ApiProblem if this is more than a job of functions: who calls them submits it, with
    rights that the one who deploys may not have.
    """
    ask = SubmitRequest(text=part.text, path=name, origin=part.origin)
    origin = submission.read_origin(ask, part.text)
    if (origin.snapshot or "") != part.snapshot:
        raise ApiProblem("invalid-request", "`snapshot` is another than that of `origin`")
    task = await submission.read_task(app_state, project, ask, part.text, origin, app_state.now())
    if refused := [f"`{each}`" for each in _REFUSED if getattr(task, each)]:
        raise ApiProblem(
            "invalid-task",
            f"{name}: {', '.join(refused)}: functions run in plain jobs",
            "remove it from what is deployed; `cavvy run` submits such a task",
        )
    await submission.check_snapshot(app_state, project, origin.snapshot)


def _rows(app_state: AppState) -> FunctionRows:
    return FunctionRows(*app_state.store.database)


async def _find(app_state: AppState, project: str, name: str) -> Sequence[StoredPart]:
    """Raises ApiProblem."""
    if not (found := await _rows(app_state).parts(project, name)):
        raise ApiProblem("app-not-found", f"project {project} has no app {name}")
    return found


def _view(request: Request, name: str, parts: Sequence[StoredPart]) -> wire.DeployedApp:
    account = principal_of(request).account
    return wire.DeployedApp(name=name, parts=[_view_part(each, account) for each in parts])


def _view_part(row: StoredPart, account: str | None) -> wire.AppPart:
    """Return the part as this account sees it, which has not consented to what others have."""
    ask = decode(row.document, type=wire.AppPartAsk)
    return wire.AppPart(
        part=row.part,
        revision=row.revision,
        text=ask.text,
        origin=ask.origin,
        snapshot=row.snapshot,
        meet=ask.meet,
        functions=ask.functions,
        consent=ask.consent and account in (None, "", row.user),
        job=row.job,
        user=row.user,
        updated_at=row.updated_at,
    )
