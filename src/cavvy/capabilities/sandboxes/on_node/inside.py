"""The first process of a sandbox: starts its programs, and ends with all of them when its time is
over or its host is gone.

It is forked from the zygote, closes itself in (`walls`), and obeys messages of the host. It has the
user ID of the programs that it starts, so the host believes nothing that it says.
"""

from __future__ import annotations

import array
import json
import os
import resource
import select
import signal
import socket
import time
from contextlib import suppress

from cavvy.capabilities.sandboxes.on_node import (
    file_calls,
    network,
    state_gate,
    system_calls,
    walls,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST_MESSAGE = 192 << 10
_MOST_FDS = 3
_LOOK_S = 0.25  # between two looks at the memory, while much of it is used
_CALM_LOOK_S = 1.0
_CONNECT_S = 10.0
_OPEN_FILES = 1024
_MIB = 1 << 20
# what only this process uses (`Documentation/filesystems/proc.rst`); shared memory is counted else
_OWN_MEMORY = (b"RssAnon:", b"VmSwap:", b"VmPTE:")
# bytes that the kernel takes for the numbers of each line, by their column, at least
_SHARED_BY_KEY = {"shm": {3: 1}, "msg": {3: 1, 4: 64}, "sem": {3: 64}}


def live(
    control: socket.socket,
    made: walls.Walls,
    options: dict[str, Any],
    shown: list[str],
    *,
    is_root: bool,
) -> None:
    """Be the sandbox. Never returns."""
    try:
        walls.end_with_parent()
        with suppress(ValueError):  # where it is 0 for good
            # 1, unlike 0, also keeps the kernel from starting the machine's program for crashes
            # (`fs/coredump.c`), as root and outside, with what a program has in its memory; the
            # filter of system calls then lets nothing change it
            resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
        questions = walls.close_in(made, options["disk_mib"], shown, is_root=is_root)
        _limit(options)
        _Inside(control, options, questions).run()
    except BaseException as error:  # noqa: BLE001 - this process must not go on as the zygote
        with suppress(OSError):
            control.send(json.dumps({"op": "broken", "text": f"{error}"}).encode()[:MOST_MESSAGE])
    finally:
        os._exit(1)


class _Inside:
    def __init__(self, control: socket.socket, options: dict[str, Any], questions: int) -> None:
        self._control, self._questions = control, questions
        self._until = time.monotonic() + options["timeout_s"]
        self._memory = options["memory_mib"] * _MIB
        self._programs: dict[int, int] = {}  # the number of each program, by its process ID
        # what programs have asked for, such as bytes of shared memory, and how much there may be
        self._most = {system_calls.MEMORY: self._memory, **system_calls.MOST_WATCHING}
        self._had = dict.fromkeys(self._most, 0)
        self._alive = False  # whether there is any process but this
        self._memory_over = False
        self._network = bool(options["network"])
        self._state = bool(options.get("dicts") or options.get("queues"))

    def run(self) -> None:
        awake, signalled = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python would end for `kill -INT -1`
        poll = select.poll()
        poll.register(awake, select.POLLIN)
        poll.register(self._control, select.POLLIN)
        if self._questions >= 0:
            poll.register(self._questions, select.POLLIN)
        self._say_ready()
        look_at = 0.0
        while True:
            now = time.monotonic()
            if now >= self._until:
                return
            if self._alive and now >= look_at:
                look_at = now + self._look()
            until = min(self._until, look_at) if self._alive else self._until
            for fd, _ in poll.poll(max(1, int((until - now) * 1000))):
                if fd == awake:
                    with suppress(BlockingIOError):
                        os.read(awake, 512)
                elif fd == self._questions:
                    left = {name: most - self._had[name] for name, most in self._most.items()}
                    what, amount = system_calls.answer(self._questions, left)
                    self._had[what] += amount
                elif not self._obey():
                    return
            self._reap()

    def _say_ready(self) -> None:
        """Tell the host that programs can start, and hand it the sockets of the proxy and of the
        way to dicts and queues, if any."""
        made = []
        if self._network:
            made.append(socket.create_server(("127.0.0.1", network.PORT), backlog=64))
        if self._state:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(state_gate.PATH)
            listener.listen()
            made.append(listener)
        self._say({"op": "ready"}, [each.fileno() for each in made])
        for each in made:
            each.close()

    def _obey(self) -> bool:
        """Obey the next message. Return False if the host is gone."""
        data, fds = receive(self._control)
        if not data:
            return False
        message = json.loads(data)
        try:
            if message["op"] == "start":
                self._start(message, fds)
            elif message["op"] == "kill":
                self._kill(message["number"], message["signal"])
            elif message["op"] == "connect":
                self._connect(message["number"], message["port"])
        except OSError as error:
            self._say({"op": "failed", "number": message["number"], "text": str(error)})
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _start(self, message: dict[str, Any], fds: list[int]) -> None:
        if (pid := os.fork()) == 0:
            _become(message, fds)
        self._programs[pid], self._alive = message["number"], True

    def _kill(self, number: int, name: int) -> None:
        for pid, known in self._programs.items():
            if known == number:
                with suppress(OSError):
                    os.killpg(pid, name)
                with suppress(OSError):  # the group is there only when the program has begun
                    os.kill(pid, name)

    def _connect(self, number: int, port: int) -> None:
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        with made:
            made.settimeout(_CONNECT_S)
            made.connect(("127.0.0.1", port))
            self._say({"op": "connected", "number": number}, [made.fileno()])

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:  # orphans are children of this process, too
                self._alive = self._memory_over = False
                self._had = dict.fromkeys(self._most, 0)
                return
            if not pid:
                return
            if (number := self._programs.pop(pid, None)) is not None:
                code = os.waitstatus_to_exitcode(status)
                over = self._memory_over and code == -signal.SIGKILL
                self._say({"op": "exited", "number": number, "code": code, "memory": over})
            if not self._programs:
                self._memory_over = False

    def _look(self) -> float:
        """End the programs if they use too much memory. Return when to look again, in seconds."""
        used = _count_memory() + self._had[system_calls.MEMORY]
        if used > self._memory:
            self._memory_over = True
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # all but this process
        return _LOOK_S if used * 4 > self._memory else _CALM_LOOK_S

    def _say(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        sent = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._control.sendmsg([json.dumps(message).encode()], sent)


def receive(control: socket.socket) -> tuple[bytes, list[int]]:
    """Return a message and the files that came with it; no bytes if the other end is gone."""
    fds = array.array("i")
    size = socket.CMSG_LEN(_MOST_FDS * fds.itemsize)
    try:
        data, ancillary, _, _ = control.recvmsg(MOST_MESSAGE, size, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return b"", []
    for _, _, payload in ancillary:
        fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, list(fds)


def _become(order: dict[str, Any], fds: list[int]) -> None:
    """Become a program of the sandbox. Never returns."""
    code = 127
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for each in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)
        held = [os.dup(fd) for fd in fds]  # none of them is 0, 1 or 2 afterwards
        for number, fd in enumerate(held):
            os.dup2(fd, number)
        os.closerange(3, _OPEN_FILES)
        os.umask(0o022)
        if "call" in order:
            code = file_calls.run(order["call"])
        else:
            os.chdir(order["cwd"])
            try:
                os.execvpe(order["argv"][0], order["argv"], order["env"])
            except FileNotFoundError as error:  # the last folder that was looked in says nothing
                raise OSError(error.errno, "not found") from None
    except OSError as error:
        with suppress(OSError):
            where = f": {error.filename}" if error.filename else ""
            os.write(2, f"{order.get('argv', ['cavvy'])[0]}: {error.strerror}{where}\n".encode())
    except BaseException as error:  # noqa: BLE001 - this process must not go on as the first one
        with suppress(OSError):
            os.write(2, f"{error}\n".encode())
    finally:
        os._exit(code)


def _limit(options: dict[str, Any]) -> None:
    """Limit this process and its children, besides what `_look` limits."""
    memory, disk = options["memory_mib"] * _MIB, options["disk_mib"] * _MIB
    for what, most in (
        (resource.RLIMIT_DATA, memory),
        (resource.RLIMIT_FSIZE, disk),
        (resource.RLIMIT_NPROC, options["processes"]),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_MEMLOCK, 64 << 10),
        (resource.RLIMIT_SIGPENDING, 1024),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_RTPRIO, 0),
    ):
        with suppress(ValueError):  # a lower limit is kept
            resource.setrlimit(what, (most, most))


def _count_memory() -> int:
    """Return the bytes of memory that programs and files of this sandbox use, and what they share
    by keys; not the shared memory that they have asked for.
    """
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            total += _count_process(f"/proc/{name}")
    for kind, columns in _SHARED_BY_KEY.items():
        with suppress(OSError, ValueError), open(f"/proc/sysvipc/{kind}", "rb") as file:
            for line in file.readlines()[1:]:
                fields = line.split()
                total += sum(int(fields[at]) * size for at, size in columns.items())
    disk = os.statvfs("/tmp")
    return total + (disk.f_blocks - disk.f_bfree) * disk.f_bsize


def _count_process(folder: str) -> int:
    """Return the bytes that a process uses. If its first thread has ended, another one tells."""
    with suppress(OSError):
        if used := _read_used(f"{folder}/status"):
            return used
        for name in os.listdir(f"{folder}/task"):
            with suppress(OSError):
                if used := _read_used(f"{folder}/task/{name}/status"):
                    return used
    return 0


def _read_used(path: str) -> int:
    with open(path, "rb") as file:
        lines = [line.split() for line in file if line.startswith(_OWN_MEMORY)]
    return sum(int(each[1]) << 10 for each in lines)
