"""Routes to set, list and delete secrets, and for the keys that encrypt them. No answer contains a
key or a secret's value.
"""

import asyncio
from typing import Annotated

from fastapi import Path
from starlette.requests import Request

from cavvy.api.app_state import AppState
from cavvy.api.audit import note_change
from cavvy.api.errors import ApiProblem
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path, on_installation
from cavvy.api.wire import view
from cavvy.client import account_wire, wire
from cavvy.domain.accounts import Permission
from cavvy.spec.fields.kinds import WrongValue
from cavvy.spec.fields.task import check_secret
from cavvy.store.base import RowNotFound, SealedSecret
from cavvy.store.rotation import list_keys, rotate_key

router = RouteGroup("secrets", prefix="/v1")
# A secret's name is also the name of the environment variable that has its value.
NamePath = Annotated[str, Path(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=128)]


@router.get("/projects/{project}/secrets", rule=in_path(Permission.RUN))
async def list_names(app_state: AppState, project: ProjectPath) -> wire.SecretList:
    """List the names of a project's secrets."""
    found = await app_state.store.secrets(project)
    rows = [view(wire.SecretRow, secret) for secret in found]
    return wire.SecretList(secrets=rows)


@router.put(
    "/projects/{project}/secrets/{name}", rule=in_path(Permission.OPERATE), errors=("too-large",)
)
async def put(
    request: Request, app_state: AppState, project: ProjectPath, name: NamePath, ask: wire.SecretAsk
) -> None:
    """Set a secret."""
    try:
        check_secret(name)
    except WrongValue as error:
        raise ApiProblem("invalid-request", str(error), error.suggestion) from None
    if "\0" in ask.value:
        raise ApiProblem(
            "invalid-request",
            "a secret cannot contain a NUL byte, because no program could receive it",
        )
    sealed = await asyncio.to_thread(app_state.sealer.seal, project, name, ask.value)
    known = {each.name: each for each in await app_state.store.secrets(project)}
    before = known.get(name)
    note_change(
        request,
        before={"set_at": None if before is None else before.updated_at.isoformat()},
        after={"set_at": app_state.now().isoformat()},
    )
    await app_state.store.put_secret(
        SealedSecret(project=project, name=name, sealed=sealed, updated_at=app_state.now())
    )
    if app_state.control_plane.devices is not None:
        app_state.control_plane.devices.secret_changed(project)


@router.delete(
    "/projects/{project}/secrets/{name}",
    rule=in_path(Permission.OPERATE),
    errors=("secret-not-found",),
)
async def delete(app_state: AppState, project: ProjectPath, name: NamePath) -> None:
    """Delete a secret."""
    try:
        await app_state.store.delete_secret(project, name)
    except RowNotFound:
        raise ApiProblem("secret-not-found", f"project {project} has no secret {name}") from None
    if app_state.control_plane.devices is not None:
        app_state.control_plane.devices.secret_changed(project)


@router.get("/secret-keys", rule=on_installation(Permission.MANAGE))
async def list_used(app_state: AppState) -> list[account_wire.SecretKeyRow]:
    """List the keys that encrypt secrets, with the number of secrets for each key."""
    found = await list_keys(app_state.store, app_state.sealer, app_state.file_keys)
    return [view(account_wire.SecretKeyRow, each) for each in found]


@router.post("/secret-keys/rotate", rule=on_installation(Permission.MANAGE), errors=("disk-full",))
async def rotate(request: Request, app_state: AppState) -> account_wire.RotationView:
    """Create a new key, unless the settings name a key, and encrypt all secrets again."""
    note_change(request, after={"new_key": app_state.sealer.keys.renewable})
    done = await rotate_key(app_state.store, app_state.sealer, app_state.file_keys)
    unreadable = [
        account_wire.UnreadableSecret(project=project, name=name, reason=reason)
        for project, name, reason in done.unreadable
    ]
    return account_wire.RotationView(
        id=done.key.id,
        place=done.key.place,
        encrypted=done.encrypted,
        files=done.files,
        unreadable=unreadable,
    )
