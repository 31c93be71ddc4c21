"""A tunnel through the control plane to one node of a job. Many shells, connections and file
operations share one tunnel; `agent/access/session.py` is the node's end of it.

A tunnel has two byte streams, one in each direction. The streams are sent as requests to the
server, by one thread for each stream.
"""

import asyncio
import json
import struct
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from cavvy.agent.access import frames
from cavvy.client.client import ApiClient
from cavvy.client.errors import ApiError, Unreachable

_CREDIT_AT = frames.WINDOW // 4  # number of received bytes after which they are confirmed
_ANSWER_BYTES = 2 << 20  # maximum bytes of a frame, enough for the answer to a read of 1 MiB
_LIST_BYTES = 256 << 20  # maximum bytes of a list of files, enough for about two million files
# seconds to wait for a node; a mailbox on a shared file system needs several in each direction
_OPEN_S = 60.0
Fields = dict[str, Any]

# seconds for which requests are repeated if the server is unreachable; a restarted server has lost
# its tunnels
_PATIENCE_S = 60.0
_PIECE = 512 * 1024


class TunnelLost(Exception):
    """Raised if the tunnel to the node is lost. The message gives the reason for the loss."""


class RemoteError(OSError):
    """An error that the node reported, with its errno and, if known, the path."""


class CommandExit:
    """The end of a command: its exit code, or the name of a signal."""

    def __init__(self, code: int | None, signal: str | None) -> None:
        self.code, self.signal = code, signal


class TunnelChannel:
    """One command or connection on the node."""

    def __init__(self, tunnel: "NodeTunnel", number: int) -> None:
        self.number = number
        self.opened: asyncio.Future[Fields] = asyncio.get_running_loop().create_future()
        self.exit: CommandExit | None = None
        self.accepted: Callable[[TunnelChannel, Fields], Awaitable[None]] | None = None
        self._tunnel = tunnel
        self._arrived: deque[tuple[int, bytes]] = deque()
        self._news = asyncio.Event()
        self._credit = frames.WINDOW
        self._room = asyncio.Event()
        self._room.set()
        self._unconfirmed = 0  # bytes that were read but not confirmed
        self._waiting = 0  # bytes that arrived but were not read
        self._over = False

    async def read(self) -> tuple[int, bytes] | None:
        """Return the next item: (DATA or ERR, bytes), (EOF, b""), or None when the channel has
        ended. Raises TunnelLost.
        """
        while not self._arrived:
            if self._over:
                if self._tunnel.problem and self.exit is None:
                    raise TunnelLost(self._tunnel.problem)
                return None
            self._news.clear()
            await self._news.wait()
        kind, data = self._arrived.popleft()
        self._unconfirmed += len(data)
        self._waiting -= len(data)
        if self._unconfirmed >= _CREDIT_AT and not self._over:
            self._tunnel.send(self.number, frames.CREDIT, struct.pack(">I", self._unconfirmed))
            self._unconfirmed = 0
        return kind, data

    async def write(self, data: bytes) -> None:
        """Send data. Waits until the node has confirmed enough of the earlier data. If the channel
        is closed, the data is discarded.
        """
        rest = memoryview(data)
        while rest and not self._over:
            if self._credit <= 0:
                self._room.clear()
                await self._room.wait()
                continue
            piece = rest[: min(frames.CHUNK, self._credit)]
            self._credit -= len(piece)
            rest = rest[len(piece) :]
            self._tunnel.send(self.number, frames.DATA, bytes(piece))

    def end(self) -> None:
        """Tell the node that this channel sends no more data."""
        if not self._over:
            self._tunnel.send(self.number, frames.EOF)

    def control(self, **fields: object) -> None:
        """Change the terminal's size (`cols` and `rows`), or send a signal (`signal`, its name
        without SIG)."""
        if not self._over:
            self._tunnel.send(self.number, frames.CONTROL, json.dumps(fields).encode())

    def close(self) -> None:
        """Close the channel. If the channel's command is still running, the command receives
        SIGHUP.
        """
        if not self._over:
            self._tunnel.send(self.number, frames.CLOSE)
            self.lose()

    def take(self, kind: int, payload: bytes) -> None:
        """Process a received frame. Raises ValueError, KeyError or TypeError if the frame is
        invalid.
        """
        if kind == frames.OPENED:
            if not self.opened.done():
                self.opened.set_result(json.loads(payload))
        elif kind == frames.FAILED:
            said = json.loads(payload)
            if not self.opened.done():
                self.opened.set_exception(
                    RemoteError(int(said.get("errno") or 0), str(said["error"]))
                )
            self.lose()
        elif kind == frames.CREDIT:
            self._credit += struct.unpack(">I", payload)[0]
            self._room.set()
        elif kind == frames.EXIT:
            said = json.loads(payload)
            code, signal = said["code"], said["signal"]
            self.exit = CommandExit(code if code is None else int(code), signal and str(signal))
        elif kind == frames.CLOSE:
            self.lose()
        elif payload or kind == frames.EOF:
            self._waiting += len(payload)
            if self._waiting + self._unconfirmed > frames.WINDOW or kind not in (
                frames.DATA,
                frames.ERR,
                frames.EOF,
            ):
                raise ValueError("the node sent more data than its window allows")
            self._arrived.append((kind, payload))
            self._news.set()

    def lose(self) -> None:
        """Mark the channel as ended, in both directions."""
        self._over = True
        if not self.opened.done():
            self.opened.set_exception(
                TunnelLost(self._tunnel.problem or "the connection was closed")
            )
        self.opened.exception()  # marks the error as retrieved, in case the caller was cancelled
        self._news.set()
        self._room.set()
        self._tunnel.forget(self.number)


