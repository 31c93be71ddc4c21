"""The control socket: the control plane sets services and replicas, and reads statistics.

Only the socket's owner can open this Unix socket. Each line is a JSON object with a `type`; each
object is answered by one line, in order.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import msgspec

from cavvy.capabilities.serving.gateway.config import (
    GatewayConfigError,
    ReplicaAddress,
    ServiceRoute,
)
from cavvy.capabilities.serving.gateway.door import Door
from cavvy.capabilities.serving.gateway.inbound import ClientConnections
from cavvy.capabilities.serving.gateway.statistics import ServiceFacts
from cavvy.domain.values import Struct

_LINE_MAX = 64 << 20


class SetServices(Struct, frozen=True, forbid_unknown_fields=True, tag="services"):
    services: tuple[ServiceRoute, ...]


class SetReplicas(Struct, frozen=True, forbid_unknown_fields=True, tag="replicas"):
    service: str
    replicas: tuple[ReplicaAddress, ...]


class CountElsewhere(Struct, frozen=True, forbid_unknown_fields=True, tag="elsewhere"):
    """Count what other gateways have served since the last such line: by key, the tokens of
    language models, and the micro-dollars of replicas' time."""

    service: str
    used: dict[str, tuple[int, int]]


class SetCredentials(Struct, frozen=True, forbid_unknown_fields=True, tag="credentials"):
    """The keys of the APIs that fallbacks name, and the private targets that may be called for
    users. They are in no file.
    """

    values: dict[str, str]
    private_targets: str


class ReadStatistics(Struct, frozen=True, forbid_unknown_fields=True, tag="statistics"):
    pass


class AwaitCold(Struct, frozen=True, forbid_unknown_fields=True, tag="cold"):
    """Wait until requests wait for the first replica of a service, and then send the reply."""


class StopGateway(Struct, frozen=True, forbid_unknown_fields=True, tag="stop"):
    """Stop the gateway; requests that wait or are in flight may finish within the given time."""

    drain_s: float = 30.0


ControlLine = (
    SetServices
    | SetReplicas
    | CountElsewhere
    | SetCredentials
    | ReadStatistics
    | AwaitCold
    | StopGateway
)


class ControlReply(Struct, frozen=True, kw_only=True, omit_defaults=True):
    error: str | None = None
    services: tuple[ServiceFacts, ...] | None = None
    cold: tuple[str, ...] | None = None
    connections: int | None = None
    cpu_s: float | None = None  # CPU seconds of the process since its start


class ControlSocket:
    def __init__(
        self, path: Path, door: Door, connections: ClientConnections, stop: Callable[[float], None]
    ) -> None:
        self._path = path
        self._door = door
        self._connections = connections
        self._stop = stop
        self._decoder = msgspec.json.Decoder(ControlLine)
        self._server: asyncio.Server | None = None
        # when a control plane last sent a line; a paused process keeps its connections, but is
        # silent
        self.heard_at = monotonic()

    async def open(self) -> None:
        """Open the socket, and replace the socket of a process that has ended. Raises OSError."""
        self._path.unlink(missing_ok=True)
        before = os.umask(0o177)  # the socket never has wider permissions
        try:
            self._server = await asyncio.start_unix_server(
                self._serve, str(self._path), limit=_LINE_MAX
            )
        finally:
            os.umask(before)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                self.heard_at = monotonic()
                writer.write(msgspec.json.encode(await self._answer(line)) + b"\n")
                await writer.drain()
        except (ConnectionError, ValueError, asyncio.CancelledError):
            pass  # ValueError: the line is too long; CancelledError: the process is stopping
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> ControlReply:
        try:
            match self._decoder.decode(line):
                case SetServices(services=services):
                    self._door.set_services(services)
                case SetReplicas(service=service, replicas=replicas):
                    self._door.set_replicas(service, replicas)
                case CountElsewhere(service=service, used=used):
                    self._door.count_elsewhere(service, used)
                case SetCredentials(values=values, private_targets=targets):
                    self._door.fallbacks.credentials = values
                    self._door.fallbacks.private_targets = targets
                case ReadStatistics():
                    times = os.times()
                    return ControlReply(
                        services=self._door.describe(),
                        connections=len(self._connections),
                        cpu_s=times.user + times.system,
                    )
                case AwaitCold():
                    await self._door.cold_event.wait()
                    return ControlReply(cold=self._door.take_cold())
                case StopGateway(drain_s=drain_s):
                    self._stop(drain_s)
        except (msgspec.DecodeError, GatewayConfigError) as error:
            return ControlReply(error=str(error))
        return ControlReply()
