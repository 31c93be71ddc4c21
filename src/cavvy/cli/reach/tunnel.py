"""Shared code of the commands that connect to nodes: parses NAME:RANK, opens the tunnel, and
reports errors of the tunnel.

Connects this terminal to a command or shell that runs on a node: sends each key unprocessed,
prints the output, and returns the exit code.
"""

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import click

from cavvy.cli.reach.names import find_running
from cavvy.cli.reach.session import NO_SERVER, named, session
from cavvy.cli.view.failure import CommandFailure

if TYPE_CHECKING:
    import asyncio

    from cavvy.client import ApiClient
    from cavvy.client.tunnel import (
        CommandExit,
        NodeTunnel,
        OpenCarrier,
        TunnelCarrier,
        TunnelChannel,
    )


_T = TypeVar("_T")
_RECONNECT_S = 600.0  # seconds for which a lost tunnel is opened again
_AGAIN_S = 0.5

_PIECE = 64 * 1024


class LatestTunnel:
    """The tunnel that is open now, for connections that outlive a tunnel."""

    def __init__(self) -> None:
        self.tunnel: NodeTunnel | None = None

    async def connect(self, host: str, port: int) -> "TunnelChannel":
        """See `NodeTunnel.connect`."""
        from cavvy.client.tunnel import TunnelLost

        if self.tunnel is None:
            raise TunnelLost("the connection to the node is being opened again")
        return await self.tunnel.connect(host, port)


def read_target(target: str) -> tuple[str, int]:
    """Split NAME or NAME:RANK; the default rank is 0. Raises CommandFailure."""
    from cavvy.domain.units import is_whole

    name, colon, rank = target.partition(":")
    if not name or (colon and not is_whole(rank)):
        raise CommandFailure(
            f"{target}: expected NAME or NAME:RANK", "for example digits:1", exit_code=2
        )
    return name, int(rank or 0)


def with_tunnel(
    project: str, target: str, act: Callable[["NodeTunnel"], Awaitable[_T]], *, lost_code: int = 1
) -> _T:
    """Call `act` with a tunnel to the node, and return the result. Raises CommandFailure, with the
    exit code `lost_code` if the node cannot be reached or no longer answers.
    """
    import asyncio

    from cavvy.client.tunnel import NodeTunnel, RemoteError, TunnelLost

    name, rank = read_target(target)
    context = click.get_current_context(silent=True)
    program = "" if context is None else context.info_name or ""

    async def run() -> _T:
        async with NodeTunnel(_open(client, project, name, rank, program)) as tunnel:
            return await act(tunnel)

    with session() as client:
        try:
            return asyncio.run(run())
        except TunnelLost as error:
            raise CommandFailure(
                f"{target}: {error}",
                f"`cavvy status {named(project, name)}` shows the job's state",
                lost_code,
            ) from error
        except RemoteError as error:
            where = f"{target}:{error.filename}" if error.filename else target
            raise CommandFailure(f"{where}: {error.strerror}") from error


def _open(client: "ApiClient", project: str, name: str, rank: int, program: str) -> "OpenCarrier":
    """Return a tunnel to this rank of the job, or of the job that `find_running` finds."""
    from cavvy.client import ApiError
    from cavvy.client.tunnel import open_by_api

    async def open_carrier(
        heard: "Callable[[bytes], None]", over: "Callable[[str], None]"
    ) -> "TunnelCarrier":
        try:
            return await open_by_api(client, project, name, rank, program)(heard, over)
        except ApiError as error:
            job = find_running(client, project, name, error)
            return await open_by_api(client, project, job, rank, program)(heard, over)

    return open_carrier


async def wait_lost(tunnel: "NodeTunnel") -> None:
    """Wait until the tunnel is lost. Raises TunnelLost."""
    from cavvy.client.tunnel import TunnelLost

    await tunnel.lost.wait()
    raise TunnelLost(tunnel.problem or "the connection was closed")


