"""A node that lies to the commands that reach into it: the server's routes of a line over HTTP,
and the far end of the line, whose answers a test replaces one by one.

Frames and answers are the agent's own; what a test does not replace is answered from a real folder.
"""

import json
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cavvy import __version__
from cavvy.agent.access.files import answer
from cavvy.agent.access.frames import CALL, HEAD, OPEN, REPLY
from cavvy.client import API, REVISION
from cavvy.client.state import ServerFile, write_server

Fields = dict[str, Any]
Lie = Callable[[Fields], bytes]  # what was asked -> the answer
Frames = Callable[["LyingNode", int, Fields], bytes]


def reply(fields: object, data: bytes = b"") -> bytes:
    """An answer as a node gives it."""
    return json.dumps(fields).encode() + b"\n" + data


def frame(number: int, kind: int, payload: bytes) -> bytes:
    return HEAD.pack(number, kind, len(payload)) + payload


class LyingNode:
    """`lies` by the name of the call; `opens` answers what wants a shell or a connection."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # what a relative path begins in
        self.lies: dict[str, Lie] = {}
        self.opens: Frames | None = None
        self.asked: list[Fields] = []
        self._in = bytearray()
        self._out = bytearray()
        self._news = threading.Condition()
        self._ended = False

    def begin(self) -> None:
        """A new line."""
        self._in, self._out, self._ended = bytearray(), bytearray(), False

    def say(self, data: bytes) -> None:
        with self._news:
            self._out += data
            self._news.notify_all()

    def end(self) -> None:
        with self._news:
            self._ended = True
            self._news.notify_all()

    def hear(self, offset: int, data: bytes) -> int:
        """Bytes from the user's side; how many there are now."""
        self._in += data
        while len(self._in) >= HEAD.size:
            number, kind, size = HEAD.unpack_from(self._in)
            if len(self._in) < HEAD.size + size:
                break
            payload = bytes(self._in[HEAD.size : HEAD.size + size])
            del self._in[: HEAD.size + size]
            if kind == CALL:
                self.say(frame(number, REPLY, self._answer(payload)))
            elif kind == OPEN and self.opens is not None:
                self.say(self.opens(self, number, json.loads(payload)))
        return offset + len(data)

    def _answer(self, payload: bytes) -> bytes:
        line, _, data = payload.partition(b"\n")
        asked = json.loads(line)
        self.asked.append(asked)
        asked.setdefault("folder", str(self.folder))
        lie = self.lies.get(asked["op"])
        if lie is not None:
            return lie(asked)
        return answer(lambda: "", json.dumps(asked).encode() + b"\n" + data)

    def output(self, offset: int) -> tuple[bytes, bool]:
        """What it says from this byte on; waits a while for some."""
        with self._news:
            self._news.wait_for(lambda: len(self._out) > offset or self._ended, timeout=2.0)
            return bytes(self._out[offset:]), self._ended and len(self._out) <= offset


class _Routes(BaseHTTPRequestHandler):
    """The routes of one line: open, input, output."""

    protocol_version = "HTTP/1.1"
    node: LyingNode

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not url.path.endswith("/input"):
            self.node.begin()
            self._give({"id": "line"})
            return
        asked = parse_qs(url.query)
        taken = self.node.hear(int(asked["offset"][0]), data)
        if "end" in asked:
            self.node.end()
        self._give({"next": taken, "ended": False})

    def do_GET(self) -> None:
        data, ended = self.node.output(int(parse_qs(urlsplit(self.path).query)["offset"][0]))
        self._send(data, {"Cavvy-Exit-Code": "0"} if ended else {})

    def _give(self, value: Fields) -> None:
        self._send(json.dumps(value).encode(), {})

    def _send(self, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def lying_node(home: Path, folder: Path) -> Iterator[LyingNode]:
    """The node of every job of the server that `home` names."""
    node = LyingNode(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Routes", (_Routes,), {"node": node}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    home.mkdir(mode=0o700, exist_ok=True)
    file = ServerFile(
        pid=1,
        process="",
        host="",
        address=f"http://127.0.0.1:{server.server_port}",
        version=__version__,
        api=API,
        revision=REVISION,
        started_at=datetime.now(UTC),
    )
    write_server(str(home), file)
    (home / "token").write_text("secret")
    try:
        yield node
    finally:
        node.end()
        server.shutdown()
        server.server_close()
        thread.join()


def credit(number: int, size: int) -> bytes:
    from cavvy.agent.access.frames import CREDIT

    return frame(number, CREDIT, struct.pack(">I", size))
