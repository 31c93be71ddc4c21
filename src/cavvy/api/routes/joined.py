"""Routes for machines that join the installation. Users invite and dismiss machines. Requests of
joined machines are forwarded to the provider that the machines joined.
"""

from datetime import timedelta
from typing import Annotated

from fastapi import Path
from starlette.requests import Request
from starlette.responses import Response

from cavvy.api.app_state import AppState
from cavvy.api.errors import ApiProblem
from cavvy.api.peers import passed_token
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import MACHINE, OPEN, on_installation
from cavvy.api.wire import MIB, read_bytes, view
from cavvy.client import wire
from cavvy.domain.accounts import Permission
from cavvy.providers.abilities import SERVES_NODES, JoinTerms, ServesNodes, ability
from cavvy.providers.base import NotFound, Refused, TryAgain

_LIMIT = 16 * MIB
_LONGEST_H = 24 * 30
ProviderPath = Annotated[str, Path(max_length=63)]

router = RouteGroup("fleet")


@router.post(
    "/v1/invitations",
    rule=on_installation(Permission.OPERATE),
    status=201,
    errors=("no-joining",),
    when={Refused: "join-refused"},
)
async def invite(app_state: AppState, ask: wire.InviteAsk) -> wire.InvitationView:
    """Create commands that join a machine; one of them must be run on that machine."""
    if not 0 < ask.valid_s <= _LONGEST_H * 3600:
        raise ApiProblem(
            "invalid-request", f"`valid_s` must be more than 0 and at most {_LONGEST_H} hours"
        )
    if not 0 <= ask.session_s <= _LONGEST_H * 3600 or (ask.session_s and ask.group):
        raise ApiProblem(
            "invalid-request",
            f"`session_s` must be at most {_LONGEST_H} hours, and needs a machine without a group",
        )
    serving = _joinable(app_state)
    if not serving:
        raise ApiProblem("no-joining", "no enabled provider accepts joining machines")
    terms = JoinTerms(
        name=ask.name,
        group=ask.group,
        valid=timedelta(seconds=ask.valid_s),
        labels=ask.labels,
        session=timedelta(seconds=ask.session_s) if ask.session_s else None,
    )
    return view(wire.InvitationView, await serving[0].invite(terms))


@router.get("/v1/joined", rule=on_installation(Permission.VIEW))
async def machines(app_state: AppState) -> list[wire.MachineRow]:
    """List the machines that joined."""
    serving = _joinable(app_state)
    return [view(wire.MachineRow, each) for one in serving for each in await one.machines()]


@router.delete(
    "/v1/joined/{name}", rule=on_installation(Permission.OPERATE), errors=("machine-not-found",)
)
async def dismiss(app_state: AppState, name: Annotated[str, Path(max_length=63)]) -> None:
    """Dismiss a machine: its work ends, and its token becomes invalid."""
    for serving in _joinable(app_state):
        try:
            await serving.dismiss(name)
        except NotFound:
            continue
        return
    raise ApiProblem("machine-not-found", f"no machine {name} has joined")


@router.get("/nodes/v1/{provider}/script", rule=OPEN, gives=True, when={Refused: "no-joining"})
async def script(app_state: AppState, provider: ProviderPath) -> Response:
    """Get the script that joins a machine."""
    text = await _serving(app_state, provider).script()
    return Response(text, media_type="text/x-shellscript")


@router.post(
    "/nodes/v1/{provider}/{call}",
    rule=MACHINE,
    sends=True,
    gives=True,
    errors=("no-joining",),
    when={Refused: "forbidden", NotFound: "not-found", TryAgain: "conflict"},
)
async def answer(
    request: Request,
    app_state: AppState,
    provider: ProviderPath,
    call: Annotated[str, Path(max_length=63)],
) -> Response:
    """Pass a call to the provider of a joined machine. The caller is the machine, or another server
    that asks about the machine.
    """
    signature = passed_token(request.scope)
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    if signature is None and (kind != "Bearer" or not token):
        raise ApiProblem("unauthorised", "the request has no token")
    serving = _serving(app_state, provider)
    body = await read_bytes(request, _LIMIT)
    if signature is None:
        answered = await serving.answer(call, token, body)
    elif app_state.peers.sent(request.scope, signature, body, app_state.now()):
        answered = await serving.answer_server(call, body)
    else:
        raise ApiProblem("forbidden", "a server's token is not valid for this request")
    return Response(answered, media_type="application/json")


def _serving(app_state: AppState, name: str) -> ServesNodes:
    provider = app_state.control_plane.pool.providers.get(name)
    serving = provider and ability(provider, SERVES_NODES)
    if not serving:
        raise ApiProblem("no-joining", f"this server has no provider {name} for joining machines")
    return serving


def _joinable(app_state: AppState) -> list[ServesNodes]:
    providers = app_state.control_plane.pool.providers.values()
    return [serving for each in providers if (serving := ability(each, SERVES_NODES))]
