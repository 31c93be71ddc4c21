"""Routes for the calls in the queue of a service, and the route to which other systems send signed
requests that become calls: the webhooks of services.
"""

import asyncio
import re
from collections.abc import Collection
from typing import Annotated, Literal

from fastapi import Path, Query
from starlette.requests import Request
from starlette.responses import Response

from cavvy.api.app_state import AppState
from cavvy.api.audit import note_change, note_reading, note_refusal
from cavvy.api.errors import ApiProblem, RetryLater
from cavvy.api.hook_limits import TooManyDeliveries
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import OPEN, in_path, name_user
from cavvy.api.wire import MIB, read_bytes, reply, view
from cavvy.capabilities.serving import call_wire as wire
from cavvy.capabilities.serving.call_wire import DeliveryView
from cavvy.capabilities.serving.cloud_events import InvalidEvent
from cavvy.capabilities.serving.control.call_queue import (
    CallReused,
    QueuedCallRequests,
    QueueFull,
    UnsignedDelivery,
)
from cavvy.capabilities.serving.decide.webhook_calls import ALLOWED_ORIGIN, ALLOWED_RATE, grant
from cavvy.capabilities.serving.keeper import find_requests
from cavvy.capabilities.serving.queued_calls import (
    ID_PATTERN,
    MOST_BYTES,
    CallState,
    QueuedCall,
)
from cavvy.capabilities.serving.routes.services import ServicePath
from cavvy.domain.accounts import Permission
from cavvy.spec.fields.places import names_parent
from cavvy.store.base import RowNotFound

router = RouteGroup("services", prefix="/v1/projects/{project}/services/{name}/calls")
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}"
_MOST_HEADERS = 50
FULL_S = 10  # seconds until a call may be submitted again after the queue was full
_LONGEST = 4096  # characters of a path or of a header
CallPath = Annotated[str, Path(pattern=ID_PATTERN, description="The call's ID.")]
# the state `forgotten` is not shown to users
CallStateQuery = Annotated[Literal["waiting", "done", "dead"], Query(description="The state.")]


@router.post(
    "",
    rule=in_path(Permission.RUN),
    answer=wire.QueuedCallView,
    status=201,
    errors=("key-reused", "queue-full", "too-large"),
    when={RowNotFound: "service-not-found"},
    limit=2 * MIB,
)
async def submit(
    request: Request,
    app_state: AppState,
    project: ProjectPath,
    name: ServicePath,
    ask: wire.QueuedCallAsk,
) -> Response:
    """Add a call to the queue of a service. If a call with this ID exists, no call is added."""
    _check(ask)
    now = app_state.now()
    note_change(request, after={"call": ask.id, "path": ask.path})
    call = QueuedCall(
        project=project,
        service=name,
        id=ask.id,
        method=ask.method,
        path=ask.path,
        headers=ask.headers,
        user=name_user(request, ""),
        submitted_at=now,
        due_at=now,
    )
    try:
        found, new = await _calls(app_state).submit(call, ask.body)
    except CallReused as error:
        raise ApiProblem("key-reused", str(error), "give this call another ID") from error
    except QueueFull as error:
        raise RetryLater("queue-full", str(error), after_s=FULL_S) from error
    return reply(_view(found), 201 if new else 200)


