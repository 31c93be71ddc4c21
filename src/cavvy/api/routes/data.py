"""Routes with which agents list the files of inputs, and transfer the files of inputs, outputs and
checkpoints. Files are transferred by signed requests or, if that is impossible, through the server.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Path, Query
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from cavvy.api.app_state import app_state_of
from cavvy.api.errors import ApiProblem, RetryLater
from cavvy.api.reported import LARGEST, FilePath, Part, Size, Upload
from cavvy.api.routes.agents import GangQuery, RankQuery, enter
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import GANG
from cavvy.api.wire import MIB, BytesQuery, read, read_bytes, reply
from cavvy.client.wire import Answer
from cavvy.control.agents.deposit_records import MOST_BYTES
from cavvy.control.agents.transfers import SignedObjects
from cavvy.control.agents.uploads import UnfinishedUploads
from cavvy.store.objects.base import ObjectDenied, ObjectMissing, ObjectTryAgain, SignedRequest
from cavvy.store.objects.threads import in_thread

_PIECE = 32 * MIB
_ASK_LIMIT = 8 * MIB
_ERRORS = ("gang-not-found", "data-missing", "data-denied", "data-trouble")

_CHECKPOINT_ERRORS = (*_ERRORS, "blob-not-found")

router = RouteGroup("agent", prefix="/agent/v1/data")
T = TypeVar("T")
IndexPath = Annotated[int, Path(ge=0, le=100_000)]
PathQuery = Annotated[str, Query(max_length=4096)]


class SignedAnswer(Answer, frozen=True, kw_only=True):
    """A signed request. With a signed request, an agent transfers one file and needs no
    credentials.
    """

    method: str
    url: str
    headers: dict[str, str]


class InputEntry(Answer, frozen=True, kw_only=True):
    """One file of an input. `path` is relative to the input's URL; it is "" if the URL is that of a
    single file.
    """

    path: str
    size: int | None
    tag: str
    md5: str
    signed: SignedAnswer | None


class InputAnswer(Answer, frozen=True, kw_only=True):
    """One page of an input's files. To get the next page, the agent sends the value of `next`."""

    files: list[InputEntry]
    next: str


class UploadAsk(Struct, frozen=True, kw_only=True):
    """Starts the upload of a file of an output or a checkpoint; `path` is relative to the output's
    URL.
    """

    size: Size
    path: FilePath = ""


class UploadAnswer(Answer, frozen=True, kw_only=True):
    """How to upload the file: in parts of `part_bytes` bytes, or in one request if `upload` is
    "". If `relay` is true, the agent sends the file to the control plane, which forwards it.
    """

    upload: str
    part_bytes: int
    relay: bool = False


class PartAsk(Struct, frozen=True, kw_only=True):
    """Asks for a signed request with which the agent can upload one part. Parts are numbered from
    1."""

    upload: Upload
    part: Part
    path: FilePath = ""


class CompleteAsk(Struct, frozen=True, kw_only=True):
    """Completes an upload. `tags` are the ETags that the storage returned for the parts."""

    upload: Upload
    size: Size
    tags: list[str]
    path: FilePath = ""


class AbortAsk(Struct, frozen=True, kw_only=True):
    """Aborts an upload, so that the storage service deletes the uploaded parts."""

    upload: Upload
    path: FilePath = ""


class MovedAnswer(Answer, frozen=True, kw_only=True):
    """Confirms that the server accepted the part."""


class DepositAnswer(Answer, frozen=True, kw_only=True):
    """Signed uploads for the results of ended work. The agent uses these uploads if the server is
    unreachable when the work ends. The first upload is for the manifest, and the other uploads are
    for the parts. The list `uploads` is empty if the job has no bucket.
    """

    uploads: list[SignedAnswer]
    most_bytes: int  # maximum bytes of a part
    valid_s: float
    again_s: float  # the agent repeats the request after this many seconds


@router.get("/deposit", rule=GANG, errors=("gang-not-found",))
async def deposit(request: Request, gang: GangQuery, rank: RankQuery) -> DepositAnswer:
    """Get signed uploads for the results of ended work."""
    app_state = await enter(request, gang, rank)
    signed = await app_state.control_plane.deposits.sign(gang, rank)
    return DepositAnswer(
        uploads=[signed_answer(each) for each in signed.uploads],
        most_bytes=MOST_BYTES,
        valid_s=signed.valid.total_seconds(),
        again_s=signed.again.total_seconds(),
    )


@router.get("/inputs/{index}", rule=GANG, errors=_ERRORS)
async def page(
    request: Request, index: IndexPath, gang: GangQuery, after: PathQuery = ""
) -> InputAnswer:
    """List an input's files."""
    app_state = await enter(request, gang)
    found = await told(app_state.control_plane.data.page(gang, index, after))
    files = [
        InputEntry(
            path=each.path,
            size=each.size,
            tag=each.tag,
            md5=each.md5,
            signed=None if each.signed is None else signed_answer(each.signed),
        )
        for each in found.files
    ]
    return InputAnswer(files=files, next=found.next)


async def open_input(request: Request, index: IndexPath, gang: GangQuery) -> SignedObjects:
    app_state = await enter(request, gang)
    return await told(app_state.control_plane.data.input(gang, index))