class TunnelCarrier(Protocol):
    """Carries the frames of one tunnel."""

    def put(self, data: bytes) -> None:
        """Send data to the node."""

    def close(self) -> None:
        """Send the remaining data, and then the end of the stream."""


# opens the carrier of a tunnel, which calls the first function with data from the node, and the
# second one with a problem (or "") when the tunnel ends, both in the event loop
OpenCarrier = Callable[[Callable[[bytes], None], Callable[[str], None]], Awaitable[TunnelCarrier]]


def open_by_api(
    client: ApiClient, project: str, name: str, rank: int, program: str = ""
) -> OpenCarrier:
    """Return a tunnel to this rank of a job; the tunnel's data is sent in requests to the server.
    The job's event names `program`, the command that opens the tunnel.
    """

    async def open_carrier(
        heard: Callable[[bytes], None], over: Callable[[str], None]
    ) -> TunnelCarrier:
        started = await asyncio.to_thread(client.open_tunnel, project, name, rank, program)
        return TunnelStreams(client, project, name, started, heard=heard, over=over)

    return open_carrier


class NodeTunnel:
    """The tunnel to one node: an asynchronous context manager."""

    def __init__(self, open_carrier: OpenCarrier) -> None:
        self._open_carrier = open_carrier
        self._channels: dict[int, TunnelChannel] = {}
        self._calls: dict[int, asyncio.Future[tuple[Fields, bytes]]] = {}
        self._lists: set[int] = set()  # numbers of calls whose answers may be long
        self._next = 0
        self._in = bytearray()
        self._carrier: TunnelCarrier | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.problem = ""
        self.lost = asyncio.Event()

    async def __aenter__(self) -> "NodeTunnel":
        self._carrier = await self._open_carrier(self._hear, self._end)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._carrier is not None:
            self._carrier.close()
            with_grace = asyncio.create_task(self.lost.wait())
            await asyncio.wait([with_grace], timeout=2.0)
            with_grace.cancel()

    async def run(
        self,
        *,
        argv: list[str] | None = None,
        line: str | None = None,
        env: Mapping[str, str] | None = None,
        pty: Fields | None = None,
        keep: str = "",
    ) -> TunnelChannel:
        """Start a command, given as words (`argv`) or as a shell line (`line`). If `argv` and
        `line` are None, start a shell. With the name `keep`, the command stays when the tunnel
        ends, and a later call with the same name connects to it; it needs a `pty`, and its exit
        code is not told. Raises RemoteError, TunnelLost.
        """
        asked = {"what": "run", "argv": argv, "line": line, "env": dict(env or {}), "pty": pty}
        asked |= {"keep": keep} if keep else {}
        return await self._open(asked)

    async def connect(self, host: str, port: int) -> TunnelChannel:
        """Let the node open a TCP connection to this address. Raises RemoteError, TunnelLost."""
        return await self._open({"what": "tcp", "host": host, "port": port})

    async def watch(self, path: str, without: Sequence[str]) -> TunnelChannel:
        """Watch a folder of the node. For each byte that is written to the channel, the node sends
        one byte when something has changed. Raises RemoteError, TunnelLost.
        """
        return await self._open({"what": "watch", "path": path, "without": list(without)})

    def begin_connect(self, host: str, port: int) -> TunnelChannel:
        """Connect as `connect` does, but let the caller send before the node has answered. If the
        connection is refused, the channel ends. Raises TunnelLost.
        """
        return self._begin({"what": "tcp", "host": host, "port": port})

    async def listen(
        self, host: str, port: int, accepted: Callable[[TunnelChannel, Fields], Awaitable[None]]
    ) -> tuple[TunnelChannel, int]:
        """Listen on a port of the node. For each connection, a new channel is opened and passed to
        `accepted`. Returns the listener's own channel and the port. Raises RemoteError, TunnelLost.
        """
        channel = await self._open({"what": "listen", "host": host, "port": port}, accepted)
        return channel, int((await channel.opened)["port"])

    async def call(self, op: str, data: bytes = b"", **fields: object) -> tuple[Fields, bytes]:
        """Call a file operation of `agent/access/files.py`. Raises RemoteError, TunnelLost."""
        self._next += 1
        number = self._next
        future: asyncio.Future[tuple[Fields, bytes]] = asyncio.get_running_loop().create_future()
        if self.problem or self.lost.is_set():
            raise TunnelLost(self.problem or "the connection was closed")
        self._calls[number] = future
        if op in ("list", "walk"):
            self._lists.add(number)
        self.send(number, frames.CALL, json.dumps({"op": op, **fields}).encode() + b"\n" + data)
        try:
            return await future
        except RemoteError as error:
            raise RemoteError(error.errno, error.strerror, fields.get("path")) from error

    def send(self, number: int, kind: int, payload: bytes = b"") -> None:
        """Send one frame."""
        if self._carrier is not None:
            self._carrier.put(frames.encode_frame(number, kind, payload))

    def forget(self, number: int) -> None:
        self._channels.pop(number, None)

    def _begin(
        self,
        asked: Fields,
        accepted: Callable[[TunnelChannel, Fields], Awaitable[None]] | None = None,
    ) -> TunnelChannel:
        if self.lost.is_set():
            raise TunnelLost(self.problem or "the connection was closed")
        self._next += 1
        channel = self._channels[self._next] = TunnelChannel(self, self._next)
        channel.accepted = accepted
        self.send(channel.number, frames.OPEN, json.dumps(asked).encode())
        return channel

    async def _open(
        self,
        asked: Fields,
        accepted: Callable[[TunnelChannel, Fields], Awaitable[None]] | None = None,
    ) -> TunnelChannel:
        channel = self._begin(asked, accepted)
        try:
            async with asyncio.timeout(_OPEN_S):
                await asyncio.shield(channel.opened)
        except TimeoutError as error:
            channel.close()
            raise TunnelLost(f"the node did not answer within {_OPEN_S:g} s") from error
        return channel

    def _hear(self, data: bytes) -> None:
        """Process data from the node. The node is not trusted, so an invalid frame ends the
        tunnel."""
        if self.lost.is_set():
            return
        self._in += data
        try:
            for frame in frames.read_frames(self._in, self._limit):
                self._take(*frame)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error):
            self._in.clear()
            self._end("the node violated the protocol")

    def _limit(self, number: int, kind: int) -> int:
        return _LIST_BYTES if kind == frames.REPLY and number in self._lists else _ANSWER_BYTES

    def _take(self, number: int, kind: int, payload: bytes) -> None:
        if kind == frames.REPLY:
            line, _, data = payload.partition(b"\n")
            said = json.loads(line)
            if not isinstance(said, dict):
                raise ValueError("the answer is not a JSON object")
            error = None
            if "error" in said:
                error = RemoteError(int(said.get("errno") or 0), str(said["error"]))
            future = self._calls.pop(number, None)
            self._lists.discard(number)
            if future is None or future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result((said, data))
            return
        if kind == frames.ACCEPTED:
            self._accept(number, json.loads(payload))
            return
        channel = self._channels.get(number)
        if channel is not None:
            channel.take(kind, payload)

    def _accept(self, number: int, said: Fields) -> None:
        listener = self._channels.get(int(said["listener"]))
        if number in self._channels:
            raise ValueError("the channel is already open")
        made = self._channels[number] = TunnelChannel(self, number)
        made.opened.set_result({})
        if listener is None or listener.accepted is None:
            made.close()
            return
        task = asyncio.ensure_future(listener.accepted(made, said))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self, problem: str) -> None:
        self.problem = self.problem or problem
        if self._carrier is not None and (problem or not self.lost.is_set()):
            self._carrier.close()
        for channel in list(self._channels.values()):
            channel.lose()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(TunnelLost(self.problem or "the connection was closed"))
        self._calls.clear()
        self.lost.set()


