"""Decodes requests and encodes answers with msgspec. Limits the size of request bodies, and the
time in which a body must arrive."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Query
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cavvy.api.errors import ApiProblem
from cavvy.api.reported import LARGEST
from cavvy.domain.values import view as view

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode
_decoders: dict[type, "msgspec.json.Decoder[Any]"] = {}
# maximum seconds until a small body has arrived, and until each part of a large body has arrived
BODY_SECONDS = 30.0
MIB = 1024 * 1024
# The key in the ASGI scope of a body that has arrived together with its head, as small ones do: to
# wait for it, with a limit, would take longer than to read a report.
ARRIVED = "cavvy.arrived"
BytesQuery = Annotated[int, Query(ge=0, le=LARGEST)]
PositionQuery = Annotated[int, Query(ge=0, le=1 << 62)]


def reply(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response with this value as the body."""
    return Response(_encode(value), status, headers, "application/json")


def done() -> Response:
    return Response(status_code=204)


async def read(request: Request, kind: type[T], limit: int = MIB) -> T:
    """Decode the body to a struct of type `kind`. Raises ApiProblem with the code invalid-request,
    too-large or too-slow."""
    return decode_body(await read_bytes(request, limit), kind)


def decode_body(body: bytes, kind: type[T]) -> T:
    """Decode a body that was read before. Raises ApiProblem with the code invalid-request."""
    try:
        return _decoder(kind).decode(body or b"{}")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiProblem("invalid-request", f"the body cannot be read: {error}") from error


def _decoder(kind: type[T]) -> "msgspec.json.Decoder[T]":
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    return decoder


async def read_bytes(request: Request, limit: int) -> bytes:
    """Read the whole body. Raises ApiProblem with the code too-large or too-slow."""
    _check_length(request, limit)
    arrived: bytes | None = request.scope.get(ARRIVED)
    if arrived is not None and len(arrived) <= limit:
        return arrived
    try:
        async with asyncio.timeout(BODY_SECONDS):
            parts, size = [], 0
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
    except TimeoutError:
        raise ApiProblem(
            "too-slow", f"the body did not arrive within {BODY_SECONDS:.0f} s"
        ) from None
    except ClientDisconnect:
        raise ApiProblem("too-slow", "the connection ended in the middle of the body") from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def stream_bytes(request: Request, limit: int) -> AsyncIterator[bytes]:
    """Yield the parts of the body as they arrive. Raises ApiProblem with the code too-large or
    too-slow."""
    _check_length(request, limit)
    size, stream = 0, request.stream()
    while True:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                part = await anext(stream, None)
        except TimeoutError:
            raise ApiProblem(
                "too-slow", f"no part of the body arrived for {BODY_SECONDS:.0f} s"
            ) from None
        except ClientDisconnect:
            raise ApiProblem("too-slow", "the connection ended in the middle of the body") from None
        if part is None:
            return
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        if part:
            yield part


def _check_length(request: Request, limit: int) -> None:
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise _too_large(limit)


def _too_large(limit: int) -> ApiProblem:
    return ApiProblem(
        "too-large", f"the body is larger than {limit / MIB:g} MiB", headers={"Connection": "close"}
    )
