"""A caller's connection to the broker of functions.

This file also runs on nodes, since functions may call functions: it imports only the standard
library and files that do.
"""

import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from cavvy.capabilities.functions import payload
from cavvy.capabilities.functions.errors import KINDS, CallFailed, WorkerLost
from cavvy.capabilities.functions.frames import MOST_BYTES, CallFrames, Head, current_call, pack

_RECEIVE = 1 << 18
_MOST_LOSSES = 5  # connections in a row that ended without an answer
_NOTHING: Mapping[str, Any] = {}

Deliver = Callable[[Head, bytes], None]


class Request:
    """A call without a result yet: what was sent, and who gets what arrives."""

    __slots__ = ("body", "deliver", "head", "parts")

    def __init__(self, head: Head, body: bytes, deliver: Deliver) -> None:
        self.head, self.body, self.deliver, self.parts = head, body, deliver, 0

    def to_frames(self) -> bytes:
        """Return the call as bytes. A long body is sent in pieces before it."""
        if len(self.body) <= MOST_BYTES:
            return pack(self.head, self.body)
        put = {"op": "put", "id": self.head["id"]}
        cuts = range(0, len(self.body), MOST_BYTES)
        pieces = (pack(put, self.body[at : at + MOST_BYTES]) for at in cuts)
        return b"".join((*pieces, pack(self.head)))


class BrokerLink:
    """The connection, which is opened at the first call, and again after a loss: then the calls
    without results are sent again. `dial` connects, and may start the job; `tell` gets the lines
    that functions print.
    """

    def __init__(
        self,
        dial: Callable[[], socket.socket],
        tell: Callable[[str], None] | None,
        codec: payload.CallCodec,
    ) -> None:
        self.codec = codec
        self._dial, self._tell = dial, tell
        self._lock = threading.RLock()
        self._requests: dict[int, Request] = {}
        self._fetches: dict[int, tuple[bytearray, Future[bytearray]]] = {}
        self._number = 0
        self._socket: socket.socket | None = None
        self._losses = 0
        self.closed = False

    def make_request(
        self,
        function: str,
        body: bytes,
        deliver: Deliver,
        *,
        waits: bool = True,
        more: Mapping[str, Any] = _NOTHING,
    ) -> Request:
        """Return a call to send. `waits` says that the caller does nothing until the result is
        there; `more` goes into its head."""
        with self._lock:
            self._number += 1
            head: Head = {"op": "call", "id": self._number, "fn": function}
            head |= self.codec.head
            head |= more
        if self._tell is not None:
            head["logs"] = True
        outer = current_call.get()
        if waits and outer is not None:  # a function calls another one
            head["within"] = [*outer.get("within", ()), outer["fn"]]
        return Request(head, body, deliver)

    def send(self, requests: list[Request]) -> None:
        """Send calls; their results are delivered in another thread. Raises what `dial` raises."""
        with self._lock:
            self._connect()
            for each in requests:
                self._requests[each.head["id"]] = each
            self._write(b"".join(each.to_frames() for each in requests))

    def change_code(self, files: Mapping[str, bytes | None], deliver: Deliver) -> bool:
        """Send changed files to the job, None for those to remove. Return False if there is no
        connection yet, so that the job will begin with them."""
        with self._lock:
            if self._socket is None:
                return False
            self._number += 1
            listed = [(path, -1 if data is None else len(data)) for path, data in files.items()]
            head = {"op": "reload", "id": self._number, "fn": "reload", "files": listed}
            body = b"".join(data for data in files.values() if data is not None)
            self.send([Request(head, body, deliver)])
            return True

    def forget(self, request: Request, *, cancel: bool = True) -> None:
        """Cancel a call. Its answer is delivered nevertheless, if it was running."""
        with self._lock:
            if cancel and request.head["id"] in self._requests:
                self._write(pack({"op": "cancel", "id": request.head["id"]}))

    def take_more(self, request: Request) -> None:
        """Let a generator send one value more."""
        with self._lock:
            self._write(pack({"op": "more", "id": request.head["id"]}))

    def fetch(self, number: int) -> bytearray:
        """Return a result that lies in a file of the node."""
        found: Future[bytearray] = Future()
        with self._lock:
            if self._socket is None:
                raise WorkerLost("the connection ended before the result was read")
            self._fetches[number] = (bytearray(), found)
            self._write(pack({"op": "fetch", "id": number}))
        return found.result()

    def drop(self, number: int) -> None:
        """Delete a result that lies in a file of the node."""
        with self._lock:
            self._write(pack({"op": "drop", "id": number}))

    def close(self) -> None:
        with self._lock:
            self.closed = True
            if self._socket is not None:
                self._shut(self._socket)
                self._socket = None
        self._fail_all(WorkerLost("the app was closed in this program"))

    def _connect(self) -> None:
        if self.closed:
            raise WorkerLost(
                "the app was closed in this program", "open it again: `with app.run()`"
            )
        if self._socket is None:
            made = self._dial()
            self._socket = made
            threading.Thread(target=self._read, args=(made,), daemon=True, name="cavvy").start()

    def _write(self, data: bytes) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendall(data)
        except OSError:  # the thread that reads opens another connection
            self._shut(self._socket)

    def _shut(self, connection: socket.socket) -> None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def _read(self, connection: socket.socket) -> None:
        """Deliver what arrives until the connection ends."""
        reader = CallFrames()
        try:
            while data := connection.recv(_RECEIVE):
                for head, body in reader.feed(data):
                    self._hear(head, body)
        except Exception as error:  # noqa: BLE001 - the other end sends anything
            if not isinstance(error, OSError):
                sys.stderr.write(f"cavvy: a connection to functions was closed: {error!r}\n")
        connection.close()
        self._lose(connection)

    def _hear(self, head: Head, body: bytes) -> None:
        op, number = head["op"], head.get("id", 0)
        if op == "log":
            if self._tell is not None:
                request = self._requests.get(number)
                name = request.head["fn"] if request else "?"
                self._tell(f"{name} | {head['text']}")
        elif op == "piece":
            data, found = self._fetches[number]
            data += body
            if not head["more"]:
                del self._fetches[number]
                found.set_result(data)  # a copy would take as much memory again
        elif op == "part":
            if (request := self._requests.get(number)) is not None:
                request.parts += 1
                request.deliver(head, body)
        elif op in ("done", "failed"):
            with self._lock:
                request = self._requests.pop(number, None)
            if request is not None:
                self._losses = 0
                request.deliver(head, body)

    def _lose(self, connection: socket.socket) -> None:
        """Send the calls without results over another connection."""
        with self._lock:
            if self._socket is not connection:
                return
            self._socket = None
            self._losses += 1
            fetches, self._fetches = self._fetches, {}
            for _, found in fetches.values():
                found.set_exception(WorkerLost("the node was lost while its result was read"))
            for request in [each for each in self._requests.values() if each.parts]:
                del self._requests[request.head["id"]]
                request.deliver(_failure("the node was lost in the middle of a generator"), b"")
            again = list(self._requests.values())
            if not again:
                return
            if self._losses <= _MOST_LOSSES:
                try:
                    self.send(again)
                    return
                except Exception as error:  # noqa: BLE001 - reported by each of the calls
                    reason = f"{error}"
            else:
                reason = f"the node was lost {self._losses} times in a row"
        self._fail_all(WorkerLost(reason))

    def _fail_all(self, error: WorkerLost) -> None:
        with self._lock:
            waiting, self._requests = list(self._requests.values()), {}
        for request in waiting:
            request.deliver(_failure(str(error)), b"")


