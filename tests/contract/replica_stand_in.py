"""A replica for tests of the gateway: a small HTTP/1.1 server in a thread, which can misbehave.

It is written without the gateway's parser. The path says what it does; `seen` lists what came.
"""

import asyncio
import hashlib
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit


@dataclass
class Seen:
    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes

    def get(self, name: str) -> str | None:
        found = [value for key, value in self.headers if key.lower() == name.lower()]
        assert len(found) < 2, f"{name} came twice: {found}"
        return found[0] if found else None


@dataclass
class ReplicaStandIn:
    name: str = "r1"
    port: int = 0
    seen: list[Seen] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    aborted: int = 0  # connections that ended in the middle of a request
    connections: int = 0
    broken: list[str] = field(default_factory=list)  # requests that could not be read
    release: threading.Event = field(default_factory=threading.Event)  # ends what /hold began
    metrics: str = ""  # at /metrics, which only the gateway itself asks and `seen` leaves out

    def start(self) -> "ReplicaStandIn":
        self._serving: set[asyncio.Task[None] | None] = set()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(20)
        return self

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

    def reset(self) -> None:
        self.seen.clear()
        self.most_in_flight = self.aborted = 0
        self.release.clear()

    def _run(self, ready: threading.Event) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            self._stop = asyncio.Event()
            server = await asyncio.start_server(
                self._serve, "127.0.0.1", self.port, limit=1 << 22, backlog=1024
            )
            self.port = server.sockets[0].getsockname()[1]
            ready.set()
            await self._stop.wait()
            this = {asyncio.current_task()}
            # asyncio loses the socket of a connection that is accepted while the server closes
            while asyncio.all_tasks() - self._serving - this:
                await asyncio.sleep(0)
            server.close()
            for task in asyncio.all_tasks() - this:
                task.cancel()

        asyncio.run(main())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._serving.add(asyncio.current_task())
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except Exception as error:  # noqa: BLE001  # what came was not valid: tests look at it
            self.broken.append(repr(error))
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.IncompleteReadError:
            return False
        start, *lines = head[:-4].split("\r\n")
        method, target, _ = start.split(" ")
        headers = [
            (name, value.strip()) for name, _, value in (each.partition(":") for each in lines)
        ]
        request = Seen(method, target, headers, b"")
        if target == "/metrics":
            status = "200 OK" if self.metrics else "404 Not Found"
            size = len(self.metrics)
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n\r\n".encode())
            writer.write(self.metrics.encode())
            return True
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        whole = False
        try:
            request.body = await read_body(reader, request)
            self.seen.append(request)
            url = urlsplit(target)
            asked = {key: values[0] for key, values in parse_qs(url.query).items()}
            act = self._find(url.path)
            keep = await act(request, asked, reader, writer)
            await writer.drain()
            whole = True
            return keep
        finally:
            self.in_flight -= 1
            self.aborted += not whole

    def _find(self, path: str) -> "Act":
        name = path.strip("/").split("/")[-1].replace("-", "_")
        return getattr(self, f"_do_{name or 'echo'}", self._do_echo)

    async def _do_echo(self, request: Seen, asked: dict[str, str], reader, writer) -> bool:
        said = {
            "replica": self.name,
            "method": request.method,
            "path": request.path,
            "headers": request.headers,
            "size": len(request.body),
            "sha256": hashlib.sha256(request.body).hexdigest(),
        }
        body = json.dumps(said).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        writer.write(head.encode() + b"\r\n\r\n" + (b"" if request.method == "HEAD" else body))
        return True

    async def _do_own_origin(self, request: Seen, asked: dict[str, str], reader, writer) -> bool:
        writer.write(
            b"HTTP/1.1 200 OK\r\naccess-control-Allow-Origin: https://own.example\r\n"
            b"Content-Length: 2\r\n\r\nok"
        )
        return True

    async def _do_hold(self, request: Seen, asked: dict[str, str], reader, writer) -> bool:
        """Answer when `release` is set, or never if the connection ends before."""
        while not self.release.is_set():
            if reader.at_eof() or writer.transport.is_closing():
                raise ConnectionResetError
            await asyncio.sleep(0.005)
        return await self._do_echo(request, asked, reader, writer)

    async def _do_chunks(self, request: Seen, asked: dict[str, str], reader, writer) -> bool:
        """Events, one chunk each; the client must have got one before the next is written. With
        `plain`, the chunks have no extensions, as most servers write them. With `breaks`, the last
        chunk is missing.
        """
        note = b"" if "plain" in asked else b";note=1"
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for number in range(int(asked["n"])):
            event = b"data: %d\n\n" % number
            writer.write(b"%x%b\r\n%b\r\n" % (len(event), note, event))
            await writer.drain()
            if "pause_ms" in asked:
                await asyncio.sleep(int(asked["pause_ms"]) / 1000)
            if "paced" in asked:
                while not self.release.is_set():
                    if reader.at_eof():
                        raise ConnectionResetError
                    await asyncio.sleep(0.002)
                self.release.clear()
        if "breaks" in asked:
            writer.transport.abort()
            return False
        writer.write(b"0\r\nX-Trailer: 1\r\n\r\n")
        return True

    async def _do_large(self, request: Seen, asked: dict[str, str], reader, writer) -> bool:
        size = int(asked["n"])
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(size // 65536):
            writer.write(b"x" * 65536)
            await writer.drain()
            self.written = getattr(self, "written", 0) + 65536
        writer.write(b"x" * (size % 65536))
        return True

    async def _do_close(self, request: Seen, asked: dict[str, str], reader, writer) -> bool:
        """A body that ends with the connection."""
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nuntil the end")
        return False

    async def _do_old(self, request: Seen, asked: dict[str, str], reader, writer) -> bool:
        """A response in two parts, after which the connection ends."""
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.write(b"hello")
        return False

    async def _do_status(self, request: Seen, asked: dict[str, str], reader, writer) -> bool:
        length = b"Content-Length: 0\r\n" if asked["code"] >= "500" else b""
        writer.write(b"HTTP/1.1 %b X\r\n%b\r\n" % (asked["code"].encode(), length))
        return True

    async def _do_hints(self, request: Seen, asked: dict[str, str], reader, writer) -> bool:
        writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>\r\n\r\n")
        return await self._do_echo(request, asked, reader, writer)

    async def _do_die(self, request: Seen, asked: dict[str, str], reader, writer) -> bool:
        writer.transport.abort()
        return False

    async def _do_partial(self, request: Seen, asked: dict[str, str], reader, writer) -> bool:
        """Half of a response, then the end."""
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()
        return False

    async def _do_garbage(self, request: Seen, asked: dict[str, str], reader, writer) -> bool:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
        return False

    async def _do_both(self, request: Seen, asked: dict[str, str], reader, writer) -> bool:
        """A response with two lengths."""
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        )
        return True

    async def _do_socket(self, request: Seen, asked: dict[str, str], reader, writer) -> bool:
        """Changes the protocol and sends back what comes."""
        assert request.get("upgrade") == "websocket"
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"
        )
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        return False


Act = Callable[..., Awaitable[bool]]


async def read_body(reader: asyncio.StreamReader, request: Seen) -> bytes:
    coding, length = request.get("transfer-encoding"), request.get("content-length")
    assert coding is None or length is None, "the gateway passed two lengths on"
    if coding is None:
        return await reader.readexactly(int(length or 0))
    assert coding == "chunked"
    body = b""
    while size := int((await reader.readuntil(b"\r\n"))[:-2], 16):
        body += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"
    return body
