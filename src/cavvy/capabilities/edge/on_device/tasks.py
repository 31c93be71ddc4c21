"""What the server asks of this device at a check-in: the newest lines of its log, or a command. A
command runs only if the device was enrolled with `--allow-exec`, for a bounded time, and only the
end of its output is kept.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress

from .documents import GivenTask, TaskOutput

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_TIME_S = 60.0  # of a command
_MOST_BYTES = 32 * 1024  # of an output, which JSON makes up to six times as long
_AT_ONCE = 4  # tasks
_REFUSED = 126  # the exit code of a command that the device does not run
_lines: deque[str] = deque(maxlen=500)
_running = threading.BoundedSemaphore(_AT_ONCE)


def say(text: str) -> None:
    """Write a line to the standard error, and keep it for `cavvy edge logs`."""
    _lines.append(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} {text[:500]}")
    sys.stderr.write(f"cavvy edge: {text}\n")
    sys.stderr.flush()


def perform(task: GivenTask, allowed: bool, send: Callable[[str, TaskOutput], object]) -> None:
    """Do what the server asks in a thread of its own, and send the output. Raises nothing."""
    command = task.command

    def answer(output: str, code: int) -> None:
        with suppress(Exception):  # the user asks again
            send(f"/edge/v1/tasks/{task.id}", TaskOutput(output=output, exit_code=code))

    def work() -> None:
        if not _running.acquire(blocking=False):
            answer("the device is busy with other commands; try again in a minute\n", _REFUSED)
            return
        try:
            output, code = ("\n".join(_lines) + "\n")[-_MOST_BYTES:], 0
            if command:
                say(f"the server asks for the command {command!r}")
                output, code = run_command(command) if allowed else (_NOT_ALLOWED, _REFUSED)
            answer(output, code)
        finally:
            _running.release()

    threading.Thread(target=work, daemon=True).start()


_NOT_ALLOWED = "this device was enrolled without --allow-exec\n"


def run_command(command: list[str]) -> tuple[str, int]:
    """Run a command without input, and return the end of its output and its exit code."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return f"{error}\n", 127
    assert process.stdout is not None
    kept, until, late = b"", time.monotonic() + _TIME_S, False
    while not late:
        # a process in the background may keep the pipe open
        if select.select([process.stdout], [], [], 0.5)[0]:
            piece = os.read(process.stdout.fileno(), 1 << 16)
            kept = (kept + piece)[-_MOST_BYTES:]
            if not piece:
                break
        elif process.poll() is not None:
            break
        late = time.monotonic() >= until
    with suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, until - time.monotonic()))
    kill_session(process)  # also what it has left in the background
    code = process.wait()
    process.stdout.close()
    told = f"\nthe command was ended after {_TIME_S:g} s\n" if late else ""
    return kept.decode(errors="replace") + told, code if code >= 0 else 128 - code


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, and all that it has started there."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
