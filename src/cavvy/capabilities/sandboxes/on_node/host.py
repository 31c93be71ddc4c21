"""The main program of a sandbox host: the job in which sandboxes run.

`python3 host.py SPEC.json MEET`. Callers connect to the socket MEET if they are on this machine,
and prove that they can read MEET.key; otherwise to the socket `host.sock` beside the specification,
which a program of the job reaches. The host makes sandboxes by the zygote, carries the input and
output of their programs, and ends them. It believes nothing that comes from a sandbox, and runs
nothing of it.
"""

from __future__ import annotations

import array
import asyncio
import hmac
import json
import os
import resource
import secrets
import signal
import socket
import stat
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress

if __name__ == "__main__":  # the root of the files that were sent with the working folder
    sys.path[0] = os.path.abspath(os.path.join(__file__, *[os.pardir] * 5))

from cavvy.capabilities.functions.frames import CallFrames, WrongFrame, pack, prove
from cavvy.capabilities.functions.on_node.reporter import find_reporter
from cavvy.capabilities.sandboxes.on_node.inside import MOST_MESSAGE, receive
from cavvy.capabilities.sandboxes.on_node.network import NetworkProxy, make_variables
from cavvy.capabilities.sandboxes.on_node.state_gate import (
    KINDS,
    StateGate,
    find_agent,
    make_state_variables,
)
from cavvy.capabilities.sandboxes.on_node.walls import CLIENT, WORK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Head = dict[str, Any]

WINDOW = 1 << 20  # bytes of an output that are sent before the caller has taken them
_PIECE = 1 << 16
_GREET_S = 10.0
_READY_S = 30.0  # in which a sandbox must have closed itself in
_GRACE_S = 0.25  # after a program's end, for what its children still print
_MOST_SANDBOXES = 8192
_MOST_STARTING = 32  # at the same time; further ones wait for their turn
_REPORT_S = 1.0  # between two reports of sandboxes that were made or have ended
_MOST_TOLD = 500  # sandboxes of a report
_MOST_ENDED = 2000  # ended sandboxes that are remembered
_MOST_WORDS = 96 << 10  # bytes of a program's arguments and variables
_OPEN_FILES = 1 << 17


