"""A port of this machine that leads to a replica which is a managed endpoint.

The gateway sends requests to this port as to any replica. The server passes them to the provider,
whose API signs them: neither the gateway nor HAProxy has credentials of a cloud. If an answer is
lost, the connection is closed, so that the gateway decides whether the request is repeated.
"""

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress

import httptools

from cavvy.domain.services import ServiceReplica
from cavvy.providers.abilities import AnswersRequests, ReplicaAnswer, ReplicaRequest
from cavvy.providers.base import NotFound, ProviderError, Refused

_LOCAL = "127.0.0.1"
_CALLED, _PROBED = b"/invocations", b"/ping"
# the largest body that SageMaker passes on, and more than others do (2026-11-24):
# https://docs.aws.amazon.com/general/latest/gr/sagemaker.html
_MOST_BYTES = 25 << 20
_CHUNK = 1 << 16
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_PHRASES = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 413: "Content Too Large"}
_log = logging.getLogger(__name__)


class EndpointRelay:
    """The port of one endpoint. The port listens as long as the replica is kept."""

    def __init__(
        self, service: str, replica: ServiceReplica, find: Callable[[], AnswersRequests | None]
    ) -> None:
        """`find` returns the provider, which changes with a project's credentials."""
        self.service, self.id = service, replica.id
        self._gang, self._find = replica.gang, find
        self._socket = socket.socket()
        self._socket.bind((_LOCAL, 0))
        self.port = int(self._socket.getsockname()[1])
        self._connections: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(lambda _: self._socket.close())  # even if it never ran

    def close(self) -> None:
        self._task.cancel()
        for each in self._connections:
            each.cancel()

    async def _run(self) -> None:
        server = await asyncio.start_server(self._accept, sock=self._socket, backlog=1024)
        async with server:
            await server.serve_forever()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with suppress(OSError, httptools.HttpParserError):
                while (got := await _read_request(reader, writer)) is not None:
                    answer = await self._answer(got)
                    writer.write(_write_answer(answer, got))
                    await writer.drain()
                    if not got.keeps:
                        break
        except ProviderError as error:
            extra = {"replica": self.id, "problem": str(error)}
            _log.warning("an endpoint's answer is missing", extra=extra)
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, got: "_Incoming") -> ReplicaAnswer:
        """Return the endpoint's answer, or why there is none. Raises ProviderError."""
        provider, path = self._find(), got.target.partition(b"?")[0]
        if provider is None:
            raise NotFound("the provider's account was removed")
        if path == _PROBED:
            status = 200 if await provider.answers(self._gang) else 503
            return _explain(status, "")
        if path != _CALLED:
            return _explain(404, "a managed endpoint has the path /invocations alone")
        if got.method != b"POST":
            return _explain(405, "a managed endpoint answers POST alone")
        if got.upgrades or "text/event-stream" in got.headers.get("accept", ""):
            return _explain(405, "a managed endpoint passes on neither WebSocket nor event streams")
        if got.too_large:
            return _explain(413, f"a managed endpoint gets at most {_MOST_BYTES >> 20} MiB")
        request = ReplicaRequest(body=bytes(got.body), headers=got.headers)
        try:
            return await provider.invoke(self._gang, request)
        except Refused as error:
            return _explain(502, str(error))


class _Incoming:
    """One request as the callbacks of httptools collect it."""

    def __init__(self) -> None:
        self.method, self.target, self.body = b"", b"", bytearray()
        self.headers: dict[str, str] = {}
        self.parser = httptools.HttpRequestParser(self)
        self.complete = self.keeps = self.upgrades = self.too_large = False

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        # the parser forgets both with the end of the message
        self.method, self.keeps = self.parser.get_method(), self.parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self.too_large = self.too_large or len(self.body) + len(body) > _MOST_BYTES
        if not self.too_large:
            self.body += body

    def on_message_complete(self) -> None:
        self.complete = True


async def _read_request(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> _Incoming | None:
    """Return the next request of a connection, or None at its end. The gateway sends the next one
    only after the answer. Raises OSError, HttpParserError.
    """
    got, told = _Incoming(), False
    while not got.complete:
        data = await reader.read(_CHUNK)
        if not data:
            return None
        try:
            got.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            got.complete, got.upgrades, got.keeps = True, True, False
        if not told and not got.complete and got.headers.get("expect", "").lower():
            writer.write(_CONTINUE)
            told = True
    return got


def _explain(status: int, text: str) -> ReplicaAnswer:
    body = json.dumps({"error": text}).encode() if text else b""
    return ReplicaAnswer(status=status, headers={"content-type": "application/json"}, body=body)


def _write_answer(answer: ReplicaAnswer, got: _Incoming) -> bytes:
    """Return the bytes of an answer. After an answer to HEAD, which has no body, its reader takes
    the next bytes for another answer: https://www.rfc-editor.org/rfc/rfc9110#section-9.3.2
    """
    headers: Mapping[str, str] = {
        **answer.headers,
        "content-length": str(len(answer.body)),
        "connection": "keep-alive" if got.keeps else "close",
    }
    lines = [f"HTTP/1.1 {answer.status} {_PHRASES.get(answer.status, 'Answered')}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    body = b"" if got.method == b"HEAD" else answer.body
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
