"""Agents ask what inputs hold and how to move each file, by signed requests or through here."""

from collections.abc import Awaitable
from typing import Annotated, TypeVar

from fastapi import APIRouter, Path, Query
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from cavvy.api.errors import ApiProblem, RetryLater
from cavvy.api.openapi import document
from cavvy.api.reported import LARGEST, FilePath, Part, Size, Upload
from cavvy.api.routes.agents import GangQuery, enter
from cavvy.api.wire import MIB, read, read_bytes, reply
from cavvy.client.wire import Answer
from cavvy.store.objects.base import ObjectDenied, ObjectMissing, ObjectTryAgain, SignedRequest

_PIECE = 32 * MIB
_ERRORS = ("gang-not-found", "data-missing", "data-denied", "data-trouble")

router = APIRouter(prefix="/agent/v1/data", tags=["agent"])
T = TypeVar("T")
IndexPath = Annotated[int, Path(ge=0, le=100_000)]
PathQuery = Annotated[str, Query(max_length=4096)]


class SignedAnswer(Answer, frozen=True, kw_only=True):
    """A request that moves one file and needs no credentials; null: the file goes through the
    control plane.
    """

    method: str
    url: str
    headers: dict[str, str]


class InputEntry(Answer, frozen=True, kw_only=True):
    """One file; `path` "" is the input itself."""

    path: str
    size: int | None
    tag: str
    md5: str
    signed: SignedAnswer | None


class InputAnswer(Answer, frozen=True, kw_only=True):
    """Some of an input's files; `next` is what to ask with for more."""

    files: list[InputEntry]
    next: str


class UploadAsk(Struct, frozen=True, kw_only=True):
    """A file of an output is to be sent."""

    path: FilePath
    size: Size


class UploadAnswer(Answer, frozen=True, kw_only=True):
    """In parts of so many bytes; `upload` "" is in one request, `relay` through the control
    plane.
    """

    upload: str
    part_bytes: int
    relay: bool


class PartAsk(Struct, frozen=True, kw_only=True):
    """How to send one part, from 1."""

    path: FilePath
    upload: Upload
    part: Part


class CompleteAsk(Struct, frozen=True, kw_only=True):
    """Every part was taken, with these ETags."""

    path: FilePath
    upload: Upload
    size: Size
    tags: list[str]


class AbortAsk(Struct, frozen=True, kw_only=True):
    """No more parts come, and those that came are to go."""

    path: FilePath
    upload: Upload


class MovedAnswer(Answer, frozen=True, kw_only=True):
    """It was taken."""


@router.get(
    "/inputs/{index}", **document("What an input holds.", answer=InputAnswer, errors=_ERRORS)
)
async def page(
    request: Request, index: IndexPath, gang: GangQuery, after: PathQuery = ""
) -> Response:
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
    return reply(InputAnswer(files=files, next=found.next))


@router.get(
    "/inputs/{index}/signed",
    **document("A fresh request for a file.", answer=SignedAnswer, errors=_ERRORS),
)
async def signed(
    request: Request, index: IndexPath, gang: GangQuery, path: PathQuery = ""
) -> Response:
    app_state = await enter(request, gang)
    return reply(signed_answer(await told(app_state.control_plane.data.sign(gang, index, path))))


@router.get(
    "/inputs/{index}/bytes", **document("A piece of an input's file.", gives=True, errors=_ERRORS)
)
async def piece(
    request: Request,
    index: IndexPath,
    gang: GangQuery,
    offset: Annotated[int, Query(ge=0, le=LARGEST)],
    length: Annotated[int, Query(ge=1, le=LARGEST)],
    path: PathQuery = "",
) -> Response:
    app_state = await enter(request, gang)
    data = await told(app_state.control_plane.data.read(gang, index, path, offset, length))
    return Response(data, media_type="application/octet-stream")


@router.post(
    "/outputs/{index}",
    **document("Begin to send a file.", ask=UploadAsk, answer=UploadAnswer, errors=_ERRORS),
)
async def begin(request: Request, index: IndexPath, gang: GangQuery) -> Response:
    app_state = await enter(request, gang)
    ask = await read(request, UploadAsk)
    upload = await told(app_state.control_plane.data.begin(gang, index, ask.path, ask.size))
    return reply(
        UploadAnswer(upload=upload.upload, part_bytes=upload.part_bytes, relay=upload.relay)
    )


@router.post(
    "/outputs/{index}/parts",
    **document("How to send one part.", ask=PartAsk, answer=SignedAnswer, errors=_ERRORS),
)
async def part(request: Request, index: IndexPath, gang: GangQuery) -> Response:
    app_state = await enter(request, gang)
    ask = await read(request, PartAsk)
    return reply(
        signed_answer(
            await told(
                app_state.control_plane.data.sign_part(gang, index, ask.path, ask.upload, ask.part)
            )
        )
    )


@router.post(
    "/outputs/{index}/complete",
    **document("A file was sent.", ask=CompleteAsk, answer=MovedAnswer, errors=_ERRORS),
)
async def complete(request: Request, index: IndexPath, gang: GangQuery) -> Response:
    app_state = await enter(request, gang)
    ask = await read(request, CompleteAsk, 8 * MIB)
    await told(
        app_state.control_plane.data.complete(gang, index, ask.path, ask.upload, ask.tags, ask.size)
    )
    return reply(MovedAnswer())


@router.post(
    "/outputs/{index}/abort",
    **document("A file is not sent.", ask=AbortAsk, answer=MovedAnswer, errors=_ERRORS),
)
async def abort(request: Request, index: IndexPath, gang: GangQuery) -> Response:
    app_state = await enter(request, gang)
    ask = await read(request, AbortAsk)
    await told(app_state.control_plane.data.abort(gang, index, ask.path, ask.upload))
    return reply(MovedAnswer())


@router.put(
    "/outputs/{index}/bytes",
    **document(
        "A piece of an output's file.",
        sends=True,
        answer=MovedAnswer,
        errors=(*_ERRORS, "too-large", "too-slow"),
    ),
)
async def put(
    request: Request,
    index: IndexPath,
    gang: GangQuery,
    offset: Annotated[int, Query(ge=0, le=LARGEST)],
    size: Annotated[int, Query(ge=0, le=LARGEST)],
    path: PathQuery = "",
) -> Response:
    app_state = await enter(request, gang)
    data = await read_bytes(request, _PIECE)
    await told(app_state.control_plane.data.write(gang, index, path, offset, size, data))
    return reply(MovedAnswer())


async def told(asked: Awaitable[T]) -> T:
    """What a storage refused, as a ApiProblem."""
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
