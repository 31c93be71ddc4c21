"""Routes for blobs, which are the parts of working-folder snapshots, named by the SHA-256 of their
bytes."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Annotated

from fastapi import Path
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from cavvy.api.app_state import AppState
from cavvy.api.audit import note_reading
from cavvy.api.errors import ApiProblem
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path
from cavvy.api.wire import MIB, stream_bytes
from cavvy.client import wire
from cavvy.client.blobs import PACK_BLOBS, PACK_BYTES, SMALL, TornPack, make_entry, read_pack
from cavvy.domain.accounts import Permission
from cavvy.store.base import HashMismatch, KeyUnusable, RowNotFound, StoreUnusable
from cavvy.store.blobs import BlobStore, BlobWriter
from cavvy.store.objects.threads import StorageThreads

_NAMES_LIMIT = 4 * MIB
_AT_ONCE = 4 * MIB  # bytes that are passed to a thread at once
_PIECE = MIB  # bytes that are decrypted at once
# Files in a bucket that does not answer keep only these threads waiting.
_in_thread = StorageThreads(64, "blobs").run_to_its_end

_log = logging.getLogger(__name__)
router = RouteGroup("blobs", prefix="/v1/projects/{project}/blobs")


@router.post("/missing", rule=in_path(Permission.RUN), limit=_NAMES_LIMIT)
async def missing(
    request: Request, app_state: AppState, project: ProjectPath, ask: wire.BlobsAsk
) -> wire.BlobsMissing:
    """List the blobs that the server does not have."""
    note_reading(request)
    return wire.BlobsMissing(
        missing=await _in_thread(app_state.blobs.of(project).missing, ask.blobs)
    )


@router.put(
    "/pack",
    rule=in_path(Permission.RUN),
    sends=True,
    errors=("blob-mismatch", "too-large", "too-slow", "disk-full"),
)
async def put_pack(request: Request, app_state: AppState, project: ProjectPath) -> wire.BlobsStored:
    """Upload a pack of small blobs (at most 256 KiB each, 8 MiB in all). Each blob is sent as its
    SHA-256, its size, a newline and its bytes.
    """
    body = b"".join([part async for part in stream_bytes(request, PACK_BYTES)])
    try:
        blobs = read_pack(body)
        if len(blobs) > PACK_BLOBS:
            raise ApiProblem(
                "too-large",
                f"the pack contains {len(blobs)} blobs; the maximum is {PACK_BLOBS}",
            )
        await _in_thread(app_state.blobs.of(project).put_all, blobs)
    except TornPack as error:
        raise ApiProblem("invalid-request", f"{error}; nothing was stored") from error
    except HashMismatch as error:
        raise ApiProblem("blob-mismatch", str(error)) from error
    return wire.BlobsStored(stored=len(blobs))


@router.put(
    "/{blob}",
    rule=in_path(Permission.RUN),
    sends=True,
    errors=("blob-mismatch", "too-large", "disk-full"),
)
async def put(
    request: Request,
    app_state: AppState,
    project: ProjectPath,
    blob: Annotated[str, Path(pattern="^[0-9a-f]{64}$")],
) -> None:
    """Upload a blob."""
    await take_blob(
        request,
        app_state.blobs.of(project).writer(blob),
        app_state.settings.whole("server.blob_mib") * MIB,
    )


@router.get(
    "/{blob}", rule=in_path(Permission.RUN), gives=True, when={RowNotFound: "blob-not-found"}
)
async def get(
    request: Request,
    app_state: AppState,
    project: ProjectPath,
    blob: Annotated[str, Path(pattern="^[0-9a-f]{64}$")],
) -> Response:
    """Download a blob, or its bytes from an offset on."""
    return await send_blob(app_state.blobs.of(project), blob, request.headers.get("range", ""))


async def take_blob(request: Request, writer: BlobWriter, limit: int) -> int:
    """Write the body to a blob as it arrives, and return its size in bytes. Raises ApiProblem,
    StoreFull."""
    parts, size, total = [], 0, 0
    await _in_thread(writer.__enter__)
    try:
        async for part in stream_bytes(request, limit):
            parts.append(part)
            size += len(part)
            total += len(part)
            if size >= _AT_ONCE:
                await _in_thread(writer.write, b"".join(parts))
                parts, size = [], 0
        await _in_thread(writer.write, b"".join(parts))
    except BaseException as error:
        await asyncio.shield(_in_thread(writer.__exit__, type(error), error, None))
        raise
    try:
        await _in_thread(writer.__exit__, None, None, None)
    except HashMismatch as error:
        raise ApiProblem("blob-mismatch", str(error)) from error
    return total


class _WholeFile(FileResponse):
    """The file of a blob. If the file is replaced by chunks before it is opened, the answer is that
    of `again`."""

    def __init__(self, path: os.PathLike[str], again: Callable[[], Awaitable[Response]]) -> None:
        super().__init__(path, media_type="application/octet-stream")
        self._again = again

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head: list[Message] = []
        started = False

        async def send_opened(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                head.append(message)
                return
            started = True
            while head:
                await send(head.pop())
            await send(message)

        try:
            await super().__call__(scope, receive, send_opened)
        except (FileNotFoundError, RuntimeError):
            if started or os.path.exists(self.path):
                raise
            await (await self._again())(scope, receive, send)


async def send_blob(
    store: BlobStore,
    name: str,
    wanted: str = "",
    piece: int = _PIECE,
    wait: Callable[[int], Awaitable[None]] | None = None,
) -> Response:
    """Send a blob, or its bytes from an offset on if `wanted` is a header such as "bytes=1000-". An
    encrypted blob is decrypted in pieces. `wait` is called with the size of each `piece` before it
    is sent. Raises RowNotFound, StoreError."""
    path = await _in_thread(store.path, name)
    if path is not None and wait is None:
        return _WholeFile(path, partial(send_blob, store, name, wanted, piece))
    file = await _in_thread(store.open, name)
    size = file.seek(0, os.SEEK_END)
    start, status = _read_start(wanted, size), 200
    headers = {"content-length": str(size - start)}
    if start:
        status, headers["content-range"] = 206, f"bytes {start}-{size - 1}/{size}"
    file.seek(start)
    try:
        first = await _in_thread(file.read, piece)
    except StoreUnusable as error:
        file.close()
        if isinstance(error, KeyUnusable):
            raise
        _log.error("%s", error)
        raise RowNotFound(
            f"blob {name} is damaged after byte {start}; the server's log names the damaged file"
        ) from error

    async def pieces() -> AsyncIterator[bytes]:
        data = first
        try:
            while data:
                if wait is not None:
                    await wait(len(data))
                yield data
                data = await _in_thread(file.read, piece)
        finally:
            file.close()

    return StreamingResponse(
        pieces(), status, headers=headers, media_type="application/octet-stream"
    )


def _read_start(wanted: str, size: int) -> int:
    """Return the offset of the first byte that a header Range asks for. Other forms than
    "bytes=N-" get the whole blob, as RFC 9110 allows."""
    unit, _, rest = wanted.partition("=")
    first, dash, last = rest.partition("-")
    if unit != "bytes" or not dash or last or not first.isdecimal() or len(first) > 18:
        return 0
    return int(first) if int(first) < size else 0


def gather(stores: Mapping[BlobStore, Sequence[str]]) -> bytes:
    """Return a pack that contains as many of the requested small blobs as fit. `stores` maps each
    store to the names of the blobs that are requested from this store. Blocks on disk I/O. Raises
    ApiProblem.
    """
    found: dict[str, bytes] = {}
    size = 0
    for store, names in stores.items():
        for name in names[:PACK_BLOBS]:
            try:
                data = None if name in found else store.read(name, SMALL)
            except HashMismatch as error:
                raise ApiProblem("invalid-request", str(error)) from error
            if data is None:
                continue
            entry = make_entry(name, data)
            size += len(entry)
            if size > PACK_BYTES:
                return b"".join(found.values())
            found[name] = entry
    return b"".join(found.values())