class AsyncReader(Protocol):
    """A stream reader of asyncio or asyncssh."""

    async def read(self, n: int = -1) -> bytes: ...


class AsyncWriter(Protocol):
    """A stream writer of asyncio or asyncssh."""

    def write(self, data: bytes) -> None: ...
    def write_eof(self) -> None: ...
    async def drain(self) -> None: ...
    def close(self) -> None: ...


async def join(channel: TunnelChannel, reader: AsyncReader, writer: AsyncWriter) -> None:
    """Copy bytes between the channel and the streams until both directions have ended or one side
    disconnects. Then close both sides."""

    async def out() -> None:
        while data := await reader.read(frames.CHUNK):
            await channel.write(data)
        channel.end()

    sending = asyncio.create_task(out())
    try:
        while (piece := await channel.read()) is not None:
            if piece[0] == frames.EOF:
                writer.write_eof()
            else:
                writer.write(piece[1])
                await writer.drain()
    except (OSError, TunnelLost):
        pass
    finally:
        sending.cancel()
        channel.close()
        writer.close()


class TunnelStreams:
    """Sends to the node the data that `put` receives. Calls `heard` with data from the node, and
    `over(problem)` when either stream ends, both in the event loop.
    """

    def __init__(
        self,
        client: ApiClient,
        project: str,
        name: str,
        exec_id: str,
        *,
        heard: Callable[[bytes], None],
        over: Callable[[str], None],
    ) -> None:
        self._where = (project, name, exec_id)
        self._loop = asyncio.get_running_loop()
        self._heard, self._over = heard, over
        self._out = bytearray()
        self._news = threading.Condition()
        self._closed = False
        for work, own in ((self._read, client.sibling()), (self._write, client.sibling())):
            threading.Thread(target=self._guard, args=(work, own), daemon=True).start()

    def put(self, data: bytes) -> None:
        with self._news:
            self._out += data
            self._news.notify_all()

    def close(self) -> None:
        """Send the remaining data, and then the end of the stream."""
        with self._news:
            self._closed = True
            self._news.notify_all()

    def _guard(self, work: Callable[[ApiClient], str], client: ApiClient) -> None:
        try:
            problem = work(client)
        except ApiError as error:
            problem = error.message
        finally:
            client.close()
        self._notify(self._over, problem)

    def _notify(self, call: Callable[..., None], *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)

    def _read(self, client: ApiClient) -> str:
        offset, until = 0, 0.0
        while True:
            try:
                piece = client.read_exec(*self._where, offset=offset)
                until = 0.0
            except Unreachable:
                until = until or time.monotonic() + _PATIENCE_S
                if self._closed or time.monotonic() > until:
                    raise
                time.sleep(0.2)
                continue
            offset += len(piece.data)
            if piece.data:
                self._notify(self._heard, piece.data)
            if piece.exit_code is not None:
                return (
                    f"the node closed the connection (exit code {piece.exit_code})"
                    if piece.exit_code
                    else ""
                )

    def _write(self, client: ApiClient) -> str:
        offset = 0
        while True:
            with self._news:
                while not self._out and not self._closed:
                    self._news.wait()
                data, end = bytes(self._out[:_PIECE]), self._closed and len(self._out) <= _PIECE
            taken = client.write_exec(*self._where, offset=offset, data=data, end=end)
            with self._news:
                count = taken.next - offset
                del self._out[:count]
                offset = taken.next
                if taken.ended or (end and not self._out):
                    return ""
