"""Starts servers for tests. They end with the test process, even if that is killed."""

import ctypes
import signal
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

# Linux sends the parent-death signal when the THREAD that started the child ends (prctl(2)), so one
# thread that lasts as long as this process starts all servers.
_starter = ThreadPoolExecutor(1, thread_name_prefix="tied")
# The thread begins now, in the network of the machine: a thread begins in the namespaces of the one
# that makes it, and a test may be in those of a lab when it starts the first server.
_starter.submit(int).result()
_PR_SET_PDEATHSIG = 1
T = TypeVar("T")


def start_tied(
    argv: Sequence[object], end: signal.Signals = signal.SIGKILL, **options: Any
) -> "subprocess.Popen[bytes]":
    """Start a process that gets the signal `end` when this process ends. The `options` are those of
    Popen.
    """

    def tie() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, end)

    words = [str(each) for each in argv]
    return _starter.submit(subprocess.Popen, words, preexec_fn=tie, **options).result()


def in_starter(call: Callable[..., T], *given: object) -> T:
    """Call a function in that thread, which no test moves into other namespaces."""
    return _starter.submit(call, *given).result()
