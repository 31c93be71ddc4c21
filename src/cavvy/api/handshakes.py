"""Accepts the connections of a TLS listener. uvloop's own listener reports a connection only after
its handshake, but here connections must be counted before it, and handshakes must take turns.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import deque
from collections.abc import Callable
from functools import partial

from cavvy.api.turns import HANDSHAKE_S, Turns
from cavvy.api.waiting import Waiting, find_origin

HANDSHAKE_MOST_S = 10.0  # maximum seconds for a handshake
QUEUED = 1024  # maximum number of accepted connections that wait for a place, per listener
_CLOSE_S = 1.0  # maximum seconds in which a closing connection may still be read
_ACCEPTED = 16  # maximum number of connections accepted per call
_REST_S = 1.0  # seconds for which the listener pauses when the process has no free file descriptors
_LOOK_S = 0.02  # seconds between two looks for free places
_log = logging.getLogger(__name__)


class HandshakeQueue:
    """Accepted connections that wait for a place, by address. All addresses have the same share: if
    there are too many, the newest connection of the address with the most is left out.
    """

    def __init__(self, most: int = QUEUED) -> None:
        self._most = most
        self._queues: dict[str, deque[socket.socket]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, address: str, connection: socket.socket) -> None:
        self._queues.setdefault(address, deque()).append(connection)
        self._count += 1
        if self._count > self._most:
            longest = max(self._queues, key=lambda each: len(self._queues[each]))
            self._take(longest, newest=True).close()

    def take(self, has_room: Callable[[str], bool]) -> list[tuple[str, socket.socket]]:
        """The oldest connection of each address that has room for it."""
        return [
            (address, self._take(address)) for address in list(self._queues) if has_room(address)
        ]

    def close(self) -> None:
        for queue in self._queues.values():
            for connection in queue:
                connection.close()
        self._queues.clear()
        self._count = 0

    def _take(self, address: str, *, newest: bool = False) -> socket.socket:
        queue = self._queues[address]
        connection = queue.pop() if newest else queue.popleft()
        self._count -= 1
        if not queue:
            del self._queues[address]
        return connection


class Handshakes:
    """Accepts connections and starts their handshakes. `make` makes the protocol of a connection,
    which takes over the connection's place in `waiting` after the handshake.
    """

    def __init__(
        self,
        listener: socket.socket,
        waiting: Waiting,
        turns: Turns,
        context: ssl.SSLContext,
        make: Callable[[object], asyncio.Protocol],
    ) -> None:
        self._listener, self._waiting, self._turns = listener, waiting, turns
        self._context, self._make = context, make
        self._loop = asyncio.get_running_loop()
        self._queue = HandshakeQueue()
        self._tasks: dict[asyncio.Task[None], socket.socket] = {}
        self._open = True
        self._looks = False  # whether a look for free places is due
        self._begin()

    def close(self) -> None:
        self._open = False
        self._loop.remove_reader(self._listener.fileno())
        self._queue.close()
        for connection in self._tasks.values():
            _shut(connection)

    def _begin(self) -> None:
        if self._open:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED):
            try:
                connection, peer = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                break
            except OSError as error:  # no free file descriptors
                _log.warning("cannot accept connections: %s", error)
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(_REST_S, self._begin)
                break
            connection.setblocking(False)
            self._queue.add(find_origin(peer), connection)
        if not self._looks:
            self._look()

    def _look(self) -> None:
        """Give free places to connections that wait, one to each address after the other."""
        while taken := self._queue.take(self._waiting.make_room):
            for address, connection in taken:
                self._waiting.add(connection, address, partial(_shut, connection))
                self._turns.add(address, partial(self._start, connection), HANDSHAKE_S)
        self._looks = len(self._queue) > 0
        if self._looks:
            self._loop.call_later(_LOOK_S, self._look)

    def _start(self, connection: socket.socket) -> None:
        if not self._open:
            connection.close()
            return
        task = self._loop.create_task(self._shake(connection))
        self._tasks[task] = connection
        task.add_done_callback(self._tasks.pop)

    async def _shake(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                partial(self._make, connection),
                connection,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_MOST_S,
                ssl_shutdown_timeout=_CLOSE_S,
            )
        except OSError:  # this includes SSLError; an unfinished handshake gets no answer
            self._waiting.remove(connection)
            connection.close()
        except BaseException:
            self._waiting.remove(connection)
            raise


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
