"""Routes with which agents upload checkpoints and download the newest checkpoint. An agent uploads
the files under their hashes and then commits the checkpoint.
"""

from asyncio import to_thread
from datetime import datetime
from typing import Annotated

from fastapi import Path, Query
from msgspec import Struct, field
from starlette.requests import Request

from cavvy.api.errors import ApiProblem
from cavvy.api.reported import LARGEST, Moment, Name, Rank
from cavvy.api.routes.agents import GangQuery, enter, read_own_bytes
from cavvy.api.routes.blobs import take_blob
from cavvy.api.routes.data import told
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import GANG
from cavvy.api.wire import MIB, BytesQuery, decode_body, read, read_bytes
from cavvy.client.wire import Answer, BlobsAsk, BlobsMissing
from cavvy.control.agents.checkpoints import FilesMissing, InvalidManifest
from cavvy.domain.checkpoints import CheckpointFile, SavedCheckpoint
from cavvy.domain.messages import ClaimLost
from cavvy.store.base import HashMismatch

# maximum bytes of a list of files; enough for some 400,000 files
_LIST_LIMIT = 64 * MIB
_PART_LIMIT = 32 * MIB

router = RouteGroup("agent", prefix="/agent/v1")
BlobPath = Annotated[str, Path(pattern="^[0-9a-f]{64}$")]


class HeldCheckpoint(Answer, frozen=True, kw_only=True):
    """A complete checkpoint, whose files are downloaded as blobs."""

    number: int
    attempt: int
    made_at: datetime
    bytes: int
    files: list[CheckpointFile]
    # whether the files are in the job's bucket; if so, the agent requests a signed URL for each
    direct: bool = False


class LatestAnswer(Answer, frozen=True, kw_only=True):
    """The checkpoint from which the gang must start, or null if the job has no checkpoint."""

    checkpoint: HeldCheckpoint | None


class PartAnswer(Answer, frozen=True, kw_only=True):
    """The offset of the next byte that the server expects. If the server has the whole file, the
    offset is the file's size.
    """

    offset: int


class CommitAsk(Struct, frozen=True, kw_only=True):
    """Commits a checkpoint. The agent must send all of these files before it commits the
    checkpoint.
    """

    gang: Name
    rank: Rank
    nonce: Name
    made_at: Moment
    files: list[CheckpointFile]


class CommitAnswer(Answer, frozen=True, kw_only=True):
    """The checkpoint's number, or null if files are missing. If files are missing, the agent must
    send the files in `missing`, even if it has sent these files before.
    """

    number: int | None
    missing: list[str] = field(default_factory=list)


@router.get("/checkpoints/latest", rule=GANG, errors=("gang-not-found",))
async def latest(request: Request, gang: GangQuery) -> LatestAnswer:
    """Get the newest checkpoint of the gang's job."""
    app_state = await enter(request, gang)
    found = await told(app_state.control_plane.checkpoints.latest(gang))
    if found is None:
        return LatestAnswer(checkpoint=None)
    saved, files = found
    held = HeldCheckpoint(
        number=saved.number,
        attempt=saved.attempt,
        made_at=saved.made_at,
        bytes=saved.bytes,
        files=list(files),
        direct=await told(app_state.control_plane.checkpoints.bucket_checkpoints(gang)) is not None,
    )
    return LatestAnswer(checkpoint=held)


@router.post("/blobs/missing", rule=GANG, ask=BlobsAsk, errors=("gang-not-found",))
async def missing(request: Request, gang: GangQuery) -> BlobsMissing:
    """Ask which files of the next checkpoint must be sent."""
    app_state = await enter(request, gang)
    ask = await read(request, BlobsAsk, _LIST_LIMIT)
    missing = await told(app_state.control_plane.checkpoints.missing(gang, ask.blobs))
    direct = await told(app_state.control_plane.checkpoints.bucket_checkpoints(gang)) is not None
    return BlobsMissing(missing=list(missing), direct=direct)


@router.put(
    "/blobs/{blob}",
    rule=GANG,
    sends=True,
    errors=("gang-not-found", "too-large", "too-slow", "disk-full"),
    when={HashMismatch: "blob-mismatch"},
)
async def put(
    request: Request,
    blob: BlobPath,
    gang: GangQuery,
    offset: BytesQuery = 0,
    size: Annotated[int | None, Query(ge=1, le=LARGEST)] = None,
) -> PartAnswer:
    """Send a file of the next checkpoint: the whole file or, if `size` gives its size, the part
    that starts at `offset`.
    """
    app_state = await enter(request, gang)
    blobs = await app_state.control_plane.checkpoints.blobs(gang)
    if size is None:
        return PartAnswer(offset=await take_blob(request, blobs.writer(blob), LARGEST))
    data = await read_bytes(request, _PART_LIMIT)
    return PartAnswer(offset=await to_thread(blobs.append, blob, offset, data, size))


@router.post(
    "/checkpoints",
    rule=GANG,
    ask=CommitAsk,
    errors=("claimed", "disk-full"),
    when={InvalidManifest: "invalid-request"},
)
async def commit(request: Request) -> CommitAnswer:
    """Commit a checkpoint whose files were sent."""
    ask = decode_body(await read_own_bytes(request, _LIST_LIMIT), CommitAsk)
    app_state = await enter(request, ask.gang, ask.rank)
    asked = app_state.control_plane.checkpoints.commit(
        ask.gang, ask.rank, ask.nonce, ask.files, ask.made_at
    )
    answer = await told(asked)
    match answer:
        case SavedCheckpoint(number=number):
            return CommitAnswer(number=number)
        case FilesMissing(blobs=blobs):
            return CommitAnswer(number=None, missing=list(blobs))
        case ClaimLost(reason=reason):
            raise ApiProblem("claimed", reason)
