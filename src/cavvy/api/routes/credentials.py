"""Routes for the credentials of projects at providers; the API never returns their content."""

from typing import Annotated

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from cavvy.api.app_state import app_state_of
from cavvy.api.audit import note_change
from cavvy.api.errors import ApiProblem
from cavvy.api.openapi import document
from cavvy.api.project_credentials import CredentialContent
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.rules import in_path
from cavvy.api.wire import MIB, done, read, reply
from cavvy.client import credential_wire as wire
from cavvy.domain.accounts import Permission
from cavvy.domain.credentials import name_account
from cavvy.store.base import RowNotFound

router = APIRouter(prefix="/v1/projects/{project}/credentials", tags=["credentials"])
ProviderPath = Annotated[str, Path(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=63)]


@router.get(
    "",
    **document(
        "List the providers for which a project has its own credential.",
        rule=in_path(Permission.RUN),
        answer=list[wire.CredentialRow],
    ),
)
async def list_own(request: Request, project: ProjectPath) -> Response:
    app_state = app_state_of(request)
    problems = app_state.credentials.problems
    found = [
        wire.CredentialRow(
            provider=each.provider,
            updated_at=each.updated_at,
            problem=problems.get(name_account(each.provider, project), ""),
        )
        for each in await app_state.store.provider_credentials.list()
        if each.project == project
    ]
    return reply(found)


@router.put(
    "/{provider}",
    **document(
        "Set a project's credential for a provider, after the server has tested it. The "
        "credential also applies to the projects below this one.",
        rule=in_path(Permission.MANAGE),
        ask=wire.CredentialAsk,
        status=204,
        errors=("credential-in-use", "provider-refused", "provider-unreachable"),
    ),
)
async def put(request: Request, project: ProjectPath, provider: ProviderPath) -> Response:
    app_state = app_state_of(request)
    ask = await read(request, wire.CredentialAsk, MIB)
    after = {"settings": sorted(ask.settings), "keys": sorted(ask.keys)}
    note_change(request, after={"provider": provider, **after})
    content = CredentialContent(settings=ask.settings, keys=ask.keys)
    await app_state.credentials.put(project, provider, content)
    return done()


@router.delete(
    "/{provider}",
    **document(
        "Remove a project's credential for a provider, if no running machine uses it.",
        rule=in_path(Permission.MANAGE),
        status=204,
        errors=("credential-not-found", "credential-in-use", "provider-unreachable"),
    ),
)
async def delete(request: Request, project: ProjectPath, provider: ProviderPath) -> Response:
    note_change(request, before={"provider": provider})
    try:
        await app_state_of(request).credentials.remove(project, provider)
    except RowNotFound as missing:
        raise ApiProblem("credential-not-found", str(missing)) from None
    return done()
