"""Routes for the keys that encrypt secrets. No answer contains a key or a secret's value."""

from starlette.requests import Request

from cavvy.api.app_state import AppState
from cavvy.api.audit import note_change
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import on_installation
from cavvy.api.wire import view
from cavvy.client import key_wire as wire
from cavvy.domain.accounts import Permission
from cavvy.store.rotation import list_keys, rotate_key

router = RouteGroup("secrets", prefix="/v1/secret-keys")


@router.get(
    "",
    "List the keys that encrypt secrets, with the number of secrets for each key.",
    rule=on_installation(Permission.MANAGE),
)
async def list_used(app_state: AppState) -> list[wire.SecretKeyRow]:
    found = await list_keys(app_state.store, app_state.sealer, app_state.file_keys)
    return [view(wire.SecretKeyRow, each) for each in found]


@router.post(
    "/rotate",
    "Create a new key, unless the settings name a key, and encrypt all secrets again.",
    rule=on_installation(Permission.MANAGE),
    errors=("disk-full",),
)
async def rotate(request: Request, app_state: AppState) -> wire.RotationView:
    note_change(request, after={"new_key": app_state.sealer.keys.renewable})
    done = await rotate_key(app_state.store, app_state.sealer, app_state.file_keys)
    unreadable = [
        wire.UnreadableSecret(project=project, name=name, reason=reason)
        for project, name, reason in done.unreadable
    ]
    return wire.RotationView(
        id=done.key.id,
        place=done.key.place,
        encrypted=done.encrypted,
        files=done.files,
        unreadable=unreadable,
    )
