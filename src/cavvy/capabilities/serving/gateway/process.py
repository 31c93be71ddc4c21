"""The gateway's process: listeners, TLS, a check every second, and an orderly shutdown.

TLS has one main certificate, and further certificates for single host names, chosen by SNI. The
certificate of a host name is in the file `HOST.pem` of a folder, together with the certificates of
its authorities and the key. The file `_.example.com.pem` is for all names directly below
example.com. Files that were replaced or added are used for new connections within seconds.
"""

import asyncio
import contextlib
import gc
import json
import os
import secrets
import signal
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from ssl import SSLContext
from time import monotonic

import uvloop

from cavvy.capabilities.serving.addresses import explain_address
from cavvy.capabilities.serving.gateway.call_store import CallStore
from cavvy.capabilities.serving.gateway.config import (
    GatewayConfig,
    GatewayConfigError,
    MetricsListener,
    TlsFiles,
    read_config,
)
from cavvy.capabilities.serving.gateway.control_socket import ControlSocket
from cavvy.capabilities.serving.gateway.deferred import DeferredCalls
from cavvy.capabilities.serving.gateway.door import Door
from cavvy.capabilities.serving.gateway.inbound import ClientConnections, InboundConnection
from cavvy.capabilities.serving.gateway.kept_counts import KeptCounts
from cavvy.capabilities.serving.gateway.metrics import MetricsServer
from cavvy.capabilities.serving.gateway.traces import RequestTraces, open_request_traces

_TICK_S = 1.0
_DRAIN_S = 30.0
_REFUSAL_S = 0.5  # for clients to read why their waiting requests are refused
_BACKLOG = 4096
_HANDSHAKE_S = 10.0
_EXPIRE_EVERY = 60  # ticks
# requests create no reference cycles, so reference counts free them
_GC_THRESHOLDS = (20_000, 20, 100)
_LOOK_S = 5.0  # seconds between two checks of the files
_NAME_MAX = 253
_Stamp = tuple[tuple[int, int, int], ...]


def run(arguments: Sequence[str]) -> int:
    """Serve as the file says that is the only argument of `python -m` and this package, until a
    signal or the control socket stops the process. If the gateway cannot serve, the reason is
    printed as one line of JSON.
    """
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m cavvy.capabilities.serving.gateway CONFIG.json\n")
        return 2
    try:
        config = read_config(Path(arguments[0]))
        uvloop.run(serve(config))
    except (GatewayConfigError, OSError) as error:
        sys.stderr.write(f"gateway: {error}\n")
        with contextlib.suppress(OSError):  # the server that started the process has ended
            _say({"problem": str(error)})
        return 1
    return 0


async def serve(config: GatewayConfig) -> None:
    """Serve; print one line of JSON with the port when the gateway accepts requests. Raises
    OSError, GatewayConfigError.
    """
    tls = None if config.tls is None else HostCertificates(config.tls).context
    calls = DeferredCalls(CallStore(Path(config.state)), config.limits)
    kept = _open_counts(config.counts)
    traces = open_request_traces()
    door = _make_door(config, calls, kept, traces)
    connections = ClientConnections(config.limits)
    ticks = _Ticks(door, connections, calls)
    calls.resume(door.services.get)
    if door.shared is not None:
        door.shared.tick(monotonic())
    stop: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    control = ControlSocket(
        Path(config.control), door, connections, lambda drain_s: _set(stop, drain_s)
    )
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, _set, stop, _DRAIN_S)
    loop.add_signal_handler(signal.SIGINT, _set, stop, _DRAIN_S)
    server = await _listen(config, lambda: InboundConnection(door, connections), tls)
    metrics = await _open_metrics(config.metrics, door)
    await control.open()
    port = server.sockets[0].getsockname()[1]
    _say_ready({"host": config.host, "port": port, "tls": tls is not None})
    try:
        await _tick_until(ticks, stop, control, config.alone_s)
        server.close()
        if metrics is not None:
            metrics.close()  # the next gateway uses the port already while this one drains
        if door.shared is not None:
            door.shared.stop()
        connections.close_idle()
        await _drain(ticks, monotonic() + stop.result())
        connections.refuse_waiting()
        await _drain(ticks, monotonic() + _REFUSAL_S)
    finally:
        await control.close()
        if door.shared is not None:
            await door.shared.close()
        await calls.close()
        door.keep_work()
        kept.close()
        if traces is not None:
            await asyncio.to_thread(traces.close)


class _Ticks:
    """What is done once a second."""

    def __init__(self, door: Door, connections: ClientConnections, calls: DeferredCalls) -> None:
        self.connections = connections
        self._door, self._calls = door, calls
        self._count = 0

    def tick(self) -> None:
        now = monotonic()
        self.connections.check(now)
        self._calls.check(now)
        if self._door.shared is not None:
            self._door.shared.tick(now)
        self._door.end_second()
        self._count += 1
        if self._count % _EXPIRE_EVERY == 0:
            self._calls.expire()


