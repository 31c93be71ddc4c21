"""The routes `/v1/files` and `/v1/batches` of OpenAI's API, as far as batches need them.

A file belongs to the keys with which it was uploaded, or to a project whose models need no key. For
others, the file does not exist. Errors and objects have OpenAI's format.
"""

import asyncio
import errno
import logging
import os
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Annotated, Any, BinaryIO
from urllib.parse import parse_qs, unquote

import msgspec

from cavvy.capabilities.language_models.batch_runs import BatchRuns
from cavvy.capabilities.language_models.file_store import (
    OPEN_STATES,
    BatchState,
    FileStore,
    StoredBatch,
    StoredFile,
)
from cavvy.capabilities.language_models.upload_form import FormError, UploadForm, find_boundary
from cavvy.capabilities.serving.gateway.bodies import NO_JSON
from cavvy.capabilities.serving.gateway.heads import ResponseHead
from cavvy.capabilities.serving.gateway.own_answers import (
    OVERSIZED,
    Answer,
    AnswerCode,
    OwnAnswer,
    write_json,
)
from cavvy.capabilities.serving.gateway.responses import ClientResponse
from cavvy.capabilities.serving.gateway.seams import ClientRequest, OpenRequest, ResponseSink
from cavvy.domain.values import Struct

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/images/generations",
    "/v1/messages",
    "/v1/moderations",
    "/v1/rerank",
    "/v1/responses",
    "/v1/score",
)
FILE_MAX = 8 << 30  # bytes
_FILES_MAX, _OPEN_MAX = 2000, 100  # files, and batches that have not ended, of an owner
_ENDED_MAX = 10_000  # batches of an owner that are remembered after their end
_BODY_MAX = 1 << 20
_PIECE = 1 << 18  # bytes of a file that are sent at once
_JUDGED_EACH = 8 << 20  # bytes of an upload between two looks at what its owner has
_UNSENT_MAX = 1 << 20  # bytes that the client has not read yet
_WAIT_S = 0.01
_WINDOW = re.compile(r"([1-9]\d{0,2})h")
_HOURS_MAX = 168
_EXPIRES_S = (3600, 2_592_000)  # least and most, as OpenAI has them
_ENDING = OwnAnswer(
    503, AnswerCode.STOPPING, "an earlier gateway still has the files; repeat the request", 1
)

_log = logging.getLogger(__name__)
Handler = Callable[[bytes], Awaitable[Answer]]


