"""A connection to a sandbox host: requests with answers, and the streams of programs."""

import socket
import sys
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from cavvy.capabilities.functions.frames import CallFrames, Head, pack
from cavvy.capabilities.sandboxes.errors import SandboxLost, make_error

WINDOW = 1 << 20  # bytes that a host sends before they are taken, as in `on_node/host.py`
PIECE = 64 << 10
_RECEIVE = 1 << 18


class ProgramStream:
    """What arrives from one program, or from a connection to a port. Who only waits for the end
    keeps `most_kept` bytes of each output; the oldest are dropped.
    """

    def __init__(self, link: "SandboxLink", number: int, outputs: tuple[int, ...]) -> None:
        self._link, self.number = link, number
        self._news = threading.Condition()
        self._arrived: dict[int, deque[bytes]] = {each: deque() for each in outputs}
        self._kept = dict.fromkeys(outputs, 0)
        self._granted = dict.fromkeys(outputs, WINDOW)  # bytes that may still arrive
        self._open = set(outputs)
        self._flows = False
        self._tokens: dict[int, Future[bool]] = {}
        self._token = 0
        self.dropped = dict.fromkeys(outputs, 0)
        self.code: int | None = None
        self.why = ""
        self.lost = ""

    def take(self, fd: int, timeout: float | None = None) -> bytes | None:
        """Return the next bytes of an output, or b"" at its end; None if none came in time."""
        with self._news:
            queue = self._arrived[fd]
            if not self._news.wait_for(lambda: queue or fd not in self._open or self.lost, timeout):
                return None
            if not queue:
                return b""
            data = queue.popleft()
            self._kept[fd] -= len(data)
        self._grant(fd)
        return data

    def wait(self, timeout: float | None = None, most_kept: int = 64 << 20) -> int | None:
        """Return the exit code, or None if the program goes on. Raises SandboxLost."""
        self._flows = True
        for fd in self._arrived:
            self._grant(fd, most_kept)
        with self._news:
            self._news.wait_for(lambda: self.code is not None or self.lost, timeout)
            self._flows = False
            if self.code is None and self.lost:
                raise SandboxLost(self.lost)
            return self.code

    def write(self, data: bytes, *, last: bool = False) -> bool:
        """Write to the input, and wait until it is written. Return False if nothing reads it."""
        whole = memoryview(data)
        pieces = [whole[at : at + PIECE] for at in range(0, len(whole), PIECE)] or [whole]
        waiting = []
        for number, piece in enumerate(pieces):
            self._token += 1
            done: Future[bool] = Future()
            with self._news:
                if self.lost:
                    raise SandboxLost(self.lost)
                if self.code is not None:
                    return False
                self._tokens[self._token] = done
            end = last and number == len(pieces) - 1
            head = {"op": "in", "id": self.number, "token": self._token, "last": end}
            self._link.write(pack(head, bytes(piece)))
            waiting.append(done)
            if len(waiting) > 4 and not waiting.pop(0).result():
                return False
        return all(each.result() for each in waiting)

    def hear(self, head: Head, body: bytes) -> None:
        """Take what the host has sent."""
        op = head["op"]
        unread: list[Future[bool]] = []
        with self._news:
            if op == "out":
                fd = int(head["fd"])
                self._arrived[fd].append(body)
                self._kept[fd] += len(body)
                self._granted[fd] -= len(body)
            elif op == "eof":
                self._open.discard(int(head["fd"]))
            elif op == "exit":
                code = head["code"]
                self.code, self.why = (int(code) if code is not None else 0), str(head.get("why"))
                unread, self._tokens = list(self._tokens.values()), {}
            elif op == "took" and (done := self._tokens.pop(int(head["token"]), None)):
                done.set_result(not head["closed"])
            self._news.notify_all()
        for done in unread:
            done.set_result(False)
        if op == "out" and self._flows:
            self._grant(fd, 64 << 20)

    def lose(self, text: str) -> None:
        with self._news:
            self.lost = text
            tokens, self._tokens = self._tokens, {}
            self._news.notify_all()
        for done in tokens.values():
            done.set_exception(SandboxLost(text))

    def is_over(self) -> bool:
        return self.code is not None and not self._open

    def _grant(self, fd: int, most_kept: int = 0) -> None:
        """Let the host send more, if much of its window is used."""
        with self._news:
            if fd not in self._open:
                return
            while most_kept and self._kept[fd] > most_kept:
                data = self._arrived[fd].popleft()
                self._kept[fd] -= len(data)
                self.dropped[fd] += len(data)
            held = 0 if most_kept else self._kept[fd]
            more = WINDOW - held - self._granted[fd]
            if more < WINDOW // 2:
                return
            self._granted[fd] += more
        self._link.write(pack({"op": "credit", "id": self.number, "fd": fd, "size": more}))


