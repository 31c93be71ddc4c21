"""Routes for commands that users run in the environment of a job."""

from contextlib import suppress
from typing import Annotated

from fastapi import Path, Query
from starlette.requests import Request
from starlette.responses import Response

from cavvy.api.app_state import AppState
from cavvy.api.audit import note_reading
from cavvy.api.errors import ApiProblem
from cavvy.api.execs import JobExec
from cavvy.api.notifier import ChangeListener
from cavvy.api.routes.jobs import JobPath, ProjectPath, WaitQuery, find_job, named, say_what_to_do
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path, name_user
from cavvy.api.wire import MIB, PositionQuery, read_bytes, reply
from cavvy.client import wire
from cavvy.domain.accounts import Permission
from cavvy.domain.events import Event
from cavvy.domain.jobs import JOB_ENDS, Attempt, AttemptPhase, JobRecord, NodePhase
from cavvy.store.base import AtomicWrite, RowNotFound

router = RouteGroup("jobs", prefix="/v1/projects/{project}/jobs/{name}/exec")
_INPUT_LIMIT = 2 * MIB
# how many seconds a request with input waits until the node has accepted earlier input
_ROOM_S = 20.0
_ANNOUNCE_S = 2.0  # seconds between two announcements of a command that no agent has taken
AccessQuery = Annotated[str, Query(max_length=64)]
_ALIVE = (NodePhase.CLAIMED, NodePhase.SETUP, NodePhase.RUNNING)


@router.post(
    "",
    rule=in_path(Permission.RUN),
    status=201,
    errors=("job-not-found", "job-not-running", "agent-elsewhere"),
)
async def start(
    request: Request,
    app_state: AppState,
    project: ProjectPath,
    name: JobPath,
    ask: wire.ExecAsk,
    user: AccessQuery = "",
    program: AccessQuery = "",
) -> wire.ExecStarted:
    """Run a command in the environment of a running job.

    `user` and `program` are shown in the job's events: who opens a session, and with which command
    of Cavvy. An account's name replaces `user`.
    """
    who = name_user(request, user) or "a user"
    if (
        bool(ask.command) is ask.session
        or ask.rank < 0
        or any("\0" in word for word in ask.command)
    ):
        raise ApiProblem(
            "invalid-request",
            "`command` must be a non-empty list of strings without NUL (for a session, it must be "
            "empty), and `rank` must be 0 or greater",
        )
    job = await _find(app_state, project, name)
    if ask.rank >= job.task.nodes:
        ranks = "rank 0 alone" if job.task.nodes == 1 else f"ranks 0 to {job.task.nodes - 1}"
        hint = f"`cavvy status {named(job)}` lists the job's nodes by rank"
        raise ApiProblem(
            "job-not-running", f"{job.name} has no rank {ask.rank}: it has {ranks}", hint
        )
    for attempt in await app_state.store.attempts(job.id):
        if attempt.phase is AttemptPhase.RUNNING and ask.rank < attempt.nodes:
            node = await app_state.store.node(attempt.id, ask.rank)
            if node.phase in _ALIVE:
                _check_server(app_state, attempt, ask.rank)
                exec_id = await _start(app_state, job, attempt, ask, _say_access(ask, who, program))
                return wire.ExecStarted(id=exec_id)
    told = f"rank {ask.rank} of {job.name} is not running: the job is {job.phase}"
    raise ApiProblem("job-not-running", told, say_what_to_do(job))


@router.get(
    "/{exec_id}",
    rule=in_path(Permission.RUN),
    gives=True,
    headers=("Cavvy-Exit-Code",),
    errors=("job-not-found", "exec-not-found", "agent-protocol"),
)
async def output(
    request: Request,
    app_state: AppState,
    project: ProjectPath,
    name: JobPath,
    exec_id: Annotated[str, Path(max_length=64)],
    offset: PositionQuery = 0,
    wait_s: WaitQuery = 0,
) -> Response:
    """Get a part of a command's output; at the end of the output, a header has the exit code."""
    if (keeper := app_state.peers.find_keeper(exec_id)) is not None:
        return await app_state.peers.pass_on(request, keeper)
    job = await _find(app_state, project, name)
    with app_state.watch.listen([exec_id, job.id], wait_s) as listener:
        while True:
            found = app_state.execs.get(exec_id, job.id)
            if found.problem:
                raise ApiProblem(
                    "agent-protocol",
                    found.problem,
                    "use `cavvy exec`, or open a session in the job's next attempt",
                )
            app_state.execs.taken(found, offset)
            data = bytes(found.data[max(0, offset - found.start) :])
            if data or found.exit_code is not None:
                break
            if app_state.execs.end_lost(found):
                raise ApiProblem(
                    "exec-not-found",
                    f"the agent on rank {found.rank} of {job.name} no longer answers about the "
                    f"command {exec_id}, whose exit code is therefore unknown",
                )
            open_gangs = {attempt.gang for attempt in await app_state.store.open_attempts(project)}
            if found.gang not in open_gangs:
                app_state.execs.end_with(job.id)
                continue
            if not await _wait(app_state, listener, found):
                break
    headers = {} if found.exit_code is None else {"Cavvy-Exit-Code": str(found.exit_code)}
    return Response(data, 200, headers, "application/octet-stream")


