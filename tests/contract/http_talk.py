"""A plain HTTP/1.1 client on a socket, for tests of the gateway that must see each byte."""

import json
import socket
import ssl
import threading
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 20.0


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes
    interim: list[int] = field(default_factory=list)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Talk:
    """A connection."""

    def __init__(
        self, port: int, tls: ssl.SSLContext | None = None, source: str = "127.0.0.1"
    ) -> None:
        plain = socket.create_connection(("127.0.0.1", port), TIMEOUT_S, (source, 0))
        self.socket = plain if tls is None else tls.wrap_socket(plain, server_hostname="localhost")
        self._buffer = b""

    def __enter__(self) -> "Talk":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Reply:
        self.send(write_request(method, path, body, **headers))
        return self.read(method)

    def read(self, method: str = "GET") -> Reply:
        """Read one response. Raises EOFError if there is none."""
        interim = []
        while True:
            status, headers = self._read_head()
            if status >= 200 or status == 101:
                break
            interim.append(status)
        body = b"" if method == "HEAD" or status in (101, 204, 304) else self._read_body(headers)
        return Reply(status, headers, body, interim)

    def _read_head(self) -> tuple[int, dict[str, str]]:
        head = self._until(b"\r\n\r\n").decode("latin-1")
        start, *lines = head[:-4].split("\r\n")
        assert start.startswith("HTTP/1.1 "), start
        pairs = [
            (name.lower(), value.strip()) for name, _, value in (x.partition(":") for x in lines)
        ]
        headers = dict(pairs)
        assert len(headers) == len(pairs), f"a field came twice: {pairs}"
        return int(start[9:12]), headers

    def _read_body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") == "chunked":
            assert "content-length" not in headers
            body = b""
            while piece := self.read_chunk():
                body += piece
            return body
        if "content-length" in headers:
            return self.exactly(int(headers["content-length"]))
        return self.rest()

    def read_chunk(self) -> bytes:
        size = int(self._until(b"\r\n"), 16)
        while not size and self._until(b"\r\n") != b"\r\n":
            pass  # a trailer
        if not size:
            return b""
        data = self.exactly(size)
        assert self.exactly(2) == b"\r\n"
        return data

    def read_until_head(self) -> tuple[int, dict[str, str]]:
        return self._read_head()

    def exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._more()
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data

    def rest(self) -> bytes:
        try:
            while True:
                self._more()
        except EOFError:
            data, self._buffer = self._buffer, b""
            return data

    def is_closed(self) -> bool:
        """Wait for the end of the connection; False if more data comes."""
        try:
            self._more()
        except (EOFError, ConnectionError):
            return True
        return False

    def _until(self, end: bytes) -> bytes:
        while end not in self._buffer:
            self._more()
        at = self._buffer.index(end) + len(end)
        data, self._buffer = self._buffer[:at], self._buffer[at:]
        return data

    def _more(self) -> None:
        data = self.socket.recv(1 << 20)
        if not data:
            raise EOFError
        self._buffer += data


def write_request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """Header names are given with `_` for `-`."""
    fields = {"host": "svc.example", **{k.replace("_", "-"): v for k, v in headers.items()}}
    if (body or method == "POST") and "transfer-encoding" not in fields:
        fields.setdefault("content-length", str(len(body)))
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body


def ask(port: int, method: str, path: str, body: bytes = b"", **headers: str) -> Reply:
    with Talk(port) as talk:
        return talk.ask(method, path, body, **headers)


class Background:
    """A call in a thread; `result` waits for it and raises what it raised."""

    def __init__(self, function: Any, *args: Any, **kwargs: Any) -> None:
        self._value: Any = None
        self._error: BaseException | None = None

        def run() -> None:
            try:
                self._value = function(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001  # raised in the test's own thread
                self._error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "no answer"
        if self._error is not None:
            raise self._error
        return self._value
