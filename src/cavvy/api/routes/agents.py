"""The routes for agents, as specified in `docs/concepts/agent-protocol.md`. Each route requires the
token of the agent's own gang, except the one for files that a node downloads by hash before it has
a token: they contain no secrets, and each node checks the hash of each downloaded file.
"""

from asyncio import to_thread
from base64 import b64encode
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from typing import Annotated

from fastapi import Path, Query
from msgspec import Meta, Struct
from msgspec.json import decode
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from cavvy.agent.documents import EQUIPPED, WorkConfig
from cavvy.api.app_state import AppState, app_state_of
from cavvy.api.errors import ApiProblem
from cavvy.api.execs import JobExec
from cavvy.api.reported import Name, Rank, ReportedBatch, read_batch, read_gang, read_quiet
from cavvy.api.routes.blobs import gather, send_blob
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import GANG, OPEN
from cavvy.api.wire import MIB, BytesQuery, PositionQuery, read, read_bytes, reply
from cavvy.client.wire import Answer, BlobsAsk
from cavvy.domain.jobs import Attempt, AttemptPhase, Order
from cavvy.domain.messages import (
    NEWEST,
    OLDEST,
    ClaimGranted,
    ClaimLost,
    ClaimRefused,
    ClaimWait,
    HostFacts,
    MessagesStored,
    is_served,
)
from cavvy.domain.values import replace
from cavvy.store.base import RowNotFound

_LONGEST_WAIT_S = 60.0
_MESSAGES_LIMIT = 16 * MIB
_MOST_MESSAGES = 1000  # further messages are not acknowledged, so the agent sends them again
_LOG_LIMIT = 16 * MIB
# how many seconds a request with output waits until the user has read earlier output
_ROOM_S = 20.0
# maximum bytes that are written directly; passing so few bytes to a thread would take longer
_SMALL = 65536
_QUIET = 16384  # maximum bytes of a body that is read in one step, before its token is checked

router = RouteGroup("agent", prefix="/agent/v1")
GangQuery = Annotated[str, Query(max_length=63)]
ExecPath = Annotated[str, Path(max_length=64)]
PatienceQuery = Annotated[float, Query(ge=0, le=3600)]
RankQuery = Annotated[int, Query(ge=0, le=1_000_000)]


class ClaimAsk(Struct, frozen=True, kw_only=True):
    """An agent's request for the work of its rank."""

    gang: Name
    rank: Rank
    nonce: Name
    address: Name
    host: HostFacts = HostFacts()
    # how long the answer waits while agents of other ranks are missing
    wait_s: Annotated[float, Meta(ge=0, le=3600)] = 0


class ClaimAnswer(Answer, frozen=True, kw_only=True):
    """The answer to a claim: either `work` or, if other ranks are not ready, `after_s`, the seconds
    after which the agent must ask again.
    """

    state: str
    after_s: float | None = None
    keep_s: float | None = None  # seconds for which the agent of a warm node waits for more work
    work: WorkConfig | None = None
    lease_s: float | None = None
    token: str | None = (
        None  # the token that the agent must use from now on, which no other agent has
    )


class MessagesAnswer(Answer, frozen=True, kw_only=True):
    """Confirms that every message up to the number `ack` was processed."""

    ack: int
    # The messages up to this number will be stored soon; the agent keeps those after `ack`, and
    # sends them again if it is told of an earlier number, such as by another server.
    taken: int | None = None
    lease_s: float
    every_s: float | None = None
    # how long messages that only tell figures may wait before the next are sent
    pause_s: float | None = None


class LogAnswer(Answer, frozen=True, kw_only=True):
    """The offset of the next byte that the server expects."""

    offset: int


class ExecWanted(Answer, frozen=True, kw_only=True):
    """A command to run in the environment of the work."""

    id: str
    command: list[str]
    tty: bool
    # whether to open a remote session, for shells, connections and files
    session: bool = False
    # whether the command ends when its input ends, because the user has disconnected
    attached: bool = False


class OrdersAnswer(Answer, frozen=True, kw_only=True):
    """The current order for the rank, and the commands that the rank must run."""

    order: Order | None
    execs: list[ExecWanted]
    lease_s: float
    # 0 while a user looks at the figures: from now on, they do not wait
    pause_s: float | None = None


class ExecAnswer(Answer, frozen=True, kw_only=True):
    """Confirms that the output was accepted."""


