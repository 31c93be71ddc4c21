"""The agents' routes, exactly as `docs/concepts/agent-protocol.md` says; each takes the token of
its own gang only.
"""

from asyncio import to_thread
from base64 import b64encode
from contextlib import suppress
from dataclasses import replace
from pathlib import Path as PathOf
from typing import Annotated

from fastapi import APIRouter, Path, Query
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from cavvy.api.errors import Problem
from cavvy.api.house import House, house_of
from cavvy.api.openapi import document
from cavvy.api.reported import LARGEST, Batch, Name, Rank, read_batch
from cavvy.api.routes.blobs import gather
from cavvy.api.wire import MIB, read, read_bytes, reply
from cavvy.client.wire import BlobsAsk, Reply
from cavvy.domain.jobs import Attempt, Order
from cavvy.domain.messages import Assignment, Go, HostFacts, NotYours, Refused, Wait
from cavvy.domain.protocol import EQUIPPED, NEWEST, OLDEST, is_served
from cavvy.store.base import NotFound

_LONGEST_WAIT_S = 60.0
_MESSAGES_LIMIT = 16 * MIB
_LOG_LIMIT = 16 * MIB
_ROOM_S = 20.0  # that output waits for its user
_SMALL = 65536  # bytes that the page cache takes sooner than a thread is woken

router = APIRouter(prefix="/agent/v1", tags=["agent"])
GangQuery = Annotated[str, Query(max_length=63)]
RankQuery = Annotated[int, Query(ge=0, le=1_000_000)]


class ClaimAsk(Struct, frozen=True, kw_only=True):
    """An agent asks for its work."""

    gang: Name
    rank: Rank
    nonce: Name
    address: Name
    host: HostFacts = HostFacts()


class ClaimAnswer(Reply, frozen=True, kw_only=True):
    """Wait for the other ranks (`after_s`), or do `work`."""

    state: str
    after_s: float | None = None
    work: Assignment | None = None
    lease_s: float | None = None
    token: str | None = (
        None  # to be shown from now on, where the claim was made with a token for one claim
    )


class MessagesAnswer(Reply, frozen=True, kw_only=True):
    """Every message up to `ack` is stored."""

    ack: int
    lease_s: float
    every_s: float | None = None


class LogAnswer(Reply, frozen=True, kw_only=True):
    """The next byte that the server wants."""

    offset: int


class ExecWanted(Reply, frozen=True, kw_only=True):
    """A command to run beside the work."""

    id: str
    command: list[str]
    tty: bool
    hand: bool = False  # a user's hand: shells, connections and files, both ways


class OrdersAnswer(Reply, frozen=True, kw_only=True):
    """What is wanted of the rank now."""

    order: Order | None
    execs: list[ExecWanted]
    lease_s: float


class ExecAnswer(Reply, frozen=True, kw_only=True):
    """The output was taken."""


@router.post(
    "/claim",
    **document(
        "Claim a rank of a gang.",
        ask=ClaimAsk,
        answer=ClaimAnswer,
        errors=("claimed", "agent-protocol"),
    ),
)
async def claim(request: Request) -> Response:
    house, protocol = _speak(request), _version(request)
    ask = await read(request, ClaimAsk)
    once = house.tokens.check_claim(request, ask.gang, ask.rank)
    match await house.plant.agents.claim(
        ask.gang, ask.rank, ask.nonce, ask.address, ask.host, protocol=protocol
    ):
        case Go(work=work, lease=lease):
            work = replace(work, log_limit_mib=house.settings.whole("logs.job_mib"))
            token = house.tokens.of(ask.gang) if once else None
            return reply(
                ClaimAnswer(state="go", work=work, lease_s=lease.total_seconds(), token=token)
            )
        case Wait(after=after):
            return reply(ClaimAnswer(state="wait", after_s=after.total_seconds()))
        case Refused(reason=reason):
            raise Problem("claimed", reason)