def _failure(text: str) -> Head:
    return {"op": "failed", "id": 0, "kind": "WorkerLost", "text": text}


def read_result(link: BrokerLink, head: Head, body: bytes) -> Any:
    """Return the result of a call from what arrived. Raises the exception of the function."""
    if head["op"] != "failed":
        return link.codec.load(link.fetch(head["id"]) if head.get("file") else body)
    raise make_error(link, head, body)


def make_error(link: BrokerLink, head: Head, body: bytes) -> BaseException:
    """Return the exception of a call that failed; a note has the traceback of the other side."""
    kind, text = str(head.get("kind", "")), str(head.get("text", ""))
    if kind != "error":
        return KINDS.get(kind, CallFailed)(text)
    error: BaseException = CallFailed(f"{head.get('type')}: {text}")
    if body and link.codec.loads_errors:
        with suppress(Exception):  # its class may be missing here
            if isinstance(found := link.codec.load(body), BaseException):
                error = found
    if trace := str(head.get("trace", "")).strip():
        error.add_note(trace)
    return error


def print_line(line: str) -> None:
    """Print a line of a function, on standard error: standard output is the program's own. A
    terminal gets what it gets of a job's log.
    """
    if sys.stderr.isatty():
        from cavvy.cli.view.job_output import EscapeFilter  # programs on nodes print no lines

        line = EscapeFilter().take(line.encode(errors="replace"), final=True).decode()
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