@router.post("/claim", rule=GANG, ask=ClaimAsk, errors=("claimed", "agent-protocol"))
async def claim(request: Request) -> ClaimAnswer:
    """Claim a rank of a gang."""
    app_state, protocol = _speak(request), _version(request)
    ask = await read(request, ClaimAsk)
    attempt: Attempt | None = None
    with suppress(RowNotFound):  # the control plane refuses the claim
        attempt = await app_state.store.attempt_of_gang(ask.gang)
    token = app_state.tokens.check_claim(request, ask.gang, ask.rank, attempt)
    with app_state.poll(ask.gang, min(ask.wait_s, _LONGEST_WAIT_S)) as wait:
        answer = await app_state.control_plane.agents.claim(
            ask.gang,
            ask.rank,
            ask.nonce,
            ask.address,
            ask.host,
            protocol=protocol,
            wait=wait,
            sealed=True,
        )
    match answer:
        case ClaimGranted(work=work, lease=lease):
            work = replace(work, log_limit_mib=app_state.settings.whole("logs.job_mib"))
            return ClaimAnswer(state="go", work=work, lease_s=lease.total_seconds(), token=token)
        case ClaimWait(after=after, keep=keep):
            keep_s = None if keep is None else keep.total_seconds()
            return ClaimAnswer(state="wait", after_s=after.total_seconds(), keep_s=keep_s)
        case ClaimRefused(reason=reason):
            raise ApiProblem("claimed", reason)


@router.post("/messages", rule=GANG, ask=ReportedBatch, errors=("claimed", "agent-protocol"))
async def messages(request: Request) -> MessagesAnswer:
    """Send an agent's messages."""
    app_state = _speak(request)
    body = await read_bytes(request, _MESSAGES_LIMIT)
    quiet = read_quiet(body) if len(body) <= _QUIET else None
    if quiet is not None:
        batch, told = quiet
        app_state.tokens.check(request, batch.gang)
        answer = await app_state.control_plane.agents.messages(
            batch.gang, batch.rank, batch.nonce, told, sent_at=batch.at, keeps=True
        )
        return _say_stored(answer)
    _check_own(request, body)
    parse = partial(read_batch, body, app_state.now(), ReportedBatch, most=_MOST_MESSAGES)
    try:
        # another program than an agent can send a batch that takes seconds to read
        ask, told = parse() if len(body) <= _SMALL else await to_thread(parse)
    except (ValueError, RecursionError) as error:
        raise ApiProblem("invalid-request", f"the body cannot be read: {error}") from error
    app_state.tokens.check(request, ask.gang)
    answer = await app_state.control_plane.agents.messages(
        ask.gang, ask.rank, ask.nonce, told, sent_at=ask.sent_at
    )
    return _say_stored(answer)


def _say_stored(answer: MessagesStored | ClaimLost) -> MessagesAnswer:
    if isinstance(answer, ClaimLost):
        raise ApiProblem("claimed", answer.reason)
    return MessagesAnswer(
        ack=answer.seq,
        taken=answer.taken,
        lease_s=answer.lease.total_seconds(),
        every_s=None if answer.every is None else answer.every.total_seconds(),
        pause_s=None if answer.pause is None else answer.pause.total_seconds(),
    )


@router.post("/log", rule=GANG, sends=True, errors=("gang-not-found", "disk-full"))
async def log(
    request: Request, gang: GangQuery, rank: RankQuery, offset: BytesQuery, lost: BytesQuery = 0
) -> LogAnswer:
    """Append output to a rank's log."""
    app_state, attempt = await enter_attempt(request, gang, rank)
    # A rank reports its end after it has sent its whole log.
    if attempt.phase is AttemptPhase.KEPT:
        raise ApiProblem("claimed", f"attempt {attempt.number} is over: its log is complete")
    data = await read_bytes(request, _LOG_LIMIT)
    where = (attempt.project, attempt.job_id, attempt.number, rank)
    what = (*where, offset, data, lost, app_state.now().timestamp())
    quick = len(data) <= _SMALL and app_state.logs.is_quick(attempt.project)
    wanted = await app_state.use_logs(quick, app_state.logs.append, *what)
    app_state.watch.wake(attempt.job_id)
    return LogAnswer(offset=wanted)


