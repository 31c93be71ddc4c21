"""The two byte streams of a tunnel, one in each direction. The streams are sent as requests to the
server, by one thread for each stream.
"""

import asyncio
import threading
import time
from collections.abc import Callable

from cavvy.client.client import ApiClient
from cavvy.client.errors import ApiError, Unreachable

# seconds for which requests are repeated if the server is unreachable; a restarted server has lost
# its tunnels
_PATIENCE_S = 60.0
_PIECE = 512 * 1024


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