class BatchAsk(Struct, frozen=True):
    """The body of a request that creates a batch."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: (
        Annotated[
            dict[
                Annotated[str, msgspec.Meta(max_length=64)],
                Annotated[str, msgspec.Meta(max_length=512)],
            ],
            msgspec.Meta(max_length=16),
        ]
        | None
    ) = None


_decode_ask = msgspec.json.Decoder(BatchAsk).decode


class OpenAiFiles:
    """All files and batches of the gateway."""

    def __init__(self, runs: BatchRuns) -> None:
        self.runs = runs
        self.store: FileStore = runs.store
        self._ready = False
        self._count = 0

    def tick(self, now: float) -> None:
        """Called once a second."""
        if not self._ready:
            try:
                self._ready = self.store.open()
            except OSError as error:
                _log.error("the files of OpenAI's API cannot be read: %s", error)
            if not self._ready:
                return
            for batch in self.store.batches.values():
                if batch.state in OPEN_STATES:
                    self.runs.start(batch)
        self.runs.check(now)
        self._count += 1
        if self._count % 60 == 0:
            self._expire(int(time.time()))

    def _expire(self, now: int) -> None:
        old = [each.id for each in self.store.files.values() if _is_past(each.expires_at, now)]
        for file_id in old:
            if self._find_user(file_id) is None:
                self._remove(self.store.files, file_id)
        gone = [each.id for each in self.store.batches.values() if _is_past(each.forget_at, now)]
        for batch_id in gone:
            self._remove(self.store.batches, batch_id)

    def _remove(self, held: dict[str, Any], name: str) -> None:
        del held[name]
        self.runs.work.spawn(self.runs.work.call(lambda: self.store.remove(name)))

    def open(self, request: ClientRequest, owners: tuple[str, ...]) -> OpenRequest | Answer:
        """Open a request for files or batches, or answer it. Each of `owners` may use the same."""
        if not self._ready:
            return _ENDING
        head = request.head
        path, _, query = head.target.partition(b"?")
        kind, _, rest = path.decode("latin-1").partition("/v1/")[2].partition("/")
        name, _, act = unquote(rest.rstrip("/")).partition("/")
        method = "GET" if head.method == b"HEAD" else head.method.decode()
        asked = {key: each[-1] for key, each in parse_qs(query.decode("latin-1")).items()}
        match (method, kind, bool(name), act):
            case ("POST", "files", False, ""):
                return self._open_upload(request, owners)
            case ("GET", "files", False, ""):
                return self._list_files(owners, asked)
            case ("POST", "batches", False, ""):
                return BodyRequest(self.runs, request, lambda body: self._create(owners, body))
            case ("GET", "batches", False, ""):
                return self._list_batches(owners, asked)
            case ("GET", "batches", True, ""):
                batch = self._find_batch(owners, name)
                return write_json(_show_batch(batch)) if batch else _refuse_batch(name)
            case ("POST", "batches", True, "cancel"):
                return BodyRequest(self.runs, request, lambda _: self._cancel(owners, name))
            case (_, "files", True, "" | "content"):
                return self._open_file(request, owners, name, f"{method} {act}".strip())
        return OwnAnswer(405, AnswerCode.BAD_REQUEST, f"{method} is not permitted for this path")

    # files

    def _open_upload(
        self, request: ClientRequest, owners: tuple[str, ...]
    ) -> "UploadRequest | OwnAnswer":
        boundary = find_boundary(request.head.get_header(b"content-type"))
        if boundary is None or request.head.length == 0:
            return _refuse("the body is not a form with the fields `file` and `purpose`")
        if request.head.length > FILE_MAX + _BODY_MAX:
            return _TOO_LARGE
        if sum(1 for _ in _owned(self.store.files, owners)) >= _FILES_MAX:
            text = f"there are {_FILES_MAX} files already; delete some of them"
            return OwnAnswer(429, AnswerCode.TOO_MANY, text)
        if not self.store.may_own(owners, max(request.head.length, 0)):
            return _OWNS_TOO_MUCH
        if not self.store.has_room(max(request.head.length, 0)):
            text = "the disk of the gateway is almost full; delete files, or ask its operator"
            return OwnAnswer(507, AnswerCode.TOO_LARGE, text)
        return UploadRequest(self.runs, request, owners, boundary)

    def _open_file(
        self, request: ClientRequest, owners: tuple[str, ...], name: str, what: str
    ) -> OpenRequest | Answer:
        file = self.store.files.get(name)
        if file is None or not set(owners).intersection(file.owners):
            return OwnAnswer(404, AnswerCode.NO_OBJECT, f"No such File object: {name}")
        if what == "GET content":
            return ContentRequest(self.runs, request, file)
        if what == "GET":
            return write_json(show_file(file))
        if what != "DELETE":
            return OwnAnswer(405, AnswerCode.BAD_REQUEST, "use GET or DELETE for a file")
        if (user := self._find_user(name)) is not None:
            return OwnAnswer(409, AnswerCode.BAD_REQUEST, f"{user} still reads the file {name}")
        self._remove(self.store.files, name)
        return write_json({"id": name, "object": "file", "deleted": True})

    def _find_user(self, file_id: str) -> str | None:
        return next(
            (
                each.id
                for each in self.store.batches.values()
                if each.input_file_id == file_id and each.state in OPEN_STATES
            ),
            None,
        )

    def _list_files(self, owners: tuple[str, ...], asked: Mapping[str, str]) -> Answer:
        purpose = asked.get("purpose")
        found = _owned(self.store.files, owners)
        return _list([show_file(f) for f in found if purpose in (None, f.purpose)], asked, 10_000)

    # batches

    def _find_batch(self, owners: tuple[str, ...], name: str) -> StoredBatch | None:
        batch = self.store.batches.get(name)
        return batch if batch and set(owners).intersection(batch.owners) else None

    async def _create(self, owners: tuple[str, ...], body: bytes) -> Answer:
        try:
            ask = _decode_ask(body)
        except NO_JSON as error:
            return _refuse(f"the body does not describe a batch: {error}")
        file = self.store.files.get(ask.input_file_id)
        if file is None or not set(owners).intersection(file.owners):
            return _refuse(f"No such File object: {ask.input_file_id}")
        if file.purpose != "batch":
            return _refuse(f"the purpose of the file {file.id} is not `batch`")
        if ask.endpoint not in ENDPOINTS:
            known = ", ".join(ENDPOINTS)
            return _refuse(f"`endpoint` is {ask.endpoint!r}, but must be one of {known}")
        hours = _WINDOW.fullmatch(ask.completion_window)
        if hours is None or int(hours[1]) > _HOURS_MAX:
            text = f"`completion_window` is whole hours, such as 24h, at most {_HOURS_MAX}h"
            return _refuse(text)
        mine = list(_owned(self.store.batches, owners))
        running = sum(1 for each in mine if each.state in OPEN_STATES)
        if running >= _OPEN_MAX:
            text = f"{_OPEN_MAX} batches have not ended yet; wait, or cancel some of them"
            return OwnAnswer(429, AnswerCode.TOO_MANY, text, 60)
        if len(mine) - running >= _ENDED_MAX:
            ended = (each for each in mine if each.state not in OPEN_STATES)
            self._remove(self.store.batches, min(ended, key=lambda each: each.created_at).id)
        now = int(time.time())
        batch = StoredBatch(
            id=f"batch_{secrets.token_hex(16)}",
            owners=owners,
            endpoint=ask.endpoint,
            input_file_id=file.id,
            completion_window=ask.completion_window,
            created_at=now,
            expires_at=now + 3600 * int(hours[1]),
            metadata=ask.metadata,
        )
        self.store.batches[batch.id] = batch  # from now on, the file is not removed
        try:
            await self.runs.work.call(lambda: self.store.write_batch(batch))
        except OSError:
            del self.store.batches[batch.id]
            raise
        answer = write_json(_show_batch(batch))
        self.runs.start(batch)
        return answer

    async def _cancel(self, owners: tuple[str, ...], name: str) -> Answer:
        if (batch := self._find_batch(owners, name)) is None:
            return _refuse_batch(name)
        state = _show_state(batch)
        if state is not BatchState.CANCELLING:
            if state not in (BatchState.VALIDATING, BatchState.IN_PROGRESS):
                return OwnAnswer(
                    409,
                    AnswerCode.BAD_REQUEST,
                    f"Cannot cancel a batch with status '{state}'.",
                )
            if batch.state is BatchState.IN_PROGRESS:
                batch.state = BatchState.CANCELLING
            batch.changed_at[BatchState.CANCELLING] = int(time.time())
            self.runs.stop(batch.id, BatchState.CANCELLED)
            data = msgspec.structs.replace(batch)
            await self.runs.work.call(lambda: self.store.write_batch(data))
        return write_json(_show_batch(batch))

    def _list_batches(self, owners: tuple[str, ...], asked: Mapping[str, str]) -> Answer:
        found = _owned(self.store.batches, owners)
        return _list([_show_batch(each) for each in found], asked, 100, usual=20)


_TOO_LARGE = OwnAnswer(413, AnswerCode.TOO_LARGE, f"a file has at most {FILE_MAX >> 30} GiB")


_OWNS_TOO_MUCH = OwnAnswer(
    429,
    AnswerCode.TOO_MANY,
    "the files of a key may use at most a quarter of the gateway's disk; delete some of them",
)


class BodyRequest:
    """Reads a small body, and gives it to a handler."""

    held_bytes = 0

    def __init__(self, runs: BatchRuns, request: ClientRequest, handle: Handler) -> None:
        self._runs = runs
        self._request = request
        self._handle = handle
        self._body = b""
        self._begun = False
        self._done = request.head.length == 0

    def begin(self) -> None:
        self._begun = True
        if self._done:
            self._runs.work.spawn(self._answer())
        else:
            self._request.sink.want_body()

    def feed(self, payload: bytes, done: bool) -> OwnAnswer | None:
        self._body += payload
        self._done = done
        if len(self._body) > _BODY_MAX:
            return OVERSIZED
        if done and self._begun:
            self._runs.work.spawn(self._answer())
        return None

    def abort(self) -> None: ...

    async def _answer(self) -> None:
        try:
            answer = await self._handle(self._body)
        except OSError as error:
            answer = _refuse_storage(error)
        _respond(self._request.sink, answer)


class UploadRequest:
    """Writes the file of a form to the disk while it arrives."""

    def __init__(
        self, runs: BatchRuns, request: ClientRequest, owners: tuple[str, ...], boundary: bytes
    ) -> None:
        self.held_bytes = 0  # that are not written yet
        self._runs = runs
        self._request = request
        self._owners = owners
        self._id = f"file-{secrets.token_hex(12)}"
        self._form = UploadForm(boundary, self._write)
        self._size = self._judged = 0  # bytes; the second, those whose owner was allowed to have
        self._content: BinaryIO | None = None
        self._problem: OSError | None = None
        self._ended = False

    def begin(self) -> None:
        self._request.sink.want_body()

    def feed(self, payload: bytes, done: bool) -> OwnAnswer | None:
        try:
            self._form.feed(payload)
        except FormError as error:
            return _refuse(f"the form cannot be read: {error}")
        if self._size > FILE_MAX:
            return _TOO_LARGE
        if self._size - self._judged > _JUDGED_EACH or done:
            self._judged = self._size
            if not self._runs.store.may_own(self._owners, 0):
                return _OWNS_TOO_MUCH  # the head may not state the length, others may arrive too
        if done:
            if wrong := self._check():
                return wrong
            self._ended = True
            self._runs.work.spawn(self._finish())
        return None

    def abort(self) -> None:
        self._runs.store.uploads.pop(self._id, None)
        if not self._ended:
            self._runs.work.spawn(self._runs.work.call(self._drop))
        self._ended = True

    def _check(self) -> OwnAnswer | None:
        form = self._form
        if not form.ended:
            return _refuse("the form ends before its last boundary")
        if form.filename is None:
            return _refuse("the form has no `file`")
        if (purpose := form.fields.get("purpose")) != "batch":
            return _refuse(f"`purpose` is {purpose!r}, but this gateway takes files for `batch`")
        seconds = form.fields.get("expires_after[seconds]")
        least, most = _EXPIRES_S
        if seconds is not None and not least <= _read_count(seconds) <= most:
            return _refuse(f"`expires_after[seconds]` is a number from {least} to {most}")
        return None

    def _write(self, data: bytes) -> None:
        """Write a part of the file in the thread of the store."""
        self._size += len(data)
        self._runs.store.uploads[self._id] = self._owners, self._size
        self.held_bytes += len(data)
        self._runs.work.spawn(self._store_part(data))

    async def _store_part(self, data: bytes) -> None:
        await self._runs.work.call(lambda: self._put(data))
        self.held_bytes -= len(data)
        if self.held_bytes <= _PIECE and not self._ended:
            self._request.sink.resume_body()

    def _put(self, data: bytes) -> None:
        try:
            if self._content is None:
                self._content = self._runs.store.begin_upload(self._id)
            if self._problem is None:
                if not self._runs.store.has_room(len(data)):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._content.write(data)
        except OSError as error:
            self._problem = error

    def _drop(self) -> None:
        if self._content is not None:
            self._runs.store.drop_upload(self._id, self._content)

    async def _finish(self) -> None:
        now = int(time.time())
        seconds = self._form.fields.get("expires_after[seconds]")
        file = StoredFile(
            id=self._id,
            owners=self._owners,
            filename=self._form.filename or "",
            purpose="batch",
            bytes=self._size,
            created_at=now,
            expires_at=now + int(seconds or _EXPIRES_S[1]),
        )
        problem = await self._runs.work.call(lambda: self._keep(file))
        self._runs.store.uploads.pop(self._id, None)
        sink = self._request.sink
        if problem is not None:
            _respond(sink, _refuse_storage(problem))
            return
        self._runs.store.files[file.id] = file
        _respond(sink, write_json(show_file(file)))

    def _keep(self, file: StoredFile) -> OSError | None:
        self._put(b"")
        if self._problem is None and self._content is not None:
            try:
                self._runs.store.finish_upload(file, self._content)
            except OSError as error:
                self._problem = error
        if self._problem is not None:
            self._drop()
        return self._problem


class ContentRequest:
    """Sends the content of a file as fast as the client reads it."""

    held_bytes = 0

    def __init__(self, runs: BatchRuns, request: ClientRequest, file: StoredFile) -> None:
        self._runs = runs
        self._request = request
        self._file = file
        self._gone = False

    def begin(self) -> None:
        self._runs.work.spawn(self._send())

    def feed(self, payload: bytes, done: bool) -> OwnAnswer:
        return OVERSIZED  # this kind of request has no body

    def abort(self) -> None:
        self._gone = True

    async def _send(self) -> None:
        sink, runs = self._request.sink, self._runs
        assert isinstance(sink, ClientResponse)
        try:
            content = await runs.work.call(lambda: runs.store.open_file(self._file.id))
        except FileNotFoundError:  # it was removed meanwhile
            text = f"No such File object: {self._file.id}"
            return _respond(sink, OwnAnswer(404, AnswerCode.NO_OBJECT, text))
        with content:
            size = self._file.bytes
            head = ResponseHead(200, False)
            head.fields = (
                b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n"
                b"Content-Length: %d\r\n" % size
            )
            head.length = size
            if self._gone:
                return None
            if self._request.head.method == b"HEAD":
                size = 0
            sink.respond(head, b"", not size)
            unsent = sink.transport.get_write_buffer_size
            while size and not self._gone:
                piece = await runs.work.call(lambda: content.read(_PIECE))
                size = size - len(piece) if piece else 0
                # a transport has no event for this
                while not self._gone and unsent() > _UNSENT_MAX:  # noqa: ASYNC110
                    await asyncio.sleep(_WAIT_S)
                if not self._gone:
                    sink.send(piece, not size)
            if not self._gone:
                sink.end()


def show_file(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def _show_state(batch: StoredBatch) -> BatchState:
    ends = batch.state in OPEN_STATES and batch.stop is BatchState.CANCELLED
    return BatchState.CANCELLING if ends else batch.state


def _show_batch(batch: StoredBatch) -> dict[str, Any]:
    at = batch.changed_at.get
    problems = [msgspec.to_builtins(each) for each in batch.problems]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": problems} if problems else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": str(_show_state(batch)),
        "output_file_id": batch.output_id if batch.has_output else None,
        "error_file_id": batch.errors_id if batch.has_errors else None,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{f"{state}_at": at(state) for state in BatchState if state is not BatchState.VALIDATING},
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "metadata": batch.metadata,
    }


def _owned(held: Mapping[str, Any], owners: tuple[str, ...]) -> Iterable[Any]:
    mine = set(owners)
    return (each for each in held.values() if mine.intersection(each.owners))


def _list(
    rows: list[dict[str, Any]], asked: Mapping[str, str], most: int, usual: int | None = None
) -> Answer:
    """Answer with one page of a list, the newest first."""
    limit = asked.get("limit", str(usual or most))
    if not 1 <= _read_count(limit) <= most:
        return _refuse(f"`limit` is a number from 1 to {most}")
    if (order := asked.get("order", "desc")) not in ("asc", "desc"):
        return _refuse("`order` is `asc` or `desc`")
    rows.sort(key=lambda row: row["created_at"])  # those of a second as they were added
    if order == "desc":
        rows.reverse()
    ids = [row["id"] for row in rows]
    start = 0
    if after := asked.get("after"):
        if after not in ids:
            return _refuse(f"`after` is {after!r}, which the list does not have")
        start = ids.index(after) + 1
    page = rows[start : start + int(limit)]
    return write_json(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": start + len(page) < len(rows),
        }
    )


def _read_count(text: str) -> int:
    """Return a number, or -1 if the text is none that the gateway could use."""
    return int(text) if text.isdecimal() and len(text) < 10 else -1  # int() refuses long ones


def _is_past(at: int | None, now: int) -> bool:
    return at is not None and at <= now


def _refuse_batch(name: str) -> OwnAnswer:
    return OwnAnswer(404, AnswerCode.NO_OBJECT, f"No batch found with id '{name}'.")


def _refuse_storage(error: OSError) -> OwnAnswer:
    text = f"the gateway cannot store this now: {error.strerror or error}"
    return OwnAnswer(503, AnswerCode.STOPPING, text)


def _refuse(text: str) -> OwnAnswer:
    return OwnAnswer(400, AnswerCode.BAD_REQUEST, text)


def _respond(sink: ResponseSink, answer: Answer) -> None:
    """Send an answer after the body was read. A client that has gone gets nothing."""
    if isinstance(answer, OwnAnswer):
        if isinstance(sink, ClientResponse) and sink.open:
            sink.answer(answer)
        return
    head = ResponseHead(200, False)
    head.fields, head.length = answer.fields, len(answer.body)
    if isinstance(sink, ClientResponse) and sink.open:
        sink.respond(head, answer.body, True)
        sink.end()
