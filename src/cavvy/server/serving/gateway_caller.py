"""Sends queued calls to this machine's gateway, over the loopback."""

import asyncio
import hmac
import io
import secrets
import ssl
from datetime import timedelta
from http.client import HTTPException, HTTPResponse
from typing import cast
from urllib.parse import quote

from cavvy.api.tokens import hash_token
from cavvy.domain.queued_calls import MOST_BYTES, CallAnswer, QueuedCall
from cavvy.domain.stored_services import StoredService
from cavvy.gateway.client_keys import SERVICE_KEY
from cavvy.server.serving.listener import ServiceListener

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_PATH_MARKS = "/?=&%:;,@+$!*'()~[]-._"
_MOST_INTERIM = 100  # interim answers before the answer
_MOST_READ = MOST_BYTES + (1 << 17)  # a larger answer is cut off, and is then refused as too large
# headers of a connection, not of a call; this module sets the body's length itself
_DROPPED = frozenset(
    {"host", "connection", "content-length", "transfer-encoding", "expect", "x-api-key", "prefer"}
    # the gateway would take the call for one of a page
    | {"origin", "sec-fetch-site"}
)


class GatewayCaller:
    """Sends queued calls. For a service with keys, the caller has its own key, which is
    derived from a secret of this process and is not stored.
    """

    def __init__(self, listener: ServiceListener) -> None:
        self._listener = listener
        self._secret = secrets.token_bytes(32)

    def hash_key(self, service_id: str) -> str:
        """Return the SHA-256 of the key for a service."""
        return hash_token(self._make_key(service_id))

    def _make_key(self, service_id: str) -> str:
        return SERVICE_KEY + hmac.digest(self._secret, service_id.encode(), "sha256").hex()

    async def call(
        self,
        port: int,
        service: StoredService,
        call: QueuedCall,
        body: bytes,
        timeout: timedelta,
    ) -> CallAnswer:
        """Send a call to the gateway at `port`, and return the answer."""
        if not port:
            return CallAnswer(status=429, problem="the gateway is starting")
        head = self._make_head(service, call, len(body))
        writer = None
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                reader, writer = await self._connect(service, port)
                writer.write(head + body)
                return _parse(await _read(reader), call.method)
        except TimeoutError:
            return CallAnswer(problem=f"no answer within {timeout.total_seconds():g} s")
        except (OSError, HTTPException, ValueError) as error:
            return CallAnswer(
                problem=f"the gateway did not answer: {error or type(error).__name__}"
            )
        finally:
            if writer is not None:
                writer.close()

    async def _connect(
        self, service: StoredService, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host = _LOOPBACK.get(self._listener.host, self._listener.host)
        if not self._listener.certificate:
            return await asyncio.open_connection(host, port)
        context = ssl.create_default_context()
        # the certificate is for the public name, but the connection is to this machine
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        name = service.spec.hosts[0] if service.spec.hosts else self._listener.name or None
        return await asyncio.open_connection(host, port, ssl=context, server_hostname=name or host)

    def _make_head(self, service: StoredService, call: QueuedCall, length: int) -> bytes:
        hosts = service.spec.hosts
        prefix = "" if hosts else service.path
        lines = [f"{call.method} {prefix}{quote(call.path, safe=_PATH_MARKS)} HTTP/1.1"]
        lines += [f"Host: {hosts[0] if hosts else 'localhost'}", "Connection: close"]
        names = {name.lower() for name in call.headers}
        lines += [f"{k}: {v}" for k, v in call.headers.items() if k.lower() not in _DROPPED]
        if "idempotency-key" not in names:
            lines.append(
                f"Idempotency-Key: {call.id}"
            )  # the gateway may repeat the call on a second replica
        if service.spec.keys:
            lines.append(f"X-API-Key: {self._make_key(service.id)}")
        lines.append(f"Content-Length: {length}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


class _ReadBytes:
    """Has the interface of the socket from which `HTTPResponse` reads."""

    def __init__(self, data: bytes, start: int) -> None:
        self._data, self._start = data, start

    def makefile(self, mode: str) -> io.BytesIO:
        file = io.BytesIO(self._data)
        file.seek(self._start)
        return file


async def _read(reader: asyncio.StreamReader) -> bytes:
    parts, size = [], 0
    while size < _MOST_READ and (part := await reader.read(1 << 16)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _parse(data: bytes, method: str) -> CallAnswer:
    """Raises HTTPException, ValueError."""
    answer, interim = _begin(data, 0, method), 0
    while answer.status < 200:  # `begin` itself skips only the status 100
        if (interim := interim + 1) > _MOST_INTERIM:
            raise HTTPException(f"more than {_MOST_INTERIM} interim answers")
        answer = _begin(data, answer.fp.tell(), method)
    headers = {name.lower(): value for name, value in answer.getheaders()}
    cut = len(data) >= _MOST_READ
    body = bytes(MOST_BYTES + 1) if cut else answer.read()
    for each in ("connection", "transfer-encoding", "content-length", "keep-alive", "date"):
        headers.pop(each, None)
    return CallAnswer(status=answer.status, headers=headers, body=body)


def _begin(data: bytes, start: int, method: str) -> HTTPResponse:
    """Return the answer whose head begins at `start`. Raises HTTPException, ValueError."""
    from socket import socket

    answer = HTTPResponse(cast(socket, _ReadBytes(data, start)), method=method)
    answer.begin()
    return answer
