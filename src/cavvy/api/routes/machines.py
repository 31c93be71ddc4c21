"""Machines that join: users invite and dismiss them, and what they say themselves is carried to
their place.
"""

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from cavvy.api.app_state import AppState, app_state_of
from cavvy.api.errors import ApiProblem
from cavvy.api.openapi import document
from cavvy.api.wire import MIB, done, read, read_bytes, reply
from cavvy.client import wire
from cavvy.providers.base import NotFound, Refused, ServesNodes, TryAgain

_LIMIT = 16 * MIB
_LONGEST_H = 24 * 30
PlacePath = Annotated[str, Path(max_length=63)]

router = APIRouter(tags=["fleet"])


@router.post(
    "/v1/invitations",
    **document(
        "Lines that make a machine a node of ours when one of them is pasted there.",
        ask=wire.InviteAsk,
        answer=wire.InvitationView,
        status=201,
        errors=("no-joining", "join-refused"),
    ),
)
async def invite(request: Request) -> Response:
    ask = await read(request, wire.InviteAsk)
    if not 0 < ask.valid_s <= _LONGEST_H * 3600:
        raise ApiProblem(
            "invalid-request", f"`valid_s` must be at most {_LONGEST_H} hours, and more than none"
        )
    try:
        made = await _joinable(app_state_of(request)).invite(
            name=ask.name, group=ask.group, valid=timedelta(seconds=ask.valid_s)
        )
    except Refused as error:
        raise ApiProblem("join-refused", str(error)) from error
    return reply(
        wire.InvitationView(shell=made.shell, python=made.python, expires_at=made.expires_at), 201
    )


@router.get("/v1/machines", **document("Machines that joined.", answer=list[wire.MachineRow]))
async def machines(request: Request) -> Response:
    places = app_state_of(request).control_plane.pool.providers.values()
    found = [
        each
        for place in places
        if isinstance(place, ServesNodes)
        for each in await place.machines()
    ]
    return reply(
        [
            wire.MachineRow(
                name=each.name,
                state=each.state,
                has=each.has,
                joined_at=each.joined_at,
                heard_at=each.heard_at,
            )
            for each in found
        ]
    )


@router.delete(
    "/v1/machines/{name}",
    **document(
        "Dismiss a machine: its work ends, its token opens nothing.",
        status=204,
        errors=("machine-not-found",),
    ),
)
async def dismiss(request: Request, name: Annotated[str, Path(max_length=63)]) -> Response:
    for place in app_state_of(request).control_plane.pool.providers.values():
        if isinstance(place, ServesNodes):
            try:
                await place.dismiss(name)
            except NotFound:
                continue
            return done()
    raise ApiProblem("machine-not-found", f"no machine {name} has joined")


@router.get(
    "/nodes/v1/{place}/script",
    **document("What a pasted line runs.", gives=True, errors=("no-joining",)),
)
async def script(request: Request, place: PlacePath) -> Response:
    try:
        text = await _place(app_state_of(request), place).script()
    except Refused as error:
        raise ApiProblem("no-joining", str(error)) from error
    return Response(text, media_type="text/x-shellscript")


@router.post(
    "/nodes/v1/{place}/{call}",
    **document(
        "What a machine says to its place.",
        sends=True,
        gives=True,
        errors=("forbidden", "no-joining"),
    ),
)
async def answer(
    request: Request, place: PlacePath, call: Annotated[str, Path(max_length=63)]
) -> Response:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    if kind != "Bearer" or not token:
        raise ApiProblem("unauthorised", "the request has no token")
    serving = _place(app_state_of(request), place)
    body = await read_bytes(request, _LIMIT)
    try:
        return Response(await serving.answer(call, token, body), media_type="application/json")
    except Refused as error:
        raise ApiProblem("forbidden", str(error)) from error
    except NotFound as error:
        raise ApiProblem("not-found", str(error)) from error
    except TryAgain as error:
        raise ApiProblem("conflict", str(error)) from error


def _place(app_state: AppState, name: str) -> ServesNodes:
    place: object = app_state.control_plane.pool.providers.get(name)
    if not isinstance(place, ServesNodes):
        raise ApiProblem("no-joining", f"machines cannot join a place {name} here")
    return place


def _joinable(app_state: AppState) -> ServesNodes:
    found = next(
        (
            each
            for each in app_state.control_plane.pool.providers.values()
            if isinstance(each, ServesNodes)
        ),
        None,
    )
    if found is None:
        raise ApiProblem("no-joining", "no place that machines can join is enabled")
    return found
