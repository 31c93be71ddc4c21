"""Routes for the credentials of projects at providers; the API never returns their content."""

from typing import Annotated

from fastapi import Path
from starlette.requests import Request

from cavvy.api.app_state import AppState
from cavvy.api.audit import note_change
from cavvy.api.project_credentials import CredentialContent
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path
from cavvy.client import account_wire as wire
from cavvy.domain.accounts import Permission
from cavvy.domain.credentials import name_account
from cavvy.store.base import RowNotFound

router = RouteGroup("credentials", prefix="/v1/projects/{project}/credentials")
ProviderPath = Annotated[str, Path(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=63)]


@router.get("", rule=in_path(Permission.RUN))
async def list_own(app_state: AppState, project: ProjectPath) -> list[wire.CredentialRow]:
    """List the providers for which a project has its own credential."""
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
    return found


@router.put(
    "/{provider}",
    rule=in_path(Permission.MANAGE),
    errors=("credential-in-use", "provider-refused", "provider-unreachable"),
)
async def put(
    request: Request,
    app_state: AppState,
    project: ProjectPath,
    provider: ProviderPath,
    ask: wire.CredentialAsk,
) -> None:
    """Set a project's credential for a provider, after the server has tested it. The credential
    also applies to the projects below this one.
    """
    after = {"settings": sorted(ask.settings), "keys": sorted(ask.keys)}
    note_change(request, after={"provider": provider, **after})
    content = CredentialContent(settings=ask.settings, keys=ask.keys)
    await app_state.credentials.put(project, provider, content)


@router.delete(
    "/{provider}",
    rule=in_path(Permission.MANAGE),
    errors=("credential-in-use", "provider-unreachable"),
    when={RowNotFound: "credential-not-found"},
)
async def delete(
    request: Request, app_state: AppState, project: ProjectPath, provider: ProviderPath
) -> None:
    """Remove a project's credential for a provider, if no running machine uses it."""
    note_change(request, before={"provider": provider})
    await app_state.credentials.remove(project, provider)