@router.get("/orders", rule=GANG, errors=("gang-not-found",))
async def orders(
    request: Request,
    gang: GangQuery,
    rank: RankQuery,
    after: PositionQuery = 0,
    wait_s: PatienceQuery = 0,
) -> OrdersAnswer:
    """Wait for an order to a rank, or for commands that the rank must run."""
    app_state = await enter(request, gang, rank)
    told = app_state.execs.untold(gang, rank) or app_state.peers.expects(gang, rank)
    wait = 0 if told else min(wait_s, _LONGEST_WAIT_S)
    order = await app_state.wait_order(gang, rank, after, wait)
    lease = await app_state.control_plane.agents.lease(gang, rank)
    if (version := _version(request)) < EQUIPPED:
        app_state.execs.refuse_sessions(gang, rank, version)
    wanted = app_state.execs.wanted(gang, rank)
    for each in wanted:
        each.told = True
    execs = [_ask_for(each) for each in wanted]
    for fetched in await app_state.peers.fetch(request, gang, rank):
        execs.append(decode(fetched, type=ExecWanted))
    pause_s = 0.0 if app_state.control_plane.agents.is_looked_at(gang, rank) else None
    return OrdersAnswer(order=order, execs=execs, lease_s=lease.total_seconds(), pause_s=pause_s)


def _ask_for(made: JobExec) -> ExecWanted:
    return ExecWanted(
        id=made.id, command=made.command, tty=False, session=made.session, attached=True
    )


@router.get("/execs/{exec_id}", rule=GANG, errors=("gang-not-found", "exec-not-found"))
async def exec_wanted(
    request: Request, exec_id: ExecPath, gang: GangQuery, rank: RankQuery
) -> ExecWanted:
    """Get a command that a user wants to run. The server to which the node's agent is connected
    calls this route.
    """
    app_state = await enter(request, gang, rank)
    if (version := _version(request)) < EQUIPPED:
        app_state.execs.refuse_sessions(gang, rank, version)
    for each in app_state.execs.wanted(gang, rank):
        if each.id == exec_id:
            return _ask_for(each)
    raise ApiProblem("exec-not-found", f"the command {exec_id} is not pending for this rank")


@router.post(
    "/execs/{exec_id}", rule=GANG, answer=ExecAnswer, sends=True, errors=("gang-not-found",)
)
async def exec_output(
    request: Request,
    exec_id: ExecPath,
    gang: GangQuery,
    rank: RankQuery,
    stream: str = "stdout",
    offset: BytesQuery = 0,
    exit_code: Annotated[int | None, Query(ge=-(1 << 31), lt=1 << 31)] = None,
) -> Response:
    """Send the output of a command that a user runs in the environment of the work."""
    app_state = await enter(request, gang, rank)
    data = await read_bytes(request, _LOG_LIMIT)
    if (keeper := app_state.peers.find_keeper(exec_id)) is not None:
        return await app_state.peers.pass_on(request, keeper, data)
    with app_state.watch.listen([exec_id], _ROOM_S) as listener:
        while data and app_state.execs.full(exec_id):
            if not await listener.wait():
                raise ApiProblem("output-waits", "the user has not read the earlier output yet")
    # After a restart, the server does not know earlier commands. The output of unknown commands is
    # ignored without an error, because no client reads the output.
    app_state.execs.put(exec_id, gang, rank, offset, data, exit_code)
    return reply(ExecAnswer())


class ExecInput(Answer, frozen=True, kw_only=True):
    """The user's input, in base64. `end` means that no more input follows."""

    data: str
    end: bool


@router.get("/execs/{exec_id}/input", rule=GANG, answer=ExecInput, errors=("gang-not-found",))
async def exec_input(
    request: Request,
    exec_id: ExecPath,
    gang: GangQuery,
    rank: RankQuery,
    offset: PositionQuery = 0,
    wait_s: PatienceQuery = 0,
) -> Response:
    """Get input for a user's remote session. The input of a command ends when the user
    disconnects.
    """
    app_state = await enter(request, gang, rank)
    if (keeper := app_state.peers.find_keeper(exec_id)) is not None:
        return await app_state.peers.pass_on(request, keeper)
    with app_state.watch.listen([exec_id], min(wait_s, _LONGEST_WAIT_S)) as listener:
        while True:
            data, end = app_state.execs.input_of(exec_id, gang, rank, offset)
            if data or end or not await listener.wait():
                return reply(ExecInput(data=b64encode(data).decode(), end=end))


@router.post(
    "/blobs/pack",
    rule=GANG,
    ask=BlobsAsk,
    gives=True,
    errors=("gang-not-found", "too-large", "too-slow"),
)
async def blob_pack(request: Request, gang: GangQuery) -> Response:
    """Get small blobs of a working folder, as many as fit into one pack."""
    app_state, attempt = await enter_attempt(request, gang)
    ask = await read(request, BlobsAsk)
    parts = await _folder_parts(app_state, attempt)
    stores = {app_state.blobs.of(attempt.project): [name for name in ask.blobs if name in parts]}
    with suppress(RowNotFound):  # this job's checkpoints may be stored elsewhere than on the server
        stores[await app_state.control_plane.checkpoints.blobs(gang)] = ask.blobs
    return Response(await to_thread(gather, stores), media_type="application/octet-stream")


