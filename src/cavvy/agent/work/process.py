"""Runs a process of the work. The module reports the process's output, its end, and the end of all
processes that the process started.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from ..loop import EventLoop, PipeReader, by_line
from .alone import reap
from .reaper import ChildCommand, guard, sweep

LOOK_S = 0.05  # after so long, what was written last is read, unless more is there
LOOKS = 40


def _ignore(*_: object) -> None:
    """Do nothing; this is the default callback."""


class WorkProcess:
    """Starts the command under its own reaper, and reports output and exits by callbacks.

    `wrote(bytes)` is called with output, and `heard(line)` with each line that the command's
    function writes to its channel. `ended(code)` is called when the first process has ended; `code`
    is None if the reaper was killed. `started(False)` is called if the program still starts when it
    is asked patiently, and `started(True)` when it is to be asked again. `is_complete()` says, when
    its programs have ended after SIGTERM, whether what follows them runs all the same. `gone()` is
    called last, when all processes have ended and `wrote` has received all output.
    """

    def __init__(
        self,
        loop: EventLoop,
        command: ChildCommand,
        *,
        wrote: Callable[[bytes], None] = _ignore,
        heard: Callable[[bytes], None] | None = None,
        ended: Callable[[int | None], None] = _ignore,
        started: Callable[[bool], None] = _ignore,
        is_complete: Callable[[], bool] = bool,
        gone: Callable[[], None] = _ignore,
    ) -> None:
        self._ended, self._started, self._gone = ended, started, gone
        self._loop, self._is_complete = loop, is_complete
        self._reported = False
        self.oom_kills = (
            # number of the work's processes that the kernel killed for exceeding the memory limit
            0
        )
        self.interrupted = False  # whether the first process received SIGTERM before it ended
        ours, theirs = socket.socketpair()
        output, writer = os.pipe()
        if heard is not None:
            lines, command.channel = os.pipe()
        self.reaper = os.fork()
        if self.reaper == 0:
            try:
                guard(command, theirs.fileno(), writer, loop.lock)
            finally:
                os._exit(70)
        theirs.close()
        os.close(writer)
        self._output = PipeReader(loop, output, wrote)
        self._readers = [self._output]
        if heard is not None:
            os.close(command.channel)
            self._readers.append(PipeReader(loop, lines, by_line(heard)))
        self._control = PipeReader(loop, ours.detach(), by_line(self._heard), self._finish)

    def ask(self, *, patient: bool = False) -> None:
        """Send SIGTERM to the programs of the work. If `patient`, a program that still starts gets
        it only when it is asked again."""
        self._control.write(b"N" if patient else b"T")

    def hang_up(self) -> None:
        """Send SIGHUP to the work's process group, and close the output, so that a program that
        writes more output receives SIGPIPE.
        """
        self._control.write(b"H")
        self._output.close()

    def kill(self) -> None:
        """Send SIGKILL to every process of the work."""
        self._control.write(b"K")

    def pause(self, paused: bool) -> None:
        """Pause or resume reading the output; while reading is paused, the command's writes
        block."""
        self._output.pause(paused)

    def read_waiting(self) -> None:
        """Read the output that waits to be read."""
        self._output.read_waiting()

    def move(self, loop: EventLoop) -> None:
        """Report in another loop from now on; the former one must no longer run."""
        self._loop = loop
        for reader in (*self._readers, self._control):
            reader.move(loop)

    def close(self) -> None:
        """Read and discard the remaining output."""
        self._output.drain()

    def _answer(self, looks: int) -> None:
        """Say whether the work is complete, when its output has been read."""
        if looks and self._output.has_data():
            self._loop.after(LOOK_S, lambda: self._answer(looks - 1))
        else:
            self._control.write(b"C" if self._is_complete() else b"E")

    def _heard(self, line: bytes) -> None:
        if line == b"halted":
            # what the programs have written last may still be in the pipe of the output
            self._loop.after(LOOK_S, lambda: self._answer(LOOKS))
            return
        if line.startswith(b"start"):
            self._started(line == b"started")
            return
        self._reported = True
        code, self.oom_kills, asked = (int(word) for word in line.split()[1:])
        self.interrupted = bool(asked)
        self._ended(code)

    def _finish(self) -> None:
        """Pass the remaining output to the callbacks. The method is called when the reaper and all
        processes of the work have ended.
        """
        if self._reported:
            reap()
        else:
            sweep()  # the reaper was killed, so this process must kill the work's processes
        for reader in self._readers:
            reader.drain()
        if not self._reported:
            self._ended(None)
        self._gone()
