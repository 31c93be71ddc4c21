"""Routes for dicts and queues: for users, and for the programs of jobs, which ask through the agent
of their node. The server reads no values.
"""

import re
from collections.abc import Sequence
from typing import Annotated

from fastapi import Path
from starlette.requests import Request

from cavvy.api.app_state import AppState
from cavvy.api.audit import note_change
from cavvy.api.errors import ApiProblem
from cavvy.api.routes.agents import GangQuery, RankQuery, enter_attempt
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.routes.submission import check_runner
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import GANG, in_path, name_user
from cavvy.api.wire import read
from cavvy.capabilities.functions.state.rows import StateCaller, StateFull, StateRows
from cavvy.capabilities.functions.state.wire import (
    MOST_BODY,
    MOST_VALUE,
    DictAnswer,
    DictAsk,
    Kind,
    QueueAnswer,
    QueueAsk,
    StateView,
)
from cavvy.domain.accounts import Permission
from cavvy.store.base import RowNotFound

router = RouteGroup("apps", prefix="/v1/projects/{project}")
agent_router = RouteGroup("agent", prefix="/agent/v1/asks/state")
_NAME = r"^[a-zA-Z0-9]([a-zA-Z0-9._-]*[a-zA-Z0-9])?$"
StateName = Annotated[str, Path(pattern=_NAME, max_length=64)]
_MISSING: dict[type[Exception], str] = {RowNotFound: "state-not-found"}
_LOOK_S = 2.0  # between two looks at what other servers have changed
_ERRORS = ("state-full", "value-too-large")


class NamedDictAsk(DictAsk, frozen=True, kw_only=True):
    """A request to the dict of this name."""

    name: str


class NamedQueueAsk(QueueAsk, frozen=True, kw_only=True):
    """A request to the queue of this name."""

    name: str


@router.get("/dicts", rule=in_path(Permission.VIEW))
async def list_dicts(app_state: AppState, project: ProjectPath) -> list[StateView]:
    """List the dicts of a project."""
    return await _rows(app_state).list_objects(project, "dict")


@router.post("/dicts/{name}", rule=in_path(Permission.RUN), errors=_ERRORS, limit=MOST_BODY)
async def use_dict(
    request: Request, app_state: AppState, project: ProjectPath, name: StateName, ask: DictAsk
) -> DictAnswer:
    """Read and change a dict, which the first change makes."""
    return await _use_dict(app_state, project, name, name_user(request, ""), ask)


@router.delete(
    "/dicts/{name}", rule=in_path(Permission.RUN), errors=("state-not-found",), when=_MISSING
)
async def delete_dict(
    request: Request, app_state: AppState, project: ProjectPath, name: StateName
) -> None:
    """Delete a dict."""
    await _delete(request, app_state, project, "dict", name)


@router.get("/queues", rule=in_path(Permission.VIEW))
async def list_queues(app_state: AppState, project: ProjectPath) -> list[StateView]:
    """List the queues of a project."""
    return await _rows(app_state).list_objects(project, "queue")


@router.post("/queues/{name}", rule=in_path(Permission.RUN), errors=_ERRORS, limit=MOST_BODY)
async def use_queue(
    request: Request, app_state: AppState, project: ProjectPath, name: StateName, ask: QueueAsk
) -> QueueAnswer:
    """Read and change a queue, which the first change makes."""
    return await _use_queue(request, app_state, project, name, name_user(request, ""), ask)


@router.delete(
    "/queues/{name}", rule=in_path(Permission.RUN), errors=("state-not-found",), when=_MISSING
)
async def delete_queue(
    request: Request, app_state: AppState, project: ProjectPath, name: StateName
) -> None:
    """Delete a queue."""
    await _delete(request, app_state, project, "queue", name)


@agent_router.post("/dict", rule=GANG, ask=NamedDictAsk, errors=("role-needed", *_ERRORS))
async def ask_dict(request: Request, gang: GangQuery, rank: RankQuery) -> DictAnswer:
    """Read and change a dict of the job's project."""
    app_state, project, user = await _enter(request, gang, rank)
    ask = await read(request, NamedDictAsk, MOST_BODY)
    _check_name(ask.name)
    return await _use_dict(app_state, project, ask.name, user, ask)


@agent_router.post("/queue", rule=GANG, ask=NamedQueueAsk, errors=("role-needed", *_ERRORS))
async def ask_queue(request: Request, gang: GangQuery, rank: RankQuery) -> QueueAnswer:
    """Read and change a queue of the job's project."""
    app_state, project, user = await _enter(request, gang, rank)
    ask = await read(request, NamedQueueAsk, MOST_BODY)
    _check_name(ask.name)
    return await _use_queue(request, app_state, project, ask.name, user, ask)


async def _enter(request: Request, gang: str, rank: int) -> tuple[AppState, str, str]:
    """Return the project and the user of the job whose program asks, as long as the user may run
    jobs there. Raises ApiProblem."""
    app_state, attempt = await enter_attempt(request, gang, rank)
    job = await app_state.store.job(attempt.job_id)
    await check_runner(app_state, job.project, job.account, job.since)
    return app_state, job.project, job.user


async def _use_dict(
    app_state: AppState, project: str, name: str, user: str, ask: DictAsk
) -> DictAnswer:
    if ask.op == "put" and len(ask.keys) != len(ask.data):
        raise ApiProblem("invalid-request", "`keys` and `data` must have the same length")
    await _check(app_state, project, ask.op, ask.data)
    caller = StateCaller(project, name, user, app_state.now())
    try:
        return await _rows(app_state).use_dict(caller, ask)
    except StateFull as error:
        raise ApiProblem("state-full", str(error)) from error


async def _use_queue(
    request: Request, app_state: AppState, project: str, name: str, user: str, ask: QueueAsk
) -> QueueAnswer:
    """Answer a request to a queue, which waits for items or for room."""
    await _check(app_state, project, ask.op, ask.data)
    rows, key = _rows(app_state), f"queue/{project}/{name}"
    with app_state.watch.listen([key], ask.wait_s) as listener:
        while True:
            caller = StateCaller(project, name, user, app_state.now())
            try:
                answer = await rows.use_queue(caller, ask)
            except StateFull as error:
                raise ApiProblem("state-full", str(error)) from error
            if not answer.full and (ask.op not in ("get", "list") or answer.items):
                break
            # one whose caller is gone must take no item
            if listener.left_s <= 0 or app_state.watch.closed or await request.is_disconnected():
                return answer
            await listener.wait(_LOOK_S)
    if ask.op not in ("len", "list") and answer.count:
        app_state.watch.wake(key)
    return answer


async def _check(app_state: AppState, project: str, op: str, data: Sequence[bytes]) -> None:
    """Raise ApiProblem if values are too large, or if the project takes no new ones."""
    if (size := max(map(len, data), default=0)) > MOST_VALUE:
        raise ApiProblem(
            "value-too-large", f"a value has {size:,} bytes, and at most {MOST_VALUE:,} are kept"
        )
    if op == "put":
        await app_state.store.archive.check(project)


async def _delete(
    request: Request, app_state: AppState, project: str, kind: Kind, name: str
) -> None:
    await _rows(app_state).delete(project, kind, name)
    note_change(request, before={kind: name}, after=None)


def _check_name(name: str) -> None:
    """Raise ApiProblem if this is no name of a dict or queue."""
    if len(name) > 64 or re.fullmatch(_NAME, name) is None:
        raise ApiProblem("invalid-request", f"{name[:100]!r} is no name of a dict or queue")


def _rows(app_state: AppState) -> StateRows:
    return StateRows(*app_state.store.database)
