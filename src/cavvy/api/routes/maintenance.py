"""Routes for the installation's own hosts: who holds what, cordon, drain and uncordon, and
reservations; and for machines that join the installation. Users invite and dismiss machines;
requests of joined machines are forwarded to the provider that the machines joined.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from re import compile as pattern
from typing import Annotated

from fastapi import Path
from starlette.requests import Request
from starlette.responses import Response

from cavvy.api.app_state import AppState
from cavvy.api.audit import note_change
from cavvy.api.errors import ApiProblem
from cavvy.api.peers import passed_token
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import MACHINE, OPEN, in_query, name_user, on_installation
from cavvy.api.wire import MIB, read_bytes, view
from cavvy.client import maintenance_wire, wire
from cavvy.control.decide.maintenance import find_end, find_loss
from cavvy.control.decide.queue_state import GangRow
from cavvy.control.maintenance import ForeignNode, HostStatus, NodeHolder, UnknownNode
from cavvy.control.reservations import (
    ReservationClash,
    ReservationRefused,
    ReservationRequest,
)
from cavvy.domain.accounts import Permission
from cavvy.domain.maintenance import Reservation
from cavvy.domain.values import replace
from cavvy.providers.abilities import SERVES_NODES, JoinTerms, ServesNodes, ability
from cavvy.providers.base import NotFound, Refused, TryAgain
from cavvy.store.base import ProjectFilter, RowNotFound, is_visible

_LONGEST = timedelta(days=30)
_LONGEST_REASON = 200  # characters
_LONGEST_S = 366 * 86_400
_NO_NODE: Mapping[type[Exception], str] = {
    UnknownNode: "node-not-found",
    ForeignNode: "node-not-own",
}
_NAME = pattern(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")

router = RouteGroup("fleet", prefix="/v1")


@router.get("/hosts", rule=in_query(Permission.VIEW))
async def list_all(app_state: AppState, projects: ProjectFilter) -> list[maintenance_wire.HostView]:
    """List the server's own hosts, and who holds what."""
    if projects is not None and not projects:
        return []
    found = await app_state.control_plane.maintenance.list()
    reserved = await app_state.control_plane.reservations.list()
    running = {
        each.attempt.id: GangRow(attempt=each.attempt, job=each.job)
        for status in found
        for each in status.holders
        if find_end(each.attempt, each.job)[0] is None
    }
    estimator, now = app_state.control_plane.start_estimator, app_state.now()
    ends = await estimator.estimate_ends([*running.values()], now) if running else {}
    return [_view(app_state, each, projects, reserved, ends) for each in found]


@router.post("/hosts/cordon", rule=on_installation(Permission.OPERATE), when=_NO_NODE)
async def cordon(
    request: Request, app_state: AppState, ask: maintenance_wire.CordonAsk
) -> maintenance_wire.HostView:
    """Place no new work on an own host. Running work goes on."""
    return await _cordon(request, app_state, ask, None)


@router.post("/hosts/drain", rule=on_installation(Permission.OPERATE), when=_NO_NODE)
async def drain(
    request: Request, app_state: AppState, ask: maintenance_wire.DrainAsk
) -> maintenance_wire.HostView:
    """Cordon an own host, and let its work leave within a time."""
    if not 0 <= ask.within_s <= _LONGEST.total_seconds():
        raise ApiProblem(
            "invalid-request",
            f"`within_s` is {ask.within_s:g}; expected 0 to {_LONGEST.days} days, in seconds",
            "work that saves checkpoints leaves at once; 0 ends the rest after its grace period",
        )
    return await _cordon(request, app_state, ask, timedelta(seconds=ask.within_s))


@router.post("/hosts/uncordon", rule=on_installation(Permission.OPERATE), when=_NO_NODE)
async def uncordon(
    request: Request, app_state: AppState, ask: maintenance_wire.UncordonAsk
) -> maintenance_wire.HostView:
    """Place work on an own host again. Work that was told to leave leaves."""
    note_change(request, after={"node": ask.node, "state": "ready"})
    status = await app_state.control_plane.maintenance.uncordon(ask.node)
    return _view(app_state, status, None)


@router.get("/reservations", rule=in_query(Permission.VIEW))
async def list_reservations(
    app_state: AppState, projects: ProjectFilter
) -> list[maintenance_wire.ReservationView]:
    """List the reservations of own hosts that have not ended."""
    found = await app_state.control_plane.reservations.list()
    return [_reservation(each) for each in found if is_visible(each.project, projects)]


@router.post(
    "/reservations",
    rule=on_installation(Permission.OPERATE),
    status=201,
    when={
        **_NO_NODE,
        ReservationRefused: "reservation-refused",
        ReservationClash: "reservation-clash",
    },
)
async def add_reservation(
    request: Request, app_state: AppState, ask: maintenance_wire.ReservationAsk
) -> maintenance_wire.ReservationView:
    """Reserve own hosts or GPUs for a project."""
    _check_text("reason", ask.reason)
    _check_text("user", ask.user)
    if ask.name and not _NAME.fullmatch(ask.name):
        raise ApiProblem(
            "invalid-request", "`name` has at most 63 lower-case letters, digits and hyphens"
        )
    begins_at = _read_time(ask.begins_at)
    if begins_at is None or not 0 < ask.length_s <= _LONGEST_S:
        raise ApiProblem(
            "invalid-request",
            "`begins_at` needs a time zone, and `length_s` is more than 0 and at most a year",
        )
    note_change(
        request,
        after={
            "project": ask.project,
            "nodes": ask.nodes,
            "gpus": ask.gpus,
            "begins_at": ask.begins_at.isoformat(),
            "length_s": str(ask.length_s),
        },
    )
    wanted = ReservationRequest(
        project=ask.project,
        user=ask.user,
        name=ask.name,
        nodes=ask.nodes,
        gpus=ask.gpus,
        begins_at=begins_at,
        length=timedelta(seconds=ask.length_s),
        reason=ask.reason,
        made_by=name_user(request, ask.made_by),
        moves=ask.moves,
    )
    return _reservation(await app_state.control_plane.reservations.add(wanted))