class SandboxLink:
    """The connection; a thread reads it."""

    def __init__(self, made: socket.socket) -> None:
        self._socket = made
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._number = 0
        self._answers: dict[int, Future[Head]] = {}
        self._streams: dict[int, ProgramStream] = {}
        self.lost = ""
        threading.Thread(target=self._read, daemon=True, name="cavvy-sandboxes").start()

    def ask(self, op: str, timeout: float | None = None, **fields: Any) -> Head:
        """Return the answer to a request. Raises CavvyError, TimeoutError."""
        return self._send(op, fields, None).result(timeout)

    def open(
        self, op: str, outputs: tuple[int, ...] = (1, 2), **fields: Any
    ) -> tuple[ProgramStream, Head]:
        """Ask for a stream. Raises CavvyError."""
        stream = ProgramStream(self, 0, outputs)
        return stream, self._send(op, fields, stream).result()

    def kill(self, stream: ProgramStream, name: int) -> None:
        self.write(pack({"op": "kill", "id": stream.number, "signal": name}))

    def write(self, data: bytes) -> None:
        """Send bytes. If the connection is lost, its thread notes it."""
        with self._sending, suppress(OSError):
            self._socket.sendall(data)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _send(
        self, op: str, fields: dict[str, Any], stream: ProgramStream | None
    ) -> "Future[Head]":
        answer: Future[Head] = Future()
        with self._lock:
            if self.lost:
                raise SandboxLost(self.lost)
            self._number += 1
            number = self._number
            self._answers[number] = answer
            if stream is not None:
                stream.number = number
                self._streams[number] = stream
        self.write(pack({"op": op, "id": number, **fields}))
        return answer

    def _read(self) -> None:
        reader, why = CallFrames(), "the connection to the sandbox host ended"
        try:
            while data := self._socket.recv(_RECEIVE):
                for head, body in reader.feed(data):
                    self._hear(head, body)
        except Exception as error:  # noqa: BLE001 - the other end sends anything
            if not isinstance(error, OSError):
                why = f"the sandbox host sent what no host sends: {error!r}"
        with suppress(OSError):
            self._socket.close()
        with self._lock:
            self.lost = why
            answers, self._answers = self._answers, {}
            streams, self._streams = self._streams, {}
        for answer in answers.values():
            answer.set_exception(SandboxLost(why))
        for stream in streams.values():
            stream.lose(why)

    def _hear(self, head: Head, body: bytes) -> None:
        op, number = head["op"], int(head["id"])
        if op in ("reply", "failed"):
            with self._lock:
                answer = self._answers.pop(number)
                if op == "failed":
                    self._streams.pop(number, None)
            if op == "reply":
                answer.set_result(head)
            else:
                answer.set_exception(make_error(str(head.get("kind")), str(head.get("text"))))
        elif (stream := self._streams.get(number)) is not None:
            stream.hear(head, body)
            if stream.is_over():
                with self._lock:
                    self._streams.pop(number, None)


def tell(text: str) -> None:
    """Write a line about what is waited for, on standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
