"""A port of this machine that forwards requests to a managed endpoint, which is one kind of
replica.

The gateway sends requests to this port as to the port of any other replica. The server signs the
requests with its cloud credentials and forwards them to the endpoint. Neither the gateway nor
HAProxy has cloud credentials. If an answer is lost, the connection is closed, so that the gateway
decides whether the request is repeated. While the endpoint is not in service, the port refuses
connections, so that the gateway repeats requests later.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress

import httptools

from cavvy.capabilities.serving.replicas import ServiceReplica
from cavvy.providers.abilities import AnswersRequests, ReplicaAnswer, ReplicaRequest
from cavvy.providers.base import NotFound, ProviderError, Refused
from cavvy.server.doors import LOCAL, hold_port

_CALLED, _PROBED = b"/invocations", b"/ping"
# the largest body that SageMaker passes on; other providers accept less (2026-11-24):
# https://docs.aws.amazon.com/general/latest/gr/sagemaker.html
_MOST_BYTES = 25 << 20
_CHUNK = 1 << 16
_PAUSE_S = 1.0  # seconds between two looks whether the endpoint is in service again
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_PHRASES = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 413: "Content Too Large"}
_log = logging.getLogger(__name__)


class EndpointRelay:
    """The port of one endpoint. The port stays the same while the replica exists."""

    def __init__(
        self, service: str, replica: ServiceReplica, find: Callable[[], AnswersRequests | None]
    ) -> None:
        """`find` returns the current provider: new credentials create a new provider."""
        self.service, self.id = service, replica.id
        self._gang, self._find = replica.gang, find
        held = hold_port()
        self.port = int(held.getsockname()[1])
        self._connections: set[asyncio.Task[None]] = set()
        self._idle: set[asyncio.StreamWriter] = set()  # connections without a request
        self._server: asyncio.Server | None = None
        self._lost = asyncio.Event()  # the endpoint is not in service
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(lambda _: held.close())  # even if the task never ran

    def close(self) -> None:
        self._task.cancel()
        for each in self._connections:
            each.cancel()

    async def _run(self) -> None:
        while True:
            try:
                await self._serve()
            except OSError as error:  # such as too many open files
                extra = {"replica": self.id, "problem": str(error)}
                _log.warning("the port of an endpoint does not listen", extra=extra)
                await asyncio.sleep(_PAUSE_S)
            while not await self._is_in_service():  # noqa: ASYNC110 - asks the provider
                await asyncio.sleep(_PAUSE_S)

    async def _serve(self) -> None:
        """Listen for connections until the endpoint is out of service."""
        self._lost.clear()
        self._server = await asyncio.start_server(
            self._accept, LOCAL, self.port, backlog=1024, reuse_address=True
        )
        try:
            await self._lost.wait()
        finally:  # requests in flight are not waited for
            self._server.close()

    def _refuse(self) -> None:
        """Close the port first, and only then drop the connections. In this order, the gateway does
        not repeat a lost request on this port.
        """
        if self._server is not None:
            self._server.close()
        for each in self._idle:
            each.close()
        self._lost.set()

    async def _is_in_service(self) -> bool:
        provider = self._find()
        try:
            return provider is not None and await provider.answers(self._gang)
        except ProviderError:
            return False

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with suppress(OSError, httptools.HttpParserError):
                while (got := await self._read_next(reader, writer)) is not None:
                    answer = await self._answer(got)
                    writer.write(_write_answer(answer, got))
                    await writer.drain()
                    if not got.keeps:
                        break
        except ProviderError as error:
            extra = {"replica": self.id, "problem": str(error)}
            _log.warning("an endpoint's answer is missing", extra=extra)
            if not await self._is_in_service():
                self._refuse()
        finally:
            self._connections.discard(task)
            writer.close()

    async def _read_next(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> "_Incoming | None":
        self._idle.add(writer)
        try:
            return await _read_request(reader, writer)
        finally:
            self._idle.discard(writer)

    async def _answer(self, got: "_Incoming") -> ReplicaAnswer:
        """Return the endpoint's answer, or an answer that explains the error. Raises
        ProviderError."""
        provider, path = self._find(), got.target.partition(b"?")[0]
        if provider is None:
            raise NotFound("the provider's account was removed")
        if path == _PROBED:
            status = 200 if await provider.answers(self._gang) else 503
            return _explain(status, "")
        if path != _CALLED:
            return _explain(404, "a managed endpoint has only the path /invocations")
        if got.method != b"POST":
            return _explain(405, "a managed endpoint answers only POST requests")
        if got.upgrades or "text/event-stream" in got.headers.get("accept", ""):
            return _explain(405, "a managed endpoint does not support WebSockets or event streams")
        if got.too_large:
            return _explain(
                413,
                "the request is too large: a managed endpoint accepts at most "
                f"{_MOST_BYTES >> 20} MiB",
            )
        request = ReplicaRequest(body=bytes(got.body), headers=got.headers)
        try:
            return await provider.invoke(self._gang, request)
        except Refused as error:
            return _explain(502, str(error))


class _Incoming:
    """A request that the callbacks of httptools assemble."""

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
        # the parser no longer has these two values after the end of the message
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
    """Return the next request of a connection, or None at the connection's end. The gateway sends
    the next request only after it has received the answer. Raises OSError, HttpParserError.
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
    """Return the bytes of an answer. An answer to HEAD has no body, so the client would parse any
    bytes after the head as another answer: https://www.rfc-editor.org/rfc/rfc9110#section-9.3.2
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
