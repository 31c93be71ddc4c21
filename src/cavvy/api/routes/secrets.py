"""Routes to set, list and delete secrets; the API never returns their values."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from cavvy.api.app_state import app_state_of
from cavvy.api.audit import note_change
from cavvy.api.errors import ApiProblem
from cavvy.api.openapi import document
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.rules import in_path
from cavvy.api.wire import MIB, done, read, reply, view
from cavvy.client import wire
from cavvy.domain.accounts import Permission
from cavvy.spec.fields.kinds import WrongValue
from cavvy.spec.fields.task import check_secret
from cavvy.store.base import RowNotFound, SealedSecret

router = APIRouter(prefix="/v1/projects/{project}/secrets", tags=["secrets"])
# A secret's name is also the name of the environment variable that has its value.
NamePath = Annotated[str, Path(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=128)]


@router.get(
    "",
    **document(
        "List the names of a project's secrets.",
        rule=in_path(Permission.RUN),
        answer=wire.SecretList,
    ),
)
async def list_names(request: Request, project: ProjectPath) -> Response:
    found = await app_state_of(request).store.secrets(project)
    rows = [view(wire.SecretRow, secret) for secret in found]
    return reply(wire.SecretList(secrets=rows))


@router.put(
    "/{name}",
    **document(
        "Set a secret.",
        rule=in_path(Permission.OPERATE),
        ask=wire.SecretAsk,
        status=204,
        errors=("too-large",),
    ),
)
async def put(request: Request, project: ProjectPath, name: NamePath) -> Response:
    app_state = app_state_of(request)
    ask = await read(request, wire.SecretAsk, MIB)
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
    return done()


@router.delete(
    "/{name}",
    **document(
        "Delete a secret.",
        rule=in_path(Permission.OPERATE),
        status=204,
        errors=("secret-not-found",),
    ),
)
async def delete(request: Request, project: ProjectPath, name: NamePath) -> Response:
    try:
        await app_state_of(request).store.delete_secret(project, name)
    except RowNotFound:
        raise ApiProblem("secret-not-found", f"project {project} has no secret {name}") from None
    return done()