def with_kept_tunnel(
    project: str,
    target: str,
    act: Callable[["NodeTunnel", LatestTunnel], Awaitable[_T]],
) -> _T:
    """Call `act` with a tunnel to the node, as `with_tunnel` does. When the tunnel is lost, for
    example because the server was restarted, open another and call `act` again. Raises
    CommandFailure if this fails for ten minutes, or if the job has ended.
    """
    import asyncio

    from cavvy.client.tunnel import NodeTunnel, RemoteError, TunnelLost, open_by_api

    name, rank = read_target(target)
    context = click.get_current_context(silent=True)
    program = "" if context is None else context.info_name or ""

    async def run() -> _T:
        latest, until = LatestTunnel(), 0.0
        while True:
            try:
                with session() as client:
                    carrier = open_by_api(client, project, name, rank, program)
                    async with NodeTunnel(carrier) as tunnel:
                        latest.tunnel = tunnel
                        if until:
                            click.echo("connected again", err=True)
                        until = 0.0
                        return await act(tunnel, latest)
            except TunnelLost as error:
                problem = CommandFailure(
                    f"{target}: {error}",
                    f"`cavvy status {named(project, name)}` shows the job's state",
                )
            except RemoteError as error:
                raise CommandFailure(f"{target}: {error.strerror}") from error
            except CommandFailure as failure:
                if failure.exit_code != NO_SERVER:
                    raise
                problem = failure
            if not until:
                click.echo(f"{problem.message}; connecting again, Ctrl-C gives up", err=True)
            until = until or time.monotonic() + _RECONNECT_S
            if time.monotonic() > until:
                raise problem
            await asyncio.sleep(_AGAIN_S)

    return asyncio.run(run())


async def run_here(
    tunnel: "NodeTunnel",
    *,
    argv: list[str] | None,
    line: str | None,
    terminal: bool,
    keep: str = "",
    keys: "asyncio.Queue[bytes] | None" = None,
) -> int:
    """Run the command until it ends. Returns the command's exit code in the form that a shell uses.
    With `keep`, connect to the kept shell of this name instead. `keys` are those of `read_input`,
    if the caller has called it. Raises RemoteError or TunnelLost.
    """
    import asyncio

    if not terminal:
        return await _converse(await tunnel.run(argv=argv, line=line))
    size = shutil.get_terminal_size()
    pty = {"term": os.environ.get("TERM", "xterm"), "cols": size.columns, "rows": size.lines}
    channel = await tunnel.run(argv=argv, line=line, pty=pty, keep=keep)

    def resized() -> None:
        size = os.get_terminal_size(sys.stdin.fileno())
        channel.control(cols=size.columns, rows=size.lines)

    asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, resized)
    with _raw(sys.stdin.fileno()):
        return await _converse(channel, keys, kept=bool(keep))


async def _converse(
    channel: "TunnelChannel", keys: "asyncio.Queue[bytes] | None" = None, *, kept: bool = False
) -> int:
    import asyncio

    from cavvy.agent.access.frames import EOF, ERR
    from cavvy.client.tunnel import TunnelLost

    loop = asyncio.get_running_loop()
    keys = keys or read_input()

    async def send_keys() -> None:
        while data := await keys.get():
            await channel.write(data)
        channel.end()

    for number, name in ((signal.SIGINT, "INT"), (signal.SIGTERM, "TERM"), (signal.SIGHUP, "HUP")):
        loop.add_signal_handler(number, partial(channel.control, signal=name))
    sending = asyncio.create_task(send_keys())
    try:
        while (piece := await channel.read()) is not None:
            kind, data = piece
            if kind == EOF:  # of a kept shell, which has no exit code
                channel.close()
                return 0
            await asyncio.to_thread(write_all, 2 if kind == ERR else 1, data)
    finally:
        sending.cancel()
    if kept and channel.exit is None:
        raise TunnelLost("the connection was closed")
    return exit_code(channel.exit)


def read_input() -> "asyncio.Queue[bytes]":
    """Read standard input in a thread. The returned queue receives the data, and b"" at the end of
    the input.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[bytes] = asyncio.Queue(maxsize=64)

    def read() -> None:
        data = b"-"
        while data:
            try:
                data = os.read(0, _PIECE)
            except OSError:
                data = b""
            if loop.is_closed():
                return
            asyncio.run_coroutine_threadsafe(arrived.put(data), loop).result()

    threading.Thread(target=read, daemon=True).start()
    return arrived


def exit_code(end: "CommandExit | None") -> int:
    """Return the exit code in the form that a shell uses: 128 + N if signal N ended the command."""
    if end is None:
        return 255
    if end.code is not None:
        return end.code
    return 128 + getattr(signal, f"SIG{end.signal}", 127)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all data. A single call of os.write is not guaranteed to write all data to a terminal
    or pipe.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


@contextmanager
def _raw(terminal: int) -> Iterator[None]:
    """Put the terminal into raw mode, so that every key is sent to the node, including Ctrl-C."""
    import termios
    import tty

    before = termios.tcgetattr(terminal)
    try:
        # This mode does not discard keys that the user has already typed.
        tty.setraw(terminal, termios.TCSADRAIN)
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
