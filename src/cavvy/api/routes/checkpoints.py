"""Agents hand checkpoints over and fetch the newest: files by content, then the commit that
makes them count.
"""

from asyncio import to_thread
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Path, Query
from msgspec import Struct, field
from starlette.requests import Request
from starlette.responses import Response

from cavvy.api.errors import ApiProblem
from cavvy.api.openapi import document
from cavvy.api.reported import LARGEST, Moment, Name, Part, Rank, Size, Upload
from cavvy.api.routes.agents import GangQuery, enter
from cavvy.api.routes.blobs import take_blob
from cavvy.api.routes.data import MovedAnswer, SignedAnswer, signed_answer, told
from cavvy.api.wire import MIB, read, read_bytes, reply
from cavvy.client.wire import Answer, BlobsAsk, BlobsMissing
from cavvy.control.agents.bucket_checkpoints import BucketCheckpoints
from cavvy.control.agents.checkpoints import FilesMissing, InvalidManifest
from cavvy.domain.checkpoints import CheckpointFile, SavedCheckpoint
from cavvy.domain.messages import ClaimLost
from cavvy.store.base import HashMismatch
from cavvy.store.objects.threads import in_thread

_LIST_LIMIT = 64 * MIB  # of a list of files: some 400,000 of them
_PART_LIMIT = 32 * MIB

router = APIRouter(prefix="/agent/v1", tags=["agent"])
BlobPath = Annotated[str, Path(pattern="^[0-9a-f]{64}$")]


class HeldCheckpoint(Answer, frozen=True, kw_only=True):
    """A complete checkpoint; its files are fetched as blobs."""

    number: int
    attempt: int
    made_at: datetime
    bytes: int
    files: list[CheckpointFile]
    direct: bool = False  # they lie in the job's bucket: ask for a signed request for each


class LatestAnswer(Answer, frozen=True, kw_only=True):
    """What the gang starts from; null where the job has none."""

    checkpoint: HeldCheckpoint | None


class PartAnswer(Answer, frozen=True, kw_only=True):
    """The next byte that the server wants; the size of the file when it holds all of it."""

    offset: int


class CommitAsk(Struct, frozen=True, kw_only=True):
    """These files are the folder as it was at one moment; all of them have been sent."""

    gang: Name
    rank: Rank
    nonce: Name
    made_at: Moment
    files: list[CheckpointFile]


class CommitAnswer(Answer, frozen=True, kw_only=True):
    """The checkpoint's number; or null, and what has to be sent (again) before it can count."""

    number: int | None
    missing: list[str] = field(default_factory=list)


@router.get(
    "/checkpoints/latest",
    **document(
        "The newest checkpoint of the gang's job.", answer=LatestAnswer, errors=("gang-not-found",)
    ),
)
async def latest(request: Request, gang: GangQuery) -> Response:
    app_state = await enter(request, gang)
    found = await told(app_state.control_plane.checkpoints.latest(gang))
    if found is None:
        return reply(LatestAnswer(checkpoint=None))
    saved, files = found
    held = HeldCheckpoint(
        number=saved.number,
        attempt=saved.attempt,
        made_at=saved.made_at,
        bytes=saved.bytes,
        files=list(files),
        direct=await told(app_state.control_plane.checkpoints.bucket_checkpoints(gang)) is not None,
    )
    return reply(LatestAnswer(checkpoint=held))


@router.post(
    "/blobs/missing",
    **document(
        "Which files of the coming checkpoint to send.",
        ask=BlobsAsk,
        answer=BlobsMissing,
        errors=("gang-not-found",),
    ),
)
async def missing(request: Request, gang: GangQuery) -> Response:
    app_state = await enter(request, gang)
    ask = await read(request, BlobsAsk, _LIST_LIMIT)
    missing = await told(app_state.control_plane.checkpoints.missing(gang, ask.blobs))
    direct = await told(app_state.control_plane.checkpoints.bucket_checkpoints(gang)) is not None
    return reply(BlobsMissing(missing=list(missing), direct=direct))


@router.put(
    "/blobs/{blob}",
    **document(
        "Send a file of the coming checkpoint, whole, or the part at `offset` of its `size` bytes.",
        sends=True,
        answer=PartAnswer,
        errors=("gang-not-found", "blob-mismatch", "too-large", "too-slow", "disk-full"),
    ),
)
async def put(
    request: Request,
    blob: BlobPath,
    gang: GangQuery,
    offset: Annotated[int, Query(ge=0, le=LARGEST)] = 0,
    size: Annotated[int | None, Query(ge=1, le=LARGEST)] = None,
) -> Response:
    app_state = await enter(request, gang)
    blobs = await app_state.control_plane.checkpoints.blobs(gang)
    if size is None:
        return reply(PartAnswer(offset=await take_blob(request, blobs.writer(blob), LARGEST)))
    data = await read_bytes(request, _PART_LIMIT)
    try:
        return reply(PartAnswer(offset=await to_thread(blobs.append, blob, offset, data, size)))
    except HashMismatch as error:
        raise ApiProblem("blob-mismatch", str(error)) from error