@router.get("/blobs/{blob}", rule=GANG, gives=True, errors=("blob-not-found",))
async def blob(
    request: Request, blob: Annotated[str, Path(pattern="^[0-9a-f]{64}$")], gang: GangQuery
) -> Response:
    """Get a blob of a working folder."""
    app_state, attempt = await enter_attempt(request, gang)
    try:
        return await _send_blob(app_state, attempt, blob)
    except RowNotFound:
        raise ApiProblem("blob-not-found", f"the job has no blob {blob}") from None


async def _send_blob(app_state: AppState, attempt: Attempt, blob: str) -> Response:
    """Send a blob that belongs to the working folder or to a checkpoint of the attempt's job.
    Raises RowNotFound.
    """
    if blob in await _folder_parts(app_state, attempt):
        with suppress(RowNotFound):
            return await send_blob(app_state.blobs.of(attempt.project), blob)
    return await send_blob(await app_state.control_plane.checkpoints.blobs(attempt.gang), blob)


async def _folder_parts(app_state: AppState, attempt: Attempt) -> Collection[str]:
    """Return the blobs of the snapshot of the job's working folder, including the manifest."""
    snapshot = (await app_state.store.job(attempt.job_id)).origin.snapshot
    with suppress(RowNotFound):
        if snapshot is not None:
            return await to_thread(app_state.blobs.of(attempt.project).folder_parts, snapshot)
    return ()


async def read_own_bytes(request: Request, limit: int) -> bytes:
    """Read a body that states the agent's gang, and check the token of this gang. Decoding a large
    body delays other requests, so the body is decoded only for agents. Raises ApiProblem.
    """
    body = await read_bytes(request, limit)
    _check_own(request, body)
    return body


def _check_own(request: Request, body: bytes) -> None:
    gang = read_gang(body)
    if gang is None:
        raise ApiProblem("invalid-request", "the body cannot be read: it states no gang")
    app_state_of(request).tokens.check(request, gang)


async def enter(request: Request, gang: str, rank: int = 0) -> AppState:
    """Check that an agent has sent the token of its gang, that its node was not replaced, and that
    the gang has not ended. Returns the application state. Raises ApiProblem.
    """
    return (await enter_attempt(request, gang, rank))[0]


async def enter_attempt(request: Request, gang: str, rank: int = 0) -> tuple[AppState, Attempt]:
    """Check the request as `enter` does, and also return the gang's attempt."""
    app_state = _speak(request)
    app_state.tokens.check(request, gang)
    known = app_state.control_plane.agents.find_attempt(gang, rank)
    attempt = known or await _attempt(app_state, gang, rank)
    app_state.tokens.check_attempt(request, attempt)
    return app_state, attempt


def _speak(request: Request) -> AppState:
    """Return the application state. Raises ApiProblem if the server does not support the agent's
    protocol version.
    """
    version = _version(request)
    if not is_served(version):
        told = f"version {version}" if version else "not told"
        raise ApiProblem(
            "agent-protocol",
            f"the agent's protocol is {told}; this server supports {OLDEST} to {NEWEST}",
        )
    return app_state_of(request)


def _version(request: Request) -> int:
    """Return the agent's protocol version, or 0 if the request does not state it."""
    said = request.headers.get("cavvy-agent-protocol", "")
    return int(said) if said.isdecimal() and len(said) < 6 else 0


async def _attempt(app_state: AppState, gang: str, rank: int) -> Attempt:
    try:
        attempt = await app_state.store.attempt_of_gang(gang)
    except RowNotFound:
        raise ApiProblem("gang-not-found", f"the server does not know the gang {gang}") from None
    if rank >= attempt.nodes:
        raise ApiProblem("gang-not-found", f"gang {gang} has no rank {rank}")
    if attempt.phase is AttemptPhase.ENDED:  # the token of an ended attempt is no longer valid
        raise ApiProblem("claimed", f"attempt {attempt.number} is over: {attempt.reason}")
    return attempt


boot_router = RouteGroup("agent", prefix="/boot/v1")


@boot_router.get("/{digest}", rule=OPEN, gives=True, errors=("blob-not-found",))
async def fetch(
    app_state: AppState, digest: Annotated[str, Path(pattern="^[0-9a-f]{64}$")]
) -> Response:
    """Get a file that a starting node needs, by its hash."""
    downloads = app_state.downloads
    path = await to_thread(downloads.find, digest) if downloads is not None else None
    if path is None:
        raise ApiProblem("blob-not-found", f"this server has no file with the hash {digest}")
    return FileResponse(path, media_type="application/octet-stream")
