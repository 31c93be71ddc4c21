"""Routes for the keys of a service. Only the answer to the request that creates a key contains its
secret.
"""

from datetime import timedelta
from secrets import token_hex
from typing import Annotated

from fastapi import Path
from starlette.requests import Request

from cavvy.api.app_state import AppState
from cavvy.api.audit import note_change
from cavvy.api.errors import ApiProblem
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path, name_user
from cavvy.api.tokens import hash_token, make_token
from cavvy.api.wire import view
from cavvy.capabilities.serving import wire
from cavvy.capabilities.serving.gateway.client_keys import SERVICE_KEY
from cavvy.capabilities.serving.gateway.extensions import UNCOUNTED, find_meters
from cavvy.capabilities.serving.keeper import find_requests
from cavvy.capabilities.serving.routes.services import ServicePath
from cavvy.capabilities.serving.stored_services import (
    KeyPriority,
    KeyUnknown,
    ServiceKey,
    TooManyKeys,
    note_uses,
)
from cavvy.catalog.regions import is_known_place, wished_place
from cavvy.domain.accounts import Permission
from cavvy.store.base import RowNotFound

router = RouteGroup("services", prefix="/v1/projects/{project}/services/{name}/keys")
_LONGEST_S = 10 * 365 * 86_400
_LONGEST_LABEL = 100
_MOST = 10**12  # tokens a minute, micro-dollars a day
_LIMITS = (
    *("per_s", "burst", "tokens_per_min", "micros_per_day", "weight", "priority", "residency"),
)
KeyPath = Annotated[str, Path(max_length=32, pattern=r"^[0-9a-f]+$", description="The key's ID.")]


@router.get("", rule=in_path(Permission.RUN), when={RowNotFound: "service-not-found"})
async def list_keys(
    app_state: AppState, project: ProjectPath, name: ServicePath
) -> list[wire.ServiceKeyView]:
    """List the keys of a service, without their secrets."""
    found = await find_requests(app_state).get(project, name)
    used = {} if found.traffic is None else found.traffic.keys_used
    service = note_uses(found.service, used)
    return [view(wire.ServiceKeyView, each) for each in service.keys]


@router.post(
    "",
    rule=in_path(Permission.RUN),
    status=201,
    errors=("service-open",),
    when={RowNotFound: "service-not-found", TooManyKeys: "invalid-request"},
)
async def make(
    request: Request,
    app_state: AppState,
    project: ProjectPath,
    name: ServicePath,
    ask: wire.ServiceKeyAsk,
) -> wire.ServiceKeyMade:
    """Create a key that may call the service. The answer contains the key, which cannot be read
    again.
    """
    _check(ask)
    found = await find_requests(app_state).get(project, name)
    if not found.service.spec.keys:
        raise ApiProblem("service-open", f"service {name} answers requests without a key")
    now, secret = app_state.now(), make_token(SERVICE_KEY)
    key = ServiceKey(
        id=token_hex(8),
        sha256=hash_token(secret),
        label=ask.label,
        user=name_user(request, ""),
        per_s=ask.per_s,
        burst=ask.burst,
        tokens_per_min=ask.tokens_per_min,
        micros_per_day=ask.micros_per_day,
        weight=ask.weight,
        priority=KeyPriority(ask.priority),
        residency=None if ask.residency is None else wished_place(ask.residency),
        created_at=now,
        expires_at=None if ask.expires_s is None else now + timedelta(seconds=ask.expires_s),
    )
    limits = {name: getattr(key, name) for name in _LIMITS}
    after = {"key": key.id, "label": key.label, **limits, "expires_s": ask.expires_s}
    note_change(request, after=after)
    await find_requests(app_state).add_key(project, name, key)
    return wire.ServiceKeyMade(key=secret, view=view(wire.ServiceKeyView, key))


@router.delete(
    "/{key}",
    rule=in_path(Permission.RUN),
    when={RowNotFound: "service-not-found", KeyUnknown: "service-key-not-found"},
)
async def revoke(
    app_state: AppState, project: ProjectPath, name: ServicePath, key: KeyPath
) -> None:
    """Revoke a key immediately."""
    await find_requests(app_state).remove_key(project, name, key)


def _check(ask: wire.ServiceKeyAsk) -> None:
    if ask.expires_s is not None and not 0 < ask.expires_s <= _LONGEST_S:
        raise ApiProblem("invalid-request", "`expires_s` must be from 1 second to 10 years")
    if ask.per_s is not None and not 1e-5 <= ask.per_s <= 1e6:
        raise ApiProblem("invalid-request", "`per_s` must be from 0.00001 to 1,000,000")
    if not 1 <= ask.burst <= 1_000_000:
        raise ApiProblem("invalid-request", "`burst` must be from 1 to 1,000,000")
    if ask.tokens_per_min is not None and not 1 <= ask.tokens_per_min <= _MOST:
        raise ApiProblem("invalid-request", f"`tokens_per_min` must be from 1 to {_MOST:,}")
    if ask.tokens_per_min is not None and not find_meters().counts_tokens:
        raise ApiProblem("invalid-request", f"`tokens_per_min`: {UNCOUNTED}; leave the limit out")
    if ask.micros_per_day is not None and not 1 <= ask.micros_per_day <= _MOST:
        raise ApiProblem("invalid-request", f"`micros_per_day` must be from 1 to {_MOST:,}")
    if not 0.01 <= ask.weight <= 100:
        raise ApiProblem("invalid-request", "`weight` must be from 0.01 to 100")
    if ask.priority not in list(KeyPriority):
        named = ", ".join(KeyPriority)
        raise ApiProblem("invalid-request", f"`priority` must be one of {named}")
    if ask.residency is not None and not is_known_place(ask.residency):
        raise ApiProblem(
            "invalid-request", "`residency` must be an area such as eu, or a country such as de"
        )
    if len(ask.label) > _LONGEST_LABEL:
        raise ApiProblem("invalid-request", f"`label` is longer than {_LONGEST_LABEL} characters")
