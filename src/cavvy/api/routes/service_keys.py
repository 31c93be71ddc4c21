"""Routes for the keys of a service. Only the answer to the request that creates a key contains its
secret.
"""

from datetime import timedelta
from secrets import token_hex
from typing import Annotated

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from cavvy.api.access_tokens import hash_token, make_service_key
from cavvy.api.app_state import app_state_of
from cavvy.api.audit import note_change
from cavvy.api.errors import ApiProblem
from cavvy.api.openapi import document
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.routes.services import ServicePath
from cavvy.api.rules import in_path, name_user
from cavvy.api.wire import done, read, reply, view
from cavvy.catalog.regions import is_known_place, wished_place
from cavvy.client import service_key_wire as wire
from cavvy.control.decide.service_keys import KeyUnknown, TooManyKeys, note_uses
from cavvy.control.serving.requests import ServiceStatus
from cavvy.domain.accounts import Permission
from cavvy.domain.stored_services import ServiceKey
from cavvy.store.base import RowNotFound

router = APIRouter(prefix="/v1/projects/{project}/services/{name}/keys", tags=["services"])
_LONGEST_S = 10 * 365 * 86_400
_LONGEST_LABEL = 100
KeyPath = Annotated[str, Path(max_length=32, pattern=r"^[0-9a-f]+$", description="The key's ID.")]


@router.get(
    "",
    **document(
        "List the keys of a service, without their secrets.",
        rule=in_path(Permission.RUN),
        answer=list[wire.ServiceKeyView],
        errors=("service-not-found",),
    ),
)
async def list_keys(request: Request, project: ProjectPath, name: ServicePath) -> Response:
    found = await _find(request, project, name)
    used = {} if found.traffic is None else found.traffic.keys_used
    service = note_uses(found.service, used)
    return reply([view(wire.ServiceKeyView, each) for each in service.keys])


@router.post(
    "",
    **document(
        "Create a key that may call the service. The answer contains the key, which cannot "
        "be read again.",
        rule=in_path(Permission.RUN),
        ask=wire.ServiceKeyAsk,
        answer=wire.ServiceKeyMade,
        status=201,
        errors=("service-not-found", "service-open"),
    ),
)
async def make(request: Request, project: ProjectPath, name: ServicePath) -> Response:
    ask = await read(request, wire.ServiceKeyAsk)
    _check(ask)
    found = await _find(request, project, name)
    if not found.service.spec.keys:
        raise ApiProblem("service-open", f"service {name} answers requests without a key")
    app_state, secret = app_state_of(request), make_service_key()
    now = app_state.now()
    key = ServiceKey(
        id=token_hex(8),
        sha256=hash_token(secret),
        label=ask.label,
        user=name_user(request, ""),
        per_s=ask.per_s,
        burst=ask.burst,
        residency=None if ask.residency is None else wished_place(ask.residency),
        created_at=now,
        expires_at=None if ask.expires_s is None else now + timedelta(seconds=ask.expires_s),
    )
    limits = {"per_s": key.per_s, "burst": key.burst, "residency": key.residency}
    after = {"key": key.id, "label": key.label, **limits, "expires_s": ask.expires_s}
    note_change(request, after=after)
    try:
        await app_state.control_plane.services.add_key(project, name, key)
    except RowNotFound as error:
        raise ApiProblem("service-not-found", str(error)) from error
    except TooManyKeys as error:
        raise ApiProblem("invalid-request", str(error)) from error
    return reply(wire.ServiceKeyMade(key=secret, view=view(wire.ServiceKeyView, key)), 201)


@router.delete(
    "/{key}",
    **document(
        "Revoke a key immediately.",
        rule=in_path(Permission.RUN),
        status=204,
        errors=("service-not-found", "service-key-not-found"),
    ),
)
async def revoke(
    request: Request, project: ProjectPath, name: ServicePath, key: KeyPath
) -> Response:
    try:
        await app_state_of(request).control_plane.services.remove_key(project, name, key)
    except RowNotFound as error:
        raise ApiProblem("service-not-found", str(error)) from error
    except KeyUnknown as error:
        raise ApiProblem("service-key-not-found", str(error)) from error
    return done()


async def _find(request: Request, project: str, name: str) -> ServiceStatus:
    try:
        return await app_state_of(request).control_plane.services.get(project, name)
    except RowNotFound as error:
        raise ApiProblem("service-not-found", str(error)) from error


def _check(ask: wire.ServiceKeyAsk) -> None:
    if ask.expires_s is not None and not 0 < ask.expires_s <= _LONGEST_S:
        raise ApiProblem("invalid-request", "`expires_s` must be from 1 second to 10 years")
    if ask.per_s is not None and not 1e-5 <= ask.per_s <= 1e6:
        raise ApiProblem("invalid-request", "`per_s` must be from 0.00001 to 1,000,000")
    if not 1 <= ask.burst <= 1_000_000:
        raise ApiProblem("invalid-request", "`burst` must be from 1 to 1,000,000")
    if ask.residency is not None and not is_known_place(ask.residency):
        raise ApiProblem(
            "invalid-request", "`residency` must be an area such as eu, or a country such as de"
        )
    if len(ask.label) > _LONGEST_LABEL:
        raise ApiProblem("invalid-request", f"`label` is longer than {_LONGEST_LABEL} characters")
