"""Finds the process of the gateway or starts one, and talks to it through its control socket. The
gateway sends one reply for each line, in the order of the lines.

Queued calls are sent to the gateway over the loopback.
"""

import asyncio
import hmac
import io
import json
import os
import secrets
import socket
import ssl
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from datetime import timedelta
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Self, cast
from urllib.parse import quote

import msgspec

from cavvy.api.tokens import hash_token
from cavvy.capabilities.serving.addresses import find_obstacle
from cavvy.capabilities.serving.gateway.client_keys import SERVICE_KEY
from cavvy.capabilities.serving.gateway.config import ServiceRoute
from cavvy.capabilities.serving.gateway.control_socket import ControlLine, ControlReply, StopGateway
from cavvy.capabilities.serving.queued_calls import MOST_BYTES, CallAnswer, QueuedCall
from cavvy.capabilities.serving.server.listener import ServiceListener
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.client.state import write_private
from cavvy.domain.values import replace

_LINE_MAX = 64 << 20
_decode = msgspec.json.Decoder(ControlReply).decode
_encode = msgspec.json.Encoder().encode
_START_S = 30.0
_END_S = 5.0
# seconds for which a gateway continues without its server if other servers also have gateways
_ALONE_S = 60.0


class GatewayLost(Exception):
    """Raised if the gateway does not answer, or refuses a line."""


class GatewayRefused(GatewayLost):
    """Raised if the gateway refuses a line, or if its answer cannot be read, for example because
    another version of Cavvy started the gateway.
    """


