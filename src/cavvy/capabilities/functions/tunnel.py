"""Connects to a broker on another machine, through the tunnel of the control plane."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future

from cavvy.capabilities.functions.errors import WorkerLost
from cavvy.capabilities.functions.frames import pack
from cavvy.client.tunnel import NodeTunnel, RemoteError, TunnelLost, join, open_by_api
from cavvy.sdk.connections import Connections

_ADDRESS = ".cavvy/functions/address.json"
_MOST_ADDRESS = 4096  # bytes
_OPEN_S = 90.0
_WAIT = (
    f"for i in $(seq 600); do test -s {_ADDRESS} && exec cat {_ADDRESS}; sleep 0.1; done; exit 1"
)


class Tunnel:
    """A tunnel to one node, in a thread of its own."""

    def __init__(self, connections: Connections, project: str, job: str) -> None:
        self._connections, self._project, self._job = connections, project, job
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None

    def open(self) -> socket.socket:
        """Return a connection to the broker. Raises WorkerLost."""
        opened: Future[socket.socket] = Future()
        threading.Thread(target=self._run, args=(opened,), daemon=True, name="cavvy-tunnel").start()
        try:
            return opened.result(_OPEN_S)
        except (TunnelLost, RemoteError, TimeoutError) as error:
            raise WorkerLost(
                f"the node of the job {self._job} cannot be reached: {error}"
            ) from error

    def close(self) -> None:
        def cancel() -> None:
            if self._task is not None:
                self._task.cancel()

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(cancel)

    def _run(self, opened: "Future[socket.socket]") -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self._serve(opened))
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        finally:
            self._loop.close()

    async def _serve(self, opened: "Future[socket.socket]") -> None:
        try:
            with self._connections.use() as client:
                carrier = open_by_api(client, self._project, self._job, 0, "functions")
                await reach_broker(NodeTunnel(carrier), opened.set_result)
        except Exception as error:  # noqa: BLE001 - reported where `open` waits
            if opened.done():
                return
            opened.set_exception(error)


async def reach_broker(tunnel: NodeTunnel, opened: Callable[[socket.socket], object]) -> None:
    """Open a tunnel, give `opened` a connection to the broker of the node, and carry what is sent
    until one side ends. Raises TunnelLost, RemoteError.
    """
    async with tunnel:
        port, key = await _read_address(tunnel)
        channel = await tunnel.connect("127.0.0.1", port)
        ours, theirs = socket.socketpair()
        ours.sendall(pack({"op": "hello", "id": 0, "key": key}))
        reader, writer = await asyncio.open_connection(sock=theirs)
        opened(ours)
        await join(channel, reader, writer)


async def _read_address(tunnel: NodeTunnel) -> tuple[int, str]:
    """Return the port and the key of the broker. Raises RemoteError: the node is the app's."""
    channel = await tunnel.run(argv=["sh", "-c", _WAIT])
    data = b""
    try:
        async with asyncio.timeout(_OPEN_S):
            while (piece := await channel.read()) is not None:
                data += piece[1]
                if len(data) > _MOST_ADDRESS:
                    raise ValueError(f"more than {_MOST_ADDRESS} bytes")
        found = json.loads(data)
        return int(found["port"]), str(found["key"])
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise RemoteError(f"{_ADDRESS} has no address of the broker: {error}") from error
    except TimeoutError as error:
        raise RemoteError(f"{_ADDRESS} was not read within {_OPEN_S:g} s") from error