def _make_door(
    config: GatewayConfig, calls: DeferredCalls, kept: KeptCounts, traces: RequestTraces | None
) -> Door:
    start = secrets.token_hex(4)
    door = Door(config, start=start, calls=calls, kept=kept, traces=traces)
    door.set_services(config.services)
    return door


def _open_counts(path: str) -> KeptCounts:
    kept = KeptCounts(Path(path) if path else None)
    if path and not kept.kept:
        sys.stderr.write(f"gateway: {path} cannot be used to keep the counts of requests\n")
    return kept


async def _listen(
    config: GatewayConfig, connect: Callable[[], InboundConnection], tls: SSLContext | None
) -> asyncio.Server:
    try:
        return await asyncio.get_running_loop().create_server(
            connect,
            config.host,
            config.port,
            ssl=tls,
            backlog=_BACKLOG,
            reuse_port=config.reuse_port or None,
            ssl_handshake_timeout=_HANDSHAKE_S if tls else None,
        )
    except OSError as error:
        text = explain_address(config.host, config.port, error)
        raise GatewayConfigError(text) from error


async def _open_metrics(listener: MetricsListener | None, door: Door) -> asyncio.Server | None:
    if listener is None:
        return None
    tls = None if listener.tls is None else HostCertificates(listener.tls).context
    return await MetricsServer(listener, door).open(tls)


def _say_ready(facts: dict[str, object]) -> None:
    gc.collect()
    gc.freeze()  # the garbage collector no longer examines objects that live as long as the process
    gc.set_threshold(*_GC_THRESHOLDS)
    _say(facts)


def _say(facts: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def _set(stop: asyncio.Future[float], drain_s: float) -> None:
    if not stop.done():
        stop.set_result(drain_s)


async def _tick_until(
    ticks: _Ticks, stop: asyncio.Future[float], control: ControlSocket, alone_s: float | None
) -> None:
    """Serve until the process is stopped, or until no server has sent a line for `alone_s`
    seconds. A gateway whose server is dead or paused does not learn that replicas have moved, so
    its waiting requests could fail.
    """
    while not stop.done():
        await asyncio.wait((stop,), timeout=_TICK_S)
        ticks.tick()
        if alone_s is not None and monotonic() - control.heard_at > alone_s:
            _set(stop, _DRAIN_S)


async def _drain(ticks: _Ticks, until: float) -> None:
    while ticks.connections and monotonic() < until:
        ticks.tick()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.05)


class HostCertificates:
    """The certificates in use. Raises GatewayConfigError if the main certificate cannot be used. An
    unusable certificate for a single name is skipped.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._looked_at = time.monotonic()
        self._stamp = self._read_stamp()
        self._main = make_tls(files.certificate, files.key)
        self._hosts = self._read_hosts()
        self.context = make_tls(files.certificate, files.key)
        self.context.sni_callback = self._choose

    def _choose(
        self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext
    ) -> None:
        self._renew()
        connection.context = self._find((name or "").lower()[:_NAME_MAX])

    def _find(self, name: str) -> ssl.SSLContext:
        found = self._hosts.get(name) or self._hosts.get(f"_.{name.partition('.')[2]}")
        return found or self._main

    def _renew(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._main = make_tls(self._files.certificate, self._files.key)
        except GatewayConfigError:
            # the files may be half written; the old certificate is used until they change again
            return
        self._hosts = self._read_hosts()

    def _list_files(self) -> list[Path]:
        folder = self._files.folder
        return sorted(Path(folder).glob("*.pem")) if folder else []

    def _read_hosts(self) -> dict[str, ssl.SSLContext]:
        found = {}
        for path in self._list_files():
            try:
                found[path.stem.lower()] = make_tls(str(path), str(path))
            except GatewayConfigError:
                continue
        return found

    def _read_stamp(self) -> _Stamp:
        stamps = []
        for path in (self._files.certificate, self._files.key, *map(str, self._list_files())):
            try:
                seen = os.stat(path)
            except OSError:
                continue
            stamps.append((seen.st_ino, seen.st_mtime_ns, seen.st_size))
        return tuple(stamps)


def make_tls(certificate: str, key: str) -> ssl.SSLContext:
    """Raises GatewayConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except (OSError, ValueError) as error:
        raise GatewayConfigError(
            f"tls: {certificate} and {key} cannot be used: {error}; both must be files in PEM, the "
            "key without a password"
        ) from error
    return context


def _refuse_password() -> str:
    raise ValueError("the key is encrypted")
