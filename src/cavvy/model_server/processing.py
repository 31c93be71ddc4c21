"""Runs `cavvy_process.py`, a file beside a model. Its function `before(request)` returns what the
model gets, and `after(request, answer)` what the caller gets; each is optional. All are JSON
objects in the form of the requested path.

The file runs in a process of its own, one request at a time: `python -m PACKAGE.processing FILE`.
A call that takes too long, or too much memory, ends that process and fails this request only.
"""

from __future__ import annotations

import json
import os
import resource
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .inference import WrongRequest

if TYPE_CHECKING:
    from pathlib import Path

FILE = "cavvy_process.py"
_MOST_FILE = 64 * 1024  # bytes
_MOST_ANSWER = 64 << 20  # bytes
_MEMORY = 2 << 30  # bytes of addresses
_TIME_S, _START_S = 5.0, 30.0  # of a call, and of the first one, which imports packages
_FUNCTIONS = ("before", "after")


class ProcessingFailed(Exception):
    """Raised if the file cannot be used, takes too long, or ends its process."""


class Processing:
    """The functions of a file, perhaps one that does not exist. Raises ProcessingFailed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.functions: frozenset[str] = frozenset()
        if path.exists():
            if path.stat().st_size > _MOST_FILE:
                raise ProcessingFailed(f"{FILE} has more than {_MOST_FILE >> 10} KiB")
            with self._lock:
                self.functions = frozenset(self._ask({"do": "list"}, _START_S))

    def call(self, function: str, *values: Any) -> Any:
        """Return what a function of the file returns, or the last value if it has no such
        function. Raises WrongRequest, ProcessingFailed."""
        if function not in self.functions:
            return values[-1]
        with self._lock:
            fresh = self._process is None
            return self._ask({"do": function, "values": values}, _START_S if fresh else _TIME_S)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # also what it has started
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()  # not read to its end, which another process may keep open

    def _ask(self, told: dict[str, Any], limit_s: float) -> Any:
        try:
            answer = json.loads(self._exchange(json.dumps(told).encode() + b"\n", limit_s))
        except (OSError, ValueError) as error:
            self.close()
            raise ProcessingFailed(f"{FILE}: {error or 'its process ended'}") from error
        if "error" in answer:
            if told["do"] == "list":
                self.close()
                raise ProcessingFailed(f"{FILE}: {answer['error']}")
            raise WrongRequest(f"{FILE}: {answer['error']}")
        return answer["value"]

    def _exchange(self, line: bytes, limit_s: float) -> bytes:
        if self._process is None:
            package = str(__package__)
            words = [sys.executable, "-m", f"{package}.processing", str(self._path)]
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        source, sink = self._process.stdout, self._process.stdin
        assert source is not None
        assert sink is not None
        os.set_blocking(sink.fileno(), False)
        until, got, rest = time.monotonic() + limit_s, b"", memoryview(line)
        while not got.endswith(b"\n"):
            left = until - time.monotonic()
            ready, free, _ = select.select([source], [sink] if rest else [], [], max(0.0, left))
            if left <= 0:
                raise OSError(f"it took more than {limit_s:g} s")
            if free:
                rest = rest[os.write(sink.fileno(), rest[:65536]) :]
            if ready:
                piece = os.read(source.fileno(), 1 << 20)
                if not piece:
                    raise OSError("its process ended, perhaps because it needs too much memory")
                got += piece
            if len(got) > _MOST_ANSWER:
                raise OSError(f"it returned more than {_MOST_ANSWER >> 20} MiB")
        return got


def main(arguments: list[str]) -> None:
    """Answer the lines of the standard input. What the file prints goes to the standard error."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    known: dict[str, Any] = {}
    problem = ""
    most_s = int(_START_S) + 1
    signal.alarm(most_s)  # ends this process also if the one that started it was killed
    try:
        known = runpy.run_path(arguments[0])
    except BaseException as error:  # noqa: BLE001 - a user's file may raise anything
        problem = f"it cannot be loaded: {type(error).__name__}: {error}"
    for line in sys.stdin.buffer:
        signal.alarm(most_s)
        told = json.loads(line)
        try:
            if problem:
                raise ImportError(problem)
            if told["do"] == "list":
                value: Any = [each for each in _FUNCTIONS if callable(known.get(each))]
            else:
                value = known[told["do"]](*told["values"])
            answer = json.dumps({"value": value})
        except Exception as error:  # noqa: BLE001 - as above
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"[:500]})
        with suppress(BrokenPipeError):
            answers.write(answer.encode() + b"\n")
            answers.flush()
        signal.alarm(0)


if __name__ == "__main__":
    main(sys.argv[1:])