class GatewayLink:
    """Only one caller at a time may use the link. A link that has failed is not used again."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._turn = asyncio.Lock()

    @classmethod
    async def open(cls, path: str) -> Self:
        """Raises OSError if no gateway listens."""
        return cls(*await asyncio.open_unix_connection(path, limit=_LINE_MAX))

    async def ask(self, line: ControlLine, timeout_s: float | None = 10.0) -> ControlReply:
        """Raises GatewayLost."""
        async with self._turn:
            if self._writer.is_closing():  # an earlier caller found the end of the gateway
                raise GatewayLost("the gateway has ended")
            try:
                async with asyncio.timeout(timeout_s):
                    self._writer.write(_encode(line) + b"\n")
                    await self._writer.drain()
                    told = await self._reader.readline()
            except (OSError, ValueError) as error:  # OSError includes TimeoutError
                self.close()
                raise GatewayLost(str(error) or type(error).__name__) from error
            except asyncio.CancelledError:
                self.close()  # otherwise the reply would be mistaken for that of the next line
                raise
            if not told.endswith(b"\n"):  # the gateway may have been killed in the middle of a line
                self.close()
                raise GatewayLost("the gateway has ended")
        try:
            reply = _decode(told)
        except ValueError as error:
            self.close()
            raise GatewayRefused(f"the gateway's answer cannot be read: {error}") from error
        if reply.error is not None:
            self.close()
            raise GatewayRefused(reply.error)
        return reply

    async def wait_ended(self, timeout_s: float) -> None:
        """Wait until the gateway's process has ended. Raises OSError if the gateway does not end
        in time.
        """
        async with asyncio.timeout(timeout_s):
            await self._reader.read()

    def close(self) -> None:
        self._writer.close()


class GatewayChild:
    """The gateway's process. The gateway counts as running while its control socket answers. The
    gateway continues if the server is killed; the next server finds the gateway by its control
    socket. A new gateway uses the port of the last gateway if the port is free.
    """

    def __init__(self, folder: Path, control: str, listener: ServiceListener) -> None:
        self._folder = folder
        self._listener = listener
        self._control = control
        self._process: asyncio.subprocess.Process | None = None
        self._routes: Sequence[ServiceRoute] = ()
        self.port = 0  # 0 while no gateway was found or started
        self.counts = folder / "counts"  # the file that keeps the numbers of requests
        self.problem = ""  # why the gateway could not be started at the last try

    @property
    def started(self) -> bool:
        """Whether this server has started the gateway, instead of connecting to a running
        gateway."""
        return self._process is not None

    async def reach(self, routes: Sequence[ServiceRoute] = ()) -> GatewayLink:
        """Return a link to the gateway. If no gateway answers, start a gateway. A new gateway
        receives `routes` before it listens, so that it refuses no requests for known services.
        Raises OSError, GatewayLost.
        """
        self._routes = routes
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(OSError):
            link = await GatewayLink.open(self._control)
            self.port, self.problem = self._read_port(), ""
            return link
        if port := self._listener.port:
            self.problem = self._find_obstacle() or await self._start(port)
        else:
            self.problem = await self._start(self._read_port()) and await self._start(0)
        if self.problem:
            raise GatewayLost(self.problem)
        return await GatewayLink.open(self._control)

    def find_problem(self) -> str:
        """Return why the gateway cannot start, or "" if it runs, starts, or can start."""
        if self.problem or not self._listener.port or self._runs():
            return self.problem
        return self._find_obstacle()

    def _find_obstacle(self) -> str:
        listener = self._listener
        return find_obstacle(listener.host, listener.port, reuse_port=listener.shared)

    def _runs(self) -> bool:
        """Return whether a gateway process of this server or of another server runs."""
        if self._process is not None and self._process.returncode is None:
            return True
        with socket.socket(socket.AF_UNIX) as tried, suppress(OSError):
            tried.connect(self._control)
            return True
        return False

    async def open_another(self) -> GatewayLink:
        """Return an additional link to the gateway to which this object is connected. Raises
        OSError.
        """
        return await GatewayLink.open(self._control)

    async def end(self, drain_s: float) -> None:
        """End the gateway once its requests are answered, but after at most `drain_s` seconds."""
        self.port = 0
        try:
            link = await GatewayLink.open(self._control)
            with closing(link):
                await link.ask(StopGateway(drain_s=drain_s))
                await link.wait_ended(drain_s + _END_S)
        except (OSError, GatewayLost):  # for example while the gateway starts
            if self._process is not None:
                with suppress(ProcessLookupError):
                    self._process.terminate()
        if self._process is not None:
            try:
                async with asyncio.timeout(drain_s + _END_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
            self._process = None

    async def _start(self, port: int) -> str:
        """Start the gateway on a port. Returns the reason why the start failed, or "" if the
        gateway listens.
        """
        os.makedirs(os.path.dirname(self._control), mode=0o700, exist_ok=True)
        file = self._folder / "gateway.json"
        token = self._folder / "metrics.token"
        if self._listener.metrics is not None and not token.exists():
            write_private(str(token), secrets.token_urlsafe(32).encode())
        write_private(str(file), json.dumps(self._make_config(port)).encode())
        with (self._folder / "gateway.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "cavvy.capabilities.serving.gateway",
                str(file),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(_START_S):
                said = await self._process.stdout.readline()
        except TimeoutError:
            self._process.kill()
            said = b""
        facts = json.loads(said or b"{}")
        if "port" not in facts:
            await self._process.wait()
            self.port = 0
            where = self._folder / "gateway.log"
            return str(facts.get("problem") or f"the gateway did not start; see {where}")
        self.port = facts["port"]
        write_private(str(self._folder / "port"), str(self.port).encode())
        return ""

    def _make_config(self, port: int) -> dict[str, object]:
        listener = self._listener
        config: dict[str, object] = {
            "host": listener.host,
            "port": port,
            "control": self._control,
            "state": str(self._folder / "calls"),
            "counts": str(self.counts),
            "names": [listener.name] if listener.name else [],
            "any_name": listener.public,
            "owner": msgspec.to_builtins(listener.owner),
            "services": [msgspec.to_builtins(each) for each in self._routes],
        }
        if listener.metrics is not None:
            file = str(self._folder / "metrics.token")
            config["metrics"] = msgspec.to_builtins(replace(listener.metrics, token_file=file))
        if listener.haproxy is not None:
            config["behind_proxy"] = True
        if listener.shared:
            config |= {"reuse_port": listener.port > 0, "alone_s": _ALONE_S}
        if listener.certificate:
            config["tls"] = {
                "certificate": listener.certificate,
                "key": listener.key,
                "folder": listener.folder,
            }
        return config

    def _read_port(self) -> int:
        """Return the port of the running gateway or of the last gateway, or 0 if there was no
        gateway.
        """
        with suppress(OSError, ValueError):
            return int((self._folder / "port").read_text())
        return 0


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
