"""A process of the work as the agent sees it: its output, its end, and the end of everything
that it started.
"""

from __future__ import annotations

import os
import socket

from ..loop import READ
from .reaper import guard, reap, sweep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..loop import EventLoop
    from .reaper import ChildCommand

READ_BYTES = 65536


class WorkProcess:
    """Starts the command under a reaper of its own and calls back.

    `wrote(bytes)` for output, `ended(code)` at the end of its first process (None: the reaper was
    killed), and `gone()` once, last, when no process of it is left and all of its output has been
    handed over.
    """

    def __init__(
        self,
        loop: EventLoop,
        command: ChildCommand,
        keep: int,
        *,
        wrote: Callable[[bytes], None],
        ended: Callable[[int | None], None],
        gone: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._wrote, self._ended, self._gone = wrote, ended, gone
        self._lines = b""
        self._told = False
        self.oom_kills = (
            0  # of its processes, by the kernel, for using more memory than the work may
        )
        self.interrupted = False  # it got SIGTERM before it ended
        ours, theirs = socket.socketpair()
        self._output, output = os.pipe()
        self.reaper = os.fork()
        if self.reaper == 0:
            try:
                guard(command, theirs.fileno(), output, keep)
            finally:
                os._exit(70)
        theirs.close()
        os.close(output)
        os.set_blocking(self._output, False)
        ours.setblocking(False)
        self._control: socket.socket | None = ours
        loop.watch(ours.fileno(), READ, self._heard)
        loop.watch(self._output, READ, self._read)

    def ask(self) -> None:
        """SIGTERM to the work's process group."""
        self._send(b"T")

    def kill(self) -> None:
        """SIGKILL to every process of the work."""
        self._send(b"K")

    def pause(self, paused: bool) -> None:
        """Stop reading the output, so that the command waits, or go on."""
        if self._output >= 0:
            self._loop.watch(self._output, 0 if paused else READ, self._read)

    def _send(self, letter: bytes) -> None:
        if self._control is not None:
            try:
                self._control.send(letter)
            except OSError:
                return  # the reaper has gone; the loop hears of it

    def _heard(self, events: int) -> None:
        assert self._control is not None
        try:
            data = self._control.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._finish()
            return
        *lines, self._lines = (self._lines + data).split(b"\n")
        for line in lines:
            self._told = True
            code, self.oom_kills, asked = (int(word) for word in line.split()[1:])
            self.interrupted = bool(asked)
            self._ended(code)

    def _read(self, events: int) -> None:
        try:
            data = os.read(self._output, READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._wrote(data)
        else:
            self._close_output()

    def _finish(self) -> None:
        """The reaper has gone, and all of the work with it: hand over what is left in the
        pipe.
        """
        assert self._control is not None
        self._loop.unwatch(self._control.fileno())
        self._control.close()
        self._control = None
        if self._told:
            reap()
        else:
            sweep()  # somebody killed the reaper, so that what it guarded is ours to end
        while self._output >= 0:
            try:
                data = os.read(self._output, READ_BYTES)
            except BlockingIOError:
                data = b""
            if data:
                self._wrote(data)
            else:
                self._close_output()
        if not self._told:
            self._ended(None)
        self._gone()

    def _close_output(self) -> None:
        if self._output >= 0:
            self._loop.unwatch(self._output)
            os.close(self._output)
            self._output = -1
