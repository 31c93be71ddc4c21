"""Routes for maintenance of the server's own hosts: who holds what, cordon, drain and uncordon."""

from datetime import timedelta

from starlette.requests import Request

from cavvy.api.app_state import AppState
from cavvy.api.audit import note_change
from cavvy.api.errors import ApiProblem
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_query, name_user, on_installation
from cavvy.client import maintenance_wire as wire
from cavvy.control.decide.maintenance import find_end, find_loss
from cavvy.control.maintenance import ForeignNode, HostStatus, NodeHolder, UnknownNode
from cavvy.domain.accounts import Permission
from cavvy.store.base import ProjectFilter, is_visible

_LONGEST = timedelta(days=30)
_LONGEST_REASON = 200  # characters

router = RouteGroup("fleet", prefix="/v1")


@router.get(
    "/hosts", "List the server's own hosts, and who holds what.", rule=in_query(Permission.VIEW)
)
async def list_all(app_state: AppState, projects: ProjectFilter) -> list[wire.HostView]:
    if projects is not None and not projects:
        return []
    found = await app_state.control_plane.maintenance.list()
    return [_view(app_state, each, projects) for each in found]


@router.post(
    "/hosts/cordon",
    "Place no new work on an own host. Running work goes on.",
    rule=on_installation(Permission.OPERATE),
    when={UnknownNode: "node-not-found", ForeignNode: "node-not-own"},
)
async def cordon(request: Request, app_state: AppState, ask: wire.CordonAsk) -> wire.HostView:
    return await _cordon(request, app_state, ask, None)


@router.post(
    "/hosts/drain",
    "Cordon an own host, and let its work leave within a time.",
    rule=on_installation(Permission.OPERATE),
    when={UnknownNode: "node-not-found", ForeignNode: "node-not-own"},
)
async def drain(request: Request, app_state: AppState, ask: wire.DrainAsk) -> wire.HostView:
    if not 0 <= ask.within_s <= _LONGEST.total_seconds():
        raise ApiProblem(
            "invalid-request",
            f"`within_s` is {ask.within_s:g}; expected 0 to {_LONGEST.days} days, in seconds",
            "work that saves checkpoints leaves at once; 0 ends the rest after its grace period",
        )
    return await _cordon(request, app_state, ask, timedelta(seconds=ask.within_s))


@router.post(
    "/hosts/uncordon",
    "Place work on an own host again. Work that was told to leave leaves.",
    rule=on_installation(Permission.OPERATE),
    when={UnknownNode: "node-not-found", ForeignNode: "node-not-own"},
)
async def uncordon(request: Request, app_state: AppState, ask: wire.UncordonAsk) -> wire.HostView:
    note_change(request, after={"node": ask.node, "state": "ready"})
    status = await app_state.control_plane.maintenance.uncordon(ask.node)
    return _view(app_state, status, None)


async def _cordon(
    request: Request, app_state: AppState, ask: wire.CordonAsk, within: timedelta | None
) -> wire.HostView:
    if len(ask.reason) > _LONGEST_REASON or not ask.reason.isprintable():
        raise ApiProblem(
            "invalid-request", f"`reason` must be one line of at most {_LONGEST_REASON} characters"
        )
    state = {"node": ask.node, "state": "cordoned", "reason": ask.reason}
    if within is not None:
        state |= {"state": "drained", "within_s": str(within.total_seconds())}
    note_change(request, after=state)
    status = await app_state.control_plane.maintenance.cordon(
        ask.node, user=name_user(request, ask.user), reason=ask.reason, within=within
    )
    return _view(app_state, status, None)


def _view(app_state: AppState, status: HostStatus, projects: ProjectFilter) -> wire.HostView:
    host, state = status.host, status.state
    return wire.HostView(
        name=host.name,
        state=status.phase,
        why=state.describe() or host.problem,
        since=state.cordoned_at,
        drain_by=state.drain_by,
        cpus=host.cpus,
        memory_mib=host.memory_mib,
        devices=list(host.devices),
        kinds=list(host.kinds),
        sick=state.sick,
        holders=[_holder(app_state, each, projects) for each in status.holders],
    )


def _holder(app_state: AppState, holder: NodeHolder, projects: ProjectFilter) -> wire.HolderView:
    allocation, attempt, job = holder.allocation, holder.attempt, holder.job
    seen = is_visible(job.project, projects)
    loss = find_loss(attempt, job, app_state.now())
    until, source = find_end(attempt, job)
    return wire.HolderView(
        project=job.project if seen else "",
        job=job.name if seen else "",
        job_id=job.id if seen else "",
        user=job.user if seen else "",
        rank=allocation.rank,
        phase=attempt.phase,
        devices=list(allocation.devices),
        part=allocation.part,
        cpus=allocation.cpus,
        memory_mib=allocation.memory_mib,
        since=attempt.launched_at or attempt.created_at,
        until=until,
        until_from=source,
        lost_s=loss.length.total_seconds(),
        lost_micros=loss.cost.micros,
    )
