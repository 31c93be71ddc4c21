"""The fork server: a process that has loaded the agent's modules and forks into agents. The local
provider starts agents in this way, because Python's start and the imports take longer than a short
task.

The fork server reads no configuration and runs no work, so every agent begins in the same state, as
if it had been started by itself. Its standard input is a socket; requests and answers are messages
of JSON. A request to start an agent contains `arguments`, `environ` and `output`; the answer
contains the agent's `pid`, or an `error`. A request to reap an agent contains its PID as `reap`;
the answer contains its `status`, or null if it still runs or is not a child of this process. The
fork server ends when the other end of the socket is closed.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys

# the modules that most agents need besides those of `main`, which calls this module
from . import disk, notification_socket  # noqa: F401
from .work import (  # noqa: F401
    cache,
    home_entries,
    meters,
    monitor,
    mounts,
    prepare,
    protect,
    view,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Run = Callable[[list[str]], int]

LONGEST = 1 << 20  # bytes of a request
_LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
# where the arguments and the environment of a process are in memory, in `read_process`
_ARGUMENTS, _ENVIRON = slice(45, 47), slice(47, 49)


def serve_forks(run: Run) -> int:
    """Serve requests until the socket is closed. Each agent calls `run`, `main.main`, with its
    arguments. Return the exit code."""
    # fill caches that the agents inherit
    mounts.load_library()
    mounts.load_attributes()
    protect.list_named([])
    for names in (protect.DEVICES, protect.NEEDED):
        protect.compile_names(names)
    meters.CpuMeter()
    gc.collect()
    gc.freeze()  # so that collections in the agents do not copy the memory of the modules
    with socket.socket(fileno=0) as requests:
        while request := requests.recv(LONGEST):
            requests.send(json.dumps(_answer(json.loads(request), run)).encode())
    return 0


def _answer(request: dict[str, Any], run: Run) -> dict[str, object]:
    try:
        if "reap" in request:
            pid, status = os.waitpid(request["reap"], os.WNOHANG)
            return {"status": status if pid else None}
        return {"pid": _fork(request["arguments"], request["environ"], request["output"], run)}
    except ChildProcessError:
        return {"status": None}
    except OSError as error:
        return {"error": str(error)}


def _fork(arguments: list[str], environ: dict[str, str], output: str, run: Run) -> int:
    """Start an agent. Raises OSError.

    The agent does nothing until this process has seen that the agent can be found by its arguments.
    If this process is killed before that, the agent exits.
    """
    log = os.open(output, _LOG_FLAGS, 0o600)  # the work could put a link there
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pid = os.fork()
        if pid == 0:
            ours.close()
            _become(arguments, environ, log, theirs, run)
        os.close(log)
        theirs.close()
        if not ours.recv(1):
            os.waitpid(pid, 0)
            raise OSError("the arguments of the process cannot be changed")
        ours.send(b"x")
    return pid


def _become(
    arguments: list[str], environ: dict[str, str], log: int, starter: socket.socket, run: Run
) -> None:
    """Run an agent in this process; never returns."""
    code = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(null)
        os.close(log)
        os.environ.clear()  # before its memory changes
        os.environ.update(environ)
        _rename(_ARGUMENTS, arguments)
        _rename(_ENVIRON, [f"{name}={value}" for name, value in environ.items()])
        starter.send(b"x")
        if starter.recv(1):
            starter.close()
            code = run(arguments[arguments.index(sys.argv[0]) + 1 :])
            sys.stderr.flush()
    except BaseException:  # noqa: BLE001
        # after any error, this process must not go on as a fork server
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _rename(where: slice, words: list[str]) -> None:
    """Replace the arguments or the environment that other programs read about this process in
    /proc, so that they find the agent as if it had been started by itself. Raises OSError."""
    start, end = map(int, disk.read_process(os.getpid())[where])
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    if len(text) > end - start:
        raise OSError(f"{len(text)} bytes do not fit into {end - start}")
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(text.ljust(end - start, b"\0"))