@router.post(
    "/checkpoints",
    **document(
        "Commit a checkpoint whose files were sent.",
        ask=CommitAsk,
        answer=CommitAnswer,
        errors=("claimed", "disk-full"),
    ),
)
async def commit(request: Request) -> Response:
    ask = await read(request, CommitAsk, _LIST_LIMIT)
    app_state = await enter(request, ask.gang, ask.rank)
    try:
        asked = app_state.control_plane.checkpoints.commit(
            ask.gang, ask.rank, ask.nonce, ask.files, ask.made_at
        )
        answer = await told(asked)
    except InvalidManifest as error:
        raise ApiProblem("invalid-request", str(error)) from error
    match answer:
        case SavedCheckpoint(number=number):
            return reply(CommitAnswer(number=number))
        case FilesMissing(blobs=blobs):
            return reply(CommitAnswer(number=None, missing=list(blobs)))
        case ClaimLost(reason=reason):
            raise ApiProblem("claimed", reason)


class BucketUploadAsk(Struct, frozen=True, kw_only=True):
    """A file of the coming checkpoint is to be sent to the job's bucket."""

    size: Size


class BucketUploadAnswer(Answer, frozen=True, kw_only=True):
    """In parts of so many bytes; `upload` "" is in one request."""

    upload: str
    part_bytes: int


class BucketPartAsk(Struct, frozen=True, kw_only=True):
    """How to send one part, from 1."""

    upload: Upload
    part: Part


class BucketCompleteAsk(Struct, frozen=True, kw_only=True):
    """Every part was taken, with these ETags."""

    upload: Upload
    size: Size
    tags: list[str]


class BucketAbortAsk(Struct, frozen=True, kw_only=True):
    """No more parts come, and those that came are to go."""

    upload: Upload


_BUCKET = "/data/checkpoint/{blob}"
_BUCKET_ERRORS = ("gang-not-found", "blob-not-found", "data-missing", "data-denied", "data-trouble")


@router.get(
    _BUCKET,
    **document("A request for a checkpoint's file.", answer=SignedAnswer, errors=_BUCKET_ERRORS),
)
async def bucket_get(request: Request, blob: BlobPath, gang: GangQuery) -> Response:
    bucket_checkpoints = await _bucket_checkpoints(request, gang)
    return reply(signed_answer(await told(in_thread(bucket_checkpoints.sign_get, blob))))


@router.post(
    _BUCKET,
    **document(
        "Begin to send a file.",
        ask=BucketUploadAsk,
        answer=BucketUploadAnswer,
        errors=_BUCKET_ERRORS,
    ),
)
async def bucket_begin(request: Request, blob: BlobPath, gang: GangQuery) -> Response:
    bucket_checkpoints = await _bucket_checkpoints(request, gang)
    ask = await read(request, BucketUploadAsk)
    upload = await told(in_thread(bucket_checkpoints.begin, blob, ask.size))
    return reply(BucketUploadAnswer(upload=upload.upload, part_bytes=upload.part_bytes))


@router.post(
    _BUCKET + "/parts",
    **document(
        "How to send one part.", ask=BucketPartAsk, answer=SignedAnswer, errors=_BUCKET_ERRORS
    ),
)
async def bucket_part(request: Request, blob: BlobPath, gang: GangQuery) -> Response:
    bucket_checkpoints = await _bucket_checkpoints(request, gang)
    ask = await read(request, BucketPartAsk)
    return reply(
        signed_answer(
            await told(in_thread(bucket_checkpoints.sign_part, blob, ask.upload, ask.part))
        )
    )


@router.post(
    _BUCKET + "/complete",
    **document(
        "A file was sent.", ask=BucketCompleteAsk, answer=MovedAnswer, errors=_BUCKET_ERRORS
    ),
)
async def bucket_complete(request: Request, blob: BlobPath, gang: GangQuery) -> Response:
    bucket_checkpoints = await _bucket_checkpoints(request, gang)
    ask = await read(request, BucketCompleteAsk, 8 * MIB)
    await told(in_thread(bucket_checkpoints.complete, blob, ask.upload, ask.tags, ask.size))
    return reply(MovedAnswer())


@router.post(
    _BUCKET + "/abort",
    **document(
        "A file is not sent.", ask=BucketAbortAsk, answer=MovedAnswer, errors=_BUCKET_ERRORS
    ),
)
async def bucket_abort(request: Request, blob: BlobPath, gang: GangQuery) -> Response:
    bucket_checkpoints = await _bucket_checkpoints(request, gang)
    ask = await read(request, BucketAbortAsk)
    await told(in_thread(bucket_checkpoints.abort, blob, ask.upload))
    return reply(MovedAnswer())


async def _bucket_checkpoints(request: Request, gang: str) -> BucketCheckpoints:
    app_state = await enter(request, gang)
    bucket_checkpoints = await told(app_state.control_plane.checkpoints.bucket_checkpoints(gang))
    if bucket_checkpoints is None:
        raise ApiProblem(
            "blob-not-found", "the job keeps its checkpoints at the server, not in a bucket"
        )
    return bucket_checkpoints
