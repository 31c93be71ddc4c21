"""Routes for machines that join the installation. Users invite and dismiss machines. Requests of
joined machines are forwarded to the provider that the machines joined.
"""

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from cavvy.api.app_state import AppState, app_state_of
from cavvy.api.errors import ApiProblem
from cavvy.api.openapi import document
from cavvy.api.peers import passed_token
from cavvy.api.rules import MACHINE, OPEN, on_installation
from cavvy.api.wire import MIB, done, read, read_bytes, reply, view
from cavvy.client import wire
from cavvy.domain.accounts import Permission
from cavvy.providers.abilities import SERVES_NODES, ServesNodes, ability
from cavvy.providers.base import NotFound, Refused, TryAgain

_LIMIT = 16 * MIB
_LONGEST_H = 24 * 30
ProviderPath = Annotated[str, Path(max_length=63)]

router = APIRouter(tags=["fleet"])


@router.post(
    "/v1/invitations",
    **document(
        "Create commands that join a machine; one of them must be run on that machine.",
        rule=on_installation(Permission.OPERATE),
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
            "invalid-request", f"`valid_s` must be more than 0 and at most {_LONGEST_H} hours"
        )
    serving = _joinable(app_state_of(request))
    if not serving:
        raise ApiProblem("no-joining", "no enabled provider accepts joining machines")
    try:
        made = await serving[0].invite(
            name=ask.name, group=ask.group, valid=timedelta(seconds=ask.valid_s)
        )
    except Refused as error:
        raise ApiProblem("join-refused", str(error)) from error
    return reply(view(wire.InvitationView, made), 201)


@router.get(
    "/v1/joined",
    **document(
        "List the machines that joined.",
        rule=on_installation(Permission.VIEW),
        answer=list[wire.MachineRow],
    ),
)
async def machines(request: Request) -> Response:
    serving = _joinable(app_state_of(request))
    return reply([view(wire.MachineRow, each) for one in serving for each in await one.machines()])


@router.delete(
    "/v1/joined/{name}",
    **document(
        "Dismiss a machine: its work ends, and its token becomes invalid.",
        rule=on_installation(Permission.OPERATE),
        status=204,
        errors=("machine-not-found",),
    ),
)
async def dismiss(request: Request, name: Annotated[str, Path(max_length=63)]) -> Response:
    for serving in _joinable(app_state_of(request)):
        try:
            await serving.dismiss(name)
        except NotFound:
            continue
        return done()
    raise ApiProblem("machine-not-found", f"no machine {name} has joined")


@router.get(
    "/nodes/v1/{provider}/script",
    **document(
        "Get the script that joins a machine.", rule=OPEN, gives=True, errors=("no-joining",)
    ),
)
async def script(request: Request, provider: ProviderPath) -> Response:
    try:
        text = await _serving(app_state_of(request), provider).script()
    except Refused as error:
        raise ApiProblem("no-joining", str(error)) from error
    return Response(text, media_type="text/x-shellscript")


@router.post(
    "/nodes/v1/{provider}/{call}",
    **document(
        "Pass a call to the provider of a joined machine. The caller is the machine, or another "
        "server that asks about the machine.",
        rule=MACHINE,
        sends=True,
        gives=True,
        errors=("forbidden", "no-joining"),
    ),
)
async def answer(
    request: Request, provider: ProviderPath, call: Annotated[str, Path(max_length=63)]
) -> Response:
    app_state, signature = app_state_of(request), passed_token(request.scope)
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    if signature is None and (kind != "Bearer" or not token):
        raise ApiProblem("unauthorised", "the request has no token")
    serving = _serving(app_state, provider)
    body = await read_bytes(request, _LIMIT)
    try:
        if signature is None:
            answered = await serving.answer(call, token, body)
        elif app_state.peers.sent(request.scope, signature, body, app_state.now()):
            answered = await serving.answer_server(call, body)
        else:
            raise ApiProblem("forbidden", "a server's token is not valid for this request")
        return Response(answered, media_type="application/json")
    except Refused as error:
        raise ApiProblem("forbidden", str(error)) from error
    except NotFound as error:
        raise ApiProblem("not-found", str(error)) from error
    except TryAgain as error:
        raise ApiProblem("conflict", str(error)) from error


def _serving(app_state: AppState, name: str) -> ServesNodes:
    provider = app_state.control_plane.pool.providers.get(name)
    serving = provider and ability(provider, SERVES_NODES)
    if not serving:
        raise ApiProblem("no-joining", f"this server has no provider {name} for joining machines")
    return serving


def _joinable(app_state: AppState) -> list[ServesNodes]:
    providers = app_state.control_plane.pool.providers.values()
    return [serving for each in providers if (serving := ability(each, SERVES_NODES))]
