"""Makes the sandboxes of a host: a small process that forks itself, so that a sandbox starts within
milliseconds and shares its memory.

`python3 -I zygote.py FOLDER FD`. The host sends messages over the socket FD; it has started this
process without its own keys and variables. When the host ends, so does this process, and with it
all sandboxes.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress

if __name__ == "__main__":
    sys.path.insert(0, os.path.abspath(os.path.join(__file__, *[os.pardir] * 5)))

from cavvy.capabilities.sandboxes.on_node import inside, walls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MOST_PAUSE_S = 3600.0


class Zygote:
    """The process, and the sandboxes that it has made."""

    def __init__(self, control: socket.socket, made: walls.Walls, shown: list[str]) -> None:
        self._control, self._walls, self._shown = control, made, shown
        self._is_root = os.geteuid() == 0
        self._number = 0
        self._sandboxes: dict[
            int, tuple[str, float]
        ] = {}  # by process ID: the name, and until when
        self._cpus = sorted(os.sched_getaffinity(0))
        self._next_cpu = 0

    def run(self) -> None:
        """Obey the host until it is gone."""
        awake, signalled = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(awake, select.POLLIN)
        poll.register(self._control, select.POLLIN)
        gc.collect()
        gc.freeze()
        while True:
            now = time.monotonic()
            until = min((each for _, each in self._sandboxes.values()), default=now + _MOST_PAUSE_S)
            pause = min(max(0.001, until - now), _MOST_PAUSE_S)
            for fd, _ in poll.poll(int(pause * 1000) + 1):
                if fd == awake:
                    with suppress(BlockingIOError):
                        os.read(awake, 512)
                elif not self._obey():
                    return
            self._end_late(time.monotonic())
            self._reap()

    def _obey(self) -> bool:
        data, fds = inside.receive(self._control)
        if not data:
            return False
        message = json.loads(data)
        if message["op"] == "create":
            self._create(message["name"], message["options"], fds[0])
        elif message["op"] == "end":
            for pid, (name, _) in self._sandboxes.items():
                if name == message["name"]:
                    _kill(pid)
        return True

    def _create(self, name: str, options: dict[str, Any], control: int) -> None:
        made = socket.socket(fileno=control)
        self._number += 1
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            pid = walls.clone()
            if pid == 0:
                self._be_sandbox(made, options, reader, writer)
            try:
                self._pin(pid, options["cpu"])
                walls.map_user(pid, self._number % walls.MOST_USERS)
                os.write(writer, b"x")
            except BaseException:
                _kill(pid)
                raise
            self._sandboxes[pid] = (name, time.monotonic() + options["timeout_s"])
        except Exception as error:  # noqa: BLE001 - the other sandboxes go on
            with suppress(OSError):
                made.send(json.dumps({"op": "broken", "text": str(error)}).encode())
            self._say({"op": "ended", "name": name, "late": False})
        finally:
            os.close(reader)
            os.close(writer)
            made.close()

    def _be_sandbox(
        self, control: socket.socket, options: dict[str, Any], reader: int, writer: int
    ) -> None:
        """Continue as the first process of a sandbox. Never returns."""
        try:
            _close_all_but(control.fileno(), reader)
            if os.read(reader, 1):
                os.close(reader)
                inside.live(control, self._walls, options, self._shown, is_root=self._is_root)
        finally:
            os._exit(1)

    def _pin(self, pid: int, cpu: float) -> None:
        """Keep a sandbox on as many CPUs as it may use, each on the next ones."""
        count = max(1, -int(-cpu // 1))
        if count < len(self._cpus):
            chosen = {self._cpus[(self._next_cpu + at) % len(self._cpus)] for at in range(count)}
            self._next_cpu += count
            os.sched_setaffinity(pid, chosen)

    def _end_late(self, now: float) -> None:
        for pid, (_, until) in self._sandboxes.items():
            if now >= until:
                _kill(pid)

    def _reap(self) -> None:
        while self._sandboxes:
            pid = os.waitpid(-1, os.WNOHANG)[0]
            if not pid:
                return
            if pid in self._sandboxes:
                name, until = self._sandboxes.pop(pid)
                self._say({"op": "ended", "name": name, "late": time.monotonic() >= until})

    def _say(self, message: dict[str, Any]) -> None:
        self._control.send(json.dumps(message).encode())


def _close_all_but(*kept: int) -> None:
    begin = 3  # standard input and output are no files of the host
    for fd in sorted(kept):
        os.closerange(begin, fd)
        begin = fd + 1
    os.closerange(begin, 4096)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Be the zygote."""
    folder, fd = sys.argv[1:]
    walls.end_with_parent()
    control = socket.socket(fileno=int(fd))
    shown = walls.list_python()
    try:
        made = walls.find_walls()
        walls.build_template(made, folder, shown, f"{os.path.dirname(folder)}/client")
    except OSError as error:
        control.send(json.dumps({"op": "unable", "text": str(error)}).encode())
        return
    control.send(json.dumps({"op": "able", "missing": made.list_missing()}).encode())
    Zygote(control, made, shown).run()


if __name__ == "__main__":
    main()
