"""Routes for the keys that encrypt secrets. No answer contains a key or a secret's value."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cavvy.api.app_state import app_state_of
from cavvy.api.audit import note_change
from cavvy.api.openapi import document
from cavvy.api.rules import on_installation
from cavvy.api.wire import reply, view
from cavvy.client import key_wire as wire
from cavvy.domain.accounts import Permission
from cavvy.store.rotation import list_keys, rotate_key

router = APIRouter(prefix="/v1/secret-keys", tags=["secrets"])


@router.get(
    "",
    **document(
        "List the keys that encrypt secrets, with the number of secrets for each key.",
        rule=on_installation(Permission.MANAGE),
        answer=list[wire.SecretKeyRow],
    ),
)
async def list_used(request: Request) -> Response:
    app_state = app_state_of(request)
    found = await list_keys(app_state.store, app_state.sealer, app_state.file_keys)
    return reply([view(wire.SecretKeyRow, each) for each in found])


@router.post(
    "/rotate",
    **document(
        "Create a new key, unless the settings name a key, and encrypt all secrets again.",
        rule=on_installation(Permission.MANAGE),
        answer=wire.RotationView,
        errors=("disk-full",),
    ),
)
async def rotate(request: Request) -> Response:
    app_state = app_state_of(request)
    note_change(request, after={"new_key": app_state.sealer.keys.renewable})
    done = await rotate_key(app_state.store, app_state.sealer, app_state.file_keys)
    unreadable = [
        wire.UnreadableSecret(project=project, name=name, reason=reason)
        for project, name, reason in done.unreadable
    ]
    return reply(
        wire.RotationView(
            id=done.key.id,
            place=done.key.place,
            encrypted=done.encrypted,
            files=done.files,
            unreadable=unreadable,
        )
    )