async def open_output(request: Request, index: IndexPath, gang: GangQuery) -> SignedObjects:
    app_state = await enter(request, gang)
    return await told(app_state.control_plane.data.output(gang, index))


async def open_checkpoint(
    request: Request, blob: Annotated[str, Path(pattern="^[0-9a-f]{64}$")], gang: GangQuery
) -> SignedObjects:
    app_state = await enter(request, gang)
    found = await told(app_state.control_plane.checkpoints.bucket_checkpoints(gang))
    if found is None:
        raise ApiProblem(
            "blob-not-found", "the job keeps its checkpoints on the server, not in a bucket"
        )
    return found.file(blob)


Input = Annotated[SignedObjects, Depends(open_input)]
Output = Annotated[SignedObjects, Depends(open_output)]


@router.get("/inputs/{index}/signed", rule=GANG, errors=_ERRORS)
async def signed(objects: Input, path: PathQuery = "") -> SignedAnswer:
    """Get a new signed request that reads a file of an input."""
    return signed_answer(await told(in_thread(objects.sign_get, path)))


@router.get("/checkpoint/{blob}", rule=GANG, errors=_CHECKPOINT_ERRORS)
async def signed_checkpoint(
    objects: Annotated[SignedObjects, Depends(open_checkpoint)],
) -> SignedAnswer:
    """Get a signed request that reads a checkpoint's file."""
    return signed_answer(await told(in_thread(objects.sign_get)))


@router.get("/inputs/{index}/bytes", rule=GANG, gives=True, errors=_ERRORS)
async def piece(
    objects: Input,
    offset: BytesQuery,
    length: Annotated[int, Query(ge=1, le=LARGEST)],
    path: PathQuery = "",
) -> Response:
    """Get a part of an input's file."""
    data = await told(in_thread(objects.read, path, offset, length))
    return Response(data, media_type="application/octet-stream")


@router.put(
    "/outputs/{index}/bytes", rule=GANG, sends=True, errors=(*_ERRORS, "too-large", "too-slow")
)
async def put(
    request: Request, objects: Output, offset: BytesQuery, size: BytesQuery, path: PathQuery = ""
) -> MovedAnswer:
    """Send a part of an output's file."""
    data = await read_bytes(request, _PIECE)
    await told(in_thread(objects.write, path, offset, size, data))
    return MovedAnswer()


async def begin(
    uploads: UnfinishedUploads, gang: str, objects: SignedObjects, ask: UploadAsk
) -> UploadAnswer:
    """Start the upload of a file."""
    how = await uploads.begin(gang, objects, ask.path, ask.size)
    return UploadAnswer(upload=how.upload, part_bytes=how.part_bytes, relay=how.relay)


async def part(
    uploads: UnfinishedUploads, gang: str, objects: SignedObjects, ask: PartAsk
) -> SignedAnswer:
    """Get a signed request that sends one part of a file."""
    return signed_answer(await in_thread(objects.sign_part, ask.path, ask.upload, ask.part))


async def complete(
    uploads: UnfinishedUploads, gang: str, objects: SignedObjects, ask: CompleteAsk
) -> MovedAnswer:
    """Complete a file's upload."""
    await uploads.complete(objects, ask.path, ask.upload, ask.tags, ask.size)
    return MovedAnswer()


async def abort(
    uploads: UnfinishedUploads, gang: str, objects: SignedObjects, ask: AbortAsk
) -> MovedAnswer:
    """Abandon a file's upload."""
    await uploads.abort(objects, ask.path, ask.upload)
    return MovedAnswer()


def _add_upload(
    route: str,
    act: Callable[[UnfinishedUploads, str, SignedObjects, Any], Awaitable[Answer]],
    ask: type[Struct],
) -> None:
    """Add two routes for one step of an upload: one for files of outputs, and one for files of
    checkpoints."""
    for prefix, opened, errors in (
        ("/outputs/{index}", open_output, _ERRORS),
        ("/checkpoint/{blob}", open_checkpoint, _CHECKPOINT_ERRORS),
    ):
        given = Depends(opened)

        async def endpoint(
            request: Request, gang: GangQuery, objects: SignedObjects = given
        ) -> Response:
            asked = await read(request, ask, _ASK_LIMIT)
            uploads = app_state_of(request).control_plane.uploads
            return reply(await told(act(uploads, gang, objects, asked)))

        endpoint.__name__, endpoint.__doc__ = act.__name__, act.__doc__
        answer = act.__annotations__["return"]
        add = router.post(prefix + route, rule=GANG, ask=ask, answer=answer, errors=errors)
        add(endpoint)


_add_upload("", begin, UploadAsk)
_add_upload("/parts", part, PartAsk)
_add_upload("/complete", complete, CompleteAsk)
_add_upload("/abort", abort, AbortAsk)


async def told(asked: Awaitable[T]) -> T:
    """Wait for an operation of a storage service, and turn its errors into ApiProblems."""
    try:
        return await asked
    except ObjectMissing as error:
        raise ApiProblem("data-missing", str(error)) from error
    except ObjectDenied as error:
        raise ApiProblem("data-denied", str(error)) from error
    except ObjectTryAgain as error:
        raise RetryLater("data-trouble", str(error)) from error


def signed_answer(signed: SignedRequest) -> SignedAnswer:
    return SignedAnswer(method=signed.method, url=signed.url, headers=dict(signed.headers))