@router.delete(
    "/reservations/{name}",
    rule=on_installation(Permission.OPERATE),
    when={RowNotFound: "reservation-not-found"},
)
async def delete_reservation(
    app_state: AppState, name: Annotated[str, Path(max_length=63)]
) -> None:
    """Give what is reserved back."""
    await app_state.control_plane.reservations.remove(name)


async def _cordon(
    request: Request, app_state: AppState, ask: maintenance_wire.HostAsk, within: timedelta | None
) -> maintenance_wire.HostView:
    _check_text("reason", ask.reason)
    state = {"node": ask.node, "state": "cordoned", "reason": ask.reason}
    if within is not None:
        state |= {"state": "drained", "within_s": str(within.total_seconds())}
    note_change(request, after=state)
    status = await app_state.control_plane.maintenance.cordon(
        ask.node,
        user=name_user(request, ask.user),
        reason=ask.reason,
        within=within,
        gpus=ask.gpus if isinstance(ask, maintenance_wire.CordonAsk) else (),
    )
    return _view(app_state, status, None)


def _read_time(time: datetime) -> datetime | None:
    """Return the time in UTC, or None if it has no time zone, or if UTC has no such time."""
    with suppress(OverflowError):
        return None if time.tzinfo is None else time.astimezone(UTC)
    return None


def _check_text(name: str, text: str) -> None:
    if len(text) > _LONGEST_REASON or not text.isprintable():
        raise ApiProblem(
            "invalid-request", f"`{name}` must be one line of at most {_LONGEST_REASON} characters"
        )


def _reservation(found: Reservation) -> maintenance_wire.ReservationView:
    parts = [view(maintenance_wire.ReservedPartView, part) for part in found.parts]
    gpus = sum(len(part.devices) for part in found.parts)
    return view(maintenance_wire.ReservationView, found, parts=parts, gpus=gpus)


def _view(
    app_state: AppState,
    status: HostStatus,
    projects: ProjectFilter,
    reserved: Sequence[Reservation] = (),
    ends: Mapping[str, datetime] | None = None,
) -> maintenance_wire.HostView:
    host, state = status.host, status.state
    mine = [each for each in reserved if any(part.host == host.name for part in each.parts)]
    told = [
        each
        if is_visible(each.project, projects)
        else replace(each, project="", user="", name="", reason="")
        for each in mine
    ]
    return view(
        maintenance_wire.HostView,
        host,
        state=status.phase,
        why=state.describe() or host.problem,
        since=state.cordoned_at,
        drain_by=state.drain_by,
        sick=dict(status.sick),
        holders=[_holder(app_state, each, projects, ends or {}) for each in status.holders],
        reservations=[_reservation(each) for each in told],
    )


def _holder(
    app_state: AppState,
    holder: NodeHolder,
    projects: ProjectFilter,
    ends: Mapping[str, datetime],
) -> maintenance_wire.HolderView:
    allocation, attempt, job = holder.allocation, holder.attempt, holder.job
    seen = is_visible(job.project, projects)
    loss = find_loss(attempt, job, app_state.now())
    until, source = find_end(attempt, job)
    if until is None and attempt.id in ends:
        until, source = ends[attempt.id], "estimate"
    return view(
        maintenance_wire.HolderView,
        allocation,
        project=job.project if seen else "",
        job=job.name if seen else "",
        job_id=job.id if seen else "",
        user=job.user if seen else "",
        phase=attempt.phase,
        since=attempt.launched_at or attempt.created_at,
        until=until,
        until_from=source,
        lost_s=loss.length.total_seconds(),
        lost_micros=loss.cost.micros,
    )


_LIMIT = 16 * MIB
_LONGEST_H = 24 * 30
ProviderPath = Annotated[str, Path(max_length=63)]

joined_router = RouteGroup("fleet")


@joined_router.post(
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


@joined_router.get("/v1/joined", rule=on_installation(Permission.VIEW))
async def machines(app_state: AppState) -> list[wire.MachineRow]:
    """List the machines that joined."""
    serving = _joinable(app_state)
    return [view(wire.MachineRow, each) for one in serving for each in await one.machines()]


@joined_router.delete(
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


@joined_router.get(
    "/nodes/v1/{provider}/script", rule=OPEN, gives=True, when={Refused: "no-joining"}
)
async def script(app_state: AppState, provider: ProviderPath) -> Response:
    """Get the script that joins a machine."""
    text = await _serving(app_state, provider).script()
    return Response(text, media_type="text/x-shellscript")


@joined_router.post(
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
