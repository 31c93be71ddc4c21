"""Accepts the connections of a TLS listener. The listener of uvloop reports a connection only after
the connection's handshake. This module counts connections before their handshakes, and lets
handshakes take turns.
"""

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
from collections import deque
from collections.abc import Callable
from functools import partial

from cavvy.server.turns import HANDSHAKE_S, Turns, Waiting, find_origin

HANDSHAKE_MOST_S = 10.0  # maximum seconds for a handshake
# maximum number of accepted connections that wait for their handshake, per listener; at most a
# quarter of the file descriptors that the process may have
QUEUED = 2048
_ACCEPTED = 16  # maximum number of connections accepted per call
_REST_S = 1.0  # seconds for which the listener pauses when the process has no free file descriptors
_LOOK_S = 0.02  # seconds until an address without a free place is checked again
_log = logging.getLogger(__name__)


class HandshakeQueue:
    """Accepted connections that wait for their handshake, grouped by address. If too many
    connections wait, the queue closes the newest connection of the address with the most waiting
    connections. Therefore one address cannot fill the queue.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._queues: dict[str, deque[socket.socket]] = {}
        self._count = 0

    def __contains__(self, address: str) -> bool:
        return address in self._queues

    def add(self, address: str, connection: socket.socket) -> None:
        self._queues.setdefault(address, deque()).append(connection)
        self._count += 1
        if self._count > self._most:
            longest = max(self._queues, key=lambda each: len(self._queues[each]))
            self._pop(longest, newest=True).close()

    def take(self, address: str) -> socket.socket:
        """Return the oldest connection of this address."""
        return self._pop(address)

    def close(self) -> None:
        for address in list(self._queues):
            while address in self:
                self._pop(address).close()

    def _pop(self, address: str, *, newest: bool = False) -> socket.socket:
        queue = self._queues[address]
        connection = queue.pop() if newest else queue.popleft()
        self._count -= 1
        if not queue:
            del self._queues[address]
        return connection


class Handshakes:
    """Accepts connections and starts their handshakes. `make` creates a connection's protocol,
    which takes the connection's place in `waiting` after the handshake.
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
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._queue = HandshakeQueue(min(QUEUED, files // 4))
        self._taking: set[str] = set()  # addresses that wait for their turn to start a handshake
        self._tasks: dict[asyncio.Task[None], socket.socket] = {}
        self._open = True
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
                return
            except OSError as error:  # no free file descriptors
                _log.warning("cannot accept connections: %s", error)
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(_REST_S, self._begin)
                return
            connection.setblocking(False)
            address = find_origin(peer)
            self._queue.add(address, connection)
            if address not in self._taking:
                self._taking.add(address)
                self._wait_for_turn(address)

    def _wait_for_turn(self, address: str) -> None:
        self._turns.add(address, partial(self._start_next, address), HANDSHAKE_S)

    def _start_next(self, address: str) -> None:
        if address not in self._queue:
            self._taking.discard(address)
        elif self._waiting.make_room(address):
            connection = self._queue.take(address)
            self._waiting.add(connection, address, partial(_shut, connection))
            task = self._loop.create_task(self._shake(connection))
            self._tasks[task] = connection
            task.add_done_callback(self._tasks.pop)
            self._wait_for_turn(address)
        else:
            self._loop.call_later(_LOOK_S, self._wait_for_turn, address)

    async def _shake(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                partial(self._make, connection),
                connection,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_MOST_S,
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
