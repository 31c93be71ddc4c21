"""Connects this terminal to a command or shell that runs on a node: sends each key unprocessed,
prints the output, and returns the exit code.
"""

import asyncio
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cavvy.client.tunnel.mux import CommandExit, NodeTunnel, TunnelChannel

_PIECE = 64 * 1024


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
    from cavvy.agent.access.frames import EOF, ERR
    from cavvy.client.tunnel.mux import TunnelLost

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
