"""Keeps what the program has loaded while its job replaces a lost node.

The process forks when the run begins. The child goes on with the program. The parent has imported
everything and computed nothing; it waits. If another node of the job is lost, the child ends, and
the parent tells Cavvy's agent so (`apart`). When the new node is there, the agent sends the
variables of the next attempt (`rejoin`), and the parent forks again. The new child goes on from
the same place of the program: it joins the other ranks, and loads the newest checkpoint.

A copy of a process has only the thread that forked, and cannot use an accelerator that the process
has used. So a process that has done either before the run begins is not kept: the agent starts its
program again, which has the same result but takes longer.
"""

import gc
import json
import os
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

REJOINS = "CAVVY_REJOINS"  # set by agents that can keep a program
WAIT_S = 60.0  # seconds in which the agent answers that the process leaves, or stays
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_LONGEST = 4096  # bytes of the description of a lost connection
_LOST = 1  # exit code of a child that has lost its connection to another rank


def _count_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0


_at_import = _count_threads()  # the threads of libraries, such as those of OpenBLAS


class _Keeper:
    """The parent of the program's processes. What it says to the agent is written once more in
    `agent/work/torchrun.py`, since neither may import the other; a test compares both. There,
    the agent may keep no program, and several ranks may have ended.
    """

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._rest = b""
        self._child = 0
        self._handlers: dict[int, Any] = {}
        self._error = ""  # why the child's connection to another rank was lost
        self._asked = False  # whether the agent has asked the child to end

    def run(self) -> socket.socket:
        """Fork until a child ends for good, whose exit code the process then has. Return, in each
        child, the socket on which it says that it has lost its connection, and hears that it is
        to end."""
        while True:
            mine, its = socket.socketpair()
            self._error, self._asked = "", False
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            gc.freeze()  # the collector would write to each object, which copies its page
            self._child = os.fork()
            if not self._child:
                mine.close()
                self._become_child()
                return its
            its.close()
            if not self._handlers:
                for number in _PASSED_ON:
                    self._handlers[number] = signal.signal(number, self._pass_on)
            with mine:
                code = self._await_child(mine)
            if not (self._error or self._asked) or not self._wait_for_rejoin(code):
                self._leave(code)

    def _become_child(self) -> None:
        self._line.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self._child:
            with suppress(ProcessLookupError):
                os.kill(self._child, number)

    def _await_child(self, line: socket.socket) -> int:
        """Wait for the child's end, and return its exit code, negative if a signal ended it."""
        ended, poll = os.pidfd_open(self._child), select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(self._line, select.POLLIN)
        while ended not in [fd for fd, _ in poll.poll()]:
            heard = self._read()
            if heard is None:
                poll.unregister(self._line)
            elif "regroup" in heard:
                self._asked = True
                line.send(b"1")
                self._pass_on(signal.SIGTERM, None)
        os.close(ended)
        _, status = os.waitpid(self._child, 0)
        self._child = 0
        line.setblocking(False)
        with suppress(OSError):  # it has said nothing
            self._error = line.recv(_LONGEST).decode(errors="replace")
        return os.waitstatus_to_exitcode(status)

    def _wait_for_rejoin(self, code: int) -> bool:
        """Tell the agent that the child has ended, and take the variables of the next attempt.
        Return False if the process must leave."""
        with suppress(OSError):
            self._say({"apart": {"code": _as_shell(code), "error": self._error}})
        poll, answered = select.poll(), False
        poll.register(self._line, select.POLLIN)
        while poll.poll(None if answered else WAIT_S * 1000):
            heard = self._read()
            if heard is None or "leave" in heard:
                return False
            answered = answered or "stay" in heard
            if "rejoin" in heard:
                os.environ.update(heard["rejoin"]["env"])
                return True
        return False

    def _read(self) -> dict[str, Any] | None:
        """Return what the agent has said, by kind; None if the connection is closed."""
        try:
            data = self._line.recv(65536)
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        said: dict[str, Any] = {}
        for line in lines:
            said.update(json.loads(line))
        return said

    def _say(self, line: dict[str, object]) -> None:
        self._line.sendall(json.dumps(line).encode() + b"\n")

    def _leave(self, code: int) -> NoReturn:
        with suppress(OSError):
            self._say({"keeps": {"kept": 0}})
        if code < 0:
            with suppress(OSError):  # SIGKILL has no handler
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(_as_shell(code))


_child: socket.socket | None = None  # a child's connection to its parent


def stand_by() -> None:
    """Let this process be kept if a node is lost, and go on in a copy of it. Does nothing where
    this is not possible, and in later calls."""
    global _child
    if _child is not None or not _may_fork():
        return
    try:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.connect(os.environ["CAVVY_NOTICE"])
        line.sendall(json.dumps({"keeps": {"kept": 1}}).encode() + b"\n")
    except OSError:
        return  # the agent has exited
    _child = _Keeper(line).run()


def is_kept() -> bool:
    """Return whether this process is a copy, whose parent is kept if a node is lost."""
    return _child is not None


def is_forked() -> bool:
    """Return whether this process is a copy of a launcher that is kept if a node is lost
    (`agent/work/torchrun.py`). It hears of lost connections, and the agent hears it from there."""
    return "cavvy_torchrun" in sys.modules


def must_end() -> bool:
    """Return whether this copy is to end, since its job replaces a node."""
    return _child is not None and bool(select.select([_child], [], [], 0)[0])


def leave_lost(error: str) -> NoReturn:
    """End this copy, because its connection to another rank is lost. `error` says how."""
    assert _child is not None
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    _child.send(error.encode(errors="replace")[:_LONGEST])
    os._exit(_LOST)


def _may_fork() -> bool:
    """Return whether the agent keeps programs, and a copy of this process can do all that the
    process can. Threads that work for a computation would be missing in the copy."""
    env = os.environ
    return (
        env.get(REJOINS) == "1"
        and bool(env.get("CAVVY_NOTICE"))
        and "RANK" not in env  # a launcher starts its ranks again
        and _has_pidfds()
        and threading.current_thread() is threading.main_thread()
        and threading.active_count() == 1
        and 0 < _count_threads() <= _at_import
        and not dist.is_initialized()
        and not any(_is_used(getattr(torch, kind, None)) for kind in ("cuda", "xpu"))
    )


def _has_pidfds() -> bool:
    """Return whether both the kernel and this Python have them."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def _is_used(accelerator: Any) -> bool:
    return accelerator is not None and bool(accelerator.is_initialized())


def _as_shell(code: int) -> int:
    return 128 - code if code < 0 else code
