"""Gives the work its own process namespace, in which it can neither signal nor trace processes
outside. All processes of the work end when the namespace's first process ends.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from . import mounts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

CLONE_NEWPID = 0x20000000
LAST_MS = 50  # for which the end of a namespace is awaited
_FLAGS = mounts.MS_NOSUID | mounts.MS_NODEV | mounts.MS_NOEXEC


def start_alone(
    then: Callable[[], None],
    finish: Callable[[], str] | None = None,
    meet: Callable[[int], None] | None = None,
) -> None:
    """Start the namespace that this process has unshared for its children.

    The function returns in a new process, after a call of `then` in the namespace's first process,
    which writes what `finish` returns to the output when the new process has ended. The first
    process also calls `meet` with the ID of the new process. The calling process waits for the new
    process and exits with the new process's exit code. It must have only one thread. Raises
    OSError.
    """
    reader, writer = os.pipe()
    if first := os.fork():
        os.close(writer)
        _wait_for(reader, first)
    os.close(reader)
    mounts.mount("proc", "/proc", "proc", _FLAGS)
    then()
    program = os.fork()
    if program:
        if meet is not None:
            meet(program)
        _serve(program, writer, finish)
    os.close(writer)


def continue_as_child() -> None:
    """Continue in a child process, so that it is in a process namespace that this process entered.
    The calling process waits for the child process and exits with its exit code."""
    program = os.fork()
    if program:
        let_go(4096)
        os._exit(find_code(os.waitpid(program, 0)[1]))


def _wait_for(reader: int, first: int) -> None:
    """Exit with the exit code that the first process of the namespace reports."""
    let_go(reader)
    told = os.read(reader, 2)
    # The first process ends now, so that the reaper of the work has nothing to search for. It takes
    # longer if another process that has entered the namespace cannot be killed.
    for _ in range(LAST_MS if len(told) > 1 else 0):
        if os.waitpid(first, os.WNOHANG)[0]:
            break
        time.sleep(0.001)
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
            alone = not reap()
            os.write(writer, bytes([find_code(status), *([1] if alone else [])]))
            os.close(writer)
            if alone:
                os._exit(0)


def reap() -> bool:
    """Reap the child processes that have ended. Return False if no child process is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


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