@router.post(
    "/messages",
    **document("Report.", ask=Batch, answer=MessagesAnswer, errors=("claimed", "agent-protocol")),
)
async def messages(request: Request) -> Response:
    house = _speak(request)
    body = await read_bytes(request, _MESSAGES_LIMIT)
    try:
        ask, told = read_batch(body, house.now())
    except (ValueError, RecursionError) as error:
        raise Problem("invalid-request", f"the body cannot be read: {error}") from error
    house.tokens.check(request, ask.gang)
    answer = await house.plant.agents.messages(ask.gang, ask.rank, ask.nonce, told)
    if isinstance(answer, NotYours):
        raise Problem("claimed", answer.reason)
    every = None if answer.every is None else answer.every.total_seconds()
    return reply(
        MessagesAnswer(ack=answer.seq, lease_s=answer.lease.total_seconds(), every_s=every)
    )


@router.post(
    "/log",
    **document(
        "Append to a rank's log.",
        answer=LogAnswer,
        sends=True,
        errors=("gang-not-found", "disk-full"),
    ),
)
async def log(
    request: Request,
    gang: GangQuery,
    rank: RankQuery,
    offset: Annotated[int, Query(ge=0, le=LARGEST)],
    lost: Annotated[int, Query(ge=0, le=LARGEST)] = 0,
) -> Response:
    house = _speak(request)
    house.tokens.check(request, gang)
    attempt = await _attempt(house, gang, rank)
    data = await read_bytes(request, _LOG_LIMIT)
    where = (attempt.project, attempt.job_id, attempt.number, rank)
    if len(data) <= _SMALL:
        wanted = await house.quickly(house.logs.append, *where, offset, data, lost)
    else:
        wanted = await to_thread(house.logs.append, *where, offset, data, lost)
    house.watch.wake(attempt.job_id)
    return reply(LogAnswer(offset=wanted))


@router.get(
    "/orders", **document("Wait for an order.", answer=OrdersAnswer, errors=("gang-not-found",))
)
async def orders(
    request: Request,
    gang: GangQuery,
    rank: RankQuery,
    after: Annotated[int, Query(ge=0, le=1 << 62)] = 0,
    wait_s: Annotated[float, Query(ge=0, le=3600)] = 0,
) -> Response:
    house = _speak(request)
    house.tokens.check(request, gang)
    await _attempt(house, gang, rank)
    wait = 0 if house.execs.untold(gang, rank) else min(wait_s, _LONGEST_WAIT_S)
    order = await house.wait_order(gang, rank, after, wait)
    lease = await house.plant.agents.lease(gang)
    if (version := _version(request)) < EQUIPPED:
        house.execs.refuse_hands(gang, rank, version)
    wanted = house.execs.wanted(gang, rank)
    for each in wanted:
        each.told = True
    execs = [
        ExecWanted(id=each.id, command=each.command, tty=False, hand=each.hand) for each in wanted
    ]
    return reply(OrdersAnswer(order=order, execs=execs, lease_s=lease.total_seconds()))


@router.post(
    "/execs/{exec_id}",
    **document(
        "Output of a command beside the work.",
        answer=ExecAnswer,
        sends=True,
        errors=("gang-not-found",),
    ),
)
async def exec_output(
    request: Request,
    exec_id: Annotated[str, Path(max_length=64)],
    gang: GangQuery,
    rank: RankQuery,
    stream: str = "stdout",
    offset: Annotated[int, Query(ge=0, le=LARGEST)] = 0,
    exit_code: Annotated[int | None, Query(ge=-(1 << 31), lt=1 << 31)] = None,
) -> Response:
    house = _speak(request)
    house.tokens.check(request, gang)
    data = await read_bytes(request, _LOG_LIMIT)
    with house.watch.listen([exec_id]) as listener:
        while data and house.execs.full(exec_id):
            if not await listener.wait(_ROOM_S):
                raise Problem("output-waits", "the user has not taken what came before")
    # A restart of the server forgets commands; the agent is answered well, for nobody waits for the
    # output.
    house.execs.put(exec_id, gang, rank, offset, data, exit_code)
    return reply(ExecAnswer())


