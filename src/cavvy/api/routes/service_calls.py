"""Routes for the calls in the queue of a service."""

import re
from collections.abc import Collection
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from cavvy.api.app_state import app_state_of
from cavvy.api.audit import note_change
from cavvy.api.errors import ApiProblem, RetryLater
from cavvy.api.openapi import document
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.routes.services import ServicePath
from cavvy.api.rules import in_path, name_user
from cavvy.api.wire import MIB, read, reply, view
from cavvy.client import queue_wire as wire
from cavvy.control.serving.call_requests import CallReused, QueuedCallRequests, QueueFull
from cavvy.domain.accounts import Permission
from cavvy.domain.queued_calls import (
    ID_PATTERN,
    MOST_BYTES,
    CallState,
    QueuedCall,
    names_parent,
)
from cavvy.store.base import RowNotFound

router = APIRouter(prefix="/v1/projects/{project}/services/{name}/calls", tags=["services"])
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}"
_MOST_HEADERS = 50
FULL_S = 10  # seconds until a call may be submitted again after the queue was full
_LONGEST = 4096  # characters of a path or of a header
CallPath = Annotated[str, Path(pattern=ID_PATTERN, description="The call's ID.")]
# the state `forgotten` is not shown to users
CallStateQuery = Annotated[Literal["waiting", "done", "dead"], Query(description="The state.")]


@router.post(
    "",
    **document(
        "Add a call to the queue of a service. If a call with this ID exists, no call is added.",
        rule=in_path(Permission.RUN),
        ask=wire.QueuedCallAsk,
        answer=wire.QueuedCallView,
        status=201,
        errors=("service-not-found", "key-reused", "queue-full", "too-large"),
    ),
)
async def submit(request: Request, project: ProjectPath, name: ServicePath) -> Response:
    ask = await read(request, wire.QueuedCallAsk, 2 * MIB)
    _check(ask)
    now = app_state_of(request).now()
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
        found, new = await _calls(request).submit(call, ask.body)
    except RowNotFound as error:
        raise ApiProblem("service-not-found", str(error)) from error
    except CallReused as error:
        raise ApiProblem("key-reused", str(error), "give this call another ID") from error
    except QueueFull as error:
        raise RetryLater("queue-full", str(error), after_s=FULL_S) from error
    return reply(_view(found), 201 if new else 200)


@router.get(
    "",
    **document(
        "List calls of a service by ID, and count the calls in each state.",
        rule=in_path(Permission.RUN),
        answer=wire.CallQueueView,
        errors=("service-not-found",),
    ),
)
async def list_calls(
    request: Request,
    project: ProjectPath,
    name: ServicePath,
    state: CallStateQuery | None = None,
    after: Annotated[str, Query(max_length=128)] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    kind = None if state is None else CallState(state)
    try:
        found, counts = await _calls(request).list(project, name, kind, after, limit)
    except RowNotFound as error:
        raise ApiProblem("service-not-found", str(error)) from error
    running = _calls(request).list_running(project, name) or frozenset()
    shown = {str(state): n for state, n in counts.items() if state is not CallState.FORGOTTEN}
    return reply(wire.CallQueueView(calls=[_view(each, running) for each in found], counts=shown))


@router.get(
    "/{call}",
    **document(
        "Get one call with its result.",
        rule=in_path(Permission.RUN),
        answer=wire.QueuedResultView,
        errors=("call-not-found",),
    ),
)
async def get(
    request: Request, project: ProjectPath, name: ServicePath, call: CallPath
) -> Response:
    try:
        found, body = await _calls(request).get(project, name, call)
    except RowNotFound as error:
        raise ApiProblem("call-not-found", str(error)) from error
    running = _calls(request).list_running(project, name) or frozenset()
    return reply(wire.QueuedResultView(call=_view(found, running), body=body))


@router.post(
    "/retry",
    **document(
        "Send all dead calls of a service again.",
        rule=in_path(Permission.RUN),
        answer=wire.CallCount,
        errors=("service-not-found",),
    ),
)
async def retry_all(request: Request, project: ProjectPath, name: ServicePath) -> Response:
    try:
        return reply(wire.CallCount(calls=await _calls(request).retry(project, name, None)))
    except RowNotFound as error:
        raise ApiProblem("service-not-found", str(error)) from error


@router.post(
    "/{call}/retry",
    **document(
        "Send a dead call again.",
        rule=in_path(Permission.RUN),
        answer=wire.CallCount,
        errors=("call-not-found",),
    ),
)
async def retry(
    request: Request, project: ProjectPath, name: ServicePath, call: CallPath
) -> Response:
    try:
        return reply(wire.CallCount(calls=await _calls(request).retry(project, name, call)))
    except RowNotFound as error:
        raise ApiProblem("call-not-found", str(error)) from error


@router.delete(
    "",
    **document(
        "Delete the calls of a service that are in one state.",
        rule=in_path(Permission.RUN),
        answer=wire.CallCount,
        errors=("service-not-found",),
    ),
)
async def purge(
    request: Request, project: ProjectPath, name: ServicePath, state: CallStateQuery
) -> Response:
    try:
        count = await _calls(request).purge(project, name, CallState(state))
    except RowNotFound as error:
        raise ApiProblem("service-not-found", str(error)) from error
    return reply(wire.CallCount(calls=count))


def _calls(request: Request) -> QueuedCallRequests:
    return app_state_of(request).control_plane.services.calls


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