@router.post(
    "/{exec_id}/input",
    rule=in_path(Permission.RUN),
    answer=wire.InputTaken,
    sends=True,
    errors=("job-not-found", "exec-not-found"),
)
async def give(
    request: Request,
    app_state: AppState,
    project: ProjectPath,
    name: JobPath,
    exec_id: Annotated[str, Path(max_length=64)],
    offset: PositionQuery = 0,
    end: bool = False,
) -> Response:
    """Send input to a user's session on a node. `end` ends a session or a command, as a closed
    terminal does.

    Accept input. The answer contains the offset of the next expected byte. The client's next
    request must begin with the byte at the offset in the answer.
    """
    note_reading(request)  # the session is recorded once, not each key press
    data = await read_bytes(request, _INPUT_LIMIT)
    if (keeper := app_state.peers.find_keeper(exec_id)) is not None:
        return await app_state.peers.pass_on(request, keeper, data)
    job = await _find(app_state, project, name)
    found = app_state.execs.get(exec_id, job.id)
    with app_state.watch.listen([exec_id], _ROOM_S) as listener:
        while (wanted := app_state.execs.put_input(found, offset, data, end)) < offset + len(data):
            if found.exit_code is not None or wanted < offset or not await listener.wait():
                break
    return reply(wire.InputTaken(next=wanted, ended=found.exit_code is not None))


async def _start(
    app_state: AppState, job: JobRecord, attempt: Attempt, ask: wire.ExecAsk, access: str
) -> str:
    """Store a command for an agent, and make the agent request the command. `access` is the text of
    the job's event. Returns the command's ID.
    """
    exec_id, gang = app_state.peers.make_id(), attempt.gang
    app_state.execs.start(exec_id, job.id, gang, ask.rank, ask.command, session=ask.session)
    await _tell(app_state, job, attempt, ask.rank, access)
    app_state.control_plane.agents.notify(gang)
    app_state.peers.announce(exec_id, gang, ask.rank)
    return exec_id


async def _wait(app_state: AppState, listener: ChangeListener, found: JobExec) -> bool:
    """Wait for output. Until the agent has received the command, announce the command to the other
    servers again and again. The announcement is repeated because signals can be lost and the agent
    can reconnect to a different server. Returns False if no output arrived.
    """
    while not found.taken and app_state.peers.exist and listener.left_s > _ANNOUNCE_S:
        if await listener.wait(_ANNOUNCE_S):
            return True
        app_state.peers.announce(found.id, found.gang, found.rank)
    return await listener.wait()


async def _find(app_state: AppState, project: str, name: str) -> JobRecord:
    """Find a job by `name`. The order of preference is: an unfinished job with this name, the
    newest job of a machine with this name, an ended job with this name. Raises ApiProblem.
    """
    try:
        job: JobRecord | None = await app_state.store.find_job(project, name)
        if job is not None and job.phase not in JOB_ENDS:
            return job
    except RowNotFound:
        job = None
    try:
        machine = await app_state.store.machine(project, name)
    except RowNotFound:
        return job or await find_job(app_state, project, name)
    with suppress(RowNotFound):  # the machine's last job has already been removed
        return await app_state.store.find_job(project, machine.job_id or name)
    return job or await find_job(app_state, project, name)


def _check_server(app_state: AppState, attempt: Attempt, rank: int) -> None:
    """Raise ApiProblem if the agent is connected to a different server, and that server cannot
    reach this server to fetch the command.
    """
    share, memory = app_state.share, app_state.control_plane.agents.memory
    server = share and share.find_server(memory.server_of(attempt.id, rank))
    if server and not app_state.peers.reaches_me(server):
        told = f"rank {rank} of this job is connected to the server with process {server.pid}"
        told += f" on {server.host}, whose state folder is {server.folder}"
        raise ApiProblem("agent-elsewhere", told)


def _say_access(ask: wire.ExecAsk, who: str, program: str) -> str:
    # The event contains only the program's name, because its arguments may contain secrets.
    if not ask.session:
        return f"{who} ran {ask.command[0][:80]} on this rank"
    return f"{who} opened a session on this rank" + (f" with `cavvy {program}`" if program else "")


async def _tell(
    app_state: AppState, job: JobRecord, attempt: Attempt, rank: int, access: str
) -> None:
    """Record the user's access to a node as an event of the job, so that everyone who follows the
    job sees it.
    """
    event = Event(
        project=job.project,
        job_id=job.id,
        attempt=attempt.number,
        rank=rank,
        at=app_state.now(),
        kind="access",
        text=access,
    )
    await app_state.store.commit(AtomicWrite(events=[event]))
