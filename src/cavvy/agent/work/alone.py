"""Gives the work its own process namespace, in which it can neither signal nor trace processes
outside. All processes of the work end when the namespace's first process ends.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from . import mounts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

CLONE_NEWPID = 0x20000000
_FLAGS = mounts.MS_NOSUID | mounts.MS_NODEV | mounts.MS_NOEXEC


def start_alone(then: Callable[[], None], finish: Callable[[], str] | None = None) -> None:
    """Start the namespace that this process has unshared for its children.

    The function returns in a new process, after a call of `then` in the namespace's first process,
    which writes what `finish` returns to the output when the new process has ended. The calling
    process waits for the new process and exits with the new process's exit code. It must have only
    one thread. Raises OSError.
    """
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        _wait_for(reader)
    os.close(reader)
    mounts.mount("proc", "/proc", "proc", _FLAGS)
    then()
    program = os.fork()
    if program:
        _serve(program, writer, finish)
    os.close(writer)


def continue_as_child() -> None:
    """Continue in a child process, so that it is in a process namespace that this process entered.
    The calling process waits for the child process and exits with its exit code."""
    program = os.fork()
    if program:
        let_go(4096)
        os._exit(find_code(os.waitpid(program, 0)[1]))


def _wait_for(reader: int) -> None:
    """Exit with the exit code that the first process of the namespace reports."""
    let_go(reader)
    told = os.read(reader, 1)
    os._exit(told[0] if told else 137)


def _serve(program: int, writer: int, finish: Callable[[], str] | None) -> None:
    """Act as the first process of the namespace: report the program's exit code, and reap the
    processes that the program leaves behind. All processes of the namespace are killed when this
    process ends.
    """
    output = os.dup(2) if finish else -1
    let_go(writer, output)
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            os._exit(0)
        if pid == program:
            if finish:
                with suppress(OSError):
                    os.write(output, finish().encode(errors="replace"))
                os.close(output)
            os.write(writer, bytes([find_code(status)]))
            os.close(writer)


def let_go(*kept: int) -> None:
    """Close all files except those in `kept`, and ignore signals that only the program should
    receive."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    start = 0
    for fd in sorted(each for each in kept if each >= 0):
        os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, 4096)


def find_code(status: int) -> int:
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