class ExecInput(Reply, frozen=True, kw_only=True):
    """What its user sends, in base64; `end`: that was all."""

    data: str
    end: bool


@router.get(
    "/execs/{exec_id}/input",
    **document("Input for a user's hand.", answer=ExecInput, errors=("gang-not-found",)),
)
async def exec_input(
    request: Request,
    exec_id: Annotated[str, Path(max_length=64)],
    gang: GangQuery,
    rank: RankQuery,
    offset: Annotated[int, Query(ge=0, le=1 << 62)] = 0,
    wait_s: Annotated[float, Query(ge=0, le=3600)] = 0,
) -> Response:
    house = _speak(request)
    house.tokens.check(request, gang)
    with house.watch.listen([exec_id]) as listener:
        while True:
            data, end = house.execs.input_of(exec_id, gang, rank, offset)
            if data or end or not await listener.wait(min(wait_s, _LONGEST_WAIT_S)):
                return reply(ExecInput(data=b64encode(data).decode(), end=end))


@router.post(
    "/blobs/pack",
    **document(
        "Small parts of a working folder, as many as a pack takes.",
        ask=BlobsAsk,
        gives=True,
        errors=("gang-not-found", "too-large", "too-slow"),
    ),
)
async def blob_pack(request: Request, gang: GangQuery) -> Response:
    house = await enter(request, gang)
    ask = await read(request, BlobsAsk)
    stores = [house.blobs]
    with suppress(NotFound):  # no checkpoints are held here
        stores.append(await house.plant.checkpoints.blobs(gang))
    return Response(
        await to_thread(gather, stores, ask.blobs), media_type="application/octet-stream"
    )


@router.get(
    "/blobs/{blob}",
    **document("A part of a working folder.", gives=True, errors=("blob-not-found",)),
)
async def blob(
    request: Request, blob: Annotated[str, Path(pattern="^[0-9a-f]{64}$")], gang: GangQuery
) -> Response:
    house = await enter(request, gang)
    try:
        path = await _find_blob(house, gang, blob)
    except NotFound:
        raise Problem("blob-not-found", f"there is no blob {blob}") from None
    return FileResponse(path, media_type="application/octet-stream")


async def _find_blob(house: House, gang: str, blob: str) -> PathOf:
    """Where a part of a working folder, or of a checkpoint of the gang's own job, lies. Raises
    NotFound.
    """
    try:
        return house.blobs.path(blob)
    except NotFound:
        return (await house.plant.checkpoints.blobs(gang)).path(blob)


async def enter(request: Request, gang: str, rank: int = 0) -> House:
    """The house, for an agent of a gang that is known and shows its token. Raises Problem."""
    house = _speak(request)
    house.tokens.check(request, gang)
    await _attempt(house, gang, rank)
    return house


def _speak(request: Request) -> House:
    """The house, if it speaks this agent's language."""
    version = _version(request)
    if not is_served(version):
        told = f"version {version}" if version else "not told"
        raise Problem(
            "agent-protocol",
            f"the agent's protocol is {told}; this server serves {OLDEST} to {NEWEST}",
        )
    return house_of(request)


def _version(request: Request) -> int:
    """The protocol that the agent speaks; 0 where it does not say one."""
    said = request.headers.get("cavvy-agent-protocol", "")
    return int(said) if said.isdecimal() and len(said) < 6 else 0


async def _attempt(house: House, gang: str, rank: int) -> Attempt:
    try:
        attempt = await house.store.attempt_of_gang(gang)
    except NotFound:
        raise Problem("gang-not-found", f"no gang {gang} is known here") from None
    if rank >= attempt.nodes:
        raise Problem("gang-not-found", f"gang {gang} has no rank {rank}")
    return attempt