class HostRefusal(Exception):
    """Raised if a caller asks for what is not possible: its kind, and a sentence."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class ProgramPipes:
    """The input and output of a program of a sandbox, or of a connection to one of its ports.

    `outputs` are the files to read, by their number; `source` is what to write to, or -1. A
    connection is one file for both.
    """

    def __init__(
        self,
        host: SandboxHost,
        caller: HostCaller,
        request: int,
        source: int,
        outputs: dict[int, int],
    ) -> None:
        self.host, self.caller, self.request = host, caller, request
        self._source, self._outputs = source, outputs
        self._credit = dict.fromkeys(outputs, WINDOW)
        self._waiting: deque[tuple[int, memoryview, bool]] = deque()
        self._moved = True
        self.code: int | None = None
        for each in (source, *outputs.values()):
            if each >= 0:
                os.set_blocking(each, False)
        self.look()

    def look(self) -> None:
        """Read those outputs that the caller can take."""
        for number, fd in self._outputs.items():
            if self.caller.gone or (self._credit[number] > 0 and self.caller.room):
                self.host.loop.add_reader(fd, self._read, number, fd)
            else:
                self.host.loop.remove_reader(fd)

    def credit(self, number: int, size: int) -> None:
        """Note that the caller has taken bytes of an output."""
        if number in self._credit and size > 0:
            self._credit[number] += size
            self.look()

    def write(self, token: int, body: bytes, *, last: bool) -> None:
        """Write to the input. The caller hears when it is written."""
        self._waiting.append((token, memoryview(body), last))
        if len(self._waiting) == 1:
            self._write()

    def end(self, code: int | None, **about: object) -> None:
        """Note that the program has ended; what is in its outputs is still read."""
        self.code = code
        self._say({"op": "exit", "code": code, **about})
        self.close_source()
        if self._outputs:
            self.host.loop.call_later(_GRACE_S, self._end_outputs)
        else:
            self._finish()

    def close_source(self) -> None:
        if self._source >= 0:
            self.host.loop.remove_writer(self._source)
            if self._source not in self._outputs.values():
                os.close(self._source)
            self._source = -1
        while self._waiting:
            self._say({"op": "took", "token": self._waiting.popleft()[0], "closed": True})

    def close(self) -> None:
        """Close everything."""
        self.close_source()
        for number in list(self._outputs):
            self._end_output(number)

    def _read(self, number: int, fd: int) -> None:
        most = _PIECE if self.caller.gone else min(_PIECE, self._credit[number])
        try:
            data = os.read(fd, most)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._moved = True
        if not data:
            self._end_output(number)
            return
        self._credit[number] -= len(data)
        self._say({"op": "out", "fd": number}, data)
        if self._credit[number] <= 0:
            self.look()

    def _write(self) -> None:
        while self._waiting and self._source >= 0:
            token, data, last = self._waiting[0]
            try:
                written = os.write(self._source, data) if data else 0
            except BlockingIOError:
                self.host.loop.add_writer(self._source, self._write)
                return
            except OSError:  # nothing reads it any more
                self.close_source()
                return
            if written < len(data):
                self._waiting[0] = (token, data[written:], last)
                continue
            self._waiting.popleft()
            self._say({"op": "took", "token": token, "closed": False})
            if last:
                self._end_source()
                return
        if self._source >= 0:
            self.host.loop.remove_writer(self._source)
        else:
            self.close_source()

    def _end_source(self) -> None:
        if self._source in self._outputs.values():
            with suppress(OSError), socket.socket(fileno=os.dup(self._source)) as made:
                made.shutdown(socket.SHUT_WR)
        self.close_source()

    def _end_outputs(self) -> None:
        """Close the outputs of an ended program, unless something is still printed."""
        if not self._outputs:
            return
        ready = self.caller.gone or all(
            self._credit[each] > 0 and self.caller.room for each in self._outputs
        )
        if self._moved or not ready:
            self._moved = False
            self.host.loop.call_later(_GRACE_S, self._end_outputs)
            return
        self.close()

    def _end_output(self, number: int) -> None:
        fd = self._outputs.pop(number)
        self.host.loop.remove_reader(fd)
        if fd == self._source:
            self.close_source()
        os.close(fd)
        self._say({"op": "eof", "fd": number})
        if not self._outputs and self.code is not None:
            self._finish()

    def _finish(self) -> None:
        self.caller.streams.pop(self.request, None)
        self.caller.numbers.pop(self.request, None)

    def _say(self, head: Head, body: bytes = b"") -> None:
        self.caller.send({**head, "id": self.request}, body)


class HostedSandbox:
    """A sandbox as its host sees it."""

    def __init__(self, host: SandboxHost, name: str, options: Head, control: socket.socket) -> None:
        self.host, self.name, self.options = host, name, options
        self.began, self.until = time.monotonic(), time.monotonic() + options["timeout_s"]
        self.ready: asyncio.Future[None] = host.loop.create_future()
        self.over: asyncio.Future[str] = host.loop.create_future()
        self.seconds = 0.0
        self._control = control
        self._number = 0
        self._streams: dict[int, ProgramPipes] = {}
        self._connects: dict[int, asyncio.Future[int]] = {}
        self._why = ""
        self._proxy: NetworkProxy | None = None
        self._gate: StateGate | None = None
        self._servers: list[asyncio.Server] = []
        control.setblocking(False)
        host.loop.add_reader(control, self._hear)

    def start(self, stream_of: HostCaller, request: int, message: Head) -> None:
        """Start a program, or a call of `file_calls`."""
        if len(json.dumps(message)) > _MOST_WORDS:
            raise HostRefusal("InvalidArgument", f"the arguments exceed {_MOST_WORDS >> 10} KiB")
        self._number += 1
        ends: list[int] = []
        ours: list[int] = []
        try:
            for _ in range(3):
                reader, writer = os.pipe2(os.O_CLOEXEC)
                ends.append(reader if not ends else writer)
                ours.append(writer if not ours else reader)
            self._say({**message, "number": self._number}, ends)
        except BaseException:
            for each in ours:
                os.close(each)
            raise
        finally:
            for each in ends:
                os.close(each)
        stream = ProgramPipes(self.host, stream_of, request, ours[0], {1: ours[1], 2: ours[2]})
        self._streams[self._number] = stream_of.streams[request] = stream
        stream_of.numbers[request] = (self, self._number)

    async def connect(self, port: int) -> int:
        """Return a connection to a port of the sandbox. Raises HostRefusal."""
        self._number += 1
        number = self._number
        self._say({"op": "connect", "number": number, "port": port})
        waiting: asyncio.Future[int] = self.host.loop.create_future()
        self._connects[number] = waiting
        return await waiting

    def kill(self, number: int, name: int) -> None:
        self._say({"op": "kill", "number": number, "signal": name})

    def end(self, why: str) -> None:
        """End the sandbox, soon."""
        self._why = self._why or why
        self.host.tell_zygote(encode({"op": "end", "name": self.name}))

    def note_end(self, *, late: bool) -> None:
        """Note that the sandbox has ended, as its zygote says."""
        if self.over.done():
            return
        why = self._why or ("timeout" if late else "lost")
        self.seconds = time.monotonic() - self.began
        self.host.loop.remove_reader(self._control)
        self._control.close()
        for server in self._servers:
            server.close()
        for way in (self._proxy, self._gate):
            if way is not None:
                way.close()
        for stream in self._streams.values():
            if stream.code is None:
                stream.end(-signal.SIGKILL, why=why)
        self._streams.clear()
        for each in self._connects.values():
            if not each.done():
                each.set_exception(HostRefusal("SandboxEnded", "the sandbox has ended"))
        if not self.ready.done():
            self.ready.set_exception(
                HostRefusal("SandboxLost", f"the sandbox did not start: {why}")
            )
            self.ready.exception()
        self.over.set_result(why)
        self.host.note_change(self)
        say(f"sandbox {self.name} ended after {self.seconds:.1f} s ({why})")

    def describe(self) -> Head:
        """Return what callers see."""
        now = time.monotonic()
        over = self.over.done()
        return {
            "name": self.name,
            "title": self.options["title"],
            "tags": self.options["tags"],
            "state": "ended" if over else "running",
            "why": self.over.result() if over else "",
            "seconds": self.seconds if over else now - self.began,
            "left_s": 0.0 if over else max(0.0, self.until - now),
            "programs": len(self._streams),
            "cpu": self.options["cpu"],
            "memory_mib": self.options["memory_mib"],
            "disk_mib": self.options["disk_mib"],
            "network": self.options["network"],
        }

    def report(self) -> Head:
        """Return what the page of sandboxes shows."""
        now, clock = time.monotonic(), time.time()
        over = self.over.done()
        began_s = clock - (now - self.began)
        return {
            "name": self.name,
            "title": str(self.options["title"])[:200],
            "user": str(self.options.get("user", ""))[:200],
            "state": "ended" if over else "running",
            "why": self.over.result() if over else "",
            "began_s": round(began_s, 3),
            "until_s": round(clock + self.until - now, 3),
            "ended_s": round(began_s + self.seconds, 3) if over else None,
            "cpu": self.options["cpu"],
            "memory_mib": self.options["memory_mib"],
            "network": self.options["network"],
        }

    def _hear(self) -> None:
        """Act on a message from inside. One that is unexpected ends the sandbox."""
        try:
            data, fds = receive(self._control)
        except OSError:
            return
        try:
            if not data:  # the zygote tells when it has ended
                self.host.loop.remove_reader(self._control)
                self.end("lost" if time.monotonic() < self.until else "timeout")
                return
            self._take(json.loads(data), fds)
        except (ValueError, LookupError, TypeError, OSError, RecursionError):
            self.end("broken")
        finally:
            for fd in fds:
                with suppress(OSError):
                    os.close(fd)

    def _take(self, message: Head, fds: list[int]) -> None:
        op = message["op"]
        if op == "ready" and not self.ready.done():
            wanted = bool(self.options["network"]), bool(self.list_state())
            if len(fds) != sum(wanted):
                raise ValueError("other sockets than expected")
            listeners = [socket.socket(fileno=os.dup(fd)) for fd in fds]
            self.host.start_task(self._start_ways(*wanted, listeners))
        elif op == "broken" and not self.ready.done():
            text = str(message["text"])[:1000]
            self.ready.set_exception(HostRefusal("IsolationMissing", text))
            self.end("isolation")
        elif op == "exited":
            stream = self._streams.pop(int(message["number"]))
            why = "memory" if message["memory"] is True else ""
            stream.end(int(message["code"]), why=why)
        elif op == "connected":
            waiting = self._connects.pop(int(message["number"]))
            if len(fds) != 1 or not stat.S_ISSOCK(os.fstat(fds[0]).st_mode):
                raise ValueError("no socket")
            if not waiting.done():
                try:
                    waiting.set_result(os.dup(fds[0]))
                except OSError as error:
                    waiting.set_exception(HostRefusal("SandboxError", str(error)))
        elif op == "failed":
            number, text = int(message["number"]), str(message["text"])[:1000]
            if number in self._connects:
                self._connects.pop(number).set_exception(HostRefusal("NotListening", text))
            else:
                self._streams.pop(number).end(127, why=text)
        else:
            raise ValueError(op)

    def list_state(self) -> dict[str, list[str]]:
        """Return the names of the dicts and queues that the sandbox may use, by their kind."""
        found = {kind: self.options.get(f"{kind}s") or [] for kind in KINDS}
        return {kind: names for kind, names in found.items() if names}

    async def _start_ways(self, network: bool, state: bool, listeners: list[socket.socket]) -> None:
        """Serve what the sandbox may reach: the internet, dicts and queues."""
        allowed = self.options["network"]
        if network:
            self._proxy = NetworkProxy(None if allowed is True else allowed)
            self._servers.append(await self._proxy.start(listeners.pop(0)))
        if state:
            self._gate = StateGate(find_agent(), self.list_state())
            self._servers.append(await self._gate.start(listeners.pop(0)))
        if not self.ready.done():
            self.ready.set_result(None)

    def _say(self, message: Head, fds: list[int] | None = None) -> None:
        if self.over.done():
            raise HostRefusal("SandboxEnded", f"the sandbox {self.name} has ended ({self._why})")
        try:
            send(self._control, encode(message), fds)
        except BlockingIOError:
            text = "too many programs start in this sandbox at the same time"
            raise HostRefusal("SandboxError", text) from None
        except OSError:
            self.end("lost")
            raise HostRefusal("SandboxEnded", f"the sandbox {self.name} does not answer") from None


class HostCaller(asyncio.Protocol):
    """A program that uses sandboxes."""

    def __init__(self, host: SandboxHost, *, here: bool) -> None:
        self._host, self._here = host, here
        self._reader = CallFrames()
        self._nonces = ""
        self._trusted = not here  # who reaches the other socket runs programs in this job
        self._transport: asyncio.Transport | None = None
        self.streams: dict[int, ProgramPipes] = {}
        self.numbers: dict[int, tuple[HostedSandbox, int]] = {}
        self.room, self.gone = True, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._timer = self._host.loop.call_later(_GREET_S, self._check_greeted)

    def connection_lost(self, error: Exception | None) -> None:
        self.gone = True
        self._timer.cancel()
        for stream in list(self.streams.values()):  # what its programs print is read, and dropped
            stream.close_source()
            stream.look()

    def data_received(self, data: bytes) -> None:
        try:
            for head, body in self._reader.feed(data):
                self._obey(head, body)
        except (WrongFrame, KeyError, TypeError, ValueError) as error:
            say(f"a connection was closed: {error!r}")
            self._close()

    def pause_writing(self) -> None:
        self._set_room(room=False)

    def resume_writing(self) -> None:
        self._set_room(room=True)

    def send(self, head: Head, body: bytes = b"") -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pack(head, body))

    def _set_room(self, *, room: bool) -> None:
        self.room = room
        for stream in self.streams.values():
            stream.look()

    def _check_greeted(self) -> None:
        if not self._trusted:
            self._close()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _greet(self, head: Head) -> None:
        """Let a caller in that knows the key; neither side says it."""
        key = self._host.meet_key
        if not self._nonces:
            own = secrets.token_hex(16)
            self._nonces = f"{head['nonce']}:{own}"
            proof = prove(key, "broker", self._nonces)
            self.send({"op": "challenge", "id": 0, "nonce": own, "proof": proof})
            return
        wanted = prove(key, "caller", self._nonces)
        if not hmac.compare_digest(str(head.get("proof")).encode(), wanted.encode()):
            raise ValueError("the key is wrong")
        self._trusted = True
        self.send({"op": "welcome", "id": 0})

    def _obey(self, head: Head, body: bytes) -> None:
        op, number = head["op"], int(head.get("id", 0))
        if op == "hello" and self._here:
            self._greet(head)
            return
        if not self._trusted:
            raise ValueError("no key")
        if op in ("in", "credit", "kill"):
            self._steer(op, number, head, body)
            return
        self._host.start_task(self._answer(op, number, head))

    def _steer(self, op: str, number: int, head: Head, body: bytes) -> None:
        stream = self.streams.get(number)
        if op == "in":
            if stream is None:
                self.send({"op": "took", "id": number, "token": head["token"], "closed": True})
            else:
                stream.write(int(head["token"]), body, last=bool(head.get("last")))
        elif op == "credit":
            if stream is not None:
                stream.credit(int(head["fd"]), int(head["size"]))
        elif stream is not None and stream.code is None:
            if number in self.numbers:
                sandbox, program = self.numbers[number]
                with suppress(HostRefusal):
                    sandbox.kill(program, int(head["signal"]))
            else:
                stream.end(0)
                stream.close()

    async def _answer(self, op: str, number: int, head: Head) -> None:
        try:
            found = await self._host.answer(self, op, number, head)
        except HostRefusal as error:
            self.send({"op": "failed", "id": number, "kind": error.kind, "text": str(error)})
        except Exception as error:  # noqa: BLE001 - who asks would wait for ever
            say(f"{op} failed: {error!r}")
            text = f"the host of the sandboxes could not do this: {error!r}"
            self.send({"op": "failed", "id": number, "kind": "SandboxError", "text": text})
        else:
            self.send({"op": "reply", "id": number, **found})


class SandboxHost:
    """The sandboxes of this job, and their callers."""

    def __init__(self, spec_file: str, meet: str) -> None:
        with open(spec_file, encoding="utf-8") as file:
            self._spec = json.load(file)
        self._folder = os.path.dirname(os.path.abspath(spec_file))
        self._meet, self.meet_key = meet, secrets.token_hex(16)
        self.loop = asyncio.get_running_loop()
        self._sandboxes: dict[str, HostedSandbox] = {}
        self._over = asyncio.Event()
        self._able: asyncio.Future[list[str]] = self.loop.create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._used_at = time.monotonic()
        self._reporter = find_reporter("sandboxes")
        self._changed: dict[str, HostedSandbox] = {}  # those of which there is something to tell
        self._starting = asyncio.Semaphore(_MOST_STARTING)
        # what the zygote has not taken: a message, its files, and the sandbox that it makes
        self._untold: deque[tuple[bytes, list[int], HostedSandbox | None]] = deque()

    async def run(self) -> None:
        """Serve until no sandbox has been there for long."""
        self._start_zygote()
        for name in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(name, self._over.set)
        own = os.path.relpath(f"{self._folder}/host.sock")  # paths of sockets are short
        await self._listen(own, here=False)
        with suppress(OSError):
            folder = os.lstat(os.path.dirname(self._meet))
            if folder.st_uid == os.geteuid() and folder.st_mode & 0o077 == 0:
                self._write_key()
                await self._listen(self._meet, here=True)
        self.start_task(self._watch_idle())
        self.start_task(self._report())
        try:
            await self._over.wait()
        finally:
            for path in (own, self._meet, f"{self._meet}.key"):
                with suppress(OSError):
                    os.unlink(path)
            self._zygote.kill()
            self._zygote.wait()
            await self._leave()

    def note_change(self, sandbox: HostedSandbox) -> None:
        """Tell the control plane of a sandbox that is there or has ended, soon."""
        if self._reporter is not None:
            self._changed[sandbox.name] = sandbox

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            self._tell()

    def _tell(self) -> None:
        while self._changed and self._reporter is not None:
            names = [*self._changed][:_MOST_TOLD]
            told = [self._changed.pop(each).report() for each in names]
            self._reporter.put({"sandboxes": told})

    async def _leave(self) -> None:
        """Tell that the sandboxes end with this host."""
        for each in self._sandboxes.values():
            each.note_end(late=False)
        if self._reporter is not None:
            self._tell()
            await asyncio.to_thread(self._reporter.close)

    def start_task(self, coroutine: Any) -> None:
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def tell_zygote(
        self, data: bytes, fds: tuple[int, ...] = (), makes: HostedSandbox | None = None
    ) -> None:
        """Send a message (`encode`) to the zygote, as soon as it takes it."""
        self._untold.append((data, [os.dup(fd) for fd in fds], makes))
        if len(self._untold) == 1:
            self._tell_zygote()

    def _tell_zygote(self) -> None:
        while self._untold:
            data, fds, makes = self._untold[0]
            try:
                send(self._control, data, fds)
            except BlockingIOError:
                self.loop.add_writer(self._control, self._tell_zygote)
                return
            except OSError as error:
                if makes is None or isinstance(error, ConnectionError):
                    self._over.set()
                    return
                say(f"the sandbox {makes.name} was not made: {error}")
                makes.note_end(late=False)
            self._untold.popleft()
            for fd in fds:
                os.close(fd)
        self.loop.remove_writer(self._control)

    async def answer(self, caller: HostCaller, op: str, number: int, head: Head) -> Head:
        """Do what a caller asks, and return the answer. Raises HostRefusal."""
        self._used_at = time.monotonic()
        if op == "create":
            return await self._create(head["options"])
        if op == "list":
            return {"sandboxes": [each.describe() for each in self._sandboxes.values()]}
        sandbox = self._sandboxes.get(head["sandbox"])
        if sandbox is None:
            raise HostRefusal("SandboxNotFound", f"there is no sandbox {head['sandbox']}")
        if op == "terminate":
            sandbox.end("terminated")
            await asyncio.shield(sandbox.over)
        elif op == "wait":
            await asyncio.shield(sandbox.over)
        elif op == "start":
            sandbox.start(caller, number, self._make_start(sandbox, head))
        elif op == "connect":
            fd = await sandbox.connect(int(head["port"]))
            caller.streams[number] = ProgramPipes(self, caller, number, fd, {1: fd})
        elif op != "describe":
            raise HostRefusal("InvalidArgument", f"unknown: {op}")
        return sandbox.describe()

    def _make_start(self, sandbox: HostedSandbox, head: Head) -> Head:
        if "call" in head:
            return {"op": "start", "call": head["call"]}
        env = {**self._spec["env"], **sandbox.options["env"], **head.get("env", {})}
        path = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        usual = {"PATH": path, "HOME": WORK, "USER": "sandbox", "LANG": "C.UTF-8", "TERM": "dumb"}
        if sandbox.options["network"]:
            usual |= make_variables()
        if sandbox.list_state():
            usual |= make_state_variables(f"/{CLIENT}")
        cwd = os.path.join(WORK, head.get("cwd") or "")
        return {"op": "start", "argv": head["argv"], "env": {**usual, **env}, "cwd": cwd}

    async def _create(self, options: Head) -> Head:
        missing = await asyncio.shield(self._able)
        if options["isolation"] == "required" and missing:
            raise HostRefusal("IsolationMissing", "this machine lacks " + "; ".join(missing))
        _refuse_too_large(options)
        if (options.get("dicts") or options.get("queues")) and not find_agent():
            raise HostRefusal("SandboxError", "dicts and queues are reached in jobs of Cavvy only")
        if len(self._sandboxes) - self._count_ended() >= _MOST_SANDBOXES:
            raise HostRefusal(
                "TooManySandboxes", f"the host has {_MOST_SANDBOXES} sandboxes already"
            )
        async with self._starting:
            return {**await self._start_sandbox(options), "missing": missing}

    async def _start_sandbox(self, options: Head) -> Head:
        name = secrets.token_hex(8)
        data = encode({"op": "create", "name": name, "options": options})
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                made = HostedSandbox(self, name, options, ours)
            except BaseException:
                ours.close()
                raise
            self._sandboxes[name] = made
            try:
                self.tell_zygote(data, (theirs.fileno(),), made)
            except BaseException:
                made.note_end(late=False)
                raise
        try:
            async with asyncio.timeout(_READY_S):
                await asyncio.shield(made.ready)
        except TimeoutError:
            made.end("lost")
            raise HostRefusal("SandboxLost", f"no sandbox within {_READY_S:g} s") from None
        self.note_change(made)
        return made.describe()

    def _count_ended(self) -> int:
        """Return how many sandboxes have ended, and forget the oldest of them."""
        ended = [name for name, each in self._sandboxes.items() if each.over.done()]
        for name in ended[: max(0, len(ended) - _MOST_ENDED)]:
            del self._sandboxes[name]
        return min(len(ended), _MOST_ENDED)

    def _start_zygote(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "zygote.py")
        with theirs:
            self._zygote = subprocess.Popen(
                [sys.executable, "-I", program, f"{self._folder}/root", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={"PATH": "/usr/bin:/bin"},
            )
        self.loop.add_reader(self._control, self._hear_zygote)

    def _hear_zygote(self) -> None:
        try:
            data, fds = receive(self._control)
        except BlockingIOError:
            return
        for fd in fds:
            os.close(fd)
        message: Head = json.loads(data) if data else {"op": "unable", "text": "its process ended"}
        if message["op"] == "able":
            self._able.set_result(message["missing"])
        elif message["op"] == "ended":
            if (sandbox := self._sandboxes.get(message["name"])) is not None:
                sandbox.note_end(late=message["late"])
                self._used_at = time.monotonic()
        elif not self._able.done():
            text = f"this machine cannot isolate sandboxes: {message['text']}"
            say(text)
            self._able.set_exception(HostRefusal("IsolationMissing", text))
            self._able.exception()
            self.loop.remove_reader(self._control)
        else:
            say("the process that makes sandboxes has ended")
            self.loop.remove_reader(self._control)
            self._over.set()

    async def _listen(self, path: str, *, here: bool) -> None:
        with suppress(FileNotFoundError):
            os.unlink(path)
        before = os.umask(0o177)
        try:
            await self.loop.create_unix_server(lambda: HostCaller(self, here=here), path)
        finally:
            os.umask(before)

    def _write_key(self) -> None:
        """Tell callers on this machine the key. It is said nowhere else: neither in the job's task,
        which others of the project can read, nor among the arguments of a process.
        """
        path = f"{self._meet}.key"
        with suppress(FileNotFoundError):
            os.unlink(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(path, flags, 0o600), "w", encoding="ascii") as file:
            file.write(self.meet_key)

    async def _watch_idle(self) -> None:
        while not self._over.is_set():
            await asyncio.sleep(1.0)
            now = time.monotonic()
            if any(not each.over.done() for each in self._sandboxes.values()):
                self._used_at = now
            if now - self._used_at > self._spec["idle_s"]:
                say(f"no sandbox for {self._spec['idle_s']:g} s: the node is given back")
                self._over.set()


def _refuse_too_large(options: Head) -> None:
    """Raise HostRefusal for a sandbox that this machine cannot have at all."""
    cpus, memory_mib = os.cpu_count() or 1, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory_mib >>= 20
    if options["cpu"] > cpus:
        what, hint = f"cpu={options['cpu']:g}: this machine has {cpus}", '{"cpu": ...}'
    elif options["memory_mib"] > memory_mib:
        what, hint = (
            f"memory of {options['memory_mib']} MiB: this machine has {memory_mib} MiB",
            '{"memory": ...}',
        )
    else:
        return
    raise HostRefusal("TooLarge", f"{what}; ask for less, or name another by resources={hint}")


def encode(message: Head) -> bytes:
    """Return a message as the zygote and sandboxes take it. Raises HostRefusal."""
    data = json.dumps(message).encode()
    if len(data) > MOST_MESSAGE:
        text = f"the options are {len(data) >> 10} KiB as JSON, more than {MOST_MESSAGE >> 10}"
        raise HostRefusal("InvalidArgument", text)
    return data


def send(control: socket.socket, data: bytes, fds: list[int] | None = None) -> None:
    """Send a message with files. Raises OSError."""
    sent = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    control.sendmsg([data], sent)


def say(text: str) -> None:
    """Write a line to the job's log."""
    sys.stderr.write(f"cavvy: {text}\n")
    sys.stderr.flush()


def main() -> None:
    """Run the host."""
    spec_file, meet = sys.argv[1:]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))

    async def run() -> None:
        await SandboxHost(spec_file, meet).run()

    asyncio.run(run())


if __name__ == "__main__":
    main()