@router.get("", rule=in_path(Permission.RUN), when={RowNotFound: "service-not-found"})
async def list_calls(
    app_state: AppState,
    project: ProjectPath,
    name: ServicePath,
    state: CallStateQuery | None = None,
    after: Annotated[str, Query(max_length=128)] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> wire.CallQueueView:
    """List calls of a service by ID, and count the calls in each state."""
    kind = None if state is None else CallState(state)
    found, counts = await _calls(app_state).list(project, name, kind, after, limit)
    running = _calls(app_state).list_running(project, name) or frozenset()
    shown = {str(state): n for state, n in counts.items() if state is not CallState.FORGOTTEN}
    return wire.CallQueueView(calls=[_view(each, running) for each in found], counts=shown)


@router.get("/{call}", rule=in_path(Permission.RUN), when={RowNotFound: "call-not-found"})
async def get(
    app_state: AppState, project: ProjectPath, name: ServicePath, call: CallPath
) -> wire.QueuedResultView:
    """Get one call with its result."""
    found, body = await _calls(app_state).get(project, name, call)
    running = _calls(app_state).list_running(project, name) or frozenset()
    return wire.QueuedResultView(call=_view(found, running), body=body)


@router.post("/retry", rule=in_path(Permission.RUN), when={RowNotFound: "service-not-found"})
async def retry_all(app_state: AppState, project: ProjectPath, name: ServicePath) -> wire.CallCount:
    """Send all dead calls of a service again."""
    return wire.CallCount(calls=await _calls(app_state).retry(project, name, None))


@router.post("/{call}/retry", rule=in_path(Permission.RUN), when={RowNotFound: "call-not-found"})
async def retry(
    app_state: AppState, project: ProjectPath, name: ServicePath, call: CallPath
) -> wire.CallCount:
    """Send a dead call again."""
    return wire.CallCount(calls=await _calls(app_state).retry(project, name, call))


@router.delete("", rule=in_path(Permission.RUN), when={RowNotFound: "service-not-found"})
async def purge(
    app_state: AppState, project: ProjectPath, name: ServicePath, state: CallStateQuery
) -> wire.CallCount:
    """Delete the calls of a service that are in one state."""
    count = await _calls(app_state).purge(project, name, CallState(state))
    return wire.CallCount(calls=count)


def _calls(app_state: AppState) -> QueuedCallRequests:
    return find_requests(app_state).calls


def _view(call: QueuedCall, running: Collection[str] = ()) -> wire.QueuedCallView:
    shown = "" if call.object is None else f"{call.object.url}/{call.object.key}"
    runs = call.state is CallState.WAITING and call.id in running
    return view(wire.QueuedCallView, call, state=str(call.state), object=shown, running=runs)


def _check(ask: wire.QueuedCallAsk) -> None:
    """Raise ApiProblem if a field of the call is invalid."""
    if ask.id and not re.fullmatch(ID_PATTERN, ask.id):
        raise ApiProblem("invalid-request", f"`id` must match {ID_PATTERN}")
    if not re.fullmatch(_TOKEN, ask.method):
        raise ApiProblem("invalid-request", "`method` must be a method such as POST")
    if not ask.path.startswith("/") or len(ask.path) > _LONGEST or names_parent(ask.path):
        raise ApiProblem("invalid-request", "`path` must be a path such as /v1/files, without ..")
    if len(ask.headers) > _MOST_HEADERS:
        raise ApiProblem("invalid-request", f"`headers` has more than {_MOST_HEADERS} headers")
    for name, value in ask.headers.items():
        fits = len(value) <= _LONGEST and value.isprintable() and value.isascii()
        if not re.fullmatch(_TOKEN, name) or not fits:
            raise ApiProblem("invalid-request", f"`headers` contains an invalid header: {name!r}")
    if len(ask.body) > MOST_BYTES:
        raise ApiProblem("too-large", f"`body` has more than {MOST_BYTES:,} bytes")


hook_router = RouteGroup("services", prefix="/hooks/v1")
OwnerPath = Annotated[
    str, Path(max_length=63, pattern="^[a-z0-9-]+$", description="The project of the service.")
]
HookPath = Annotated[
    str, Path(max_length=63, pattern="^[a-z0-9-]+$", description="The webhook's name.")
]


@hook_router.post(
    "/{owner}/{name}/{hook}",
    rule=OPEN,
    answer=DeliveryView,
    status=202,
    errors=("signature-wrong", "too-many-deliveries", "queue-full", "too-large", "too-slow"),
    sends=True,
)
async def deliver(
    request: Request, app_state: AppState, owner: OwnerPath, name: ServicePath, hook: HookPath
) -> Response:
    """Accept a request that another system has signed with the secret of a webhook, and add its
    calls to the queue of the service.
    """
    note_reading(request)  # the queued calls are the record
    address = request.client.host if request.client else ""
    webhook = f"{owner}/{name}/{hook}"
    try:
        with app_state.hook_limits.enter(address, webhook, app_state.now()):
            return await _accept(request, app_state, (owner, name, hook))
    except TooManyDeliveries as error:
        raise RetryLater("too-many-deliveries", str(error), after_s=error.after_s) from error
    except QueueFull as error:
        raise RetryLater("queue-full", str(error), after_s=FULL_S) from error
    except UnsignedDelivery as error:
        app_state.hook_limits.count_wrong(address, webhook)
        note_refusal(request.scope, "signature-wrong")
        message = (
            "the webhook does not exist, or the request is not signed with the webhook's secret"
        )
        raise ApiProblem("signature-wrong", message) from error
    except InvalidEvent as error:
        raise ApiProblem("invalid-request", f"the request is not a CloudEvent 1.0: {error}") from (
            error
        )


@hook_router.options(
    "/{owner}/{name}/{hook}",
    rule=OPEN,
    errors=("too-many-deliveries",),
    headers=("Allow", ALLOWED_ORIGIN, ALLOWED_RATE),
)
async def permit(
    request: Request, app_state: AppState, owner: OwnerPath, name: ServicePath, hook: HookPath
) -> Response:
    """Permit a sender of CloudEvents to send to a webhook, if the sender asks for permission first.
    Existing and missing webhooks give the same answer; only signed requests are accepted.
    """
    note_reading(request)
    address = request.client.host if request.client else ""
    try:
        with app_state.hook_limits.enter(address, f"{owner}/{name}/{hook}", app_state.now()):
            return Response(headers={"Allow": "OPTIONS, POST", **grant(request.headers)})
    except TooManyDeliveries as error:
        raise RetryLater("too-many-deliveries", str(error), after_s=error.after_s) from error


async def _accept(request: Request, app_state: AppState, place: tuple[str, str, str]) -> Response:
    body = await read_bytes(request, MOST_BYTES)
    headers = {name.lower(): value for name, value in request.headers.items()}

    async def read_secret(project: str, name: str) -> str | None:
        secrets = await app_state.store.secrets(project)
        sealed = next((each.sealed for each in secrets if each.name == name), None)
        if sealed is None:
            return None
        return await asyncio.to_thread(app_state.sealer.unseal, project, name, sealed)

    deliveries = find_requests(app_state).deliveries
    found = await deliveries.accept(place, headers, body, read_secret)
    if found.challenge is not None:
        return reply({"challenge": found.challenge})
    return reply(DeliveryView(calls=found.calls, new=found.new), 202)
