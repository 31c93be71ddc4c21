"""Starts a training on this node as torchrun does, and keeps what it has imported while the job
replaces a lost node: `python "$CAVVY_TORCHRUN" [--nproc-per-node N] [-m] train.py ...`.

The process imports PyTorch, and forks one rank for each accelerator. The ranks run the program and
get the variables of torchrun. If another node of the job is lost, they end, and this process stays:
the ranks of the next attempt are forked from it, and need not import PyTorch. It has run none of
the program, and has used no accelerator, so that a copy of it can do all that a new process can.
`kept_program.py` has the messages between this process and the agent. `cavvy.train` keeps programs
in the same way without a launcher.

The agent copies this file to the node's folder. On the node, the file runs without the rest of
Cavvy, on Python 3.9 or later.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import types
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, TracebackType
    from typing import Any, NoReturn

WAIT_S = 60.0  # seconds in which the agent answers that the process leaves, or stays
KILL_S = 30.0  # seconds that the other ranks have to end when one has failed, as with torchrun
_LONGEST = 4096  # bytes of the description of a lost connection
_ENDS = (signal.SIGTERM, signal.SIGINT)
_PASSED_ON = (*_ENDS, signal.SIGUSR1)


class NodeRanks:
    """The ranks of this node, and the connection to the agent, or None if it keeps no program. What
    is said on this connection is written once more in `train/rejoin.py`, since neither may import
    the other; a test compares both.
    """

    def __init__(self, count: int, line: socket.socket | None) -> None:
        self._count, self._line = count, line
        self._rest = b""
        self._ranks: dict[int, socket.socket] = {}  # process ID -> what the rank says of its error
        self._failed = 0  # exit code of the first rank that has failed, negative for a signal
        self._error = ""  # how its connection to another rank was lost
        self._asked = False  # whether the agent has asked the ranks to end
        self._signalled = False  # whether a signal from elsewhere has
        self._handlers: dict[int, Any] = {}
        self._woken, self._wakes = socket.socketpair()  # the second gets a byte for each signal
        for each in (self._woken, self._wakes):
            each.setblocking(False)

    def run(self) -> socket.socket:
        """Fork the ranks until they end for good, and exit with the first failed one's code.
        Return, in each rank, the socket on which it describes the error that ends it."""
        while True:
            self._failed, self._error, self._asked = 0, "", False
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            gc.freeze()  # the collector would write to each object, which copies its page
            for local in range(self._count):
                mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
                pid = os.fork()
                if not pid:
                    mine.close()
                    self._become_rank(local)
                    return its
                its.close()
                self._ranks[pid] = mine
            if not self._handlers:
                self._take_signals()
            self._await_ranks()
            # ranks that save when they are asked to end may end with 0
            stays = bool(self._failed or self._asked) and not self._signalled
            if not stays or not self._wait_for_rejoin():
                self._leave(self._failed)

    def _become_rank(self, local: int) -> None:
        if self._handlers:
            signal.set_wakeup_fd(-1)
        for each in (self._line, self._woken, self._wakes, *self._ranks.values()):
            if each is not None:
                each.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.environ.update(name_rank(os.environ, local, self._count))
        if "numpy.random" in sys.modules:  # the ranks would draw the same numbers
            sys.modules["numpy.random"].seed()

    def _take_signals(self) -> None:
        """Pass signals on from here. The end of a rank is a signal, too: older kernels, and Pythons
        that were built for these, have no pidfds."""
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        for number in _PASSED_ON:
            self._handlers[number] = signal.signal(number, self._pass_on)
        self._handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._signalled = self._signalled or number in _ENDS
        self._signal(number)

    def _signal(self, number: int) -> None:
        for pid in self._ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _await_ranks(self) -> None:
        """Wait for the end of all ranks. If one fails, the others are ended."""
        poll, ready = select.poll(), list[int]()
        poll.register(self._woken, select.POLLIN)
        if self._line is not None:
            poll.register(self._line, select.POLLIN)
        while self._reap():  # first: what has already ended was not ended by what is heard now
            if self._line is not None and self._line.fileno() in ready:
                self._hear_regroup(poll)
            ready = [fd for fd, _ in poll.poll(KILL_S * 1000 if self._failed else None)]
            if not ready and not (self._asked or self._signalled):
                self._signal(signal.SIGKILL)
            if self._woken.fileno() in ready:
                self._woken.recv(4096)

    def _reap(self) -> bool:
        """Note which ranks have ended, and end the others if one has failed by itself. Return
        whether one still runs."""
        told = bool(self._failed or self._asked or self._signalled)
        codes: dict[int, int] = {}
        for pid in self._ranks:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        self._failed = self._failed or next(filter(None, codes.values()), 0)
        if self._failed and not told:
            self._error = self._find_error(codes)
        for pid in codes:
            self._ranks.pop(pid).close()
        if self._failed and not told:
            self._signal(signal.SIGTERM)
        return bool(self._ranks)

    def _find_error(self, codes: dict[int, int]) -> str:
        """Return how a connection was lost, or "" if one of these ranks has failed otherwise, which
        is then why the others have lost theirs."""
        said = {pid: _read_error(line) for pid, line in self._ranks.items()}
        errors = [text or "" for pid, text in said.items() if text is not None or codes.get(pid)]
        return errors[0] if all(errors) else ""

    def _hear_regroup(self, poll: select.poll) -> None:
        assert self._line is not None
        heard = self._read()
        if heard is None:
            poll.unregister(self._line)
        elif "regroup" in heard:
            self._asked = True
            self._signal(signal.SIGTERM)

    def _wait_for_rejoin(self) -> bool:
        """Tell the agent that the ranks have ended, and take the variables of the next attempt.
        Return False if the process must leave."""
        if self._line is None:
            return False
        with suppress(OSError):
            self._say({"apart": {"code": _as_shell(self._failed), "error": self._error}})
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
        assert self._line is not None
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
        if self._line is not None:
            self._line.sendall(json.dumps(line).encode() + b"\n")

    def _leave(self, code: int) -> NoReturn:
        with suppress(OSError):
            self._say({"keeps": {"kept": 0}})
        if code < 0:
            with suppress(OSError):  # SIGKILL has no handler
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(_as_shell(code))


def name_rank(env: Any, local: int, count: int) -> dict[str, str]:
    """Return the variables by which torchrun tells a rank its place. Rank 0 holds the store."""
    node, nodes = int(env.get("NODE_RANK", "0")), int(env.get("NNODES", "1"))
    rank, size = str(node * count + local), str(nodes * count)
    return {
        "RANK": rank,
        "ROLE_RANK": rank,
        "WORLD_SIZE": size,
        "ROLE_WORLD_SIZE": size,
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_NAME": "default",
        "MASTER_ADDR": env.get("MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": env.get("MASTER_PORT", "29500"),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": env.get("CAVVY_JOB_ID", "none"),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="$CAVVY_TORCHRUN",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    each = int(os.environ.get("NPROC_PER_NODE", "1"))
    parser.add_argument("--nproc-per-node", "--nproc_per_node", type=int, default=each)
    parser.add_argument("-m", "--module", action="store_true")
    parser.add_argument("program")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    asked = parser.parse_args(words)
    if asked.nproc_per_node > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does; read by the import
    import torch.distributed  # noqa: F401 - before the fork

    parent = NodeRanks(asked.nproc_per_node, connect()).run()
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        lost = f"{kind.__name__}: {error}" if is_lost_connection(error) else ""
        with suppress(OSError):
            parent.send(lost.encode(errors="replace")[:_LONGEST] + b"\n")

    sys.excepthook = tell
    sys.argv = [asked.program, *asked.rest]
    run_program(asked.program, module=asked.module)


def connect() -> socket.socket | None:
    """Tell the agent that this process can be kept, if the agent keeps programs."""
    env = os.environ
    if env.get("CAVVY_REJOINS") != "1" or "CAVVY_NOTICE" not in env:
        return None
    try:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.connect(env["CAVVY_NOTICE"])
        line.sendall(json.dumps({"keeps": {"kept": 1}}).encode() + b"\n")
    except OSError:
        return None  # the agent has exited
    return line


def run_program(program: str, *, module: bool) -> None:
    """Run a script or a module as the main one, as `python PROGRAM` does."""
    if module:
        sys.path[0] = os.getcwd()
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    sys.path[0] = os.path.dirname(os.path.abspath(program))
    main_module = types.ModuleType("__main__")
    main_module.__file__ = program
    with open(program, "rb") as file:
        code = compile(file.read(), program, "exec", dont_inherit=True)
    sys.modules["__main__"] = main_module
    exec(code, main_module.__dict__)


def is_lost_connection(error: BaseException) -> bool:
    """Return whether the error is a failed collective, which may be the result of another rank's
    failure. gloo reports it as a RuntimeError that names gloo's source file."""
    import torch.distributed as dist

    of_torch = isinstance(error, getattr(dist, "DistError", ()))
    return of_torch or (isinstance(error, RuntimeError) and "third_party/gloo" in str(error))


def _read_error(line: socket.socket) -> str | None:
    """Return what a rank has said of the error that ends it: how its connection was lost, or "" for
    another error; None if it has said nothing."""
    line.setblocking(False)
    try:
        return line.recv(_LONGEST + 1).decode(errors="replace")[:-1]
    except OSError:
        return None


def _as_shell(code: int) -> int:
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    main(sys.argv[1:])
