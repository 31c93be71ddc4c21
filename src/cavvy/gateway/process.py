"""The gateway's process: listeners, a check every second, and an orderly shutdown."""

import asyncio
import contextlib
import gc
import json
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from ssl import SSLContext
from time import monotonic

import uvloop

from cavvy.gateway.addresses import explain_address
from cavvy.gateway.call_store import CallStore
from cavvy.gateway.certificates import HostCertificates
from cavvy.gateway.config import GatewayConfig, GatewayConfigError, read_config
from cavvy.gateway.control_socket import ControlSocket
from cavvy.gateway.deferred import DeferredCalls
from cavvy.gateway.door import Door
from cavvy.gateway.inbound import ClientConnections, InboundConnection
from cavvy.gateway.kept_counts import KeptCounts

_TICK_S = 1.0
_DRAIN_S = 30.0
_REFUSAL_S = 0.5  # for clients to read why their waiting requests are refused
_BACKLOG = 4096
_HANDSHAKE_S = 10.0
_EXPIRE_EVERY = 60  # ticks
# requests create no reference cycles, so reference counts free them
_GC_THRESHOLDS = (20_000, 20, 100)


def run(arguments: Sequence[str]) -> int:
    """Run `python -m cavvy.gateway CONFIG.json`: serve until a signal or the control socket stops
    the process. If the gateway cannot serve, the reason is printed as one line of JSON.
    """
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m cavvy.gateway CONFIG.json\n")
        return 2
    try:
        config = read_config(Path(arguments[0]))
        uvloop.run(serve(config))
    except (GatewayConfigError, OSError) as error:
        sys.stderr.write(f"cavvy.gateway: {error}\n")
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
    door = _make_door(config, calls, kept)
    connections = ClientConnections(config.limits)
    ticks = _Ticks(door, connections, calls)
    calls.resume(door.services.get)
    stop: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    control = ControlSocket(
        Path(config.control), door, connections, lambda drain_s: _set(stop, drain_s)
    )
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, _set, stop, _DRAIN_S)
    loop.add_signal_handler(signal.SIGINT, _set, stop, _DRAIN_S)
    server = await _listen(config, lambda: InboundConnection(door, connections), tls)
    await control.open()
    port = server.sockets[0].getsockname()[1]
    _say_ready({"host": config.host, "port": port, "tls": tls is not None})
    try:
        await _tick_until(ticks, stop, control, config.alone_s)
        server.close()
        connections.close_idle()
        await _drain(ticks, monotonic() + stop.result())
        connections.refuse_waiting()
        await _drain(ticks, monotonic() + _REFUSAL_S)
    finally:
        await control.close()
        await calls.close()
        door.keep_work()
        kept.close()


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
        self._door.end_second()
        self._count += 1
        if self._count % _EXPIRE_EVERY == 0:
            self._calls.expire()


def _make_door(config: GatewayConfig, calls: DeferredCalls, kept: KeptCounts) -> Door:
    door = Door(config, start=secrets.token_hex(4), calls=calls, kept=kept)
    door.set_services(config.services)
    return door


def _open_counts(path: str) -> KeptCounts:
    kept = KeptCounts(Path(path) if path else None)
    if path and not kept.kept:
        sys.stderr.write(f"cavvy.gateway: {path} cannot be used to keep the counts of requests\n")
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
